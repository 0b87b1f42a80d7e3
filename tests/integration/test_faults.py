"""What can go wrong between the processes changes no token and leaves nothing behind."""

import asyncio
import contextlib
import dataclasses

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deployments import drafting
from deployments.config import CoordinatorThresholds
from protos import speculation_pb2 as pb
from protos import speculation_pb2_grpc as pb_grpc
from tests import tiny
from tests.harness import Harness, ReplayDrafter, harness
from workers import limits
from workers.draft.drafters.lookup import LookupDrafter
from workers.request import SamplingParams, StopRules
from workers.rpc import messages as m
from workers.rpc.connection import DRAFT, TARGET, Connection
from workers.rpc.errors import DeadlineExceeded, FailedPrecondition, InvalidRequest, Unavailable
from workers.tree import TokenTree

tokenizer = tiny.byte_level_tokenizer()
VOCAB = len(tokenizer)
PROMPT = tokenizer("hello world, this is a test").input_ids


async def plain_answer(h: Harness, **options):
    request = h.request(PROMPT, max_tokens=60, temperature=1.0, seed=9, **options)
    answer = await h.generate(request, speculate=False)
    for drafter in h.drafters.values():
        if isinstance(drafter, ReplayDrafter):
            drafter.learn(request, answer)
    return request, answer


async def test_late_proposals_are_rebased_on_what_was_committed_meanwhile() -> None:
    """R1: the target never waits here, and the drafter is always behind."""
    drafter = ReplayDrafter("true", VOCAB)
    drafter.delay_s = 0.004
    async with harness(tiny.llama(), drafter, patient=False) as h:
        h.thresholds = CoordinatorThresholds(max_patience_ms=0.0)
        request, off = await plain_answer(h)
        answer = await h.generate(request)
        for _ in range(20):
            answer.same_as(off)
            counters = h.target._counters
            if counters.proposals_rebased and counters.proposals_dropped:
                break
            answer = await h.generate(request)
        assert h.target._counters.proposals_rebased > 0
        await h.idle()


async def test_a_slow_drafter_is_not_waited_for() -> None:
    """R5: tokens equal, and the drafter answers fewer times than there are rounds."""
    drafter = ReplayDrafter("true", VOCAB)
    drafter.delay_s = 0.2
    async with harness(tiny.llama(), drafter, patient=False) as h:
        request, off = await plain_answer(h)
        answer = await h.generate(request)
        answer.same_as(off)
        assert answer.stats.proposals < answer.stats.rounds
        await h.idle()


async def test_a_drafter_that_raises_costs_only_its_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafting, "RETRY_SECONDS", 0.01)
    drafter = ReplayDrafter("true", VOCAB)
    async with harness(tiny.llama(), drafter) as h:
        request, off = await plain_answer(h)
        drafter.fail = True
        broken = await h.generate(request)
        broken.same_as(off)
        assert broken.stats.accepted_tokens == 0
        drafter.fail = False
        healed = await h.generate(request)
        healed.same_as(off)
        assert healed.stats.accepted_tokens > 0
        await h.idle()


async def test_a_draft_connection_that_breaks_mid_answer() -> None:
    async with harness(tiny.llama(), ReplayDrafter("true", VOCAB)) as h:
        request, off = await plain_answer(h, max_draft_tokens=1)
        tokens: list[int] = []
        async for piece in h.generation(request).pieces():
            if not tokens:
                await h.drafts.close()
            tokens += piece.tokens
        assert tokens == off.tokens
        await h.idle(2.0)


async def test_no_draft_worker_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    async with harness(tiny.llama(), ReplayDrafter("true", VOCAB), patient=False) as h:
        request, off = await plain_answer(h)

        @contextlib.asynccontextmanager
        async def nobody(deadline: float | None = None):
            await asyncio.sleep(3600)
            yield

        monkeypatch.setattr(h.drafts, "lease", nobody)
        answer = await h.generate(request)
        answer.same_as(off)
        assert answer.stats.draft_tokens == 0
        assert answer.stats.drafter == ""


async def test_a_deadline_ends_the_answer_and_frees_everything() -> None:
    async with harness(tiny.llama(), ReplayDrafter("wrong", VOCAB)) as h:
        request = h.request(PROMPT, max_tokens=480, timeout_s=0.2)
        generation = h.generation(request)
        with pytest.raises(DeadlineExceeded):
            async for _ in generation.pieces():
                pass
        assert generation.stats.finish_reason == "deadline_exceeded"
        await h.idle()


@pytest.mark.parametrize("after", [0, 1, 3])
async def test_a_consumer_that_stops_frees_everything(after: int) -> None:
    async with harness(tiny.llama(), ReplayDrafter("true", VOCAB)) as h:
        request, _ = await plain_answer(h)
        pieces = h.generation(request).pieces()
        for _ in range(after):
            await anext(pieces)
        await pieces.aclose()
        await h.idle()


