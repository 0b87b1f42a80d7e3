"""Datastores of texts: built once from a corpus, then searched for what follows the last tokens."""
