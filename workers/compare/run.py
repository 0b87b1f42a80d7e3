"""A target with all drafters beside it, which answers one question after the other."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from transformers import AutoTokenizer

from workers import checkpoint
from workers.checkpoint import FeatureKind
from workers.compare.drafters import Setting
from workers.compare.questions import Question
from workers.compare.trace import Answer, Round, Turn, depth_along, places
from workers.draft import drafters
from workers.draft.config import DrafterConfig
from workers.draft.drafter import Drafter
from workers.draft.group import DrafterGroup
from workers.engine.kv_cache import KVPool
from workers.engine.loading import load_model
from workers.engine.model import Model
from workers.engine.threads import use_threads
from workers.pricing import StepTimes
from workers.request import SamplingParams, StopRules
from workers.rpc import messages as m
from workers.target.beside import BesideSession
from workers.target.counters import Counters
from workers.target.loop import TargetLoop
from workers.target.measure import measure_step_times
from workers.target.policy import Policy
from workers.target.scheduler import Scheduler
from workers.target.session import TargetSession
from workers.tree import TokenTree

_PREFILL_ROWS: Final = 2048
_LEAST_SLOTS: Final = 2048
"""Of the cache: step times are measured behind long contexts, too."""

_WARM_UP_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class Options:
    """What decides the answers and their times; fields are as in TargetConfig and SamplingParams."""

    target: str
    dtype: str
    device: str
    num_threads: int
    max_draft_tokens: int
    max_tokens: int
    temperature: float
    seed: int
    chain: bool
    settings: Mapping[str, Setting]
    drafters: tuple[DrafterConfig, ...]


class Broken(RuntimeError):
    """An answer came to no end, or lost a drafter; the log says where."""


class _Clock:
    """Seconds that calls have taken since they were taken last."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def timed(self, call: Callable[[], None]) -> Callable[[], None]:
        """The call, with its time counted."""

        def run() -> None:
            began = time.monotonic()
            call()
            self._seconds += time.monotonic() - began

        return run

    def take(self) -> float:
        """What has been counted."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


@dataclass(frozen=True, slots=True)
class _Planned:
    session: TargetSession
    base_len: int
    tree: TokenTree
    verified: TokenTree


class _TracingPolicy(Policy):
    """Decides as a server's, for one session, and keeps what it decided in `rounds`."""

    def __init__(self, times: StepTimes, counters: Counters, drafting: _Clock) -> None:
        super().__init__(times, counters)
        self.about: tuple[str, int, int] = ("", 0, 0)
        self.rounds: list[Round] = []
        self._drafting = drafting
        self._planned: _Planned | None = None

    def select(
        self, sessions: Sequence[TargetSession], other_rows: int, most: int
    ) -> dict[TargetSession, TokenTree]:
        selected = super().select(sessions, other_rows, most)
        if not sessions:
            # The prompt is read: what its drafters took belongs to no round.
            self._drafting.take()
        for session in sessions:
            verified = selected.get(session, TokenTree())
            tree = session.proposals.tree()
            self._planned = _Planned(session, len(session.tokens), tree, verified)
        return selected

    def stepped(
        self,
        rows: int,
        idle_s: float,
        waited: bool,
        seconds: float,
        since_s: float,
        sessions: int,
        tokens: int,
    ) -> None:
        assert self._planned is not None
        planned = self._planned
        price, _ = self.price(sessions)
        super().stepped(rows, idle_s, waited, seconds, since_s, sessions, tokens)
        committed = tuple(planned.session.tokens[planned.base_len :])
        draft_s = self._drafting.take()
        self.rounds.append(
            Round(
                *self.about,
                planned.base_len,
                replace(planned.tree, laws=()),
                places(planned.verified, planned.tree),
                depth_along(planned.verified, committed),
                committed,
                price,
                draft_s,
                max(0.0, idle_s - draft_s),
                seconds,
            )
        )