async def test_a_cancelled_task_frees_everything() -> None:
    async with harness(tiny.llama(), ReplayDrafter("wrong", VOCAB)) as h:
        for delay in (0.0, 0.01, 0.05, 0.2):
            task = asyncio.create_task(h.generate(h.request(PROMPT, max_tokens=450)))
            await asyncio.sleep(delay)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await h.idle()


class Recorder:
    def __init__(self) -> None:
        self.messages: list[object] = []
        self.over = asyncio.Event()

    def receive(self, message: object) -> None:
        self.messages.append(message)
        if isinstance(message, m.Failed | m.Finished):
            self.over.set()

    def disconnected(self, error: Exception) -> None:
        self.messages.append(error)
        self.over.set()


def open_target(lease_id: str, **changes) -> m.OpenTarget:
    request = m.OpenTarget(
        lease_id, tuple(PROMPT), len(PROMPT), SamplingParams(temperature=0), StopRules(20)
    )
    return dataclasses.replace(request, **changes)


async def talk(connection: Connection, message: object) -> list[object]:
    """Open a session and listen until it is over."""
    recorder = Recorder()
    connection.open(message, lambda channel: recorder)
    await asyncio.wait_for(recorder.over.wait(), 10)
    return recorder.messages


async def test_open_without_a_live_lease_is_refused() -> None:
    async with harness(tiny.llama(), LookupDrafter()) as h:
        async with h.targets.lease() as lease:
            refused = await talk(lease.connection, open_target("made up"))
            assert refused[0].code == FailedPrecondition.code.name
            done = await talk(lease.connection, open_target(lease.lease_id))
            assert isinstance(done[-1], m.Finished)
            again = await talk(lease.connection, open_target(lease.lease_id))
            assert again[0].code == FailedPrecondition.code.name
        async with h.drafts.lease() as lease:
            opened = m.OpenDraft(
                "made up", tuple(PROMPT), SamplingParams(), ("test",), 8, False, 99
            )
            refused = await talk(lease.connection, opened)
            assert refused[0].code == FailedPrecondition.code.name
            unknown = dataclasses.replace(opened, lease_id=lease.lease_id, drafters=("other",))
            refused = await talk(lease.connection, unknown)
            assert refused[0].code == InvalidRequest.code.name
            assert "this worker has test" in refused[0].message
        await h.idle()


async def test_prompts_that_do_not_fit_are_refused() -> None:
    async with harness(tiny.llama(), LookupDrafter(), max_model_len=64) as h:
        async with h.targets.lease() as lease:
            long = open_target(lease.lease_id, tokens=(1,) * 64, prompt_len=64)
            assert "leave no room" in (await talk(lease.connection, long))[0].message
        request = h.request(PROMPT, max_tokens=500)
        answer = await h.generate(request)
        assert answer.finished == m.Finished("length", 64)
        assert len(PROMPT) + len(answer.tokens) == 64


async def test_duplicates_and_strange_bases_are_harmless() -> None:
    """R2: what comes twice, too late or from the future changes nothing."""
    async with harness(tiny.llama(), LookupDrafter()) as h:
        reference = await h.generate(h.request(PROMPT, max_tokens=20), speculate=False)
        async with h.targets.lease() as lease:
            recorder = Recorder()
            channel = lease.connection.open(open_target(lease.lease_id), lambda channel: recorder)
            tree = TokenTree.chain([1, 2, 3], [0.9, 0.8, 0.7])
            channel.send(m.Asked(frozenset(), frozenset(["test"])))
            while not recorder.over.is_set():
                for base in (0, len(PROMPT), len(PROMPT) + 5, 10_000):
                    channel.send(m.Propose("test", base, tree))
                    channel.send(m.Propose("test", base, tree))
                    channel.send(m.Propose("stranger", base, tree))
                    await asyncio.sleep(0)
                await asyncio.sleep(0.001)
        tokens = [t for c in recorder.messages if isinstance(c, m.Committed) for t in c.tokens]
        assert tokens == reference.tokens


async def test_a_repeated_commit_is_taken_once_and_a_gap_ends_the_connection() -> None:
    drafter = ReplayDrafter("true", VOCAB)
    async with harness(tiny.llama(), drafter) as h:
        async with h.drafts.lease() as lease:
            recorder = Recorder()
            opened = m.OpenDraft(
                lease.lease_id, (1, 2, 3), SamplingParams(), ("test",), 8, False, 99
            )
            channel = lease.connection.open(opened, lambda channel: recorder)
            for commit in (m.Commit(3, (4, 5)), m.Commit(3, (4, 5)), m.Commit(4, (5, 6))):
                channel.send(commit)
                await asyncio.sleep(0.05)
            known = next(iter(drafter._sessions.values()))[0]
            assert known == [1, 2, 3, 4, 5, 6]
            channel.send(m.Commit(9, (1,)))
            await asyncio.wait_for(recorder.over.wait(), 5)
            assert isinstance(recorder.messages[-1], InvalidRequest | Unavailable)
            assert "are known here" in str(recorder.messages[-1])
        request = h.request(PROMPT, max_tokens=10)
        await h.generate(request)
        await h.idle()


