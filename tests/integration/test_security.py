"""Who may talk to whom: API keys at the front door, tokens and certificates between our processes."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deployments.config import DataPlaneArgs
from protos import speculation_pb2 as pb
from protos import speculation_pb2_grpc as pb_grpc
from tests import tiny
from tests.harness import harness, http_client
from tests.unit.test_keys import SECRET, key
from workers.draft.drafters.lookup import LookupDrafter
from workers.rpc.connection import TARGET, Connection
from workers.rpc.errors import ServiceError, Unauthenticated, Unavailable
from workers.rpc.security import Certificates, Security

TEXT = {"prompt": "the cat in the", "max_tokens": 8, "temperature": 0}
KEY = {"Authorization": f"Bearer {SECRET}"}


def certificates(authority: trustme.CA, name: str = "slipstream") -> Certificates:
    mine = authority.issue_cert(name)
    return Certificates(
        mine.cert_chain_pems[0].bytes(),
        mine.private_key_pem.bytes(),
        authority.cert_pem.bytes(),
        name,
    )


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys.yaml"
    path.write_text(yaml.safe_dump({"keys": [key(max_concurrent=2).model_dump()]}))
    return str(path)


async def test_without_a_key_nothing_below_v1_is_read(keys: str) -> None:
    async with (
        harness(tiny.llama(), LookupDrafter(), patient=False) as h,
        http_client(h, keys) as c,
    ):
        for headers in (
            {},
            {"Authorization": "Bearer sk-wrong"},
            {"Authorization": f"Basic {SECRET}"},
        ):
            for call in (
                c.post("/v1/completions", content=b"{not even json", headers=headers),
                c.get("/v1/models", headers=headers),
            ):
                answer = await call
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
        assert (await c.get("/health")).status_code == 200
        answer = await c.post("/v1/completions", json=TEXT, headers=KEY)
        assert answer.status_code == 200
        await h.idle()


async def test_a_key_has_its_share(keys: str) -> None:
    """Two at once, the third is told to come again; the target hears whose answer it is."""
    async with (
        harness(tiny.llama(), LookupDrafter(), patient=False) as h,
        http_client(h, keys) as c,
    ):
        long = {**TEXT, "max_tokens": 300, "ignore_eos": True}
        running = [
            asyncio.create_task(c.post("/v1/completions", json=long, headers=KEY)) for _ in "12"
        ]
        while len(h.target._scheduler.running) < 2:
            await asyncio.sleep(0.005)
        assert {s.request.key_id for s in h.target._scheduler.running} == {"team"}
        for body in (TEXT, {**TEXT, "stream": True}):
            refused = await c.post("/v1/completions", json=body, headers=KEY)
            assert refused.status_code == 429
            assert refused.headers["retry-after"]
            assert "2 at once" in refused.json()["error"]["message"]
        many = await c.post("/v1/completions", json={**TEXT, "n": 3}, headers=KEY)
        assert many.status_code == 429
        assert [(await answer).status_code for answer in running] == [200, 200]
        assert (await c.post("/v1/completions", json=TEXT, headers=KEY)).status_code == 200
        await h.idle()


async def test_a_token_guards_the_workers() -> None:
    guarded = Security(token="shared")
    async with harness(tiny.llama(), LookupDrafter(), security=guarded) as h:
        request = h.request([5, 6, 7], max_tokens=8)
        assert len((await h.generate(request)).tokens) == 8
        for wrong in (Security(), Security(token="other")):
            with pytest.raises(Unauthenticated, match="token"):
                await Connection.connect(TARGET, h.target.address, "stranger", wrong)
        async with grpc.aio.insecure_channel(h.target.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await pb_grpc.TargetWorkerStub(channel).GetStatus(pb.GetStatusRequest())
            assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
            stub = health_pb2_grpc.HealthStub(channel)
            assert (await stub.Check(health_pb2.HealthCheckRequest())).status == 1
        await h.idle()


async def test_certificates_guard_the_workers() -> None:
    authority = trustme.CA()
    ours = Security(token="shared", certificates=certificates(authority))
    strangers = [
        Security(token="shared"),
        Security(token="shared", certificates=certificates(trustme.CA())),
        Security(certificates=certificates(authority)),
    ]
    async with harness(tiny.llama(), LookupDrafter(), security=ours) as h:
        assert len((await h.generate(h.request([5, 6, 7], max_tokens=8))).tokens) == 8
        # A worker that others' authority vouches for is not believed either.
        async with harness(tiny.llama(), LookupDrafter(), security=strangers[1]) as other:
            refused = await asyncio.gather(
                *(Connection.connect(TARGET, h.target.address, "they", who) for who in strangers),
                Connection.connect(TARGET, other.target.address, "us", ours),
                return_exceptions=True,
            )
        assert all(isinstance(error, Unavailable | Unauthenticated) for error in refused[:3])
        assert isinstance(refused[3], ServiceError)
        await h.idle()


@pytest.mark.parametrize("options", [{}, {"token_file": "x"}, {"tls_folder": "x"}])
def test_beyond_loopback_something_must_be_shown(options: dict[str, Any]) -> None:
    DataPlaneArgs(**options)
    if options:
        DataPlaneArgs(host="node", **options)
    else:
        with pytest.raises(ValueError, match="set token_file or tls_folder"):
            DataPlaneArgs(host="node")
