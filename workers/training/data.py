"""A target writes its own training text, with our engine and many answers side by side.

A draft should know what its target says, not what is right: so the target answers, and where no prompts are
given it invents them too, by continuing the bare header of a user's turn (as in Magpie, arXiv 2406.08464).
"""

import itertools
import json
import logging
import os
import queue
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import AutoTokenizer

from workers import checkpoint, json_lines
from workers.engine.kv_cache import KVPool
from workers.engine.loading import load_model
from workers.engine.model import Model
from workers.pricing import StepTimes
from workers.request import SamplingParams, StopRules
from workers.rpc import messages as m
from workers.target.counters import Counters
from workers.target.loop import TargetLoop
from workers.target.policy import Policy
from workers.target.scheduler import Scheduler
from workers.target.session import TargetSession

logger = logging.getLogger(__name__)

Row = tuple[list[int], list[int], float]

_BLOCK: Final = 4
"""Batches between two saves."""
_MARK: Final = "\x00text\x00"


class Writer:
    """Continues token lists with a model, `batch` of them side by side."""

    def __init__(
        self, model: Model, tokenizer: Tokenizer, eos: frozenset[int], batch: int, max_length: int
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._eos = eos
        self._max_length = max_length
        slots = int(0.3 * psutil.virtual_memory().available) // model.kv_shape.slot_bytes
        self._pool = model.pool(min(slots, batch * (max_length + KVPool.GRAIN)))
        self._counters = Counters()
        # Nothing is drafted: nobody asks what a step takes.
        self._policy = Policy(StepTimes({(1, 0): 1.0}), self._counters)
        scheduler = Scheduler(self._pool, None, batch, 1024, "fcfs", self._policy, self._counters)
        self._done: queue.SimpleQueue[tuple[TargetSession, Any]] = queue.SimpleQueue()
        self._loop = TargetLoop(model, scheduler, self._deliver, self._counters, 0, lambda: None)
        self._loop.start()

    def write(
        self,
        prompts: Sequence[list[int]],
        temperatures: Sequence[float],
        seeds: Sequence[int],
        most: int,
    ) -> Iterator[tuple[int, list[int]]]:
        """At most `most` tokens behind each prompt, its end included: pairs of index and tokens."""
        index = {}
        for number, (prompt, temperature, seed) in enumerate(
            zip(prompts, temperatures, seeds, strict=True)
        ):
            request = m.OpenTarget(
                lease_id="",
                tokens=tuple(prompt),
                prompt_len=len(prompt),
                sampling=SamplingParams(temperature=temperature, seed=seed),
                stopping=StopRules(max_tokens=most),
            )
            session = TargetSession(
                request,
                self._pool.sequence(),
                self._tokenizer,
                self._eos,
                self._max_length,
                0,
                self._counters,
                self._policy.outlooks,
            )
            index[id(session)] = (number, session)
            self._loop.submit(session)
        while index:
            session, message = self._done.get()
            if isinstance(message, m.Failed):
                raise ValueError(f"the target failed: {message.message}")
            if isinstance(message, m.Finished):
                number, _ = index.pop(id(session))
                yield number, session.tokens[session.request.prompt_len :]

    def close(self) -> None:
        """Stop the model's thread."""
        self._loop.stop()

    def _deliver(self, results: Sequence[tuple[TargetSession, Any]]) -> None:
        for result in results:
            self._done.put(result)


class Prompts:
    """Prompts in the target's chat template: given ones, or ones that the target invents."""

    def __init__(self, tokenizer: Any, texts: Sequence[str] | None) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        turn = self.render(_MARK)
        if _MARK not in turn:
            raise ValueError("the target's chat template does not show the user's text")
        self._header = turn[: turn.index(_MARK)]

    def render(self, text: str) -> str:
        """A user's turn, and the header of the answer."""
        rendered: str = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        return rendered

    def take(self, writer: Writer, rows: range, most: int) -> list[list[int]]:
        """The prompts of these rows, as token ids."""
        if self._texts is not None:
            texts = [self._texts[row % len(self._texts)] for row in rows]
        else:
            header = self._encode(self._header)
            invented: dict[int, str] = {}
            seeds = [2 * row + 1 for row in rows]
            for number, tokens in writer.write(
                [header] * len(rows), [1.0] * len(rows), seeds, most
            ):
                invented[number] = self._tokenizer.decode(tokens, skip_special_tokens=True).strip()
            texts = [invented[number] for number in range(len(rows))]
        return [self._encode(self.render(text)) for text in texts]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return ids


def write(
    target: str,
    out: Path,
    prompts: Path | None,
    answers: int,
    temperatures: Sequence[float],
    max_tokens: int,
    batch: int,
    seed: int,
    dtype: str,
    device: str,
) -> None:
    """Write a corpus file of `answers` texts; a broken-off run continues where it was last saved.

    Raises ValueError for prompts or a half-done file that do not fit.
    """
    options = {
        "target": target,
        "prompts": prompts.name if prompts else None,
        "temperatures": list(temperatures),
        "max_tokens": max_tokens,
        "seed": seed,
        "dtype": dtype,
    }
    texts = None if prompts is None else read_prompts(prompts)
    rows = _read_rows(out, options)
    if len(rows) >= answers:
        logger.info("%s holds %d answers already", out, len(rows))
        return
    folder = checkpoint.resolve(target)
    model = load_model(folder, dtype, device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    eos = model.info.eos_token_ids | {tokenizer.eos_token_id} - {None}
    writer = Writer(model, tokenizer.backend_tokenizer, eos, batch, model.info.max_model_len)
    source = Prompts(tokenizer, texts)
    try:
        with tqdm(total=answers, initial=len(rows), unit="answer") as bar:
            while len(rows) < answers:
                block = range(len(rows), min(answers, len(rows) + _BLOCK * batch))
                asked = source.take(writer, block, max_tokens)
                heat = [temperatures[row % len(temperatures)] for row in block]
                seeds = [2 * (row + (seed << 32)) for row in block]
                made: dict[int, list[int]] = {}
                for number, tokens in writer.write(asked, heat, seeds, max_tokens):
                    made[number] = tokens
                    bar.update()
                rows += [(asked[i], made[i], heat[i]) for i in range(len(block))]
                _save_rows(out, rows, options)
    finally:
        writer.close()


def read_prompts(file: Path) -> list[str]:
    """The first turns of a file of prompts; raises ValueError for a line without one, and for no lines."""
    texts = []
    for number, row in json_lines.read(file):
        prompt = row.get("prompt") or next(iter(row.get("turns") or []), None)
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f"{file} line {number} has no text under `prompt` or `turns`")
        texts.append(prompt)
    if not texts:
        raise ValueError(f"{file} holds no prompts")
    return texts


def _read_rows(out: Path, options: dict[str, Any]) -> list[Row]:
    if not out.exists():
        return []
    with np.load(out) as content:
        written = json.loads(str(content["options"]))
        if written != options:
            raise ValueError(f"{out} was written with other options: {written}")
        parts = [
            np.split(content[f"{kind}_ids"], content[f"{kind}_offsets"][1:-1])
            for kind in ("prompt", "output")
        ]
        temperature = content["temperature"]
    return [
        (prompt.tolist(), output.tolist(), float(heat))
        for prompt, output, heat in zip(*parts, temperature, strict=True)
    ]


def _save_rows(out: Path, rows: Sequence[Row], options: dict[str, Any]) -> None:
    arrays: dict[str, Any] = {}
    texts = {"prompt": [row[0] for row in rows], "output": [row[1] for row in rows]}
    for kind, lists in texts.items():
        arrays[f"{kind}_ids"] = np.fromiter(itertools.chain.from_iterable(lists), np.uint32)
        arrays[f"{kind}_offsets"] = np.cumsum([0, *map(len, lists)])
    part = out.with_suffix(".part.npz")
    np.savez_compressed(
        part,
        temperature=np.array([row[2] for row in rows], np.float32),
        options=np.array(json.dumps(options)),
        **arrays,
    )
    os.replace(part, out)
