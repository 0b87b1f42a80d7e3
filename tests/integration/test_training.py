"""The training commands as a user runs them, on a tiny target; what they write is what a worker loads."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import tiny
from workers.draft import cut, eagle, exits, masks, medusa, models, skips
from workers.draft.levels import Accuracies
from workers.engine.loading import load_model, load_module
from workers.training import boost
from workers.training.__main__ import main
from workers.training.accuracies import measure
from workers.training.corpus import Corpus, draft_vocabulary, epochs
from workers.training.distill import CutStudent, DistillLearner
from workers.training.eagle import EagleLearner
from workers.training.losses import DIVERGENCES
from workers.training.samples import Sample, Teacher
from workers.training.skip_search import expected_gain
from workers.training.trainer import CHECKPOINT

LAWS = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0)).log_softmax(-1)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text that the tiny target wrote, to prompts that are given."""
    folder = tmp_path_factory.mktemp("corpus")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"say {n}"}) for n in range(10)))
    out = folder / "text.npz"
    assert run("data", out, answers=24, prompts=prompts, max_tokens=20, batch=8) == 0
    return out


def run(command: str, out: Path, *flags: str, **options: object) -> int:
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    common = [f"--target={tiny.llama()}", "--dtype=float32", "--device=cpu", f"--out={out}"]
    return main([command, *common, *given, *flags])


def train(command: str, corpus: Path, out: Path, *flags: str, **options: object) -> int:
    defaults: dict[str, object] = {
        "corpus": corpus,
        "features": corpus.parent / "features",
        "tokens": 2000,
        "evaluate_every": 500,
        "held_out": 4,
        "vocabulary": 128,
        "learning_rate": 0.003,
        "warmup_steps": 5,
    }
    return run(command, out, *flags, **(defaults | options))


def rates(out: Path) -> list[float]:
    curve = json.loads((out / "curve.json").read_text())
    return [point["agreement"][0][2] for point in curve]


def test_the_target_writes_what_it_would_answer(corpus: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny.llama(), dtype=torch.float32)
    with np.load(corpus) as content:
        temperatures = content["temperature"].tolist()
        offsets = content["output_offsets"]
        assert temperatures == [0.0, 1.0] * 12
        assert len(offsets) == 25
        # At temperature 0 an answer is what `generate` gives; the same prompt drawn twice differs.
        start, end = content["prompt_offsets"][2:4]
        prompt = content["prompt_ids"][start:end].tolist()
        answer = content["output_ids"][offsets[2] : offsets[3]].tolist()
    made = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)
    assert made[0, len(prompt) :].tolist() == answer
    text = tiny.byte_level_tokenizer().decode(prompt)
    assert "say 2" in text
    assert text.endswith("assistant:")


def test_writing_continues_and_invents_prompts(tmp_path: Path) -> None:
    out = tmp_path / "text.npz"
    assert run("data", out, answers=3, max_tokens=8, batch=2) == 0
    with np.load(out) as content:
        first = content["output_ids"].tolist()
    assert run("data", out, answers=5, max_tokens=8, batch=2) == 0
    with np.load(out) as content:
        assert content["output_ids"].tolist()[: len(first)] == first
        assert len(content["temperature"]) == 5
        prompts = np.split(content["prompt_ids"], content["prompt_offsets"][1:-1])
    assert len({tuple(prompt) for prompt in prompts}) == 5


