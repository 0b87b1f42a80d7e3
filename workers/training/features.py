"""The target's states at every token of a corpus, computed once and kept on disk.

The state behind the last norm gives the target's law at a position (times its head), and is what EAGLE-1
reads; EAGLE-3 reads the states that enter three layers. Both are stored as the target has them, in its dtype.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from tqdm import tqdm

from workers.engine import linear
from workers.engine.features import FeatureTap
from workers.training.corpus import Corpus

SHARD: Final = 100
"""Texts of one file: what is lost at most when the run is cut off."""


class FeatureStore:
    """Features of the texts of a corpus, in a folder that names target and texts."""

    def __init__(self, folder: Path, corpus: Corpus, target: str, three: bool) -> None:
        self._corpus = corpus
        self._kinds = ("last", "three") if three else ("last",)
        self._folder = folder / _name(corpus, target)
        self._open: dict[tuple[str, int], Any] = {}

    def fill(self, module: Any, texts: range, progress: bool = True) -> None:
        """Compute what is missing of these texts with one of transformers' models.

        Its linears are packed for speed, so the module is of no other use afterwards.
        """
        if linear.can_pack(module.dtype, module.device):
            linear.pack_linears(module)
        taps = {"last": FeatureTap(module, "last")}
        if "three" in self._kinds:
            taps["three"] = FeatureTap(module, "three")
        self._folder.mkdir(parents=True, exist_ok=True)
        shards = range(texts.start // SHARD, -(-texts.stop // SHARD))
        with tqdm(desc="target's states", unit="tok", disable=not progress) as bar:
            for shard in shards:
                if not all(self._file(kind, shard).exists() for kind in self._kinds):
                    self._fill_shard(module, taps, shard, bar)

    def __contains__(self, text: int) -> bool:
        return all(self._file(kind, text // SHARD).exists() for kind in self._kinds)

    def last(self, text: int) -> torch.Tensor:
        """The states behind the last norm of a text, [tokens, H]."""
        return self._rows("last", text)

    def three(self, text: int) -> torch.Tensor:
        """The states that enter three layers, [tokens, 3H]."""
        return self._rows("three", text)

    @torch.inference_mode()
    def _fill_shard(self, module: Any, taps: dict[str, FeatureTap], shard: int, bar: Any) -> None:
        made: dict[str, list[torch.Tensor]] = {kind: [] for kind in self._kinds}
        for text in self._texts(shard):
            tokens = torch.from_numpy(self._corpus[text].tokens).to(module.device)
            module.base_model(tokens[None], use_cache=False)
            for kind in self._kinds:
                made[kind].append(taps[kind].take().cpu())
            bar.update(len(tokens))
        for kind, parts in made.items():
            joined = torch.cat(parts)
            part = self._file(kind, shard).with_suffix(f".part{os.getpid()}")
            with part.open("wb") as stream:
                np.save(stream, joined.view(torch.int16).numpy())
            os.replace(part, self._file(kind, shard))

    def _rows(self, kind: str, text: int) -> torch.Tensor:
        shard = text // SHARD
        if (kind, shard) not in self._open:
            self._open[kind, shard] = np.load(self._file(kind, shard), mmap_mode="r")
        texts = self._texts(shard)
        first = sum(len(self._corpus[other].tokens) for other in range(texts.start, text))
        rows = self._open[kind, shard][first : first + len(self._corpus[text].tokens)]
        return torch.from_numpy(np.array(rows)).view(torch.bfloat16)

    def _texts(self, shard: int) -> range:
        return range(shard * SHARD, min((shard + 1) * SHARD, len(self._corpus)))

    def _file(self, kind: str, shard: int) -> Path:
        return self._folder / f"{kind}-{shard:05d}.npy"


def _name(corpus: Corpus, target: str) -> str:
    digest = hashlib.sha256(json.dumps([target, corpus.digest()]).encode())
    return digest.hexdigest()[:16]
