"""transformers' generate, one prompt after the other: MODEL_FOLDER [PROMPT_LOOKUP_TOKENS]."""

import json
import sys
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM


def main() -> None:
    """See the package's docstring."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
    options: dict[str, Any] = {}
    if len(sys.argv) > 2:
        options["prompt_lookup_num_tokens"] = int(sys.argv[2])
    rows: list[int] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    ready = {"ready": True, "threads": torch.get_num_threads(), "version": transformers.__version__}
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        tokens, rounds, drafted = [], 0, 0
        started = time.perf_counter()
        for prompt in asked["prompts"]:
            ids = torch.tensor([prompt])
            rows.clear()
            with torch.inference_mode():
                out = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=asked["max_tokens"],
                    do_sample=asked["temperature"] > 0,
                    # None would take the model's own end away: only those who ask for that get it.
                    **({"eos_token_id": None} if asked["ignore_eos"] else {}),
                    **options,
                )
            tokens.append(out[0, len(prompt) :].tolist())
            rounds += len(rows) - 1
            drafted += sum(rows[1:]) - (len(rows) - 1)
        answer = {
            "seconds": time.perf_counter() - started,
            "tokens": tokens,
            "rounds": rounds,
            "drafted": drafted,
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