def test_other_options_do_not_continue_a_file(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("data", corpus, answers=30, max_tokens=7) == 1
    assert "other options" in capsys.readouterr().err


@pytest.mark.parametrize("version", ["eagle", "eagle3"])
def test_a_head_learns_and_loads(version: str, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "head"
    assert train("eagle", corpus, out, version=version, passes=2, tokens=6000) == 0
    assert rates(out)[-1] > rates(out)[0] + 0.03
    head = eagle.load_head(out, tiny.llama())
    assert head.config.vocab_size == 128
    assert (out / "curve.png").stat().st_size > 1000
    recipe = json.loads((out / "recipe.json").read_text())
    assert recipe["corpus"]["texts"] == 24
    assert 0.5 < recipe["corpus"]["vocabulary_coverage"] <= 1
    assert recipe["curve"][-1]["tokens"] >= 6000


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("medusa", {"heads": 3, "blocks": 2, "tokens": 6000}),
        ("mask", {"layers": "0,2", "rank": 4, "masks": 2, "cuts": 8, "tokens": 4000}),
    ],
    ids=["medusa", "mask"],
)
def test_guesses_of_several_tokens_are_learned_and_load(
    command: str,
    options: dict[str, object],
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "draft"
    assert train(command, corpus, out, **options) == 0
    curve = json.loads((out / "curve.json").read_text())
    for depth in range(3):
        first, last = (curve[i]["agreement"][depth][2] for i in (0, -1))
        assert last > first + 0.02
    assert curve[-1]["overlap"] > curve[0]["overlap"]
    # What was measured on texts that were held out is what trees are built from.
    accuracies = Accuracies.load(out, 3)
    for depth in range(3):
        assert 0 < sum(accuracies.at(depth)) <= 1
    if command == "medusa":
        heads = medusa.load_heads(out, tiny.llama())
        assert (len(heads.heads), heads.blocks, len(heads.vocabulary)) == (3, 2, 128)
    else:
        masked = masks.load_masked(out, "float32", "cpu")
        assert masked.masks == (264, 265)
        assert masked.draft.model.kv_shape.layers == 2
    greedy, _, rejection = judge(corpus, out, capsys)
    assert greedy > 0
    assert rejection > 0


def test_accuracies_are_measured_below_what_was_right() -> None:
    """Depth 2 is tested where depth 1 holds the target's token, as in a tree."""
    guesses = torch.tensor([[[1, 2], [3, 4], [5, 6]], [[7, 8], [9, 9], [1, 2]]])
    choices = torch.tensor([[2, 3, 9], [7, 9, 2]])

    class Known:
        depths = 2

        def levels(self, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
            padded = torch.cat([guesses, torch.full((2, 3, 6), -1)], -1)
            return padded, choices

    made = measure(Known(), [Sample(torch.tensor([1]), 0, torch.empty(0), None)])
    assert list(made.at(0))[:3] == pytest.approx([1 / 3, 1 / 3, 0])
    assert made.at(1)[0] == 1.0


@pytest.mark.parametrize(
    "options",
    [
        {"rank": 4},
        {"rank": 0, "divergence": "rkl"},
        pytest.param(
            {"rank": 4, "divergence": "tvd", "on_policy": 0.5, "temperature": 0.7},
            marks=pytest.mark.slow,
        ),
        {"rank": 4, "divergence": "jsd"},
    ],
    ids=str,
)
def test_a_cut_draft_learns_and_loads(
    options: dict[str, object], corpus: Path, tmp_path: Path
) -> None:
    out = tmp_path / "draft"
    assert train("distill", corpus, out, layers="0,2", **options) == 0
    assert rates(out)[-1] > rates(out)[0]
    loaded = models.load(str(out), "float32", "cpu", None)
    assert loaded.ids is not None
    assert len(loaded.ids) == 128


def test_a_draft_that_is_its_target_is_always_right(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evaluated against itself: all guesses, and all that rejection would accept."""
    out = tmp_path / "draft"
    options: dict[str, object] = {"layers": "0,1,2", "vocabulary": 264, "learning_rate": 0.0}
    assert train("distill", corpus, out, tokens=10, **options) == 0
    assert judge(corpus, out, capsys) == pytest.approx([1.0] * 3, abs=0.04)


@pytest.mark.parametrize("version", ["eagle", "eagle3"])
def test_shared_noise_agrees_about_as_often_as_rejection_accepts(
    version: str, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Daliri et al.: at least (1 - TV) / (1 + TV), and not more than one minus TV by much."""
    _, shared, rejection = judge(corpus, tiny.trained_head(version), capsys)
    assert 0.05 < rejection < 0.9
    assert rejection / (2 - rejection) - 0.05 < shared < rejection + 0.1


def judge(corpus: Path, draft: Path, capsys: pytest.CaptureFixture[str]) -> list[float]:
    """First guesses at temperature 0 and 1, and what rejection would accept."""
    capsys.readouterr()
    common = [f"--target={tiny.llama()}", "--dtype=float32", "--device=cpu"]
    files = [f"--draft={draft}", f"--corpus={corpus}", f"--features={corpus.parent / 'features'}"]
    assert main(["evaluate", *common, *files]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["positions"] > 300
    return [made["greedy"]["first 1"], made["shared_noise"]["first 1"], made["rejection"]]


def test_a_draft_of_its_own_learns_and_loads(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "draft"
    other = str(tiny.llama(1))
    assert train("distill", corpus, out, draft=other, vocabulary=264, tokens=4000) == 0
    assert rates(out)[-1] > rates(out)[0]
    assert models.load(str(out), "float32", "cpu", None).model.info.vocab_size == 264


def test_a_draft_that_guesses_other_tokens_is_refused(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("distill", corpus, tmp_path / "d", draft=str(tiny.llama(1)), vocabulary=128) == 1
    assert "--vocabulary" in capsys.readouterr().err


def test_a_broken_off_run_goes_on_where_it_was(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Broken off and continued, a run ends with the bits of one that was not."""
    options: dict[str, object] = {"version": "eagle3", "passes": 2, "checkpoint_minutes": 0}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert train("eagle", corpus, whole, **options) == 0
    loss, calls = EagleLearner.loss, 0

    def failing(self: EagleLearner, sample: Sample) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 41:
            raise OSError("power cut")
        return loss(self, sample)

    monkeypatch.setattr(EagleLearner, "loss", failing)
    assert train("eagle", corpus, broken, **options) == 1
    assert "power cut" in capsys.readouterr().err
    assert not (broken / eagle.WEIGHTS_FILE).exists()
    assert train("eagle", corpus, broken, **options, learning_rate=0.1) == 1
    assert "another plan" in capsys.readouterr().err
    assert train("eagle", corpus, broken, **options) == 0
    assert (broken / eagle.WEIGHTS_FILE).read_bytes() == (whole / eagle.WEIGHTS_FILE).read_bytes()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_are_zero_only_for_equal_laws(name: str) -> None:
    p, q = LAWS
    assert DIVERGENCES[name](p, p).abs().max() < 1e-6
    assert (DIVERGENCES[name](p, q) > 0.01).all()


def test_divergences_are_those_of_the_paper() -> None:
    p, q = LAWS.exp()
    kl = lambda a, b: (a * (a / b).log()).sum(-1)  # noqa: E731
    expected = {
        "fkl": kl(p, q),
        "rkl": kl(q, p),
        "jsd": (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2,
        "tvd": 1 - torch.minimum(p, q).sum(-1),
    }
    for name, value in expected.items():
        torch.testing.assert_close(DIVERGENCES[name](*LAWS), value, msg=name)


def test_an_unrolled_pass_is_what_the_head_does_when_it_drafts() -> None:
    """Row r of pass k is the head's guess k tokens behind position r + 1, its own states fed back."""
    target = tiny.llama()
    head = eagle.load_head(tiny.trained_head("eagle3"), target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    from tests.integration.test_eagle_drafter import PROMPTS, reference, target_states

    tokens = PROMPTS[2]
    states = target_states(tokens, "eagle3")
    vocabulary = torch.arange(264)
    teacher = Teacher.of(model.lm_head.weight.detach(), vocabulary, torch.float32)
    learner = EagleLearner(head, teacher, str(target), 3, 10**6, DIVERGENCES["fkl"])
    sample = Sample(torch.tensor(tokens), 5, target_states(tokens, "eagle"), states)
    same = tested = 0
    for depth, logits in enumerate(learner._passes(sample)):
        for row in range(3, len(logits), 9):
            known = tokens[: row + 2]
            guessed = reference(
                tiny.trained_head("eagle3"), known, states, tokens[row + 2 : row + 2 + depth]
            )
            same += int(logits[row].argmax()) == guessed[0]
            tested += 1
    # Training runs in bfloat16: near ties may fall otherwise.
    assert tested > 20
    assert same >= 0.9 * tested


def test_epochs_can_be_entered_anywhere() -> None:
    whole = epochs(range(5), 3, 0)
    first = [next(whole) for _ in range(17)]
    assert [sorted(first[i : i + 5]) for i in (0, 5, 10)] == [[0, 1, 2, 3, 4]] * 3
    for skip in (0, 4, 5, 12):
        entered = epochs(range(5), 3, skip)
        assert [next(entered) for _ in range(17 - skip)] == first[skip:]


def test_the_draft_vocabulary_is_what_answers_hold_most(corpus: Path) -> None:
    counts = Corpus([corpus], 64).counts(264)
    chosen = draft_vocabulary(counts, 50)
    assert sorted(chosen) == list(chosen)
    assert counts[chosen].min() >= np.delete(counts, chosen).max()


class Told:
    """A draft whose guesses are right where it is told."""

    def __init__(self, *right: list[int]) -> None:
        self._right = torch.tensor(right).bool().T

    def right(self, sample: Sample, most: int) -> torch.Tensor:
        return self._right[:, :most]


def test_drafts_are_judged_alone_together_and_beside_a_wider_one() -> None:
    """On the positions of the answer, from the one that guesses its first token on."""
    sample = Sample(torch.arange(6), 3, torch.empty(0), None)
    first = Told([1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 1, 0])
    second = Told([0, 0, 1, 1, 0, 0], [0] * 6, [0] * 6)
    third = Told([0, 0, 0, 0, 0, 1], [0] * 6, [0] * 6)
    assert boost.judge([first, second, third], [sample, sample]) == [
        boost.Together(1, alone=0.25, any=0.25, guesses_of_first=0.25),
        boost.Together(2, alone=0.5, any=0.5, guesses_of_first=0.5),
        boost.Together(3, alone=0.25, any=0.75, guesses_of_first=0.75),
    ]


def test_what_is_known_weighs_less() -> None:
    sample = Sample(torch.arange(4), 2, torch.empty(0), None)
    drafts = [Told([1, 1, 0, 0]), Told([0, 1, 0, 1])]
    weights = boost.Residue(lambda text: sample, drafts, 0.5).sample(0).weights()
    torch.testing.assert_close(weights, torch.tensor([0.15, 0.5, 1.0, 0.5]))
    assert boost.Residue(lambda text: sample, [], 0.5).sample(0) is sample


def learned(folder: Path, seed: int, before: list[boost.Ranked], weight: float) -> DistillLearner:
    """A small draft that has learned some answers by heart, above all where those before it are wrong."""
    samples, teacher = tiny.known_answers()
    torch.manual_seed(seed)
    module = cut.cut_module(load_module(tiny.llama(), "float32", "cpu"), (0,))
    student = CutStudent(module, (0,), teacher.vocabulary, str(tiny.llama()), 8)
    learner = DistillLearner(student, teacher, DIVERGENCES["fkl"], 1.0)
    residue = boost.Residue(samples.__getitem__, before, weight)
    tiny.learn(learner, [residue.sample(text) for text in range(len(samples))], folder, 12_000)
    return learner


def test_boosted_drafts_are_right_together_more_often_than_copies(tmp_path: Path) -> None:
    """Of the same size, trained for as long, on the same texts, from the same beginning."""
    samples, _ = tiny.known_answers()
    first = learned(tmp_path / "first", 0, [], 1.0)
    alike = learned(tmp_path / "alike", 1, [first], 1.0)
    boosted = learned(tmp_path / "boosted", 1, [first], 0.1)
    copies = boost.judge([first, alike], samples)[1]
    together = boost.judge([first, boosted], samples)[1]
    assert together.any > copies.any + 0.03
    assert together.alone < copies.alone


def test_boosting_goes_on_where_it_was(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Broken off in the second draft and continued, it ends with the bits of one that was not."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    options: dict[str, object] = {"layers": "0", "rank": 4, "tokens": 500, "checkpoint_minutes": 0}
    assert train("boost", corpus, whole, **options) == 0
    loss, calls = DistillLearner.loss, 0

    def failing(self: DistillLearner, sample: Sample) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 35:
            raise OSError("power cut")
        return loss(self, sample)

    monkeypatch.setattr(DistillLearner, "loss", failing)
    assert train("boost", corpus, broken, **options) == 1
    assert "power cut" in capsys.readouterr().err
    assert (broken / "draft2" / CHECKPOINT).exists()
    assert not (broken / "draft2" / cut.WEIGHTS_FILE).exists()
    assert train("boost", corpus, broken, **options, known_weight=0.5) == 1
    assert "'known_weight': 0.25" in capsys.readouterr().err
    assert train("boost", corpus, broken, **options) == 0
    for file in (f"draft1/{cut.WEIGHTS_FILE}", f"draft2/{cut.WEIGHTS_FILE}", boost.REPORT):
        assert (broken / file).read_bytes() == (whole / file).read_bytes()
    first, second = json.loads((whole / boost.REPORT).read_text())["judged"]
    assert first["any"] == first["alone"] <= second["any"]
    for draft in (whole / "draft1", whole / "draft2"):
        assert models.load(str(draft), "float32", "cpu", None).ids is not None
        assert (draft / "curve.png").exists()
        assert json.loads((draft / "recipe.json").read_text())["options"]["known_weight"] == 0.25


@pytest.mark.parametrize(
    "options", [{"drafts": 1}, {"known_weight": 0}, {"known_weight": 1.5}], ids=str
)
def test_boosting_that_is_none_is_refused(
    options: dict[str, object], corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("boost", corpus, tmp_path / "b", **options) == 1
    assert f"--{next(iter(options)).replace('_', '-')}" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_an_adapter_learns_and_loads(corpus: Path, tmp_path: Path) -> None:
    """Behind the first layers: from its own last layer on, and nothing else of the target changes."""
    out = tmp_path / "exit"
    assert train("early_exit", corpus, out, exit=1, vocabulary=264, tokens=6000) == 0
    assert rates(out)[-1] > rates(out)[0] + 0.03
    curve = json.loads((out / "curve.json").read_text())
    assert curve[-1]["overlap"] > curve[0]["overlap"] + 0.03
    host = load_model(tiny.llama(), "float32")
    adapter = exits.load(out, tiny.llama(), host)
    assert adapter.layers == 1
    assert host.part(range(1), adapter.ending).num_layers == 2


def test_an_exit_that_is_none_is_refused(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("early_exit", corpus, tmp_path / "e", exit=3) == 1
    assert "give 1 to 2" in capsys.readouterr().err


def test_the_search_skips_what_matters_least(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of six layers three add little: they are found, and none of the others is worth leaving out."""
    target = str(tiny.even_llama())
    out, text = tmp_path / "skip.json", tmp_path / "text.npz"
    common = [f"--target={target}", "--dtype=float32", "--device=cpu"]
    assert main(["data", *common, f"--out={text}", "--answers=6", "--max-tokens=24"]) == 0
    capsys.readouterr()
    options = [f"--corpus={text}", f"--out={out}", "--texts=6", "--most=4"]
    assert main(["skip_search", *common, *options]) == 0
    assert json.loads(capsys.readouterr().out)["matched"] > 0.3
    way = json.loads(out.read_text())["way"]
    assert [len(entry["skip"]) for entry in way] == [1, 2, 3, 4]
    assert set(way[2]["skip"]) == {3, 4, 5}
    assert way[0]["matched"] >= way[1]["matched"] >= way[2]["matched"] > 0.3 > way[3]["matched"]
    assert tiny.EVEN_WEIGHTY not in skips.load(str(out))
    assert main(["skip_search", *common, *options[:3], "--most=6"]) == 1
    assert "has 6 layers" in capsys.readouterr().err


@pytest.mark.parametrize(("rate", "cost"), [(0.4, 0.2), (0.6, 0.05), (0.8, 0.1), (0.9, 0.2)])
def test_the_expected_gain_is_leviathans(rate: float, cost: float) -> None:
    formula = [(1 - rate ** (k + 1)) / (1 - rate) / (1 + k * cost) for k in range(1, 13)]
    assert expected_gain(rate, cost) == pytest.approx(max(formula))
