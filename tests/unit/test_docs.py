"""What the pages name exists: fields, options, metrics, files, modules. Examples print what is shown."""

import ast
import contextlib
import importlib.util
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from deployments import config, metrics
from deployments.openai.schema import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    DetokenizeBody,
    ResponseFormat,
    SpeculationBody,
    StreamOptions,
    StructuredOutputs,
    TokenizeBody,
)

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text() for page in PAGES}
EVERYTHING = "\n".join(TEXTS.values())

PACKAGES = ("deployments", "workers", "loadtest", "protos", "tests", "k8s", "docs")


def code(text: str) -> Iterator[str]:
    """What stands in blocks and spans of code."""
    blocks = re.compile(r"^( *)```.*?\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
    yield from (block[2] for block in blocks.finditer(text))
    yield from re.findall(r"`([^`]+)`", blocks.sub("", text))


CODE = {name: "\n".join(code(text)) for name, text in TEXTS.items()}


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def mentioned(name: str) -> bool:
    """Whether a name stands in code of any page, as a word of its own."""
    return any(re.search(rf"(?<![\w-]){name}(?![\w-])", said) for said in CODE.values())


@pytest.mark.parametrize(
    "body",
    [
        ChatBody,
        ChatMessage,
        CompletionBody,
        DetokenizeBody,
        ResponseFormat,
        SpeculationBody,
        StreamOptions,
        StructuredOutputs,
        TokenizeBody,
    ],
)
def test_every_field_of_a_request_is_in_the_docs(body: type[BaseModel]) -> None:
    named = [field.alias or name for name, field in body.model_fields.items()]
    assert [name for name in named if not mentioned(name)] == []


@pytest.mark.parametrize(
    "options",
    [
        config.TargetArgs,
        config.LookupArgs,
        config.ModelArgs,
        config.EagleArgs,
        config.MedusaArgs,
        config.MaskArgs,
        config.CustomArgs,
        config.DataPlaneArgs,
        config.DraftAppConfig,
        config.WorkerThresholds,
        config.CoordinatorThresholds,
    ],
)
def test_every_option_is_in_the_docs(options: type[BaseModel]) -> None:
    assert [name for name in options.model_fields if not mentioned(name)] == []


def defined_metrics(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    names: set[str] = set()

    def define(name: str, *_: Any) -> Any:
        names.add(name)

    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(metrics, kind, define)
    metrics.CoordinatorMetrics()
    metrics.WorkerMetrics()
    return names


def test_every_metric_of_the_docs_is_defined(monkeypatch: pytest.MonkeyPatch) -> None:
    defined = defined_metrics(monkeypatch)
    for page, text in TEXTS.items():
        named = set(re.findall(r"(?<![./\w-])(?:ray_)?(slipstream_[a-z0-9_]+)", text))
        assert named or page not in ("README.md", "docs/rounds.md"), "the pattern finds nothing"
        for name in named:
            bare = re.sub(r"_(total|bucket|sum|count)$", "", name)
            known = name in defined or bare in defined
            # A family, as in slipstream_worker_*.
            family = name.endswith("_") and any(metric.startswith(name) for metric in defined)
            assert known or family, f"{page}: {name}"


@pytest.mark.parametrize("page", TEXTS)
def test_every_link_leads_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", TEXTS[page]):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        to = (ROOT / page).parent / path if path else ROOT / page
        assert to.exists(), f"{page}: {link}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", to.read_text(), re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, f"{page}: {link}"


@pytest.mark.parametrize("page", TEXTS)
def test_every_file_and_folder_is_there(page: str) -> None:
    named = re.findall(rf"(?<![\w./~-])((?:{'|'.join(PACKAGES)})/[\w./*-]*)", CODE[page])
    for path in named:
        there = any(ROOT.glob(path.rstrip("./"))) if "*" in path else (ROOT / path).exists()
        assert there, f"{page}: {path}"


@pytest.mark.parametrize("page", TEXTS)
def test_every_module_is_there(page: str) -> None:
    # A command may go on behind the end of a line.
    said = re.sub(r"\s+", " ", CODE[page])
    modules = set(re.findall(r"python3? -m ([\w.]+)", said))
    named = re.findall(r"(?<![\w./-])((?:deployments|workers|loadtest)(?:\.[a-z_]+)+)(:\w+)?", said)
    for module, attribute in named:
        if module.endswith((".yaml", ".py", ".md")):
            continue
        modules.add(module)
        if attribute:
            tree = ast.parse(Path(_spec(module).origin).read_text())
            names = {getattr(node, "name", None) for node in tree.body}
            assert attribute[1:] in names, f"{page}: {module}{attribute}"
    for module in modules:
        assert _spec(module) is not None, f"{page}: {module}"


def _spec(module: str) -> Any:
    try:
        return importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None


@pytest.mark.parametrize("page", TEXTS)
def test_every_make_target_is_there(page: str) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|[`(\s])make ([a-z][a-z-]*)", CODE[page]))
    assert named <= targets, page


def test_every_page_is_in_the_index() -> None:
    index = TEXTS["docs/README.md"]
    pages = {page.name for page in PAGES if page.parent.name == "docs"} - {"README.md"}
    assert [page for page in sorted(pages) if f"]({page})" not in index] == []
    assert "docs/README.md" in TEXTS["README.md"]


def test_the_example_of_sizing_prints_its_table() -> None:
    page = TEXTS["docs/sizing.md"]
    example = re.search(r"```python\n(.*?)```\n\n((?:\|[^\n]*\n)+)", page, re.DOTALL)
    assert example is not None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(example[1], {})
    assert printed.getvalue() == example[2]


def test_the_sizes_of_the_cache_are_what_the_arithmetic_says() -> None:
    page = TEXTS["docs/sizing.md"]
    shapes = re.findall(
        r"\((\d+) layers, (\d+)(?: KV heads)? of (\d+), hidden ([\d,]+)\) \| ([\d,]+) \| ([\d,]+)",
        page,
    )
    assert len(shapes) == 3
    for shape in shapes:
        layers, heads, dim, hidden, plain, headed = (int(n.replace(",", "")) for n in shape)
        assert plain == 2 * layers * heads * dim * 2
        assert headed == plain + 3 * hidden * 2
