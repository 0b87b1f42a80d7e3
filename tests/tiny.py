"""Tiny models and tokenizers: every rule and cache path can be tested without training."""

import itertools
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from workers.cache import cache_dir
from workers.datastore import files
from workers.datastore.index import Datastore
from workers.datastore.suffix_array import suffix_array
from workers.draft import cut, eagle, medusa
from workers.draft.levels import ACCURACIES
from workers.engine.features import FeatureTap
from workers.engine.loading import load_model, load_module
from workers.training.accuracies import measure
from workers.training.data import Writer
from workers.training.distill import CutStudent
from workers.training.eagle import EagleLearner
from workers.training.losses import DIVERGENCES
from workers.training.mask import MaskLearner
from workers.training.medusa import MedusaLearner
from workers.training.samples import Sample, Teacher
from workers.training.trainer import Learner, Plan, Trainer
from workers.vocabulary import vocabulary_fingerprint

BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ':' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token, a few pairs are merged, and three special tokens come last."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "a"), ("i", "n"), ("Ã", "©")]
    vocabulary = [*alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _wrap(tokenizer)


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """In the manner of Llama 2: words begin with ▁, and what has no token is spelt in bytes."""
    vocabulary = {"<unk>": 0}
    for token in [
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁abcdefghijklmnopqrstuvwxyz.,!",
        "▁a",
        "▁the",
    ]:
        vocabulary[token] = len(vocabulary)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("▁", "a")], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return _wrap(tokenizer)


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (BOS, EOS, PAD)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


@cache
def small_vocabulary() -> Path:
    """A random Llama over 32 tokens, for laws that are compared by counting."""
    folder = cache_dir("tests") / "small-v1"
    if not (folder / "config.json").exists():
        config = LlamaConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            initializer_range=0.4,
        )
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@cache
def llama(seed: int = 0, max_position_embeddings: int = 512) -> Path:
    """A random Llama whose greedy answers wander: at least 20 different tokens in 64."""
    folder = cache_dir("tests") / f"llama-v1-{seed}-{max_position_embeddings}"
    if (folder / "config.json").exists():
        return folder
    tokenizer = byte_level_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_position_embeddings,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.25)
        # No answer ends by itself: the tests that want an end declare one.
        model.lm_head.weight[tokenizer.eos_token_id] = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@cache
def shaken(seed: int) -> Path:
    """`llama()` with some noise on its weights: a draft that is often right, and not always."""
    folder = cache_dir("tests") / f"shaken-v1-{seed}"
    if not (folder / "config.json").exists():
        model = AutoModelForCausalLM.from_pretrained(llama())
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" not in name:
                    parameter += 0.02 * torch.randn_like(parameter)
        model.save_pretrained(folder)
        byte_level_tokenizer().save_pretrained(folder)
    return folder


@cache
def trained_head(version: str) -> Path:
    """An EAGLE head that knows some greedy answers of `llama()` by heart."""
    folder = cache_dir("tests") / f"head-v5-{version}"
    if (folder / "eagle.json").exists():
        return folder
    target = llama()
    samples, teacher = known_answers()
    head = eagle.new_head(version, target, teacher.vocabulary)
    learner = EagleLearner(head, teacher, str(target), 3, 64, DIVERGENCES["fkl"])
    learn(learner, samples, folder, 40_000)
    return folder


@cache
def trained_medusa() -> Path:
    """Medusa heads that know the same answers."""
    folder = cache_dir("tests") / "medusa-v1"
    if (folder / ACCURACIES).exists():
        return folder
    samples, teacher = known_answers()
    heads = medusa.new_heads(4, 2, llama(), teacher.vocabulary)
    learner = MedusaLearner(heads, teacher, str(llama()), DIVERGENCES["fkl"])
    learn(learner, samples, folder, 100_000)
    measure(learner, samples).save(folder)
    return folder


@cache
def trained_mask() -> Path:
    """A mask drafter that knows the same answers."""
    folder = cache_dir("tests") / "mask-v1"
    if (folder / ACCURACIES).exists():
        return folder
    samples, teacher = known_answers()
    layers = (0, 1, 2)
    module = cut.cut_module(load_module(llama(), "float32", "cpu"), layers)
    student = CutStudent(module, layers, teacher.vocabulary, str(llama()), 0)
    learner = MaskLearner(student, teacher, DIVERGENCES["fkl"], masks=3, cuts=64, seed=0)
    learn(learner, samples, folder, 40_000)
    measure(learner, samples).save(folder)
    return folder


