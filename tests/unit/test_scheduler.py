"""Who runs next: priorities, fairness between keys, budgets of rows."""

from typing import Any

import pytest
import torch

from tests import tiny
from workers.engine.kv_cache import KVPool, KVShape
from workers.engine.native.attention import NativeAttention
from workers.pricing import StepTimes
from workers.request import SamplingParams, StopRules
from workers.rpc import messages as m
from workers.target.counters import Counters
from workers.target.policy import Policy
from workers.target.scheduler import Order, Scheduler
from workers.target.session import TargetSession
from workers.tree import TokenTree

TOKENIZER = tiny.byte_level_tokenizer().backend_tokenizer


class World:
    """A scheduler and sessions whose model always says token 7."""

    def __init__(
        self,
        max_num_seqs: int = 2,
        rows: int = 32,
        order: Order = "fcfs",
        slots: int = 4096,
    ) -> None:
        shape = KVShape(1, 1, 16, torch.float32, torch.device("cpu"))
        self.pool = KVPool(shape, NativeAttention(), slots)
        self.counters = Counters()
        # Rows are free: all that is proposed is worth verifying.
        policy = Policy(StepTimes({(1, 0): 0.01}), self.counters)
        self.scheduler = Scheduler(
            self.pool, None, max_num_seqs, rows, order, policy, self.counters
        )

    def session(self, prompt_len: int = 4, max_tokens: int = 3, **request: Any) -> TargetSession:
        opened = m.OpenTarget(
            "lease",
            (1,) * prompt_len,
            prompt_len,
            SamplingParams(temperature=0),
            StopRules(max_tokens),
            max_nodes=16,
            **request,
        )
        session = TargetSession(
            opened,
            self.pool.sequence(),
            TOKENIZER,
            frozenset(),
            max_model_len=2048,
            max_tree_nodes=16,
            counters=self.counters,
            outlooks=self.scheduler.policy.outlooks,
        )
        session.proposals.elsewhere = frozenset(["test"])
        self.scheduler.add(session)
        return session

    def step(self) -> dict[TargetSession, int]:
        """Run a step; how many rows each session had."""
        self.scheduler.next_start()
        work = self.scheduler.plan()
        for item in work:
            logits = torch.zeros(len(item.rows.wanted), 264)
            logits[:, 7] = 1
            item.session.advance(logits)
            self.scheduler.stepped(item.session)
        return {item.session: len(item.rows.tokens) for item in work}

    def order(self, steps: int = 200) -> list[TargetSession]:
        """Sessions in the order in which they are first given rows."""
        seen: list[TargetSession] = []
        for _ in range(steps):
            seen += [session for session in self.step() if session not in seen]
        return seen


def test_first_come_first_served() -> None:
    world = World(max_num_seqs=1)
    sessions = [world.session(priority=-i) for i in range(4)]
    assert world.order() == sessions


def test_smaller_priorities_go_first_where_the_policy_says_so() -> None:
    world = World(max_num_seqs=1, order="priority")
    late, middle, early = world.session(priority=5), world.session(), world.session(priority=-5)
    same = world.session(priority=-5)
    assert world.order() == [early, same, middle, late]


def test_one_key_cannot_keep_another_out() -> None:
    world = World(max_num_seqs=3)
    greedy = [world.session(key_id="greedy", max_tokens=50) for _ in range(10)]
    world.step()
    modest = [world.session(key_id="modest", max_tokens=50) for _ in range(2)]
    order = world.order(400)
    # Every place that becomes free goes to the key that has fewer answers running.
    assert order.index(modest[0]) < order.index(greedy[4])
    assert order.index(modest[1]) < order.index(greedy[6])


def test_answers_that_have_begun_go_before_long_prompts() -> None:
    world = World(max_num_seqs=4, rows=32)
    answering = world.session(max_tokens=50)
    world.step()
    prompt = world.session(prompt_len=100)
    steps = [world.step() for _ in range(5)]
    assert all(step[answering] == 1 for step in steps)
    assert [step.get(prompt) for step in steps[:4]] == [31, 31, 31, 7]


def test_no_step_has_more_rows_than_allowed_and_nobody_starves() -> None:
    world = World(max_num_seqs=40, rows=16)
    sessions = [world.session(max_tokens=20) for _ in range(40)]
    waited = dict.fromkeys(sessions, 0)
    for _ in range(120):
        rows = world.step()
        assert sum(rows.values()) <= 16
        for session in world.scheduler.running:
            waited[session] = 0 if session in rows else waited[session] + 1
    assert all(session.finished for session in sessions)
    assert max(waited.values()) <= 12


def test_a_tree_is_cut_to_rows_and_slots_and_never_preempts() -> None:
    world = World(max_num_seqs=2, rows=8, slots=64)
    one = world.session(prompt_len=30, max_tokens=30)
    while not one.decoding:
        world.step()
    tree = TokenTree.chain([9] * 12, [0.9] * 12)
    one.proposals.put("test", len(one.tokens), tree)
    assert world.step()[one] == 8
    other = world.session(prompt_len=20, max_tokens=12)
    while not other.decoding:
        world.step()
    for _ in range(6):
        for session in (one, other):
            chain = TokenTree.chain([9] * 7, [0.9] * 7)
            session.proposals.put("test", len(session.tokens), chain)
        world.step()
        world.pool.check_integrity()
    assert world.counters.preemptions == 0 or one.finished is None


def test_the_least_important_gives_way_and_comes_back() -> None:
    world = World(max_num_seqs=3, slots=96, order="priority")
    important = world.session(prompt_len=20, max_tokens=60, priority=-1)
    other = world.session(prompt_len=20, max_tokens=60)
    for _ in range(400):
        world.step()
        world.pool.check_integrity()
    assert world.counters.preemptions > 0
    assert important.finished == other.finished == m.Finished("length", 80)
    assert important.tokens[20:] == other.tokens[20:] == [7] * 60
    world.scheduler.check_integrity()
    assert world.pool.free_slots == world.pool.num_slots


def test_lost_slots_are_found_when_nothing_runs() -> None:
    world = World()
    session = world.session()
    world.step()
    world.scheduler.running.clear()
    assert session.kv.capacity
    with pytest.raises(RuntimeError, match="nothing runs"):
        world.scheduler.check_integrity()
