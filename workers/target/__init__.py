"""The target worker: verifies drafted tokens with the large model."""
