"""Train drafts for a target, on CPU or GPU, without Ray: see docs/training.md.

python -m workers.training data         the target writes text to train on
python -m workers.training distill      a draft model learns from it
python -m workers.training eagle        an EAGLE head learns from it
python -m workers.training medusa       Medusa heads learn from it
python -m workers.training mask         a mask drafter learns from it
python -m workers.training boost        drafts that complement each other learn from it
python -m workers.training early_exit   an adapter behind the target's first layers learns from it
python -m workers.training skip_search  which layers the target can draft without
python -m workers.training evaluate     how often a trained draft is right
python -m workers.training recommend    which method to take, and why
python -m workers.training rehearse     what a draft would learn from a stream of answers while it serves
"""

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoTokenizer

from workers import checkpoint
from workers.cache import cache_dir
from workers.compare import questions, report, statistics
from workers.compare.comparison import compare
from workers.compare.drafters import parse
from workers.compare.run import Broken, Options
from workers.draft import skips
from workers.draft.cut import cut_module, is_cut, load_cut_module, reduce_head
from workers.draft.eagle import load_head, new_head
from workers.draft.medusa import load_heads, new_heads
from workers.engine.loading import load_model, load_module, resolve_dtype
from workers.request import SamplingParams
from workers.training import boost, data, recommend, rehearsal
from workers.training.accuracies import measure
from workers.training.corpus import DRAFT_VOCABULARY, Corpus, draft_vocabulary, epochs
from workers.training.distill import (
    CutStudent,
    DistillLearner,
    OnPolicy,
    Student,
    WholeStudent,
)
from workers.training.eagle import EagleLearner
from workers.training.early_exit import ExitStudent
from workers.training.evaluate import Guesser, evaluate
from workers.training.features import FeatureStore
from workers.training.losses import DIVERGENCES
from workers.training.mask import MaskLearner
from workers.training.medusa import MedusaLearner
from workers.training.recipe import file_digest, write_recipe
from workers.training.samples import Sample, Teacher
from workers.training.sizes import Sizes
from workers.training.skip_search import search
from workers.training.trainer import Learner, Plan, Trainer

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = _parser().parse_args(arguments)
    if options.num_threads:
        torch.set_num_threads(options.num_threads)
    torch.manual_seed(options.seed)
    try:
        if options.command == "data":
            data.write(
                target=options.target,
                out=options.out,
                prompts=options.prompts,
                answers=options.answers,
                temperatures=options.temperature,
                max_tokens=options.max_tokens,
                batch=options.batch,
                seed=options.seed,
                dtype=options.dtype,
                device=options.device,
            )
        elif options.command == "evaluate":
            _evaluate(options)
        elif options.command == "skip_search":
            _skip_search(options)
        elif options.command == "boost":
            _boost(options)
        elif options.command == "recommend":
            _recommend(options)
        elif options.command == "rehearse":
            _rehearse(options)
        else:
            _train(options)
    except (ValueError, OSError, Broken) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


@dataclass(frozen=True, slots=True)
class Material:
    """What training and judging have in common: texts, the target, and its states at every token."""

    corpus: Corpus
    texts: range
    folder: Path
    target: Any
    head: torch.Tensor
    store: FeatureStore
    three: bool
    device: torch.device

    def sample(self, text: int) -> Sample:
        """A text with the target's states."""
        tokens = torch.from_numpy(self.corpus[text].tokens).to(self.device)
        entered = self.store.three(text).to(self.device) if self.three else None
        last = self.store.last(text).to(self.device)
        return Sample(tokens, self.corpus[text].answer_from, last, entered)

    def teacher(self, vocabulary: torch.Tensor) -> Teacher:
        """The target's head over a draft vocabulary."""
        return Teacher.of(self.head, vocabulary.to(self.device), self.target.dtype)


