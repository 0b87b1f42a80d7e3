"""Programs that run one rival each, or ours, in its own environment: they import nothing of each other.

An engine takes a JSON line and answers with one. In: {"prompts": [[token ids], …], "max_tokens": n,
"temperature": t, "ignore_eos": whether an end token ends nothing}, answered side by side. Out: {"seconds": …,
"tokens": [[token ids], …], "rounds": passes of the target after the prefill, summed over the answers,
"drafted": rows that these verified}. Before the first line in: {"ready": …, "threads": n, "version": …}.
"""
