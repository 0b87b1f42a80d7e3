"""What the page is made of: its files and their headers, and the numbers of the pools."""

import hashlib
from pathlib import Path
from typing import Any

import httpx

from tests import tiny
from tests.harness import harness, http_client
from workers.draft.drafters.lookup import LookupDrafter

TEXT = {"prompt": "the cat in the hat the cat", "max_tokens": 40, "temperature": 0}


async def pools(client: httpx.AsyncClient) -> dict[str, Any]:
    response = await client.get("/v1/pools")
    assert response.status_code == 200, response.text
    return {pool["role"]: pool for pool in response.json()["data"]}


async def test_pools_say_what_the_workers_do() -> None:
    async with (
        harness(
            tiny.llama(),
            LookupDrafter(),
            others=[tiny.llama()],
            slow=0.02,
            enable_prefix_caching=False,
        ) as h,
        http_client(h) as client,
    ):
        # Targets take answers in turn: both are known after two.
        for _ in range(2):
            await client.post("/v1/completions", json=TEXT)
        idle = await pools(client)
        assert set(idle) == {"target", "draft"}
        target, draft = idle["target"], idle["draft"]
        assert target["models"] == draft["models"] == ["tiny"]
        assert target["health"] == "HEALTHY"
        assert target["replicas"] == {"RUNNING": 2}
        known = {worker["worker_id"]: worker for worker in target["workers"]}
        assert known.keys() == {worker.info.worker_id for worker in h.targets.workers}
        for worker in h.targets.workers:
            shown = known[worker.info.worker_id]
            assert shown["host"] == worker.info.host
            assert shown["status"]["running_sessions"] == 0
            assert shown["status"]["kv_slots"] == shown["status"]["kv_free_slots"] > 0
            assert shown["status"]["steps"] == worker._counters.steps
            assert shown["status"]["rows"] == worker._counters.rows
        committed = sum(w["status"]["tokens_committed"] for w in target["workers"])
        assert committed >= 2 * TEXT["max_tokens"]
        (drafting,) = draft["workers"]
        assert drafting["drafters"] == ["test"]
        assert drafting["status"]["proposals"] > 0
        request = h.request(range(1, 30), max_tokens=100)
        busy, tokens = None, 0
        async for piece in h.generation(request).pieces():
            tokens += len(piece.tokens)
            if busy is None and tokens > 20:
                busy = await pools(client)
        assert busy is not None
        running = [w["status"] for w in busy["target"]["workers"]]
        assert sum(status["running_sessions"] for status in running) == 1
        assert sum(s["kv_slots"] - s["kv_free_slots"] for s in running) >= 29 + 20
        await h.idle()


async def test_a_worker_that_does_not_answer_is_shown_without_numbers() -> None:
    def broken() -> None:
        raise RuntimeError("told to fail")

    async with harness(tiny.llama(), LookupDrafter()) as h, http_client(h) as client:
        h.drafts.workers[0].status = broken  # type: ignore[method-assign]
        shown = await pools(client)
        assert [worker["status"] for worker in shown["draft"]["workers"]] == [None]
        assert shown["target"]["workers"][0]["status"]["kv_slots"] > 0


async def test_pools_are_for_those_with_a_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    digest = hashlib.sha256(b"secret").hexdigest()
    keys.write_text(f"keys:\n  - id: somebody\n    sha256: {digest}\n")
    async with harness(tiny.llama(), LookupDrafter()) as h, http_client(h, str(keys)) as client:
        refused = await client.get("/v1/pools")
        assert refused.status_code == 401
        assert "no valid API key" in refused.json()["error"]["message"]
        client.headers["authorization"] = "Bearer secret"
        assert set(await pools(client)) == {"target", "draft"}
