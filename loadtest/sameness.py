"""Whether speculation and company change any token: the same prompts off and on, alone and many at once.

    python -m loadtest.sameness --prompts prompts.jsonl --count 200 --at-once 16

Every prompt is answered greedily and, with a seed, at temperature 1. Prints one JSON object; exits with 1
if any token differed.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
from tqdm.asyncio import tqdm

from loadtest.prompts_file import Prompt, read
from loadtest.provenance import provenance
from loadtest.server import running_server

SAMPLED = ({"temperature": 0}, {"temperature": 1, "seed": 7})


async def answers(
    client: httpx.AsyncClient,
    prompts: Sequence[Prompt],
    sampling: Mapping[str, float],
    drafters: Sequence[str],
    at_once: int,
    max_tokens: int,
    name: str,
) -> list[list[int]]:
    """The token ids of all prompts, so many requests at once; without drafters they are not drafted."""
    places = asyncio.Semaphore(at_once)

    async def one(prompt: Prompt) -> list[int]:
        body = {
            "messages": [{"role": "user", "content": prompt.text}],
            "max_tokens": max_tokens,
            "return_token_ids": True,
            # Named, because what is left to the server may not be drafted at all.
            "speculation": {"enabled": bool(drafters), "drafter": list(drafters) or "auto"},
            **sampling,
        }
        async with places:
            response = await client.post("/v1/chat/completions", json=body)
        if response.is_error:
            raise RuntimeError(f"{response.status_code}: {response.text}")
        ids: list[int] = response.json()["choices"][0]["token_ids"]
        return ids

    made: list[list[int]] = await tqdm.gather(*(one(prompt) for prompt in prompts), desc=name)
    return made


async def compare(
    base: str, prompts: Sequence[Prompt], at_once: int, max_tokens: int
) -> dict[str, int]:
    """How many prompts' answers differ from those made alone without speculation."""
    differ: dict[str, int] = {}
    async with httpx.AsyncClient(base_url=base, timeout=None) as client:
        models = await client.get("/v1/models")
        everyone = models.json()["data"][0]["drafters"]
        for sampling in SAMPLED:
            kind = "greedy" if sampling["temperature"] == 0 else "seeded"
            reference: list[list[int]] = []
            for speculate, count in ((False, 1), (True, 1), (True, at_once), (False, at_once)):
                name = f"{kind}, {'on' if speculate else 'off'}, {count} at once"
                drafters = everyone if speculate else ()
                made = await answers(client, prompts, sampling, drafters, count, max_tokens, name)
                reference = reference or made
                differ[name] = sum(a != b for a, b in zip(made, reference, strict=True))
    return differ


def main(arguments: Sequence[str]) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Whether speculation or company change any token")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--config", type=Path, default=Path("deployments.yaml"))
    parser.add_argument("--url", help="use this server instead of starting one")
    parser.add_argument("--out", type=Path, default=Path("out/sameness"))
    options = parser.parse_args(arguments)
    prompts = read(options.prompts)
    # Spread over the file, so that every kind of prompt is among them.
    prompts = prompts[:: max(1, len(prompts) // options.count)][: options.count]
    options.out.mkdir(parents=True, exist_ok=True)
    with running_server(options.url, options.config, options.out / "server.log") as base:
        differ = asyncio.run(compare(base, prompts, options.at_once, options.max_tokens))
    result = {"prompts": len(prompts), "different": differ, "provenance": provenance()}
    (options.out / "sameness.json").write_text(json.dumps(result, indent=1))
    print(json.dumps({"prompts": len(prompts), "different": differ}))
    return 1 if any(differ.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
