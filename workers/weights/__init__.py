"""Trained drafts for the default model, each with its recipe and curve; see docs/training.md."""