def _material(options: argparse.Namespace, three: bool, least: int) -> Material:
    """Load the target and compute what is missing of its states; raises ValueError for too few texts."""
    corpus = Corpus(options.corpus, options.max_length)
    texts = range(min(len(corpus), options.texts or len(corpus)))
    if len(texts) <= least:
        raise ValueError(f"{len(texts)} texts, of which {least} are held out: give more")
    folder = checkpoint.resolve(options.target)
    target = load_module(folder, options.dtype, options.device)
    head = target.lm_head.weight.detach().clone()
    store = FeatureStore(options.features, corpus, options.target, target.dtype, three)
    store.fill(target, texts)
    device = torch.device(options.device)
    return Material(corpus, texts, folder, target, head, store, three, device)


def _train(options: argparse.Namespace) -> None:
    three = options.command == "eagle" and options.version == "eagle3"
    material = _material(options, three, options.held_out)
    vocabulary = _vocabulary(options, material)
    learner: Learner
    if options.command == "eagle":
        learner = _eagle(options, material, vocabulary)
    elif options.command == "early_exit":
        learner = _early_exit(options, material, vocabulary)
    elif options.command == "medusa":
        learner = _medusa(options, material, vocabulary)
    elif options.command == "mask":
        learner = _mask(options, material, vocabulary)
    else:
        learner = _distill(options, material, vocabulary)
    held_out = _learn(options, material, vocabulary, learner, material.sample)
    if isinstance(learner, MedusaLearner | MaskLearner):
        measure(learner, held_out).save(options.out)


def _vocabulary(options: argparse.Namespace, material: Material) -> torch.Tensor:
    """What a draft can guess."""
    size = len(material.head)
    counts = material.corpus.counts(size)
    return torch.from_numpy(draft_vocabulary(counts, min(options.vocabulary, size)))


def _learn(
    options: argparse.Namespace,
    material: Material,
    vocabulary: torch.Tensor,
    learner: Learner,
    sample: Callable[[int], Sample],
) -> list[Sample]:
    """Train a learner into --out, on texts as `sample` gives them; the ones that were held out."""
    corpus, texts = material.corpus, material.texts

    def samples(skip: int) -> Iterator[Sample]:
        for text in epochs(texts[options.held_out :], options.seed, skip):
            yield sample(text)

    plan = Plan(
        tokens=options.tokens,
        learning_rate=options.learning_rate,
        texts_per_step=options.texts_per_step,
        warmup_steps=options.warmup_steps,
        seed=options.seed,
        evaluate_every=options.evaluate_every,
        checkpoint_minutes=options.checkpoint_minutes,
    )
    held_out = [material.sample(text) for text in texts[: options.held_out]]
    trainer = Trainer(learner, plan, samples, held_out, options.out)
    trainer.run()
    counts = corpus.counts(len(material.head))
    description = {
        "files": {file.name: file_digest(file) for file in options.corpus},
        "texts": len(texts),
        "held_out": options.held_out,
        "tokens": sum(len(corpus[text].tokens) for text in texts),
        "answer_tokens": sum(len(corpus[text].tokens) - corpus[text].answer_from for text in texts),
        "vocabulary_coverage": round(float(counts[vocabulary].sum() / counts.sum()), 4),
    }
    trained = sum(parameter.numel() for parameter in learner.parameters())
    write_recipe(options.out, vars(options), description, trained, trainer.curve)
    return held_out