class _Host:
    """A target that keeps features of one kind, its loop, and the drafters beside it.

    `times` of its steps are measured where none are given.
    """

    def __init__(
        self,
        model: Model,
        slots: int,
        made: Mapping[str, Drafter],
        options: Options,
        deliver: Callable[[Sequence[tuple[TargetSession, Any]]], None],
        times: StepTimes | None,
    ) -> None:
        self.pool = model.pool(slots)
        self.times = times or measure_step_times(model, self.pool, _PREFILL_ROWS)
        self.counters = Counters()
        self._drafting = _Clock()
        configs = tuple(config for config in options.drafters if config.name in made)
        self.group = DrafterGroup(configs, options.target, lambda send: send(), made, model)
        self.scheduler = Scheduler(
            self.pool, None, 1, _PREFILL_ROWS, "fcfs", self.policy(), self.counters
        )
        self.loop = TargetLoop(
            model,
            self.scheduler,
            deliver,
            self.counters,
            options.num_threads,
            self._drafting.timed(self.group.turn),
        )
        self.loop.start()

    def policy(self) -> _TracingPolicy:
        """A setting's own budget and estimates."""
        return _TracingPolicy(self.times, self.counters, self._drafting)

    def close(self) -> None:
        """End the threads."""
        self.loop.stop()
        self.group.stop()


