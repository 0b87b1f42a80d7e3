"""One step's work: rows of several sequences in one flat batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from workers.engine.kv_cache import KVSequence
from workers.tree import ANCHOR


@dataclass(slots=True)
class SequenceRows:
    """The rows of one sequence in a step.

    Row 0 stands at position `kv.length`. Without `parents` the rows are a chain: a chunk of a prompt,
    or the one token that is decoded. With it they are a tree that hangs under what is committed:
    `parents[i]` is the parent row of row i, and -1 is the last committed token. A tree can grow over
    several steps: then `first` rows of it are in the cache already, and `parents` lists those too.
    `wanted` are those of the new rows, counted from 0, whose logits are needed. Of a chain the last `mutual`
    rows see each other, too.
    """

    kv: KVSequence
    tokens: Sequence[int]
    wanted: Sequence[int] = ()
    parents: Sequence[int] | None = None
    first: int = 0
    mutual: int = 0

    def all_depths(self) -> list[int]:
        """Distance of each row of the tree from position `kv.length`."""
        if self.parents is None:
            return list(range(len(self.tokens)))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == ANCHOR else depths[parent] + 1)
        return depths

    def depths(self) -> list[int]:
        """The same for the new rows only."""
        return self.all_depths()[self.first :]

    def visible(self) -> tuple[list[int], list[list[int]]]:
        """For each new row: how many slots it sees from slot 0 on, and which rows beyond those.

        A row sees what is committed and its own path. Where the path is the chain 0, 1, 2, … its slots
        continue the committed ones; else its rows are listed, in the order of their positions.
        """
        base, count = self.kv.length, self.first + len(self.tokens)
        contiguous: list[int] = []
        beyond: list[list[int]] = []
        paths: list[list[int] | None] = []  # None: the path is 0 … row
        for row in range(count):
            parent = row - 1 if self.parents is None else self.parents[row]
            if parent == row - 1 and (row == 0 or paths[parent] is None):
                paths.append(None)
                contiguous.append(base + row + 1)
                beyond.append([])
            else:
                above = [] if parent == ANCHOR else paths[parent] or list(range(parent + 1))
                path = [*above, row]
                paths.append(path)
                contiguous.append(base)
                beyond.append(path)
        for row in range(count - self.mutual, count):
            contiguous[row] = base + count
        return contiguous[self.first :], beyond[self.first :]


@dataclass(slots=True)
class RowBatch:
    """The rows of all sequences of a step, one sequence after the other."""

    sequences: Sequence[SequenceRows]
    first_rows: list[int] = field(init=False)
    num_rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.first_rows = []
        self.num_rows = 0
        for sequence in self.sequences:
            self.first_rows.append(self.num_rows)
            self.num_rows += len(sequence.tokens)

    def tokens(self) -> list[int]:
        """Token ids of all rows."""
        return [token for sequence in self.sequences for token in sequence.tokens]

    def positions(self) -> list[int]:
        """Positions of all rows, counted from the start of their own sequence."""
        return [
            sequence.kv.length + depth for sequence in self.sequences for depth in sequence.depths()
        ]

    def wanted(self) -> list[int]:
        """Indices of the rows whose logits are needed, in order."""
        return [
            first + row
            for first, sequence in zip(self.first_rows, self.sequences, strict=True)
            for row in sequence.wanted
        ]
