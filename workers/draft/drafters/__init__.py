"""The kinds of drafters that a configuration can name."""

from collections.abc import Callable
from typing import Final

from workers.draft.config import DrafterConfig
from workers.draft.drafter import Drafter
from workers.draft.drafters.lookup import LookupDrafter

KINDS: Final[dict[str, Callable[[DrafterConfig], Drafter]]] = {
    "lookup": lambda config: LookupDrafter(),
}


def make(config: DrafterConfig) -> Drafter:
    """The drafter of a config; raises ValueError for an unknown kind."""
    if config.kind not in KINDS:
        raise ValueError(
            f"drafter {config.name!r} has kind {config.kind!r}; known are {', '.join(KINDS)}"
        )
    return KINDS[config.kind](config)
