"""Rivals beside us: the same prompts, each engine in an environment of its own."""
