"""vLLM in process: MODEL_FOLDER [N_GRAM_TOKENS]."""

import json
import os
import sys
import time
from typing import Any

# Its worker in this process: what is stopped between measurements must be all of it.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")

import vllm  # type: ignore[import-not-found]
from vllm import LLM, SamplingParams


def main() -> None:
    """See the package's docstring."""
    # What it prints belongs to the log.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    options: dict[str, Any] = {}
    if len(sys.argv) > 2:
        options["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": int(sys.argv[2]),
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
    engine = LLM(
        model=sys.argv[1],
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=64,
        enable_prefix_caching=False,
        **options,
    )
    ready = {"ready": True, "threads": os.cpu_count(), "version": vllm.__version__}
    print(json.dumps(ready), file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        params = SamplingParams(temperature=0.0, max_tokens=asked["max_tokens"])
        prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
        started = time.perf_counter()
        answers = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = [list(answer.outputs[0].token_ids) for answer in answers]
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=out, flush=True)


if __name__ == "__main__":
    main()
