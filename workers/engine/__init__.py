"""A model run over flat rows: shared by target and draft workers."""
