"""How far apart two tokens' logits are, in float32 by transformers: MODEL_FOLDER.

Reads a JSON list of [token ids, one token, another] and prints a list of [logit of one less the other's, step
between bfloat16 numbers of that size].
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    """See the package's docstring."""
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    gaps = []
    for ids, one, other in json.load(sys.stdin):
        with torch.inference_mode():
            logits = model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1]
        size = logits[one].to(torch.bfloat16)
        step = torch.nextafter(size, size.new_tensor(torch.inf)) - size
        gaps.append([float(logits[one] - logits[other]), float(step)])
    print(json.dumps(gaps))


if __name__ == "__main__":
    main()
