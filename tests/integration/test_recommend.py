"""What is recommended changes with what there is, and what is printed is what a server reads."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open

from deployments.config import AppConfig
from tests import tiny
from workers.draft import cut, eagle, medusa
from workers.engine.loading import load_model, load_module
from workers.training import recommend
from workers.training.__main__ import main
from workers.training.recommend import Advice, Wishes, advise, methods, parse_bytes
from workers.training.sizes import Memory, Sizes, first_and_last

PLENTY = 2**40


@pytest.fixture(scope="module")
def sizes() -> Sizes:
    return Sizes(tiny.even_llama(), torch.float32, 128)


def advised(sizes: Sizes, **changes: Any) -> Advice:
    wishes = Wishes(**{**_WISHES, **changes})
    return advise(methods(sizes, "some/target", wishes.placement), wishes)


_WISHES: dict[str, Any] = {
    "memory": PLENTY,
    "training": True,
    "temperature": 0.0,
    "placement": "target",
}


def names(advice: Advice) -> list[str]:
    return [choice.method.name for choice in advice.ranked]


def test_sizes_are_those_of_what_is_made() -> None:
    """Beside the bytes of real modules and caches."""
    target = tiny.llama()
    sizes = Sizes(target, torch.float32, 128)
    vocabulary = torch.arange(128)
    assert sizes.eagle() == Memory(
        _bytes(eagle.new_head("eagle3", target, vocabulary).float()), 2 * 2 * 16 * 4
    )
    heads = medusa.new_heads(4, 1, target, vocabulary).float()
    assert sizes.medusa(4, 1) == Memory(_bytes(heads), 0)
    module = cut.cut_module(load_module(target, "float32", "cpu"), (0, 2))
    cut.reduce_head(module, vocabulary)
    assert sizes.cut((0, 2)) == Memory(_bytes(module), 2 * 2 * 2 * 16 * 4)
    host = load_model(target, "float32")
    assert sizes.part(2, adapter=False) == Memory(0, host.part(range(2)).kv_shape.slot_bytes)
    layer = load_module(target, "float32", "cpu").model.layers[2]
    assert sizes.part(1, adapter=True).weights == _bytes(layer) + 64 * 4
    with safe_open(target / "model.safetensors", framework="pt") as content:
        tensors = [content.get_tensor(name) for name in content.keys()]  # noqa: SIM118
    assert sizes.loading_bytes == sum(tensor.numel() for tensor in tensors) * 4


def _bytes(module: torch.nn.Module) -> int:
    return sum(parameter.numel() * parameter.itemsize for parameter in module.parameters())


def test_half_precision_takes_half(sizes: Sizes) -> None:
    half = Sizes(tiny.even_llama(), torch.bfloat16, 128)
    assert 2 * half.eagle().weights == sizes.eagle().weights
    assert 2 * half.cut((0, 1)).per_token == sizes.cut((0, 1)).per_token


def test_layers_are_cut_as_those_of_the_shipped_drafts() -> None:
    assert first_and_last(30, 10) == (0, 1, 2, 3, 4, 5, 6, 27, 28, 29)
    assert first_and_last(30, 4) == (0, 1, 2, 29)
    assert first_and_last(3, 2) == (0, 2)


def test_with_everything_the_head_comes_first(sizes: Sizes) -> None:
    advice = advised(sizes)
    assert names(advice)[0] == "eagle"
    assert set(names(advice)) | set(advice.left_out) == {
        method.name for method in methods(sizes, "x", "target")
    }
    assert list(advice.left_out) == ["datastore"]


def test_without_training_only_what_is_there_is_left(sizes: Sizes) -> None:
    advice = advised(sizes, training=False)
    assert names(advice)[0] == "suffix"
    assert not [choice for choice in advice.ranked if choice.method.training]
    for name in ("eagle", "medusa", "model", "mask", "early_exit"):
        assert "trained first" in advice.left_out[name]


def test_a_temperature_takes_most_from_what_repeats(sizes: Sizes) -> None:
    greedy, drawn = names(advised(sizes)), names(advised(sizes, temperature=1.0))
    assert greedy.index("suffix") < greedy.index("medusa")
    assert drawn.index("suffix") > drawn.index("medusa")
    assert greedy[0] == drawn[0] == "eagle"
    without = names(advised(sizes, temperature=1.0, training=False))
    assert without.index("lookahead") < without.index("suffix")
    # In between it is in between; above 1 nothing more is known.
    orders = [tuple(names(advised(sizes, temperature=t))) for t in (0.0, 0.3, 0.6, 1.0, 2.0)]
    assert orders[-1] == orders[-2]
    assert len(set(orders)) > 2


def test_on_workers_of_their_own_none_has_the_targets_layers(sizes: Sizes) -> None:
    beside, apart = advised(sizes), advised(sizes, placement="draft")
    for name in ("layer_skip", "early_exit", "plain_exit"):
        assert "target's own layers" in apart.left_out[name]
    for name in ("jacobi", "lookahead"):
        assert "target's own passes" in apart.left_out[name]
    # A draft model pays where it does not take turns with the target.
    assert names(beside).index("model") > names(beside).index("medusa")
    assert names(apart).index("model") < names(apart).index("medusa")
    assert all("placement" not in choice.config for choice in apart.ranked)
    assert all(choice.config["placement"] == "target" for choice in beside.ranked)


def test_the_memory_decides_what_fits_and_how_large_a_cache_is(sizes: Sizes) -> None:
    head = sizes.eagle()
    least = head.weights + head.per_token * recommend.LEAST_TOKENS
    whole = head.weights + head.per_token * recommend.MOST_TOKENS

    def eagle_at(memory: int) -> Any:
        return next(
            (c for c in advised(sizes, memory=memory).ranked if c.method.name == "eagle"), None
        )

    assert "num_slots" not in eagle_at(whole).config
    assert eagle_at(whole - 1).config["num_slots"] == recommend.MOST_TOKENS - 16
    assert eagle_at(least).config["num_slots"] == recommend.LEAST_TOKENS
    assert eagle_at(least - 1) is None
    assert "does not fit into" in advised(sizes, memory=least - 1).left_out["eagle"]
    assert names(advised(sizes, memory=100)) == ["lookahead", "jacobi"]


def test_what_a_target_has_not_is_said() -> None:
    small = Sizes(tiny.llama(), torch.float32, 128)
    assert "of 3 layers none" in advised(small).left_out["layer_skip"]


@pytest.mark.parametrize("placement", ["draft", "target"])
def test_every_choice_is_what_a_server_reads(sizes: Sizes, placement: str) -> None:
    advice = advised(sizes, placement=placement, memory=10**6 * 8)
    said = yaml.safe_load(recommend.drafts(choice.config for choice in advice.ranked))
    config = AppConfig(model_id="m", target={"model": "x"}, drafts=said["drafts"])
    assert [draft.name for draft in config.drafts] == names(advice)
    assert all(draft.placement == placement for draft in config.drafts)
    assert yaml.safe_load(recommend.drafts([])) == {"drafts": []}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("300", 300), ("512MiB", 2**29), ("2 GB", 2 * 10**9), ("1.5gib", 3 * 2**29), ("7b", 7)],
)
def test_memory_is_said_in_units(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "much", "5 apples", "-3", "0", "MiB", "1e9"])
def test_memory_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"--memory {re.escape(text)}: give bytes"):
        parse_bytes(text)


def run(*flags: str) -> int:
    common = [f"--target={tiny.llama()}", "--dtype=float32", "--device=cpu", "--num-threads=1"]
    return main(["recommend", *common, *flags])


def test_the_command_prints_lines_to_paste(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--memory=1GiB") == 0
    out = capsys.readouterr().out
    assert "3 layers, hidden size 64, 264 tokens, float32" in out
    assert "drafters beside the target: 1.0 GiB, training allowed, temperature 0\n" in out
    assert "\n 1. eagle (needs training; " in out
    pasted = out.rsplit("\n\n", 1)[1]
    assert f"# python -m workers.training eagle --target {tiny.llama()} " in pasted
    said = yaml.safe_load(pasted)["drafts"]
    AppConfig(model_id="m", target={"model": "x"}, drafts=said)
    assert [line["name"] for line in said] == ["eagle", "lookup"]
    assert run("--memory=1GiB", "--no-training", "--temperature=1", "--placement=draft") == 0
    out = capsys.readouterr().out
    assert yaml.safe_load(out.rsplit("\n\n", 1)[1]) == {
        "drafts": [{"name": "suffix", "kind": "suffix"}]
    }


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--memory=lots"], "--memory lots: give bytes"),
        (["--memory=1GiB", "--temperature=3"], "temperature"),
        (["--memory=1GiB", "--target=/no/where"], "was not found"),
        (["--memory=1GiB", "--dtype=float5"], "dtype must be"),
        (["--memory=1GiB", "--measure"], "--measure and --prompts"),
        (["--memory=1GiB", "--prompts=q.jsonl"], "--measure and --prompts"),
        (["--memory=1GiB", "--drafter=lookup"], "--drafter names"),
        (["--memory=1GiB", "--measure", "--prompts=no.jsonl"], "no.jsonl"),
    ],
)
def test_bad_input_is_refused(
    flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*flags) == 1
    assert complaint in capsys.readouterr().err


def test_what_is_there_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, out = tmp_path / "q.jsonl", tmp_path / "out"
    prompts.write_text(
        '{"prompt": "the cat in the hat, the cat in the hat"}\n{"prompt": "hello"}\n'
    )
    head = tiny.trained_head("eagle3")
    flags = [
        "--memory=1GiB",
        "--measure",
        f"--prompts={prompts}",
        f"--out={out}",
        "--max-tokens=12",
    ]
    given = [f"--drafter={{kind: eagle, name: head, model: {head}}}", "--drafter=head+lookup"]
    assert run(*flags, *given) == 0
    printed = capsys.readouterr().out
    told = printed[printed.index("measured beside the target, on 2 prompts:") :]
    ranked = re.findall(r"^ ?\d+\. ([a-z_+]+): (.*)$", told, re.MULTILINE)
    assert {name for name, _ in ranked} == {
        *("plain", "suffix", "lookup", "plain_exit", "lookahead", "jacobi", "head", "head+lookup")
    }
    speeds = [float(said.split()[0]) for name, said in ranked if name != "plain"]
    assert speeds == sorted(speeds, reverse=True)
    assert "guidance only, because it has to be trained first:\n  - eagle: " in told
    assert (out / "compare.md").exists()
    # What it says to paste is what was fastest.
    said = yaml.safe_load(told.rsplit("\n\n", 1)[1])["drafts"]
    AppConfig(model_id="m", target={"model": "x"}, drafts=said)
    fastest = ranked[0][0]
    assert [line["name"] for line in said] == ([] if fastest == "plain" else fastest.split("+"))
