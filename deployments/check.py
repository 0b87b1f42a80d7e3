"""Explains what is wrong with a config file before anything is started.

    python -m deployments.check deployments.yaml

Ray ignores keys that it does not know, at several levels; here every level is held against Ray's own
schema, the arguments against ours, the model references against what is installed, and the ports
against who listens already. Exits with 1 and the reasons, or with 0.
"""

import difflib
import http.client
import socket
import sys
import typing
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml
from jinja2 import TemplateError
from pydantic import BaseModel, ValidationError
from ray.serve.schema import ServeDeploySchema

from deployments.config import (
    AppConfig,
    CoordinatorThresholds,
    DatastoreArgs,
    DraftAppConfig,
    EarlyExitArgs,
    FrontConfig,
    LoadedArgs,
    Strict,
    TargetAppConfig,
    WorkerThresholds,
)
from deployments.features import features_read
from deployments.tokenizer import template_environment
from workers.checkpoint import CheckpointError, already_there, check_drafter, locate

MODULE: Final = "deployments.app"
BUILDERS: Final[dict[str, tuple[type[Strict], tuple[str, ...]]]] = {
    f"{MODULE}:build": (AppConfig, ("Coordinator", "Target", "Draft")),
    f"{MODULE}:front": (FrontConfig, ("Coordinator",)),
    f"{MODULE}:target": (TargetAppConfig, ("Target",)),
    f"{MODULE}:draft": (DraftAppConfig, ("Draft",)),
}
"""What makes an application: its arguments, and its deployments."""

SERVICER: Final = "protos.inference_pb2_grpc.add_InferenceServicer_to_server"


def check(config: Any) -> list[str]:
    """Everything that is wrong with the content of a config file, as lines "place: reason"."""
    if not isinstance(config, dict):
        return ["the file holds no mapping: it should begin with keys such as applications:"]
    problems = list(_unknown_keys(config, ServeDeploySchema, ""))
    problems += _validate(ServeDeploySchema, config, "")
    if problems:
        return problems
    servicers = (config.get("grpc_options") or {}).get("grpc_servicer_functions") or []
    if SERVICER not in servicers:
        problems.append(f"grpc_options.grpc_servicer_functions: {SERVICER} is missing")
    applications = dict(enumerate(config["applications"]))
    for index, application in applications.items():
        problems += _check_application(application, f"applications.{index}")
    if not problems:
        by_name = {application["name"]: application for application in applications.values()}
        for index, application in applications.items():
            if application["import_path"] == f"{MODULE}:front":
                problems += _check_pools(application["args"], by_name, f"applications.{index}.args")
    return problems


def check_file(path: Path) -> list[str]:
    """Everything that is wrong with a config file."""
    try:
        return check(yaml.safe_load(path.read_text()))
    except OSError as error:
        return [f"cannot be read: {error.strerror}"]
    except yaml.YAMLError as error:
        return [f"is not YAML: {error}"]


def busy_ports(config: dict[str, Any]) -> list[str]:
    """The ports of a config that cannot be listened on, unless a Ray Serve of ours is there already."""
    options = config.get("http_options") or {}
    host, port = options.get("host", "0.0.0.0"), options.get("port", 8000)
    if serve_answers("127.0.0.1" if host == "0.0.0.0" else host, port):
        return []
    grpc_port = (config.get("grpc_options") or {}).get("port", 9000)
    return [
        f"{place}: port {number} is in use by another program; stop it or choose another port"
        for place, address, number in (
            ("http_options.port", host, port),
            ("grpc_options.port", "0.0.0.0", grpc_port),
        )
        if not _can_bind(address, number)
    ]


def serve_answers(host: str, port: int) -> bool:
    """Whether Ray Serve's own health endpoint answers: `serve run` would update that instance."""
    try:
        with urllib.request.urlopen(f"http://{host}:{port}/-/healthz", timeout=2) as answer:
            return bool(answer.read() == b"success")
    except (OSError, http.client.HTTPException):
        return False


