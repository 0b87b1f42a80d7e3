"""Drafters of other packages: what is wrong with one is named, and the documented one changes no token."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.app import drafter_configs, drafter_options
from deployments.config import DraftAppConfig, TargetAppConfig
from tests import tiny
from tests.harness import harness
from tests.oracles import assert_company_changes_nothing
from workers.draft import drafters
from workers.draft.config import CustomConfig
from workers.draft.drafter import Drafter
from workers.draft.group import DrafterGroup

PAGE = (Path(__file__).parents[2] / "docs" / "custom-drafter.md").read_text()
TARGET = str(tiny.llama())
tokenizer = tiny.byte_level_tokenizer()


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's example, installed as the page says."""
    folder = tmp_path / "my_package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "drafter.py").write_text(block("python"))
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my_package", "my_package.drafter"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return folder


def documented(placement: str) -> Drafter:
    """The drafter of the page's config."""
    drafts = yaml.safe_load(block("yaml"))
    assert drafts[0]["placement"] == "target"
    if placement == "target":
        config: Any = TargetAppConfig(model_id="x", target={"model": TARGET}, drafts=drafts)
    else:
        drafts[0]["placement"] = placement
        config = DraftAppConfig(target=TARGET, drafts=drafts)
    (made,) = drafter_configs(drafter_options(config.drafts, placement))
    assert made == CustomConfig("followers", "my_package.drafter:make", {"order": 3})
    return drafters.make(made, TARGET)


@pytest.mark.parametrize("placement", ["draft", "target"])
async def test_the_documented_drafter_changes_no_token(package: Path, placement: str) -> None:
    assert len(block("python").splitlines()) <= 55
    made = {"followers": documented(placement)}
    beside = made if placement == "target" else {}
    prompts = [tokenizer(text).input_ids for text in ("0123456789 " * 8, "abcabcabcabc" * 4)]
    async with harness(
        tiny.llama(), {} if beside else made, beside=beside, max_draft_tokens=8
    ) as h:
        # Answers of few tokens repeat themselves.
        few = {"logit_bias": tuple((token, 100.0) for token in (65, 66, 67))}
        sampling = [few, {**few, "temperature": 0.5}]
        await assert_company_changes_nothing(h, prompts, sampling)
        await h.idle()


@pytest.mark.parametrize(
    ("factory", "options", "complaint"),
    [
        ("my_package.nothing:make", {}, "my_package.nothing cannot be imported .*install"),
        ("no_such_package:make", {}, "no_such_package cannot be imported .*PYTHONPATH"),
        ("my_package.broken:make", {}, "ZeroDivisionError"),
        ("my_package.drafter:mak", {}, "no function 'mak'; it has .*make"),
        ("my_package.drafter:make", {"oder": 3}, "oder.*keyword arguments"),
        ("my_package.wrong:make", {}, "returned 7; it must return a workers.draft.drafter.Drafter"),
        ("my_package.reads:make", {}, "feature_kind 'last'.*eagle"),
        ("my_package.drafter", {}, "package.module:function"),
    ],
)
def test_what_is_wrong_is_named(
    package: Path, factory: str, options: dict[str, Any], complaint: str
) -> None:
    (package / "broken.py").write_text("1 / 0")
    (package / "wrong.py").write_text("def make(target): return 7")
    (package / "reads.py").write_text(
        "from my_package.drafter import FollowersDrafter\n"
        "class Reads(FollowersDrafter):\n    feature_kind = 'last'\n"
        "def make(target): return Reads(2)"
    )
    with pytest.raises(ValueError, match=complaint) as raised:
        drafters.make(CustomConfig("mine", factory, options), TARGET)
    assert "'mine'" in str(raised.value)


async def test_it_has_no_weights_to_reload(package: Path) -> None:
    config = CustomConfig("mine", "my_package.drafter:make", {})
    group = DrafterGroup([config], TARGET, lambda send: send())
    with pytest.raises(ValueError, match="'mine' is no drafter with weights"):
        await group.reload({"mine": "x"})
