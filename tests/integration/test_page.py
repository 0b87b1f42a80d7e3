"""What the page is made of: its files and their headers, and the numbers of the pools."""

import hashlib
import re
from pathlib import Path
from typing import Any

import httpx

from tests import tiny
from tests.harness import harness, http_client
from workers.draft.drafters.lookup import LookupDrafter

TEXT = {
    "prompt": "the cat in the hat the cat",
    "max_tokens": 40,
    "temperature": 0,
    "speculation": {"drafter": "test"},
}


async def pools(client: httpx.AsyncClient) -> dict[str, Any]:
    response = await client.get("/v1/pools")
    assert response.status_code == 200, response.text
    return {pool["role"]: pool for pool in response.json()["data"]}


FILES = Path(__file__).parents[2] / "deployments" / "page" / "static"


async def test_the_pages_files_come_with_headers_that_let_nothing_else_run() -> None:
    async with harness(tiny.llama(), LookupDrafter()) as h, http_client(h) as client:
        kinds = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
        paths = {"/": "chat.html", "/pools": "pools.html"}
        paths |= {f"/page/{file.name}": file.name for file in FILES.iterdir()}
        for path, name in paths.items():
            answer = await client.get(path)
            assert answer.status_code == 200, path
            assert answer.content == (FILES / name).read_bytes()
            assert answer.headers["content-type"].startswith(
                kinds.get(Path(name).suffix, "image/svg+xml")
            )
            assert answer.headers["x-content-type-options"] == "nosniff"
            policy = answer.headers["content-security-policy"].split("; ")
            assert policy[0] == "default-src 'none'"
            assert {"script-src 'self'", "style-src 'self'", "connect-src 'self'"} <= set(policy)
            assert "unsafe" not in answer.headers["content-security-policy"]
            again = await client.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            assert (await client.head(path)).status_code == 200
        for wrong in ("/page/", "/page/none.js", "/page/..%2froutes.py", "/page/../routes.py"):
            assert (await client.get(wrong)).status_code == 404, wrong
        assert (await client.post("/")).status_code == 405
        assert "/pools" not in (await client.get("/openapi.json")).json()["paths"]


def test_nothing_in_the_page_makes_markup_or_asks_elsewhere() -> None:
    """The browser forbids it, too; here it is told before."""
    for file in FILES.iterdir():
        text = file.read_text()
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacent",
            "document.write",
            "eval(",
            "style=",
        ):
            assert word not in text, f"{file.name}: {word}"
        hosts = set(re.findall(r"https?://[^\s\"')]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not hosts, f"{file.name}: {hosts}"


async def test_pools_say_what_the_workers_do() -> None:
    async with (
        harness(
            tiny.llama(),
            LookupDrafter(),
            patient=False,
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
