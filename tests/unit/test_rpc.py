"""Messages, conflation and leases."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace

import grpc
import pytest

from protos import speculation_pb2 as pb
from workers import limits
from workers.leases import LeasedReceiver, LeaseTable
from workers.request import SamplingParams, StopRules
from workers.rpc import codec, errors
from workers.rpc import messages as m
from workers.rpc.connection import Outbox, Sessions
from workers.rpc.errors import FailedPrecondition, ProtocolError
from workers.tree import TokenTree

TREE = TokenTree((5, 6, 7), (-1, -1, 1), (0.5, 0.25, 0.125))
DRAFT = m.Draft(TREE, {"a": (0, 1, 2), "b": (), "c": (1,)}, (1, 2))
SAMPLING = SamplingParams(0.5, 3, 0.75, 0.125, seed=-5, choice=2)
MESSAGES = [
    (
        codec.to_target_codec,
        [
            m.OpenTarget(
                "lease",
                (1, 2, 3),
                2,
                SAMPLING,
                StopRules(9, ("a", "é"), frozenset({4, 5})),
                logprobs=0,
                key_id="k",
                patience_ms=1.5,
                insists=True,
                prediction=(7, 0, 7),
                max_predicted=64,
                show_drafts=True,
            ),
            m.OpenTarget("l", (1,), 1, SamplingParams(seed=2**63 - 1), StopRules(1)),
            m.Propose("eagle", 7, TREE),
            m.Propose("lookup", 7, TokenTree()),
            m.FeaturesWanted(0),
            m.FeaturesWanted(None),
            m.Asked(frozenset(["a", "b"]), frozenset()),
            m.Asked(frozenset(), frozenset(["c"])),
            m.Close(),
        ],
    ),
    (
        codec.from_target_codec,
        [
            m.Committed(
                4,
                (1, 2),
                1,
                3,
                2,
                "text",
                (m.TokenLogprobs(-0.5, ((1, -0.5), (9, -1.5))), m.TokenLogprobs(-2.0)),
                m.TargetTimings(1, 2, 3),
                price=0.5,
                pace=2.0,
                resting=True,
            ),
            m.Committed(4, (6, 7, 9), 2, 3, 2, "", draft=DRAFT),
            m.Finished("stop", 9, stop_string="x"),
            m.Finished("stop", 9, stop_token=0),
            m.Finished("length", 9),
            m.Failed("INTERNAL", "why"),
        ],
    ),
    (
        codec.to_draft_codec,
        [
            m.OpenDraft("lease", (1, 2), SAMPLING, ("a", "b"), 8, True, 99),
            m.OpenDraft("lease", (1, 2), SAMPLING, ("a", "b"), 8, True, 99, "sequential"),
            m.OpenDraft("lease", (1, 2), SAMPLING, ("a",), 8, False, 99, key_id="k"),
            m.Commit(5, (1, 2, 3)),
            m.Commit(5, (1, 2, 3), (), frozenset(["a"]), 0.25, 64.0),
            m.Commit(5, (1, 2, 3), (), frozenset()),
            m.Close(),
        ],
    ),
    (
        codec.from_draft_codec,
        [
            m.Proposal(5, TREE, "lookup", True, 11, 12),
            m.Proposal(5, TREE, "eagle", again=True),
            m.Failed("INTERNAL", "why"),
        ],
    ),
]


@pytest.mark.parametrize(("make", "messages"), MESSAGES)
def test_messages_survive_the_wire(make, messages) -> None:
    one = make()
    items = list(enumerate(messages, 1))
    frame = one.encode(items)
    assert one.decode(type(frame).FromString(frame.SerializeToString())) == items


def propose(**tree: list) -> pb.ToTarget:
    body = pb.Propose(base_len=1, tree=pb.Tree(**tree))
    return pb.ToTarget(messages=[pb.ToTargetMessage(session=1, propose=body)])


@pytest.mark.parametrize(
    ("frame", "complaint"),
    [
        (propose(tokens=[5], parents=[-1], scores=[float("nan")]), "probabilities"),
        (propose(tokens=[50], parents=[-1], scores=[1.0]), "below 10"),
        (propose(tokens=[1], parents=[3], scores=[1.0]), "parents come before"),
        (propose(tokens=[1, 2], parents=[-1], scores=[1.0]), "equally many"),
        (propose(tokens=range(9), parents=[-1] * 9, scores=[1.0] * 9), "at most 8"),
        (pb.ToTarget(messages=[pb.ToTargetMessage(session=1)]), "without a known body"),
        (
            pb.ToTarget(
                messages=[
                    pb.ToTargetMessage(
                        session=1, open=pb.OpenTarget(tokens=[1], prompt_len=2, lease_id="x")
                    )
                ]
            ),
            "prompt_len",
        ),
        (
            pb.ToTarget(
                messages=[
                    pb.ToTargetMessage(
                        session=1,
                        open=pb.OpenTarget(
                            tokens=[1],
                            prompt_len=1,
                            sampling=pb.Sampling(top_p=1.0, repetition_penalty=1.0),
                            stopping=pb.Stopping(max_tokens=1),
                            patience_ms=float("inf"),
                            mode=pb.PIPELINED,
                        ),
                    )
                ]
            ),
            "finite",
        ),
    ],
)
def test_frames_that_break_a_rule_are_refused_whole(frame: pb.ToTarget, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        codec.to_target_codec(vocab_size=10, max_tree_nodes=8).decode(frame)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"tokens": (6, 8, 9)}, "no path"),
        ({"tokens": (6,)}, "no path"),
        ({"drafted": 4}, "2 of 3 nodes are accepted, but 2 of 4"),
        ({"accepted": 1}, "but 1 of 3"),
        ({"draft": m.Draft(TREE, {"a": (0, 3)}, (1, 2))}, "'a' has nodes"),
        ({"draft": m.Draft(TREE, {"a": (0, 0, 0, 0)}, (1, 2))}, "'a' has nodes"),
        ({"draft": m.Draft(TREE, {}, (0, 2))}, "no path"),
        ({"draft": m.Draft(TREE, {}, (1, 3))}, "no path"),
        (
            {"draft": m.Draft(TokenTree((5, 6, 70), (-1, -1, 1), (0.5,) * 3), {}, (1, 2))},
            "below 10",
        ),
    ],
)
def test_a_draft_that_is_not_what_was_committed_is_refused(
    change: dict[str, object], complaint: str
) -> None:
    committed = m.Committed(4, (6, 7, 9), 2, 3, 2, "", draft=DRAFT)
    frame = codec.from_target_codec().encode([(1, replace(committed, **change))])
    with pytest.raises(ProtocolError, match=complaint):
        codec.from_target_codec(vocab_size=10).decode(frame)


@pytest.mark.parametrize("kind", [codec.to_target_codec, codec.to_draft_codec])
def test_a_key_id_is_as_long_as_a_key_files_at_most(kind: Callable[[], codec.Codec]) -> None:
    sampling, longest = SamplingParams(), "k" * limits.MAX_KEY_ID_CHARS
    for key_id, refused in ((longest, False), (longest + "k", True)):
        message = (
            m.OpenTarget("l", (1,), 1, sampling, StopRules(1), key_id=key_id)
            if kind is codec.to_target_codec
            else m.OpenDraft("l", (1,), sampling, ("a",), 8, False, 9, key_id=key_id)
        )
        frame = kind().encode([(1, message)])
        with pytest.raises(ProtocolError, match="65") if refused else contextlib.nullcontext():
            assert kind().decode(frame) == [(1, message)]


def test_another_protocol_version_is_refused() -> None:
    info = pb.WorkerInfo(protocol_version=limits.PROTOCOL_VERSION + 1)
    with pytest.raises(FailedPrecondition, match="same release"):
        codec.decode_info(info)


def test_every_error_has_a_status_and_a_name() -> None:
    for name, error in errors._BY_CODE.items():
        assert errors.http_status(error("why")) >= 400
        assert type(errors.from_code(name, "why")) is error
    assert type(errors.from_code("SOMETHING_NEW", "why")) is errors.InternalError
    assert errors.NoCapacity.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert errors.http_status(errors.NoCapacity("")) == 503
    assert errors.http_status(errors.RateLimited("")) == 429


async def test_what_waits_is_conflated_by_session() -> None:
    outbox = Outbox(codec.to_draft_codec())
    outbox.put(1, m.Commit(3, (7,)))
    outbox.put(2, m.Commit(5, (8,)))
    outbox.put(1, m.Commit(4, (9, 9)))
    frames = [frame async for frame in _closing(outbox)]
    assert len(frames) == 1
    first, second = frames[0].messages
    assert (first.session, first.commit.base_len, list(first.commit.tokens)) == (1, 3, [7, 9, 9])
    assert second.session == 2


async def test_the_newest_proposal_wins_and_a_close_forgets_what_waits() -> None:
    outbox = Outbox(codec.to_target_codec())
    outbox.put(1, m.Propose("a", 3, TREE))
    outbox.put(1, m.Propose("b", 3, TREE))
    outbox.put(1, m.Propose("a", 4, TREE))
    outbox.put(2, m.Propose("a", 9, TREE))
    outbox.discard(2)
    frames = [frame async for frame in _closing(outbox)]
    sent = [
        (item.session, item.propose.drafter, item.propose.base_len) for item in frames[0].messages
    ]
    assert sent == [(1, "b", 3), (1, "a", 4)]


async def test_a_grown_tree_that_overtakes_the_first_one_counts_as_the_first() -> None:
    outbox = Outbox(codec.from_draft_codec())
    outbox.put(1, m.Proposal(3, TREE, "a", hit=True))
    outbox.put(1, m.Proposal(3, TokenTree(), "a", again=True))
    outbox.put(2, m.Proposal(3, TREE, "a"))
    outbox.put(2, m.Proposal(4, TREE, "a", again=True))
    frames = [frame async for frame in _closing(outbox)]
    sent = [(i.proposal.base_len, i.proposal.hit, i.proposal.again) for i in frames[0].messages]
    assert sent == [(3, True, False), (4, False, True)]


async def test_one_message_leaves_at_once_and_order_is_kept() -> None:
    outbox = Outbox(codec.from_target_codec())
    frames = outbox.frames()
    outbox.put(1, m.Failed("A", ""))
    assert len((await anext(frames)).messages) == 1
    waiting = asyncio.create_task(anext(frames))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    for number in range(5):
        outbox.put(number, m.Failed(str(number), ""))
    first = (await waiting).messages
    assert [item.failed.code for item in first] == [str(n) for n in range(5)]


async def _closing(outbox: Outbox):
    outbox.close()
    async for frame in outbox.frames():
        yield frame


def test_commits_that_do_not_follow_each_other_are_a_gap() -> None:
    with pytest.raises(ValueError, match="does not follow"):
        m.Commit(3, (1,)).followed_by(m.Commit(5, (2,)))


class Recorder(LeasedReceiver):
    def __init__(self, channel, leases, lease_id) -> None:
        self.ends = 0
        super().__init__(channel, leases, lease_id)

    def handle(self, message) -> None:
        raise ProtocolError("nothing is expected")

    def ended(self) -> None:
        self.ends += 1


async def hold(table: LeaseTable) -> tuple[str, asyncio.Task[None]]:
    holder = table.hold()
    lease_id = await anext(holder)

    async def rest() -> None:
        async with contextlib.aclosing(holder):
            async for _ in holder:
                pass

    task = asyncio.create_task(rest())
    await asyncio.sleep(0)
    return lease_id, task


def session(table: LeaseTable, lease_id: str) -> Recorder:
    made: list[Recorder] = []
    sessions = Sessions(codec.from_target_codec(), codec.to_target_codec())

    def receiver(channel) -> Recorder:
        made.append(Recorder(channel, table, lease_id))
        return made[0]

    sessions.add(1, receiver)
    return made[0]


async def test_a_lease_lives_as_long_as_its_session() -> None:
    table = LeaseTable()
    lease_id, task = await hold(table)
    receiver = session(table, lease_id)
    await asyncio.sleep(0.01)
    assert not task.done()
    receiver.send(m.Finished("stop", 9))
    await asyncio.wait_for(task, 1)
    assert receiver.ends == 1
    assert len(table) == 0


@pytest.mark.parametrize("how", ["close", "disconnect", "revoke"])
async def test_whatever_ends_a_session_ends_its_lease_once(how: str) -> None:
    table = LeaseTable()
    lease_id, task = await hold(table)
    receiver = session(table, lease_id)
    if how == "close":
        receiver.receive(m.Close())
    elif how == "disconnect":
        receiver.disconnected(errors.Unavailable("gone"))
    else:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.wait_for(task, 1)
    receiver.disconnected(errors.Unavailable("gone"))
    assert receiver.ends == 1
    assert len(table) == 0


async def test_an_unclaimed_lease_ends_and_cannot_be_used_after() -> None:
    table = LeaseTable(claim_seconds=0.05)
    lease_id, task = await hold(table)
    await asyncio.wait_for(task, 1)
    with pytest.raises(FailedPrecondition, match="take a new one"):
        session(table, lease_id)


async def test_a_lease_serves_one_session() -> None:
    table = LeaseTable()
    lease_id, task = await hold(table)
    session(table, lease_id)
    with pytest.raises(FailedPrecondition):
        session(table, lease_id)
    task.cancel()