def _boost(options: argparse.Namespace) -> None:
    if options.drafts < 2:
        raise ValueError(
            f"--drafts {options.drafts}: one draft has none to complement; give 2 or more"
        )
    if not 0 < options.known_weight <= 1:
        raise ValueError(f"--known-weight {options.known_weight}: give more than 0, and 1 at most")
    names = ("target", "layers", "rank", "vocabulary", "divergence", "known_weight")
    made_with = {name: getattr(options, name) for name in names}
    boost.begin(options.out, made_with)
    material = _material(options, False, options.held_out)
    vocabulary = _vocabulary(options, material)
    held_out = [material.sample(text) for text in material.texts[: options.held_out]]
    drafts: list[DistillLearner] = []
    judged: list[boost.Together] = []
    for number in range(options.drafts):
        folder, seed = options.out / f"draft{number + 1}", options.seed + number
        logger.info("draft %d of %d, in %s", number + 1, options.drafts, folder)
        # The same whether the ones before it were trained now or in a run that was broken off.
        torch.manual_seed(seed)
        learner = DistillLearner(
            _cut_student(options, material, vocabulary),
            material.teacher(vocabulary),
            DIVERGENCES[options.divergence],
            1.0,
        )
        residue = boost.Residue(material.sample, drafts, options.known_weight)
        each = argparse.Namespace(**{**vars(options), "out": folder, "seed": seed})
        _learn(each, material, vocabulary, learner, residue.sample)
        drafts.append(_cut_guesser(options, material, folder)[0])
        judged = boost.judge(drafts, held_out)
        boost.keep_report(options.out, made_with, judged)
    print(json.dumps([asdict(each) for each in judged], indent=1))


def _cut_guesser(
    options: argparse.Namespace, material: Material, folder: Path
) -> tuple[DistillLearner, Teacher]:
    """A cut draft as it is served, and its teacher; it learns nothing."""
    draft, vocabulary = load_cut_module(folder, options.dtype, options.device)
    teacher = material.teacher(vocabulary)
    return DistillLearner(WholeStudent(draft, None), teacher, DIVERGENCES["fkl"], 1.0), teacher


def _evaluate(options: argparse.Namespace) -> None:
    is_cut_draft, is_medusa = is_cut(options.draft), checkpoint.holds_medusa(options.draft)
    is_head = not (is_cut_draft or is_medusa)
    three = is_head and checkpoint.head_features(str(options.draft)) == "three"
    material = _material(options, three, 0)
    divergence = DIVERGENCES["fkl"]  # Of no consequence: nothing is learned.
    guesser: Guesser
    if is_cut_draft:
        guesser, teacher = _cut_guesser(options, material, options.draft)
    elif is_medusa:
        heads = load_heads(options.draft, material.folder).to(options.device)
        teacher = material.teacher(heads.vocabulary)
        guesser = MedusaLearner(heads, teacher, options.target, divergence)
    else:
        head = load_head(options.draft, material.folder).to(options.device)
        teacher = material.teacher(head.get_buffer("vocabulary"))
        guesser = EagleLearner(head, teacher, options.target, 1, 512, divergence)
    samples = (material.sample(text) for text in tqdm(material.texts, unit="text"))
    made = evaluate(guesser, teacher, samples, options.seed)
    print(json.dumps(made.as_dict(), indent=1))


def _eagle(
    options: argparse.Namespace, material: Material, vocabulary: torch.Tensor
) -> EagleLearner:
    head = new_head(options.version, material.folder, vocabulary).to(options.device)
    return EagleLearner(
        head,
        material.teacher(vocabulary),
        options.target,
        options.passes,
        options.window,
        DIVERGENCES[options.divergence],
    )


def _early_exit(
    options: argparse.Namespace, material: Material, vocabulary: torch.Tensor
) -> DistillLearner:
    module = load_module(material.folder, "float32", options.device)
    student = ExitStudent(module, options.exit, vocabulary, options.target)
    divergence = DIVERGENCES[options.divergence]
    return DistillLearner(student, material.teacher(vocabulary), divergence, 1.0)


def _skip_search(options: argparse.Namespace) -> None:
    corpus = Corpus(options.corpus, options.max_length)
    texts = [corpus[text] for text in range(min(len(corpus), options.texts))]
    model = load_model(checkpoint.resolve(options.target), options.dtype, options.device)
    most = model.num_layers // 2 if options.most is None else options.most
    if not 0 < most < model.num_layers:
        raise ValueError(f"--most {most}: the target has {model.num_layers} layers")
    skip, way = search(model, texts, most)
    skips.save(options.out, skip, {"target": options.target, "way": way})
    best = next(entry for entry in way if entry["skip"] == skip)
    print(json.dumps(best))
    if best["gain"] <= 1:
        logger.warning("no set is expected to draft faster than plain decoding")


