"""Programs that run one engine each: a JSON line in, a JSON line out.

In: {"prompts": [[token ids], …], "max_tokens": n}, answered side by side, greedily, up to the end token.
Out: {"seconds": …, "tokens": [[token ids], …]}, and where the engine says so "rounds" and "drafted". Before
the first line in: {"ready": …, "threads": n, "version": …}. They import nothing of each other:
each runs in its engine's environment.
"""