def _can_bind(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _check_application(application: dict[str, Any], place: str) -> Iterator[str]:
    path = application["import_path"]
    if path not in BUILDERS:
        yield f"{place}.import_path: {path!r} is none of ours{_suggest(path, BUILDERS)}"
        return
    schema, deployments = BUILDERS[path]
    problems = _validate(schema, application.get("args") or {}, f"{place}.args")
    yield from problems
    if "Coordinator" not in deployments and application.get("route_prefix", "/") is not None:
        yield f"{place}.route_prefix: {deployments[0]} answers no HTTP; set it to null"
    config = None if problems else schema.model_validate(application["args"])
    seats, ranks = 0, 1
    gpus: set[str] = set()
    if isinstance(config, AppConfig):
        seats, ranks = config.target.max_num_seqs, config.target.tensor_parallel_size
    if isinstance(config, AppConfig | DraftAppConfig):
        yield from _check_models(config, f"{place}.args")
        yield from _check_template(config, f"{place}.args")
        yield from _check_datastores(config, f"{place}.args")
        gpus = _on_gpus(config)
        drafted = any(draft.placement == "draft" for draft in config.drafts)
    for index, deployment in enumerate(application.get("deployments") or []):
        here = f"{place}.deployments.{index}"
        name = deployment["name"]
        if name not in deployments:
            yield f"{here}.name: {name!r} is no deployment here{_suggest(name, deployments)}"
        else:
            thresholds = CoordinatorThresholds if name == "Coordinator" else WorkerThresholds
            given = deployment.get("user_config") or {}
            yield from _validate(thresholds, given, f"{here}.user_config")
        if name == "Draft" and config is not None and not drafted:
            yield f"{here}: Draft has nothing to run: no drafter has the placement draft; leave it out"
        options = deployment.get("ray_actor_options") or {}
        if name in gpus and options and not options.get("num_gpus"):
            yield (
                f"{here}.ray_actor_options: device is cuda, but Ray hides all GPUs from a replica that asks "
                "for none: add num_gpus, 1 or a part of one"
            )
        bundles = deployment.get("placement_group_bundles") or []
        if name == "Target" and bundles and len(bundles) != ranks:
            yield (
                f"{here}.placement_group_bundles: {len(bundles)} bundles for a tensor_parallel_size of "
                f"{ranks}: each rank needs one"
            )
        calls = deployment.get("max_ongoing_requests", seats)
        if isinstance(calls, int) and calls < seats:
            yield (
                f"{here}.max_ongoing_requests: {calls} sessions are fewer than the target's "
                f"max_num_seqs of {seats}: its places could not be filled"
            )


def _on_gpus(config: AppConfig | DraftAppConfig) -> set[str]:
    """The deployments whose models are on GPUs."""
    drafts = [draft for draft in config.drafts if draft.placement == "draft"]
    found = {"Draft"} if any(getattr(d, "device", "cpu") != "cpu" for d in drafts) else set()
    if isinstance(config, AppConfig) and config.target.device != "cpu":
        found.add("Target")
    return found


def _check_pools(args: dict[str, Any], by_name: dict[str, Any], place: str) -> Iterator[str]:
    """What a front asks of applications that are not there."""

    def args_of(app: str, builder: str) -> dict[str, Any] | None:
        found = by_name.get(app, {"import_path": None})
        return found["args"] if found["import_path"] == f"{MODULE}:{builder}" else None

    front = FrontConfig.model_validate(args)
    for index, model in enumerate(front.models):
        here = f"{place}.models.{index}"
        targets = args_of(model.target, "target")
        if targets is None:
            yield f"{here}.target: {model.target!r} is no application of {MODULE}:target in this file"
            continue
        beside = {draft.name for draft in TargetAppConfig.model_validate(targets).drafts}
        for number, pool in enumerate(model.drafts):
            where = f"{here}.drafts.{number}"
            drafts = args_of(pool.app, "draft")
            if drafts is None:
                yield f"{where}.app: {pool.app!r} is no application of {MODULE}:draft in this file"
                continue
            there = {draft.name for draft in DraftAppConfig.model_validate(drafts).drafts}
            for name in pool.drafters:
                if name not in there:
                    yield f"{where}.drafters: {pool.app} has no drafter {name!r}{_suggest(name, there)}"
                if name in beside:
                    yield f"{where}.drafters: {name!r} is the name of a drafter beside the target, too"


def _check_models(config: AppConfig | DraftAppConfig, place: str) -> Iterator[str]:
    """What is wrong with the models that a config names; nothing is downloaded or converted."""
    target = f"{place}.target"
    references = (
        {f"{target}.model": config.target.model}
        if isinstance(config, AppConfig)
        else {target: config.target}
    )
    kinds = {}
    for index, draft in enumerate(config.drafts):
        where = f"{place}.drafts.{index}.model"
        if isinstance(draft, LoadedArgs):
            references[where], kinds[where] = draft.model, draft.kind
        elif isinstance(draft, EarlyExitArgs) and draft.model is not None:
            references[where] = draft.model
    wrong = False
    for where, reference in references.items():
        try:
            found = locate(reference)
            if found is not None and where in kinds:
                check_drafter(found, kinds[where])
        except CheckpointError as error:
            wrong = True
            yield f"{where}: {error}"
    if wrong or not isinstance(config, AppConfig):
        return
    try:
        features_read(
            draft
            for draft in config.drafts
            if isinstance(draft, LoadedArgs) and already_there(draft.model)
        )
    except ValueError as error:
        yield f"{place}.{error}"


def _check_template(config: AppConfig | DraftAppConfig, place: str) -> Iterator[str]:
    """What is wrong with a chat template that is given in place of the model's."""
    if isinstance(config, AppConfig) and config.target.chat_template is not None:
        try:
            template_environment().parse(Path(config.target.chat_template).read_text())
        except (OSError, TemplateError) as error:
            yield f"{place}.target.chat_template: {config.target.chat_template}: {error}"


def _check_datastores(config: AppConfig | DraftAppConfig, place: str) -> Iterator[str]:
    """What is wrong with datastores; their vocabulary is looked at where the target's needs no conversion."""
    from workers.datastore.files import DatastoreError, check_vocabulary, describe

    folders = {
        f"{place}.drafts.{index}.folder": Path(draft.folder).expanduser()
        for index, draft in enumerate(config.drafts)
        if isinstance(draft, DatastoreArgs)
    }
    target = config.target.model if isinstance(config, AppConfig) else config.target
    fingerprint = _vocabulary(target) if folders else None
    for where, folder in folders.items():
        try:
            if fingerprint is None:
                describe(folder)
            else:
                check_vocabulary(folder, fingerprint)
        except DatastoreError as error:
            yield f"{where}: {error}"


def _vocabulary(reference: str) -> str | None:
    """The fingerprint of a model's vocabulary, None if the model would have to be fetched or converted."""
    from workers.vocabulary import fingerprint_of

    try:
        folder = already_there(reference)
    except CheckpointError:
        return None
    return None if folder is None else fingerprint_of(folder)


def _validate(model: type[BaseModel], data: Any, place: str) -> list[str]:
    try:
        model.model_validate(data)
    except ValidationError as error:
        return [
            f"{_join(place, *detail['loc'])}: {_reason(model, detail)}"
            for detail in error.errors(include_url=False)
        ]
    return []


def _reason(model: type[BaseModel], detail: Any) -> str:
    if detail["type"] == "extra_forbidden":
        *parents, name = detail["loc"]
        models = [model]
        for part in parents:
            if isinstance(part, str) and part in models[0].model_fields:
                models = _models_in(models[0].model_fields[part].annotation)
            elif isinstance(part, str):
                # The kind that a drafter says it is, which pydantic puts between.
                models = [
                    one
                    for one in models
                    if part in typing.get_args(one.model_fields["kind"].annotation)
                ]
        return f"unknown key{_suggest(str(name), models[0].model_fields)}"
    given = detail.get("input")
    shown = "" if isinstance(given, dict | list) or given is None else f", not {given!r}"
    return f"{detail['msg'].removeprefix('Value error, ')}{shown}"


def _unknown_keys(data: Any, model: type[BaseModel], place: str) -> Iterator[str]:
    """Keys that no level of a pydantic model knows, however deep."""
    if not isinstance(data, dict):
        return
    known = {field.alias or name: field for name, field in model.model_fields.items()}
    for key, value in data.items():
        here = _join(place, key)
        if key not in known:
            yield f"{here}: unknown key{_suggest(str(key), known)}"
            continue
        for inner in _models_in(known[key].annotation)[:1]:
            items = enumerate(value) if isinstance(value, list) else [(None, value)]
            for index, item in items:
                yield from _unknown_keys(item, inner, here if index is None else _join(here, index))


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in _models_in(part)]


def _suggest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, [str(key) for key in known], 1)
    return f"; did you mean {close[0]!r}?" if close else f" (known: {', '.join(sorted(known))})"


def _join(*parts: Any) -> str:
    return ".".join(str(part) for part in parts if str(part))


def main(arguments: list[str]) -> int:
    """See the module's docstring."""
    if len(arguments) != 1:
        print("usage: python -m deployments.check FILE", file=sys.stderr)
        return 2
    path = Path(arguments[0])
    problems = check_file(path) or busy_ports(yaml.safe_load(path.read_text()))
    for problem in problems:
        print(f"{path}: {problem}", file=sys.stderr)
    if problems:
        return 1
    print(f"{path}: ok")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
