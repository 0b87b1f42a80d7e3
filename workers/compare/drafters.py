"""What `--drafter` says: YAML, as `drafts` in deployments.yaml has it, or a word.

lookup                                   a kind that needs no option
my_package.module:make                   the factory of a package of your own
{name: head, kind: eagle, model: PATH}   a drafter with options
head+lookup                              a set: words, and names of the other ones
"""

import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import yaml

from workers.draft.config import CustomConfig, DrafterConfig, PredictionConfig
from workers.request import Verification

_COUNTING: Final[Mapping[str, Any]] = {"learn": False, "history_tokens": 131_072}
_CACHE: Final = {"num_slots": 65536}
_TREE: Final = {**_CACHE, "width": 4, "steps": 4, "floor": 0.05}
_LOADED: Final = {"dtype": "auto", "device": "cpu", "num_threads": 0}
_GROWING: Final = {**_LOADED, **_TREE}
DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "lookup": {},
    "suffix": _COUNTING,
    "datastore": _COUNTING,
    "model": {**_GROWING, "shared_vocabulary": False, "online": False},
    "eagle": {**_GROWING, "window": 512},
    "layer_skip": {**_TREE, "skip": None, "online": False},
    "early_exit": {**_TREE, "model": None, "layers": None},
    "jacobi": {"block": 8},
    "lookahead": {"window": 4, "ngram": 3, "guesses": 4},
    "medusa": _LOADED,
    "mask": {**_LOADED, **_CACHE},
    "custom": {"options": {}},
}
"""By kind, what is taken where nothing is said: the same as in a server's config."""

PLAIN: Final = "plain"
_UNSAID: Final = object()

# Predictions come with requests, and those that are compared have none.
_CONFIGS: Final[Mapping[str, Any]] = {
    config.kind: config
    for config in typing.get_args(DrafterConfig)
    if config is not PredictionConfig
}


@dataclass(frozen=True, slots=True)
class Setting:
    """Who drafts, by name, and by which rule it is verified."""

    drafters: tuple[str, ...] = ()
    verification: Verification = "coupled"


def parse(
    texts: Sequence[str], rules: Sequence[Verification] = ("coupled",)
) -> tuple[dict[str, Setting], tuple[DrafterConfig, ...]]:
    """(settings by label, plain decoding first; all drafters). Raises ValueError.

    Each drafter or set is a setting with each of the rules of verification.
    """
    said = [(text, _load(text)) for text in texts]
    configs = {}
    for text, value in said:
        if isinstance(value, Mapping):
            config = _from_options(text, value)
            if config.name in configs:
                raise ValueError(f"--drafter {text}: there are two of the name {config.name!r}")
            configs[config.name] = config
    settings = {PLAIN: Setting()}
    for text, value in said:
        if isinstance(value, Mapping):
            names = [value.get("name", value["kind"])]
        else:
            names = value.split("+")
            configs |= {word: _from_word(text, word) for word in names if word not in configs}
        label = "+".join(names)
        for rule in rules:
            said_so = label if rule == "coupled" else f"{label}@{rule}"
            if said_so in settings or len(set(names)) < len(names):
                raise ValueError(f"--drafter {text}: {said_so!r} is there already")
            settings[said_so] = Setting(tuple(names), rule)
    return settings, tuple(configs.values())


def said(config: DrafterConfig) -> dict[str, Any]:
    """What `drafts` in a server's config says of a drafter that `parse` has made."""
    defaults = DEFAULTS[config.kind]
    options: dict[str, Any] = {
        field.name: list(value) if isinstance(value, tuple) else value
        for field in fields(config)
        if (value := getattr(config, field.name)) != defaults.get(field.name, _UNSAID)
    }
    # The factory of a package is its own name here, and longer than names may be there.
    name = re.sub(r"[^a-z0-9_-]", "-", options.pop("name").lower())[-32:].lstrip("-_0123456789")
    if options.pop("shared_vocabulary", False):
        options["vocabulary"] = "shared"
    return {"name": name, "kind": config.kind, **options}


def _load(text: str) -> str | Mapping[str, Any]:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"--drafter {text}: not YAML: {error}") from error
    if not isinstance(value, str | dict):
        raise ValueError(
            f"--drafter {text}: neither a word nor options, as in {{kind: eagle, model: PATH}}"
        )
    return value


def _from_word(text: str, word: str) -> DrafterConfig:
    if ":" in word:
        return CustomConfig(word, word, {})
    if word not in _CONFIGS:
        raise ValueError(
            f"--drafter {text}: {word!r} is neither a kind ({', '.join(_CONFIGS)}), nor "
            "package.module:function, nor the name of another --drafter"
        )
    return _from_options(text, {"kind": word})


def _from_options(text: str, said: Mapping[str, Any]) -> DrafterConfig:
    options = dict(said)
    kind = options.pop("kind", None)
    if kind not in _CONFIGS:
        raise ValueError(f"--drafter {text}: kind {kind!r} is none of {', '.join(_CONFIGS)}")
    if options.pop("placement", "target") != "target":
        raise ValueError(f"--drafter {text}: all run beside the target here: leave out placement")
    if "vocabulary" in options:
        options["shared_vocabulary"] = options.pop("vocabulary") == "shared"
    options = {"name": kind, **DEFAULTS.get(kind, {}), **options}
    known = [field.name for field in fields(_CONFIGS[kind])]
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(
            f"--drafter {text}: unknown {', '.join(unknown)}; {kind} has {', '.join(known)}"
        )
    if missing := [name for name in known if name not in options]:
        raise ValueError(
            f"--drafter {text}: {kind} needs {', '.join(missing)}, as in "
            f"{{kind: {kind}, {', '.join(f'{name}: …' for name in missing)}}}"
        )
    made: DrafterConfig = _CONFIGS[kind](**options)
    return made