def learn(learner: Learner, samples: list[Sample], folder: Path, tokens: int) -> None:
    """Learn samples by heart."""
    plan = Plan(tokens, 4e-3, 3, 10, 0, tokens, 10.0)
    Trainer(learner, plan, lambda skip: itertools.cycle(samples), samples, folder).run()


@cache
def known_answers() -> tuple[list[Sample], Teacher]:
    """Greedy answers of `llama()` in both types."""
    # More threads than free cores make training ten times slower.
    torch.set_num_threads(1)
    target = llama()
    tokenizer = byte_level_tokenizer()
    samples = []
    prompts = [tokenizer(t).input_ids for t in ("the cat in the hat", "hello", "0123456789 " * 8)]
    for dtype in ("float32", "bfloat16"):
        engine = load_model(target, dtype)
        writer = Writer(engine, tokenizer.backend_tokenizer, frozenset(), 4, 512)
        answers = dict(writer.write(prompts, [0.0] * 3, [0] * 3, 64))
        writer.close()
        model = AutoModelForCausalLM.from_pretrained(target, dtype=getattr(torch, dtype))
        taps = FeatureTap(model, "last"), FeatureTap(model, "three")
        for number, prompt in enumerate(prompts):
            tokens = torch.tensor(prompt + answers[number])
            with torch.no_grad():
                model(tokens[None], use_cache=False)
            last, three = (tap.take().float() for tap in taps)
            samples.append(Sample(tokens, len(prompt), last, three))
    vocabulary = torch.arange(len(tokenizer))
    return samples, Teacher.of(model.lm_head.weight.detach().float(), vocabulary, torch.float32)


@cache
def spelling_llama() -> Path:
    """A random Llama with the byte-fallback tokenizer: another vocabulary than `llama()`'s."""
    folder = cache_dir("tests") / "spelling-llama-v1"
    if not (folder / "config.json").exists():
        tokenizer = byte_fallback_tokenizer()
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=512,
            initializer_range=0.4,
        )
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def datastore(folder: Path, texts: Sequence[Sequence[int]], dtype: str = ">u2") -> Datastore:
    """A datastore of these tokens, for `byte_level_tokenizer()`."""
    folder.mkdir(exist_ok=True)
    separator = files.separator(np.dtype(dtype).itemsize)
    tokens = np.array([t for text in texts for t in (*text, separator)], dtype)
    np.save(folder / files.TOKENS, tokens)
    np.save(folder / files.SUFFIXES, suffix_array(tokens, files.SORTED, lambda: None))
    fingerprint = vocabulary_fingerprint(byte_level_tokenizer().backend_tokenizer)
    files.Description(fingerprint, len(tokens), len(texts)).write(folder)
    return Datastore(folder, fingerprint)


EVEN_WEIGHTY = 2
"""The layer of `even_llama()` without which it says something else."""


@cache
def even_llama() -> Path:
    """A random Llama of six layers that add little, but for one: most can be left out."""
    folder = cache_dir("tests") / "even-llama-v1"
    if (folder / "config.json").exists():
        return folder
    model = AutoModelForCausalLM.from_pretrained(llama(), dtype=torch.float32)
    config = model.config
    config.num_hidden_layers = 6
    even = AutoModelForCausalLM.from_config(config)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in even.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.25)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(1.0 if f".{EVEN_WEIGHTY}." in name else 0.15)
        even.lm_head.weight[config.eos_token_id] = 0
    even.save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
    return folder


@cache
def flat_llama() -> Path:
    """`llama()` with laws so flat that at temperature 1 the noise decides most tokens."""
    folder = cache_dir("tests") / "flat-llama-v1"
    if not (folder / "config.json").exists():
        model = AutoModelForCausalLM.from_pretrained(llama(), dtype=torch.float32)
        with torch.no_grad():
            model.lm_head.weight.mul_(0.1)
        model.save_pretrained(folder)
        byte_level_tokenizer().save_pretrained(folder)
    return folder