async def test_hostile_frames_cost_the_peer_its_connection_and_nobody_else() -> None:
    """R9: ids beyond the vocabulary, a million ids, no introduction, another version."""
    async with harness(tiny.llama(), LookupDrafter()) as h:
        neighbour = asyncio.create_task(h.generate(h.request(PROMPT, max_tokens=200)))
        hello = pb.ToTarget(
            hello=pb.Hello(protocol_version=limits.PROTOCOL_VERSION, peer_id="hostile")
        )
        propose = pb.Propose(tree=pb.Tree(tokens=[10**6], parents=[-1], scores=[0.5]))
        huge = pb.Propose(
            tree=pb.Tree(tokens=[1] * 10**6, parents=range(-1, 10**6 - 1), scores=[0.5] * 10**6)
        )
        opened = pb.OpenTarget(lease_id="x", tokens=[10**7], prompt_len=1)
        attacks = [
            [pb.ToTarget(hello=pb.Hello(protocol_version=99))],
            [pb.ToTarget()],
            *(
                [hello, pb.ToTarget(messages=[pb.ToTargetMessage(session=1, **body)])]
                for body in ({"propose": propose}, {"propose": huge}, {"open": opened}, {})
            ),
        ]
        for frames in attacks:
            async with grpc.aio.insecure_channel(h.target.address) as channel:
                call = pb_grpc.TargetWorkerStub(channel).Connect(iter_frames(frames))
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    async for _ in call:
                        pass
                assert raised.value.code() in (
                    grpc.StatusCode.INVALID_ARGUMENT,
                    grpc.StatusCode.FAILED_PRECONDITION,
                )
        alone = await h.generate(h.request(PROMPT, max_tokens=200), speculate=False)
        (await neighbour).same_as(alone)
        await h.idle()


async def iter_frames(frames: list[pb.ToTarget]):
    for frame in frames:
        yield frame
    await asyncio.sleep(5)


async def test_connecting_to_nobody_or_somebody_else_is_a_clear_error() -> None:
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
        await Connection.connect(TARGET, "127.0.0.1:1", "test")
    async with harness(tiny.llama(), LookupDrafter()) as h:
        with pytest.raises(Exception, match=r"(?i)unimplemented|not found"):
            await Connection.connect(DRAFT, h.target.address, "test")


async def test_workers_answer_the_standard_health_service() -> None:
    async with harness(tiny.llama(), LookupDrafter()) as h:
        for worker in (h.target, h.drafts.workers[0]):
            async with grpc.aio.insecure_channel(worker.address) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                answer = await stub.Check(health_pb2.HealthCheckRequest())
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            worker.check_health()


async def test_sessions_share_steps_and_a_failed_step_is_told() -> None:
    async with harness(tiny.llama(), LookupDrafter()) as h:
        await asyncio.gather(*(h.generate(h.request(PROMPT[i:], max_tokens=30)) for i in range(4)))
        status = await pb_grpc.TargetWorkerStub(h.targets.connections()[0]._channel).GetStatus(
            pb.GetStatusRequest()
        )
        assert status.shared_steps > 10
        assert status.rows > status.steps
        original = h.target._model.forward
        h.target._model.forward = lambda batch: 1 / 0
        with pytest.raises(Exception, match=r"ZeroDivisionError"):
            await h.generate(h.request(PROMPT))
        h.target._model.forward = original
        await h.generate(h.request(PROMPT))
        await h.idle()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
async def test_rows_that_are_no_numbers_fail_their_request_only(
    bad: float, temperature: float
) -> None:
    async with harness(tiny.llama(), LookupDrafter()) as h:
        original = h.target._model.forward

        def poisoned(batch):
            logits = original(batch).clone()
            first = 0
            for rows in batch.sequences:
                if rows.tokens[0] == PROMPT[0] and len(rows.tokens) == 3:
                    logits[first : first + len(rows.wanted)] = bad
                first += len(rows.wanted)
            return logits

        alone = await h.generate(h.request(PROMPT, max_tokens=30), speculate=False)
        h.target._model.forward = poisoned
        good = asyncio.create_task(h.generate(h.request(PROMPT, max_tokens=30)))
        with pytest.raises(Exception, match=r"not finite numbers"):
            await h.generate(h.request(PROMPT[:3], temperature=temperature))
        (await good).same_as(alone)
        await h.idle()
