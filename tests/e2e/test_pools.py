"""Pools as applications of their own: several models in one front, upgraded, scaled and killed apart."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from loadtest.cluster import EXPORT_SECONDS, Cluster, cluster, free_port
from loadtest.server import until_well
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc
from tests import tiny
from tests.e2e.conftest import ROOT
from tests.unit.test_keys import SECRET, key

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPT = "the cat in the hat sat on the mat"


def target_app(name: str, folder: Path, **options: Any) -> dict[str, Any]:
    return {
        "name": name,
        "route_prefix": None,
        "import_path": "deployments.app:target",
        "args": {
            "model_id": name,
            "target": {
                "model": str(folder),
                "dtype": "float32",
                "num_threads": 1,
                "max_num_seqs": 8,
                "gpu_memory_utilization": 0.05,
            },
            **options.pop("args", {}),
        },
        "deployments": [
            {"name": "Target", "max_ongoing_requests": 16, "ray_actor_options": {"num_cpus": 0.5}}
            | options
        ],
    }


def draft_app(name: str, drafts: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    return {
        "name": name,
        "route_prefix": None,
        "import_path": "deployments.app:draft",
        "args": {"target": str(folder), "drafts": drafts},
        "deployments": [{"name": "Draft", "ray_actor_options": {"num_cpus": 0.2}}],
    }


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    """Two models, each with its targets, and two pools of draft workers, one of which serves both."""
    one, two = tiny.llama(), tiny.llama(seed=1)
    options: dict[str, Any] = yaml.safe_load((ROOT / "docs" / "pools.yaml").read_text())
    options["http_options"]["port"] = free_port()
    options["grpc_options"]["port"] = free_port()
    front = options["applications"][0]
    front["args"]["models"] = [
        {
            "model_id": "one",
            "target": "one",
            "drafts": [
                {"app": "lookup", "drafters": ["lookup"]},
                {"app": "self", "drafters": ["self"]},
            ],
        },
        {"model_id": "two", "target": "two", "drafts": [{"app": "lookup", "drafters": ["lookup"]}]},
    ]
    front["deployments"][0] |= {"num_replicas": 2, "user_config": {"request_limit_s": 60}}
    draft = {"name": "self", "kind": "model", "model": str(one), "dtype": "float32"}
    options["applications"] = [
        front,
        target_app("one", one, num_replicas=2),
        target_app("two", two),
        draft_app("lookup", [{"name": "lookup", "kind": "lookup"}], one),
        draft_app("self", [draft | {"num_threads": 1}], one),
    ]
    return options


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any]) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster"), num_cpus=8) as made:
        made.deploy(config)
        base = base_of(config)
        assert until_well(base, 60)
        yield made


def base_of(config: dict[str, Any]) -> str:
    return f"http://127.0.0.1:{config['http_options']['port']}"


def ask(config: dict[str, Any], model: str, **options: Any) -> dict[str, Any]:
    speculation = {"stats": True, **options.pop("speculation", {})}
    body = {"model": model, "prompt": PROMPT, "max_tokens": 64, "temperature": 0, **options}
    body["speculation"] = speculation
    answer = httpx.post(f"{base_of(config)}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def faults(config: dict[str, Any]) -> dict[str, float]:
    """What all coordinators have counted, by kind."""
    time.sleep(3 * EXPORT_SECONDS)
    families = text_string_to_metric_families(httpx.get(f"{base_of(config)}/metrics").text)
    (family,) = [family for family in families if family.name == "slipstream_faults"]
    found: Counter[str] = Counter()
    for sample in family.samples:
        found[sample.labels["kind"]] += int(sample.value)
    return dict(found)


def app_of(config: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [app for app in config["applications"] if app["name"] == name]
    return dict(found)


def test_one_front_serves_two_models_with_pools_that_they_share(
    ray: Cluster, config: dict[str, Any]
) -> None:
    models = httpx.get(f"{base_of(config)}/v1/models").json()["data"]
    assert {model["id"]: set(model["drafters"]) for model in models} == {
        "one": {"lookup", "self"},
        "two": {"lookup"},
    }
    off = {"speculation": {"enabled": False}}
    said = {}
    for model, drafter in (("one", "self"), ("one", "lookup"), ("two", "lookup")):
        plain = ask(config, model, **off)
        drafted = ask(config, model, speculation={"drafter": drafter})
        assert text(drafted) == text(plain)
        assert drafted["speculation"]["drafter"] == drafter
        said[model] = text(plain)
    assert said["one"] != said["two"]
    both = ask(config, "one", speculation={"drafter": ["lookup", "self"]}, max_tokens=200)
    assert both["speculation"]["drafter"] == "lookup+self"
    assert both["speculation"]["accepted_tokens"] > 0
    refused = httpx.post(
        f"{base_of(config)}/v1/completions", json={"model": "three", "prompt": "x"}, timeout=30
    )
    assert refused.status_code == 404
    assert "'one', 'two'" in refused.json()["error"]["message"]
    missing = httpx.post(f"{base_of(config)}/v1/completions", json={"prompt": "x"}, timeout=30)
    assert missing.status_code in (400, 422)


def test_upgrading_one_pool_leaves_the_others_alone(ray: Cluster, config: dict[str, Any]) -> None:
    pools = [("front", "Coordinator"), ("one", "Target"), ("two", "Target"), ("lookup", "Draft")]
    before = {pool: ray.replicas(*pool) for pool in pools}
    old = ray.replicas("self", "Draft")
    drafter = app_of(config, "self")["args"]["drafts"][0]
    drafter["width"] = 2
    ray.deploy(config)
    assert {pool: ray.replicas(*pool) for pool in pools} == before
    new = ray.replicas("self", "Draft")
    assert new
    assert not set(new) & set(old)
    answer = ask(config, "one", speculation={"drafter": "self"}, max_tokens=200)
    assert answer["speculation"]["accepted_tokens"] > 0


def test_thresholds_change_without_a_restart(ray: Cluster, config: dict[str, Any]) -> None:
    before = ray.replicas("front", "Coordinator")
    app_of(config, "front")["deployments"][0]["user_config"]["request_limit_s"] = 0.05
    ray.deploy(config)
    deadline = time.monotonic() + 20
    body = {"model": "one", "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}
    while True:
        answer = httpx.post(f"{base_of(config)}/v1/completions", json=body, timeout=60)
        if answer.status_code == 504:
            break
        assert time.monotonic() < deadline
    app_of(config, "front")["deployments"][0]["user_config"]["request_limit_s"] = 60
    ray.deploy(config)
    assert ray.replicas("front", "Coordinator") == before
    while httpx.post(f"{base_of(config)}/v1/completions", json=body, timeout=60).is_error:
        assert time.monotonic() < deadline + 20


def test_a_killed_target_is_followed_by_another(ray: Cluster, config: dict[str, Any]) -> None:
    """kill -9 in the middle of answers: each goes on, token for token."""
    body = {"ignore_eos": True, "max_tokens": 450, "temperature": 1.0, "seed": 3}
    plain = text(ask(config, "one", speculation={"enabled": False}, **body))
    answers: list[str] = []
    threads = [
        threading.Thread(target=lambda: answers.append(text(ask(config, "one", **body))))
        for _ in range(6)
    ]
    # Asking Ray takes as long as an answer.
    target = next(iter(ray.replicas("one", "Target").values()))
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    os.kill(target, signal.SIGKILL)
    for thread in threads:
        thread.join(120)
    assert answers == [plain] * 6
    assert faults(config)["target_lost"] >= 1
    deadline = time.monotonic() + 60
    while not ray.healthy():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_both_pools_scale_with_their_sessions(ray: Cluster, config: dict[str, Any]) -> None:
    """Up under load and down after it, and no answer is cut."""
    pools = [("two", "Target"), ("lookup", "Draft")]
    for application, _ in pools:
        app_of(config, application)["deployments"][0]["autoscaling_config"] = {
            "min_replicas": 1,
            "max_replicas": 2,
            "target_ongoing_requests": 2,
            "upscale_delay_s": 1,
            "downscale_delay_s": 2,
            "metrics_interval_s": 0.5,
            "look_back_period_s": 2,
        }
    ray.deploy(config)
    # A named drafter is asked whatever it is worth, so that every answer holds a place on both pools.
    body = {"max_tokens": 450, "ignore_eos": True, "speculation": {"drafter": "lookup"}}
    plain = text(ask(config, "two", **body))
    stop = time.monotonic() + 90
    most = dict.fromkeys(pools, 1)
    answers: list[str] = []

    def load() -> None:
        while time.monotonic() < stop and min(most.values()) == 1:
            answers.append(text(ask(config, "two", **body)))

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    while min(most.values()) == 1 and time.monotonic() < stop:
        most = {pool: max(most[pool], len(ray.replicas(*pool))) for pool in pools}
        time.sleep(0.3)
    for thread in threads:
        thread.join(120)
    assert set(most.values()) == {2}
    deadline = time.monotonic() + 90
    while any(len(ray.replicas(*pool)) > 1 for pool in pools):
        answers.append(text(ask(config, "two", **body)))
        assert time.monotonic() < deadline
    assert set(answers) == {plain}


def test_a_split_target_says_the_same_and_outlives_a_rank(
    ray: Cluster, config: dict[str, Any]
) -> None:
    """Two ranks, one of them an actor beside the replica: if it dies, the replica is replaced."""
    body = {"ignore_eos": True, "max_tokens": 450}
    plain = text(ask(config, "two", **body))
    app_of(config, "two")["args"]["target"]["tensor_parallel_size"] = 2
    ray.deploy(config)
    assert text(ask(config, "two", **body)) == plain
    (before,) = ray.replicas("two", "Target")
    answers: list[str] = []
    asking = threading.Thread(target=lambda: answers.append(text(ask(config, "two", **body))))
    asking.start()
    time.sleep(0.3)
    ranks = [process for node in ray.nodes for process in node.processes("ray::_Rank")]
    assert len(ranks) == 1
    ranks[0].kill()
    asking.join(120)
    assert answers == [plain]
    (after,) = ray.replicas("two", "Target")
    assert after != before


def test_keys_are_counted_over_all_coordinators(
    ray: Cluster, config: dict[str, Any], tmp_path: Path
) -> None:
    """Both front doors ask for a key, and two coordinators count together."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(yaml.safe_dump({"keys": [key(max_concurrent=3).model_dump()]}))
    front = app_of(config, "front")["deployments"][0]
    front["user_config"]["api_keys_file"] = str(keys)
    ray.deploy(config)
    url = f"{base_of(config)}/v1/completions"
    body = {"model": "one", "prompt": PROMPT, "max_tokens": 450, "ignore_eos": True}
    deadline = time.monotonic() + 20
    while httpx.post(url, json=body, timeout=60).status_code != 401:
        assert time.monotonic() < deadline
    headers = {"Authorization": f"Bearer {SECRET}"}
    codes: list[int] = []

    def one() -> None:
        codes.append(httpx.post(url, json=body, headers=headers, timeout=60).status_code)

    threads = [threading.Thread(target=one) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(codes) == {200, 429}
    assert codes.count(200) >= 3
    stub = pb_grpc.InferenceStub(
        grpc.insecure_channel(f"127.0.0.1:{config['grpc_options']['port']}")
    )
    request = pb.GenerateRequest(model="one", text=PROMPT, stopping=pb.Stopping(max_tokens=4))
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.Generate(request, metadata=(("application", "front"),)))
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    shown = (("application", "front"), ("authorization", f"Bearer {SECRET}"))
    answered = list(stub.Generate(request, metadata=shown))
    assert sum(len(message.token_ids) for message in answered) == 4
