"""Drafters beside one target in one process: the same text, and what each costs and finds."""
