"""The target's states at every token of a corpus, computed once and kept on disk.

The state behind the last norm gives the target's law at a position (times its head), and is what EAGLE-1
reads; EAGLE-3 reads the states that enter three layers. Both are stored as the target has them, in its dtype.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from workers.engine import linear
from workers.engine.features import FeatureTap
from workers.training.corpus import Corpus

SHARD: Final = 100
"""Texts of one file: what is lost at most when the run is cut off."""


class FeatureStore:
    """Features of the texts of a corpus, in a folder that is named for target, dtype and texts."""

    def __init__(
        self, folder: Path, corpus: Corpus, target: str, dtype: torch.dtype, three: bool
    ) -> None:
        self._corpus = corpus
        self._three = three
        name = json.dumps([target, str(dtype), corpus.digest()])
        self._folder = folder / hashlib.sha256(name.encode()).hexdigest()[:16]
        self._open: dict[int, Any] = {}

    def fill(self, module: Any, texts: range) -> None:
        """Compute what is missing of these texts with one of transformers' models.

        On CPU its linear layers are packed for speed.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        shards = range(texts.start // SHARD, -(-texts.stop // SHARD))
        missing = [shard for shard in shards if not self._is_complete(shard)]
        if not missing:
            return
        if linear.can_pack(module.dtype, module.device):
            linear.pack_linears(module)
        taps = {"last": FeatureTap(module, "last")}
        if self._three:
            taps["three"] = FeatureTap(module, "three")
        total = sum(len(self._corpus[t].tokens) for shard in missing for t in self._texts(shard))
        with tqdm(desc="states of the target", total=total, unit="tok") as bar:
            for shard in missing:
                self._fill_shard(module, taps, shard, bar)
        for tap in taps.values():
            tap.remove()

    def last(self, text: int) -> torch.Tensor:
        """The states behind the last norm of a text, [tokens, H]."""
        return self._rows("last", text)

    def three(self, text: int) -> torch.Tensor:
        """The states that enter three layers, [tokens, 3H]."""
        return self._rows("three", text)

    @torch.inference_mode()
    def _fill_shard(self, module: Any, taps: dict[str, FeatureTap], shard: int, bar: Any) -> None:
        made: dict[str, list[torch.Tensor]] = {kind: [] for kind in taps}
        for text in self._texts(shard):
            tokens = torch.from_numpy(self._corpus[text].tokens).to(module.device)
            module.base_model(tokens[None], use_cache=False)
            for kind, tap in taps.items():
                made[kind].append(tap.take().cpu())
            bar.update(len(tokens))
        part = self._file(shard).with_suffix(f".part{os.getpid()}")
        save_file({kind: torch.cat(parts) for kind, parts in made.items()}, part)
        os.replace(part, self._file(shard))

    def _is_complete(self, shard: int) -> bool:
        """Whether a shard holds what is needed; it may hold more."""
        if not self._file(shard).exists():
            return False
        with safe_open(self._file(shard), framework="pt") as content:
            return not self._three or "three" in content.keys()  # noqa: SIM118

    def _rows(self, kind: str, text: int) -> torch.Tensor:
        shard = text // SHARD
        if shard not in self._open:
            self._open[shard] = safe_open(self._file(shard), framework="pt")
        texts = self._texts(shard)
        first = sum(len(self._corpus[other].tokens) for other in range(texts.start, text))
        rows: torch.Tensor = self._open[shard].get_slice(kind)[
            first : first + len(self._corpus[text].tokens)
        ]
        return rows

    def _texts(self, shard: int) -> range:
        return range(shard * SHARD, min((shard + 1) * SHARD, len(self._corpus)))

    def _file(self, shard: int) -> Path:
        return self._folder / f"{shard:05d}.safetensors"