def _recommend(options: argparse.Namespace) -> None:
    SamplingParams(temperature=options.temperature)
    if bool(options.measure) != bool(options.prompts):
        raise ValueError(
            "--measure and --prompts are given together: what is measured is told by prompts"
        )
    if options.drafter and not options.measure:
        raise ValueError("--drafter names what is there to --measure")
    wishes = recommend.Wishes(
        recommend.parse_bytes(options.memory),
        not options.no_training,
        options.temperature,
        options.placement,
    )
    dtype = resolve_dtype(options.dtype, torch.device(options.device))
    sizes = Sizes(checkpoint.resolve(options.target), dtype, DRAFT_VOCABULARY)
    known = recommend.methods(sizes, options.target, options.placement)
    advice = recommend.advise(known, wishes)
    print(recommend.heading(sizes, options.target, wishes))
    if not options.measure:
        print(recommend.text(advice, options.target))
        return
    there = [choice.config for choice in advice.ranked if not choice.method.training]
    settings, drafters = parse(
        [*(json.dumps({**config, "placement": "target"}) for config in there), *options.drafter]
    )
    trace = compare(
        Options(
            target=options.target,
            dtype=options.dtype,
            device=options.device,
            num_threads=options.num_threads or 0,
            max_draft_tokens=options.max_draft_tokens,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            seed=options.seed,
            chain=False,
            settings=settings,
            drafters=drafters,
        ),
        questions.read(options.prompts),
        options.out,
    )
    rows = statistics.rows(trace)
    report.write(options.out, trace.run, rows)
    whole = [row for row in rows if row.category == statistics.ALL]
    print(recommend.measured(whole, settings, drafters, advice, options.placement))


def _rehearse(options: argparse.Namespace) -> None:
    corpus = Corpus(options.corpus, options.max_length)
    texts = [corpus[text] for text in range(min(len(corpus), options.texts))]
    made = rehearsal.rehearse(
        options.draft, texts, options.dtype, options.rows, options.window, options.seed
    )
    rehearsal.write(options.out, *made)


def _medusa(
    options: argparse.Namespace, material: Material, vocabulary: torch.Tensor
) -> MedusaLearner:
    heads = new_heads(options.heads, options.blocks, material.folder, vocabulary)
    return MedusaLearner(
        heads.to(options.device),
        material.teacher(vocabulary),
        options.target,
        DIVERGENCES[options.divergence],
    )


def _mask(options: argparse.Namespace, material: Material, vocabulary: torch.Tensor) -> MaskLearner:
    return MaskLearner(
        _cut_student(options, material, vocabulary),
        material.teacher(vocabulary),
        DIVERGENCES[options.divergence],
        options.masks,
        options.cuts,
        options.seed,
    )


def _cut_student(
    options: argparse.Namespace, material: Material, vocabulary: torch.Tensor
) -> CutStudent:
    layers = tuple(int(layer) for layer in options.layers.split(","))
    module = cut_module(load_module(material.folder, "float32", options.device), layers)
    reduce_head(module, vocabulary)
    return CutStudent(module, layers, vocabulary, options.target, options.rank)


