"""vLLM in process: MODEL_FOLDER [N_GRAM_TOKENS]."""

import json
import os
import sys
import time
from typing import Any

# Its worker in this process: what is stopped between measurements must be all of it.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")

import torch
import vllm  # type: ignore[import-not-found]
from vllm import LLM, SamplingParams

PASSED = ("max_tokens", "temperature", "ignore_eos")


def counted(engine: LLM) -> tuple[int, int]:
    """Tokens drafted and accepted so far."""
    values = {
        metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")
    }
    drafted, accepted = (f"vllm:spec_decode_num_{kind}_tokens" for kind in ("draft", "accepted"))
    return int(values.get(drafted, 0)), int(values.get(accepted, 0))


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
        disable_log_stats=False,
        **options,
    )
    ready = {"ready": True, "threads": torch.get_num_threads(), "version": vllm.__version__}
    print(json.dumps(ready), file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        params = SamplingParams(seed=1, **{name: asked[name] for name in PASSED})
        prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
        drafted, accepted = counted(engine)
        started = time.perf_counter()
        answers = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = [list(answer.outputs[0].token_ids) for answer in answers]
        drafted_now, accepted_now = counted(engine)
        answer = {
            "seconds": seconds,
            "tokens": tokens,
            # It does not count passes: each gives every answer one token and those accepted.
            "rounds": sum(map(len, tokens)) - len(tokens) - (accepted_now - accepted),
            "drafted": drafted_now - drafted,
        }
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
