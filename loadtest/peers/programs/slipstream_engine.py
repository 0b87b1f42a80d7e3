"""Slipstream in process, without Ray: CONFIG [off].

With --folder CONFIG it says where the model lies, with --gguf CONFIG the file that it was read from; with
--encode CONFIG it turns a JSON list of questions into lists of token ids.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from deployments.round import GenerationRequest, Speculation
from loadtest.inside.workers import Inside, app_config, workers
from workers import checkpoint
from workers.request import SamplingParams, StopRules


async def answer(inside: Inside, asked: dict[str, Any], speculation: Speculation) -> dict[str, Any]:
    """All prompts at once."""
    started = time.perf_counter()
    answers = await asyncio.gather(
        *(
            inside.answer(
                GenerationRequest(
                    tuple(prompt),
                    SamplingParams(temperature=asked["temperature"], seed=1),
                    StopRules(asked["max_tokens"], ignore_eos=asked["ignore_eos"]),
                    time.monotonic() + 600,
                    speculation,
                )
            )
            for prompt in asked["prompts"]
        )
    )
    return {
        "seconds": time.perf_counter() - started,
        "tokens": [answer.tokens for answer in answers],
        "rounds": sum(answer.stats.rounds for answer in answers),
        "drafted": sum(answer.stats.draft_tokens for answer in answers),
    }


async def serve(config: Path, on: bool) -> None:
    """Answer lines until there are no more."""
    args = app_config(config)
    speculation = Speculation()
    if on:
        names = tuple(draft.name for draft in args.drafts)
        speculation = Speculation(names, args.target.drafted_rows, auto=True, mode="sequential")
    async with workers(config) as inside:
        ready = {"ready": True, "threads": args.target.num_threads, "version": torch.__version__}
        print(json.dumps(ready), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await answer(inside, json.loads(line), speculation)), flush=True)


def main() -> None:
    """See the package's docstring."""
    if sys.argv[1] == "--folder":
        print(checkpoint.resolve(app_config(Path(sys.argv[2])).target.model))
        return
    if sys.argv[1] == "--gguf":
        print(checkpoint.locate(app_config(Path(sys.argv[2])).target.model))
        return
    if sys.argv[1] == "--encode":
        tokenizer = AutoTokenizer.from_pretrained(
            checkpoint.resolve(app_config(Path(sys.argv[2])).target.model)
        )
        texts = json.loads(sys.stdin.read())
        chats = [[{"role": "user", "content": text}] for text in texts]
        encoded = tokenizer.apply_chat_template(chats, add_generation_prompt=True)
        print(json.dumps(encoded["input_ids"] if hasattr(encoded, "keys") else encoded))
        return
    asyncio.run(serve(Path(sys.argv[1]), "off" not in sys.argv[2:]))


if __name__ == "__main__":
    main()
