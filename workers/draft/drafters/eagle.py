"""EAGLE: a head of one layer that continues the target's own states (arXiv 2401.15077, 2406.16858,
2503.01840).

Tokens that were committed are read with the target's states, drafted ones with the head's own. So nothing of
a tree stays in the cache: what was right in it can be proposed, and is read again with the target's states
before the next tree grows.
"""

from collections.abc import Sequence

import torch

from workers.draft.drafters.tree_drafter import TreeDrafter, TreeSession
from workers.draft.growth import Grown
from workers.draft.head_runner import HeadRunner
from workers.engine.kv_cache import KVPool
from workers.engine.rows import SequenceRows
from workers.request import SamplingParams
from workers.rpc.messages import Features


class EagleSession(TreeSession):
    """`tokens` are all committed tokens, `features[i]` the target's of position i, until they are read.

    The head's cache holds positions from `start` on: at most the window before the last position when the
    session began. `row_states` are the head's own states of the tree's rows, `root_state` of the last
    committed token.
    """

    def __init__(self, pool: KVPool, sampling: SamplingParams) -> None:
        super().__init__(pool, sampling)
        self.tokens: list[int] = []
        self.features: dict[int, torch.Tensor] = {}
        self.start = 0
        self.row_states: list[torch.Tensor] = []
        self.root_state = torch.empty(0)

    @property
    def next_position(self) -> int:
        """The first position that is not in the head's cache."""
        return self.start + self.kv.length


class EagleDrafter(TreeDrafter[EagleSession]):
    """Drafts with a head on the target's features."""

    def __init__(
        self,
        runner: HeadRunner,
        vocabulary_fingerprint: str,
        num_slots: int,
        window: int,
        width: int,
        steps: int,
        floor: float,
    ) -> None:
        super().__init__(runner.pool(num_slots), runner.max_length, runner.ids, width, steps, floor)
        self.vocabulary_fingerprint = vocabulary_fingerprint
        # The first row of the window reads the state before it.
        self.feature_window = window + 1
        self._window = window
        self.feature_kind = runner.feature_kind
        self.feature_width = runner.feature_width
        self._runner = runner

    def make_session(self, sampling: SamplingParams) -> EagleSession:
        """See TreeDrafter."""
        return EagleSession(self._pool, sampling)

    def observe(self, session: int, tokens: Sequence[int], features: Sequence[Features]) -> None:
        """See Drafter."""
        super().observe(session, tokens, features)
        known = self._sessions[session].features
        for chunk in features:
            first = chunk.first_position
            known.update(enumerate(self._runner.tensor(chunk), first))

    def blank_features(self, count: int) -> list[Features]:
        """See TreeDrafter."""
        return [self._runner.blank_features(count)]

    def take(self, session: EagleSession) -> Grown:
        """See TreeDrafter."""
        if not session.tokens:
            # The first position has no state before it: the head begins with the second at the earliest.
            session.start = max(1, len(session.pending) - self._window)
        session.tokens += session.pending
        known, _, _ = session.tree.reroot(session.pending)
        session.tree = Grown()
        session.row_states = []
        return known

    def unread(self, session: EagleSession, most: int) -> SequenceRows | None:
        """See TreeDrafter."""
        first = session.next_position
        end = first
        while end < len(session.tokens) and end - first < most and end - 1 in session.features:
            end += 1
        if end == first:
            return None
        wanted = [end - first - 1] if end == len(session.tokens) else []
        return SequenceRows(session.kv, session.tokens[first:end], wanted)

    def run(self, work: Sequence[tuple[EagleSession, SequenceRows]]) -> torch.Tensor:
        """See TreeDrafter."""
        before: list[torch.Tensor] = []
        for session, rows in work:
            if rows.parents is None:
                first = session.next_position
                # What was read is not needed again.
                before += [session.features.pop(first + i - 1) for i in range(len(rows.tokens))]
            else:
                before += [
                    session.root_state if parent < 0 else session.row_states[parent]
                    for parent in rows.parents[rows.first :]
                ]
        logits, states = self._runner.run([rows for _, rows in work], torch.stack(before))
        index = 0
        for session, rows in work:
            made = states[index : index + len(rows.tokens)]
            index += len(rows.tokens)
            if rows.parents is None:
                session.root_state = made[-1]
            else:
                session.row_states += list(made)
        return logits
