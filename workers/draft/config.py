"""Configuration of a draft worker."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """One drafter: the name that requests use, and its kind."""

    name: str
    kind: str


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """One draft worker and its drafters."""

    drafters: tuple[DrafterConfig, ...]
