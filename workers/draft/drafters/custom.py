"""A drafter of somebody else's package, found by its import path."""

import importlib

from workers.draft.config import CustomConfig
from workers.draft.drafter import Drafter


def make(config: CustomConfig, target: str) -> Drafter:
    """What the factory makes of the target's reference and the options.

    Raises ValueError, which says what to do, if it cannot be imported or called or makes no such drafter.
    """
    where = f"drafter {config.name!r}: factory {config.factory!r}"
    module_name, _, name = config.factory.partition(":")
    if not module_name or not name:
        raise ValueError(f"{where} is not of the form package.module:function")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(
            f"{where}: {module_name} cannot be imported ({error!r}): install its package in the Python of "
            "the worker, or add its folder to PYTHONPATH"
        ) from error
    factory = getattr(module, name, None)
    if not callable(factory):
        known = sorted(key for key, value in vars(module).items() if callable(value))
        raise ValueError(
            f"{where}: {module.__file__} has no function {name!r}; it has {', '.join(known) or 'none'}"
        )
    try:
        made = factory(target, **config.options)
    except TypeError as error:
        raise ValueError(
            f"{where}: called with the target and the options {dict(config.options)}: {error}; options are "
            "the factory's keyword arguments"
        ) from error
    if not isinstance(made, Drafter):
        raise ValueError(
            f"{where}: it returned {made!r}; it must return a workers.draft.drafter.Drafter"
        )
    if made.feature_kind is not None:
        raise ValueError(
            f"{where}: its drafter reads features of the target (feature_kind {made.feature_kind!r}), which "
            "targets keep for drafters of kind eagle only; leave feature_kind out"
        )
    return made