def _distill(
    options: argparse.Namespace, material: Material, vocabulary: torch.Tensor
) -> DistillLearner:
    student: Student
    if options.draft:
        draft = checkpoint.resolve(options.draft)
        module = load_module(draft, "float32", options.device).requires_grad_(True)
        student = WholeStudent(module, AutoTokenizer.from_pretrained(draft))
        if module.lm_head.weight.shape[0] != len(vocabulary):
            raise ValueError(
                f"--draft {options.draft} guesses {module.lm_head.weight.shape[0]} tokens: give the same "
                f"number as --vocabulary, not {len(vocabulary)}"
            )
    else:
        student = _cut_student(options, material, vocabulary)
    rewrite = None
    if options.on_policy:
        rewrite = OnPolicy(
            student,
            material.target,
            vocabulary,
            options.on_policy,
            options.temperature,
            options.seed,
        )
    return DistillLearner(
        student,
        material.teacher(vocabulary),
        DIVERGENCES[options.divergence],
        options.temperature,
        rewrite,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m workers.training", description="Train drafts for a target."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    writing = commands.add_parser("data", help="let the target write text to train on")
    _add_common(writing)
    writing.add_argument("--out", type=Path, required=True, help="the .npz to write")
    writing.add_argument(
        "--prompts",
        type=Path,
        help="JSON lines with `prompt` or `turns`; without it the target invents its prompts, behind "
        "the header of a user's turn",
    )
    writing.add_argument("--answers", type=int, default=1000, help="texts to write")
    writing.add_argument(
        "--temperature",
        type=float,
        nargs="+",
        default=[0.0, 1.0],
        help="of the answers, in turn (prompts are always drawn at 1)",
    )
    writing.add_argument("--max-tokens", type=int, default=256, help="of an answer")
    writing.add_argument(
        "--batch", type=int, default=64, help="texts that are written side by side"
    )

    for name, text in (
        ("distill", "train a draft model"),
        ("boost", "train draft models that complement each other"),
        ("eagle", "train an EAGLE head"),
        ("early_exit", "train an adapter behind the target's first layers"),
        ("medusa", "train Medusa heads"),
        ("mask", "train a mask drafter"),
    ):
        training = commands.add_parser(name, help=text)
        _add_common(training)
        training.add_argument(
            "--corpus", type=Path, nargs="+", required=True, help=".npz of `data`"
        )
        training.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
        training.add_argument(
            "--tokens", type=int, default=1_000_000, help="answer tokens to learn from"
        )
        training.add_argument("--texts", type=int, help="use the first so many texts only")
        training.add_argument(
            "--max-length", type=int, default=1024, help="tokens of a text at most"
        )
        training.add_argument("--held-out", type=int, default=40, help="texts for the curve")
        training.add_argument(
            "--vocabulary", type=int, default=DRAFT_VOCABULARY, help="tokens that can be guessed"
        )
        training.add_argument("--divergence", choices=list(DIVERGENCES), default="fkl")
        training.add_argument("--learning-rate", type=float, default=5e-4)
        training.add_argument("--texts-per-step", type=int, default=2)
        training.add_argument("--warmup-steps", type=int, default=50)
        training.add_argument("--evaluate-every", type=int, default=100_000, help="answer tokens")
        training.add_argument("--checkpoint-minutes", type=float, default=3.0)
        training.add_argument(
            "--features",
            type=Path,
            default=cache_dir("features"),
            help="where the target's states are kept",
        )
        if name in ("distill", "boost", "mask"):
            training.add_argument(
                "--layers",
                default="0,1,2,29" if name == "mask" else "0,1,2,3,4,5,6,27,28,29",
                help="of the target, in their order: the draft is cut from it",
            )
            training.add_argument(
                "--rank", type=int, default=32, help="of the updates; 0 trains whole matrices"
            )
        if name == "distill":
            training.add_argument("--draft", help="train this model instead, whole")
            training.add_argument(
                "--on-policy", type=float, default=0.0, help="share of the student's texts"
            )
            training.add_argument(
                "--temperature", type=float, default=1.0, help="at which the draft serves"
            )
        elif name == "boost":
            training.add_argument("--drafts", type=int, default=2, help="drafts in all")
            training.add_argument(
                "--known-weight",
                type=float,
                default=0.25,
                help="of a position that a draft before it predicts; with 1 all drafts are trained alike",
            )
        elif name == "medusa":
            training.add_argument(
                "--heads", type=int, default=4, help="positions that are guessed at once"
            )
            training.add_argument("--blocks", type=int, default=1, help="residual blocks of a head")
        elif name == "mask":
            training.add_argument(
                "--masks", type=int, default=3, help="tokens that are guessed beyond the next one"
            )
            training.add_argument(
                "--cuts", type=int, default=32, help="of a text that are learned from at once"
            )
        elif name == "early_exit":
            training.add_argument(
                "--exit", type=int, required=True, help="layers of the target before the adapter"
            )
        else:
            training.add_argument("--version", choices=["eagle", "eagle3"], default="eagle3")
            training.add_argument(
                "--passes", type=int, default=3, help="how often the head is unrolled"
            )
            training.add_argument(
                "--window", type=int, default=512, help="positions that it looks back"
            )
    searching = commands.add_parser("skip_search", help="which layers the target can draft without")
    _add_common(searching)
    searching.add_argument("--corpus", type=Path, nargs="+", required=True, help=".npz of `data`")
    searching.add_argument("--out", type=Path, required=True, help="the .json to write")
    searching.add_argument("--texts", type=int, default=16, help="use the first so many texts only")
    searching.add_argument("--max-length", type=int, default=256, help="tokens of a text at most")
    searching.add_argument("--most", type=int, help="layers to skip at most; half of them")
    judging = commands.add_parser("evaluate", help="how often a trained draft is right")
    _add_common(judging)
    judging.add_argument("--draft", type=Path, required=True, help="folder of the checkpoint")
    judging.add_argument("--corpus", type=Path, nargs="+", required=True, help=".npz of `data`")
    judging.add_argument("--texts", type=int, help="use the first so many texts only")
    judging.add_argument("--max-length", type=int, default=1024, help="tokens of a text at most")
    judging.add_argument(
        "--features",
        type=Path,
        default=cache_dir("features"),
        help="where the target's states are kept",
    )
    advising = commands.add_parser("recommend", help="which method to take, and why")
    _add_common(advising)
    advising.add_argument(
        "--memory", required=True, help="for drafts: bytes, or a number with MiB, GiB, MB or GB"
    )
    advising.add_argument(
        "--no-training", action="store_true", help="leave out what must be trained first"
    )
    advising.add_argument("--temperature", type=float, default=0.0, help="of most requests")
    advising.add_argument(
        "--placement",
        choices=["draft", "target"],
        default="target",
        help="where drafters run: on workers of their own, or beside the target",
    )
    advising.add_argument(
        "--measure",
        action="store_true",
        help="compare, on --prompts, those that need no training and each --drafter",
    )
    advising.add_argument(
        "--prompts", type=Path, help="JSON lines with `prompt` or `turns`, to measure with"
    )
    advising.add_argument(
        "--drafter",
        action="append",
        default=[],
        help="one that is there, or a set, as workers.compare takes it; repeat it",
    )
    advising.add_argument(
        "--max-tokens", type=int, default=128, help="of an answer that is measured"
    )
    advising.add_argument(
        "--max-draft-tokens", type=int, default=8, help="drafted rows of a pass that is measured"
    )
    advising.add_argument(
        "--out",
        type=Path,
        default=Path("out/recommend"),
        help="folder of what is measured; a run that is broken off goes on there",
    )
    rehearsing = commands.add_parser(
        "rehearse", help="what a draft would learn from a stream of answers while it serves"
    )
    _add_run(rehearsing)
    rehearsing.add_argument("--draft", required=True, help="package://…, a path or a hub id")
    rehearsing.add_argument(
        "--corpus", type=Path, nargs="+", required=True, help=".npz of `data --temperature 0`"
    )
    rehearsing.add_argument("--out", type=Path, required=True, help="folder for table and plot")
    rehearsing.add_argument("--texts", type=int, default=100, help="use the first so many texts")
    rehearsing.add_argument("--max-length", type=int, default=512, help="tokens of a text at most")
    rehearsing.add_argument("--rows", type=int, default=5, help="drafted rows of a pass")
    rehearsing.add_argument("--window", type=int, default=10, help="answers of a row of the table")
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, help="package://…, a path or a hub id")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    _add_run(parser)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype", default="auto", help="of the target, or of the draft that serves"
    )
    parser.add_argument("--num-threads", type=int, help="of torch on CPU")
    parser.add_argument("--seed", type=int, default=0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
