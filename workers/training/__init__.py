"""Training drafts for a target: its own text, a distilled draft model, an EAGLE head."""