class Bench:
    """The target, its loop and the drafters. `times` are measured where none are given.

    A target keeps features of one kind: where drafters read several, there is a second one in memory.
    """

    def __init__(
        self,
        options: Options,
        questions: Sequence[Question],
        times: StepTimes | None = None,
    ) -> None:
        """Load everything, for these questions.

        Raises ValueError if a question is too long, and what loading models and drafters raises.
        """
        self._options = options
        use_threads(options.num_threads)
        folder = checkpoint.resolve(options.target)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        model = load_model(folder, options.dtype, options.device)
        self.row_invariant = model.info.row_invariant
        self._max_model_len = model.info.max_model_len
        self._eos = model.info.eos_token_ids | {self._tokenizer.eos_token_id} - {None}
        longest = max(self._most_tokens(question) for question in questions)
        slots = max(longest + options.max_draft_tokens, _LEAST_SLOTS) + KVPool.GRAIN
        self._said: list[tuple[float, Any]] = []
        self._over = threading.Event()
        self._host_of = self._hosts(model, slots, times)
        self._policies = {setting: host.policy() for setting, host in self._host_of.items()}
        self.times = next(iter(self._host_of.values())).times

    def _hosts(self, model: Model, slots: int, times: StepTimes | None) -> dict[str, _Host]:
        """Who answers each setting; all by the step times of the first."""
        options = self._options
        made = {c.name: drafters.make(c, options.target, model) for c in options.drafters}
        kinds = {name: drafter.feature_kind for name, drafter in made.items()}
        usual = next((kind for kind in kinds.values() if kind is not None), None)
        settings: dict[FeatureKind | None, list[str]] = {usual: []}
        for label, setting in options.settings.items():
            read = {kinds[name] for name in setting.drafters} - {None}
            if len(read) > 1:
                raise ValueError(
                    f"{label}: its drafters read different features of the target (EAGLE-3, and EAGLE or "
                    "Medusa), which keeps those of one kind: take one of them"
                )
            settings.setdefault(next(iter(read), usual), []).append(label)
        hosts: dict[str, _Host] = {}
        for kind, labels in settings.items():
            names = {name for label in labels for name in options.settings[label].drafters}
            if kind != usual:
                model = load_model(
                    checkpoint.resolve(options.target), options.dtype, options.device
                )
            if kind is not None:
                model.keep_features(kind)
            mine = {
                config.name: made[config.name]
                if kind in (usual, kinds[config.name])
                else drafters.make(config, options.target, model)
                for config in options.drafters
                if config.name in names
            }
            host = _Host(model, slots, mine, options, self._deliver, times)
            times = host.times
            hosts |= dict.fromkeys(labels, host)
        return {label: hosts[label] for label in options.settings}

    def close(self) -> None:
        """End the threads."""
        for host in set(self._host_of.values()):
            host.close()

    def warm_up(self, setting: str, question: Question) -> None:
        """Answer the first turn shortly: what a setting does the first time takes longer."""
        self._answer(setting, question, 0, self._prompt(question.turns[:1], ()), _WARM_UP_TOKENS)
        self._policies[setting].rounds.clear()

    def answer(self, setting: str, question: Question) -> tuple[list[Round], Answer]:
        """All turns of a question, each after the answers to the ones before, and their rounds.

        Raises Broken.
        """
        turns: list[Turn] = []
        for number in range(len(question.turns)):
            prompt = self._prompt(question.turns[: number + 1], [turn.text for turn in turns])
            turns.append(self._answer(setting, question, number, prompt, self._options.max_tokens))
        policy = self._policies[setting]
        rounds, policy.rounds = policy.rounds, []
        return rounds, Answer(setting, question.id, question.category, tuple(turns), time.time())

    def _answer(
        self, setting: str, question: Question, turn: int, prompt: Sequence[int], most: int
    ) -> Turn:
        host, policy = self._host_of[setting], self._policies[setting]
        policy.about = (setting, question.id, turn)
        host.scheduler.policy = policy
        session = self._session(host, self._options.settings[setting], question.id, prompt, most)
        before = len(policy.rounds)
        self._said.clear()
        self._over.clear()
        began = time.perf_counter()
        host.loop.submit(session)
        self._over.wait()
        if session.beside is not None:
            session.beside.close()
        failures = [said for _, said in self._said if isinstance(said, m.Failed)]
        if failures:
            who = failures[0].drafter or "the target"
            raise Broken(f"question {question.id}, {setting}: {who}: {failures[0].message}")
        said = [(at, said) for at, said in self._said if isinstance(said, m.Committed)]
        ended, finished = self._said[-1]
        return Turn(
            "".join(committed.text for _, committed in said),
            len(prompt),
            tuple(session.tokens[len(prompt) :]),
            finished.reason,
            ended - began,
            said[0][0] - began,
            tuple(len(round_.committed) for round_ in policy.rounds[before:]),
        )

    def _session(
        self, host: _Host, setting: Setting, choice: int, prompt: Sequence[int], most: int
    ) -> TargetSession:
        nodes = self._options.max_draft_tokens if setting.drafters else 0
        request = m.OpenTarget(
            "",
            tuple(prompt),
            len(prompt),
            # Questions draw apart, and each the same with every setting.
            SamplingParams(self._options.temperature, seed=self._options.seed, choice=choice),
            StopRules(most),
            drafters=setting.drafters,
            max_nodes=nodes,
            chain=self._options.chain,
            mode="sequential",
            insists=True,
            verification=setting.verification,
        )
        session = TargetSession(
            request,
            host.pool.sequence(),
            self._tokenizer.backend_tokenizer,
            self._eos,
            self._max_model_len,
            nodes,
            host.counters,
            host.scheduler.policy.outlooks,
        )

        def drafted(message: Any) -> None:
            if isinstance(message, m.Proposal):
                session.proposals.put(message.drafter, message.base_len, message.tree)
            else:
                host.loop.say(session, message)

        if setting.drafters:
            session.beside = BesideSession.open(host.group, session.request, drafted)
        return session

    def _deliver(self, results: Sequence[tuple[TargetSession, Any]]) -> None:
        now = time.perf_counter()
        self._said += [(now, message) for _, message in results]
        if any(isinstance(said, m.Finished | m.Failed) for _, said in results):
            self._over.set()

    def _prompt(self, turns: Sequence[str], answers: Sequence[str]) -> list[int]:
        """The conversation so far as tokens, by the model's template if it has one."""
        if not self._tokenizer.chat_template:
            said = [text for pair in zip(turns, answers, strict=False) for text in pair]
            return list(self._tokenizer("\n".join([*said, turns[-1]])).input_ids)
        messages = []
        for number, turn in enumerate(turns):
            messages.append({"role": "user", "content": turn})
            if number < len(answers):
                messages.append({"role": "assistant", "content": answers[number]})
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def _most_tokens(self, question: Question) -> int:
        """Tokens of the conversation at most."""
        turns = question.turns
        prompt = len(self._prompt(turns, [""] * (len(turns) - 1)))
        # Where two texts meet, they may have some tokens more than each alone.
        most = prompt + len(turns) * (self._options.max_tokens + 4)
        if most > self._max_model_len:
            raise ValueError(
                f"question {question.id} takes up to {most} tokens with its answers, the model "
                f"{self._max_model_len}: lower --max-tokens, or leave it out"
            )
        return most
