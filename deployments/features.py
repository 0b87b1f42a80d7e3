"""What drafters read of their target."""

from collections.abc import Iterable

from deployments.config import DrafterArgs
from workers.checkpoint import FeatureKind, head_features


def features_read(drafts: Iterable[DrafterArgs]) -> FeatureKind | None:
    """The features that a target must keep for these drafters, if any reads some.

    Raises ValueError if they read different ones, and CheckpointError for a folder without a head.
    """
    read: dict[FeatureKind, str] = {}
    for draft in drafts:
        if draft.kind == "eagle":
            read[head_features(draft.model)] = draft.name
        elif draft.kind == "medusa":
            read["last"] = draft.name
    if len(read) > 1:
        raise ValueError(
            f"drafts: {read['three']} is an EAGLE-3 head, {read['last']} reads the target's last state: a "
            "target keeps features of one kind; take one of them out"
        )
    return next(iter(read), None)
