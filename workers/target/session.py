"""One answer in the making on a target: its tokens, its cache, what is proposed, its end.

Anchor convention: the last committed token is not in the KV cache yet. A decoding pass feeds it
together with the N drafted tokens; row i predicts the child of node i - 1, row 0 the child of the
anchor. Accepting m tokens commits m + 1.
"""

import copy
import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from tokenizers import Tokenizer

from workers import limits, sampling, verification
from workers.engine.kv_cache import KVSequence
from workers.engine.rows import SequenceRows
from workers.grammar import Grammar
from workers.rpc import messages as m
from workers.rpc.errors import InvalidRequest
from workers.target.beside import BesideSession, News
from workers.target.counters import Counters
from workers.target.proposals import Outlook, Proposals
from workers.text import Detokenizer, StopStrings
from workers.tracing import Stages
from workers.tree import ANCHOR, TokenTree

NO_FEATURES: Final = -1
"""As `features_from`: no more of them."""

_arrivals = itertools.count()


class TargetSession:
    """The state of one answer. Owned by the target's loop thread.

    `features_from` is set from other threads: the newest wins. `send` tells the coordinator, on the event
    loop. `outlooks` of drafters are shared by all answers. An answer that another target has begun goes on
    behind its tokens, or is `finished` from the start. Raises InvalidRequest if they go on behind its end.
    """

    send: Callable[[Any], None]

    def __init__(
        self,
        request: m.OpenTarget,
        kv: KVSequence,
        tokenizer: Tokenizer,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        max_tree_nodes: int,
        counters: Counters,
        outlooks: dict[str, Outlook],
    ) -> None:
        self.request = request
        self.kv = kv
        self.tokens = list(request.tokens)
        self.finished: m.Finished | m.Failed | None = None
        self.arrival = next(_arrivals)
        self.ready_since = time.monotonic()
        self._max_nodes = max(min(max_tree_nodes, request.max_nodes), request.max_predicted)
        self.proposals = Proposals(outlooks, self._max_nodes, request.patience_ms / 1000, counters)
        self.features_from: int | None = None
        self.beside: BesideSession | None = None
        self.stages = Stages("target", {}, request.traceparent)
        self._sends_features = False
        stopping = request.stopping
        eos = frozenset() if stopping.ignore_eos else eos_token_ids
        self._stop_ids = eos | stopping.token_ids
        self._processors = sampling.Processors(
            request.sampling,
            request.tokens[: request.prompt_len],
            request.tokens[request.prompt_len :],
            self._stop_ids,
            stopping.min_tokens,
        )
        self._prompt_logprobs_from = 1
        self.just_prefilled = False
        self._max_len = min(max_model_len, request.prompt_len + request.stopping.max_tokens)
        self._counters = counters
        self._detokenizer = Detokenizer(
            tokenizer, self.tokens[: request.prompt_len], request.show_special_tokens
        )
        self._stops = StopStrings(stopping.strings, stopping.include_stop)
        self._text: list[str] = []
        self._rows: SequenceRows
        self._set_tree(TokenTree())
        self._verified: m.Verified | None = None
        self._go_on()

    def obey(self, grammar: Grammar) -> None:
        """The answer has this grammar, and has begun before it if another target has begun it."""
        for token in self.tokens[self.request.prompt_len :]:
            grammar.observe(token)
        self._processors.grammar = self.proposals.grammar = grammar

    @property
    def pending(self) -> int:
        """Committed tokens that are not in the cache; 1 while decoding, more before."""
        return len(self.tokens) - self.kv.length

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be computed."""
        return (
            self.request.prompt_logprobs is not None
            and self._prompt_logprobs_from < self.request.prompt_len
        )

    @property
    def resumed(self) -> bool:
        """Whether another target has begun the answer."""
        return len(self.request.tokens) > self.request.prompt_len

    @property
    def decoding(self) -> bool:
        """Whether all but the last committed token is in the cache and an answer token exists."""
        return self.pending == 1 and len(self.tokens) > self.request.prompt_len

    @property
    def drafted(self) -> int:
        """Nodes of the tree in the last step."""
        return len(self._folded)

    def open_mailbox(self) -> None:
        """Take the proposals that arrived."""
        beside = self.beside.told if self.beside is not None else frozenset[str]()
        self.proposals.open_mailbox(self.tokens, self.request.prompt_len, beside)

    def news_beside(self, price: float, pace: float, affordable: bool) -> News | None:
        """What the drafters beside the target are to hear before their turn; see BesideSession."""
        if self.beside is None:
            return None
        features = partial(self._features, end=self.kv.length)
        return self.beside.news(self.tokens, features, price, pace, affordable, self._verified)

    def candidates(self) -> TokenTree:
        """What is proposed now and may be verified, in one tree."""
        # The bonus token needs its place too: a path may use all but one of the tokens left.
        room = self._max_len - len(self.tokens) - 1
        return self.proposals.tree().cut(self._max_nodes, room)

    def decode_rows(self, tree: TokenTree) -> SequenceRows:
        """The anchor and a tree under it."""
        self._set_tree(tree)
        folded = self._folded
        parents = [ANCHOR, *(parent + 1 for parent in folded.parents)]
        self._rows = SequenceRows(
            self.kv, [self.tokens[-1], *folded.tokens], range(len(folded) + 1), parents
        )
        return self._rows

    def _set_tree(self, tree: TokenTree) -> None:
        """What the step verifies: each path of the tree has one row, behind the anchor's."""
        self._tree = tree
        self._folded, became = tree.folded()
        self._row_of = {ANCHOR: 0} | {node: 1 + place for node, place in enumerate(became)}

    def prefill_rows(self, count: int) -> SequenceRows:
        """The next `count` committed tokens; the last one of all predicts the next token."""
        self._set_tree(TokenTree())
        start = self.kv.length
        tokens = self.tokens[start : start + count]
        # The row at a position predicts the token after it.
        needed_from = len(self.tokens) - 1
        if self.wants_prompt_logprobs:
            needed_from = self._prompt_logprobs_from - 1
        wanted = range(max(0, needed_from - start), len(tokens))
        self._rows = SequenceRows(self.kv, tokens, wanted)
        return self._rows

    def advance(self, logits: torch.Tensor) -> list[m.PromptLogprobs | m.Committed]:
        """Take a step's logits [wanted rows, V]: verify, commit, and say what is new.

        Sets `finished` when the answer ends. Raises ValueError if the logits are unusable.
        """
        messages: list[m.PromptLogprobs | m.Committed] = []
        self.just_prefilled = False
        if self._rows.parents is None:
            start = self.kv.length + len(self._rows.tokens) - len(self._rows.wanted)
            self.kv.keep(range(len(self._rows.tokens)))
            if self.wants_prompt_logprobs:
                messages += self._prompt_logprobs(logits, start)
            if self.pending:
                return messages
            logits = logits[-1:]
            self.just_prefilled = True
        messages.append(self._verify(logits))
        return messages

    def _verify(self, logits: torch.Tensor) -> m.Committed:
        base_len = len(self.tokens)
        verdict = self._verdict(logits, base_len)
        if self._rows.parents is not None:
            # The last committed token is the next anchor: it has no row yet.
            known = verdict.accepted[: len(verdict.tokens) - 1]
            self.kv.keep([0, *(self._row_of[node] for node in known)])
        if self.beside is not None and self.beside.reads_choices:
            self._verified = self._all_choices(logits, base_len, verdict)
        if self.finished is not None:
            self._text.append(self._stops.flush())
        text = "".join(self._text)
        self._text.clear()
        self._counters.tokens_committed += len(verdict.tokens)
        self._counters.tokens_drafted += self.drafted
        self._counters.tokens_accepted += len(verdict.accepted)
        self._counters.proposals_used += bool(self._tree)
        draft = self._draft(verdict) if self.request.show_drafts and self._tree else None
        self.proposals.committed(base_len, verdict.tokens)
        self.ready_since = time.monotonic()
        return m.Committed(
            base_len=base_len,
            tokens=verdict.tokens,
            accepted=len(verdict.accepted),
            drafted=self.drafted,
            tested=verdict.tested,
            text=text,
            logprobs=tuple(self._logprobs(logits, verdict)),
            features=self._features(base_len - 1, self.kv.length)[0]
            if self._sends_features
            else None,
            draft=draft,
        )

    def _draft(self, verdict: verification.Verdict) -> m.Draft:
        accepted = tuple(self._row_of[node] - 1 for node in verdict.accepted)
        return m.Draft(self._folded, self.proposals.sources(self._folded), accepted)

    def _verdict(self, logits: torch.Tensor, base_len: int) -> verification.Verdict:
        params = self.request.sampling
        rule = verification.RULES.get(self.request.verification)
        picked = self.request.verification != "typical" and not self._tree.laws
        if rule is None or params.greedy or picked or not self._tree:

            def target_token(node: int) -> int:
                row = self._processors.apply(logits[self._row_of[node]])
                return sampling.draw(row, params, len(self.tokens))

            return verification.walk(self._tree, target_token, self._commit)
        before = self._processors.after(())

        def law_after(path: tuple[int, ...]) -> torch.Tensor:
            row = logits[self._row_of[path[-1] if path else ANCHOR]]
            processors = before.after(self._tree.tokens[node] for node in path)
            return sampling.processed_law(processors.apply(row), params)

        return rule(self._tree, law_after, sampling.Luck(params, base_len), self._commit)

    def _logprobs(
        self, logits: torch.Tensor, verdict: verification.Verdict
    ) -> list[m.TokenLogprobs]:
        """Those of committed tokens, each from the row of the node before it."""
        count = self.request.logprobs
        if count is None:
            return []
        nodes = (ANCHOR, *verdict.accepted)
        return [
            _token_logprobs(logits[self._row_of[node]], token, count)
            for node, token in zip(nodes, verdict.tokens, strict=False)
        ]

    def _all_choices(
        self, logits: torch.Tensor, base_len: int, verdict: verification.Verdict
    ) -> m.Verified:
        """The tokens behind the nodes of a verdict, and what the target would take behind the others.

        Processors with a memory are as they stand now, and the grammar is left out: the latter are guesses
        only.
        """
        processors = copy.copy(self._processors)
        processors.grammar = None
        choices: dict[int, int | None] = dict(
            zip((ANCHOR, *verdict.accepted), verdict.tokens, strict=False)
        )
        for node, depth in enumerate(self._tree.depths()):
            if node not in choices:
                row = processors.apply(logits[self._row_of[node]])
                try:
                    choices[node] = sampling.draw(row, self.request.sampling, base_len + depth)
                except ValueError:
                    # Nobody has taken this path: the answer goes on.
                    choices[node] = None
        nodes = range(ANCHOR, len(self._tree))
        return m.Verified(base_len, self._tree, tuple(choices[node] for node in nodes))

    def wanted_features(self) -> list[m.Features]:
        """The features that were asked for and are there; those to come are sent with what is committed."""
        first, self.features_from = self.features_from, None
        if first is None or self.kv.features.shape[-1] == 0:
            return []
        self._sends_features = first != NO_FEATURES
        return self._features(first, self.kv.length) if self._sends_features else []

    def _features(self, first: int, end: int) -> list[m.Features]:
        """The features of positions first … end - 1, in chunks of at most 1 MiB."""
        rows = self.kv.features
        size = max(1, limits.FEATURE_CHUNK_BYTES // (rows.shape[1] * rows.itemsize))
        return [
            m.Features(
                start,
                min(size, end - start),
                rows.shape[1],
                str(rows.dtype).removeprefix("torch."),
                rows[start : min(start + size, end)].cpu().view(torch.uint8).numpy().tobytes(),
            )
            for start in range(first, end, size)
        ]

    def _prompt_logprobs(self, logits: torch.Tensor, start: int) -> list[m.PromptLogprobs]:
        """Those of the prompt's tokens that rows from position `start` on predict."""
        count = self.request.prompt_logprobs
        assert count is not None
        first = start + 1
        tokens = self.tokens[first : min(first + len(logits), self.request.prompt_len)]
        if not tokens or first != self._prompt_logprobs_from:
            return []
        self._prompt_logprobs_from = first + len(tokens)
        entries = [
            _token_logprobs(row, token, count) for row, token in zip(logits, tokens, strict=False)
        ]
        return [m.PromptLogprobs(first, tuple(entries))]

    def _commit(self, token: int) -> bool:
        """Make a token part of the answer; whether the answer goes on."""
        self.tokens.append(token)
        self._processors.observe(token)
        self._read(token, len(self.tokens))
        return self.finished is None

    def _go_on(self) -> None:
        """Come to where another target has left the answer: its text was shown by that one."""
        prompt_len = self.request.prompt_len
        for length, token in enumerate(self.tokens[prompt_len:], prompt_len + 1):
            if self.finished is not None:
                raise InvalidRequest(
                    f"the answer ends after {length - 1} tokens, but {len(self.tokens)} are given"
                )
            self._read(token, length)
        self._text.clear()

    def _read(self, token: int, length: int) -> None:
        """Turn the token that made prompt and answer `length` long into text; does it end the answer?"""
        stopping = self.request.stopping
        answered = length - self.request.prompt_len
        if token in self._stop_ids and answered > stopping.min_tokens:
            last = self._detokenizer.add(token) if stopping.include_stop else ""
            self._show(last + self._detokenizer.flush())
            self.finished = m.Finished("stop", length, stop_token=token)
            return
        text = self._detokenizer.add(token)
        if answered <= stopping.min_tokens:
            self._text.append(text)
        else:
            self._show(text)
        if self._stops.found is None and length >= self._max_len:
            self._show(self._detokenizer.flush())
            self.finished = m.Finished("length", length)
        if self._stops.found is not None:
            self.finished = m.Finished("stop", length, stop_string=self._stops.found)

    def _show(self, text: str) -> None:
        self._text.append(self._stops.add(text))


def _token_logprobs(row: torch.Tensor, token: int, count: int) -> m.TokenLogprobs:
    return m.TokenLogprobs(*sampling.top_logprobs(row, token, count))
