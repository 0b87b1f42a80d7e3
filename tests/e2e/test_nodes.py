"""Nodes of different hardware: pools land on theirs, near workers are preferred, a drain has an end."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from loadtest.cluster import EXPORT_SECONDS, LOOPBACK, Cluster, Place, cluster, free_port
from loadtest.server import until_well
from tests import tiny
from tests.e2e.test_pools import ask, base_of, draft_app, faults, target_app, text

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PENALTY = 3


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    """The front and a target on one node, another target on a second, drafts on hardware of their own."""
    folder = tiny.llama(max_position_embeddings=4096)
    near = {"request_router_class": "deployments.router:NearRouter"}
    targets = target_app("one", folder, num_replicas=2, max_replicas_per_node=1)
    targets["deployments"][0]["ray_actor_options"] = {"num_cpus": 1, "label_selector": BIG}
    targets["deployments"][0]["graceful_shutdown_timeout_s"] = 1
    targets["deployments"][0]["request_router_config"] = {
        **near,
        "request_router_kwargs": {"penalty": PENALTY},
    }
    drafts = draft_app("lookup", [{"name": "lookup", "kind": "lookup"}], folder)
    drafts["deployments"][0]["ray_actor_options"]["label_selector"] = {"slipstream/pool": "draft"}
    pools = [{"app": "lookup", "drafters": ["lookup"]}]
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": LOOPBACK, "port": free_port()},
        "applications": [
            {
                "name": "front",
                "route_prefix": "/",
                "import_path": "deployments.app:front",
                "args": {"models": [{"model_id": "one", "target": "one", "drafts": pools}]},
                "deployments": [
                    {
                        "name": "Coordinator",
                        "ray_actor_options": {
                            "num_cpus": 0.5,
                            "label_selector": {"slipstream/front": "yes"},
                        },
                    }
                ],
            },
            targets,
            drafts,
        ],
    }


BIG = {"slipstream/pool": "target"}


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any]) -> Iterator[Cluster]:
    places = [
        Place(LOOPBACK),
        Place(LOOPBACK, labels="slipstream/pool=target,slipstream/front=yes"),
        Place(LOOPBACK, labels="slipstream/pool=target"),
        Place(LOOPBACK, labels="slipstream/pool=draft"),
    ]
    folder = tmp_path_factory.mktemp("cluster")
    with cluster(folder, 2, places, head_cpus=0) as made:
        made.deploy(config)
        assert until_well(base_of(config), 60)
        yield made


def pids(ray: Cluster, node: int, title: str) -> set[int]:
    return {process.pid for process in ray.nodes[node].processes(f"ray::ServeReplica:{title}")}


def steps(ray: Cluster, config: dict[str, Any]) -> dict[int, float]:
    """Steps of each target, by its process."""
    time.sleep(3 * EXPORT_SECONDS)
    processes = ray.replicas("one", "Target")
    families = text_string_to_metric_families(httpx.get(f"{base_of(config)}/metrics").text)
    (family,) = [family for family in families if family.name == "slipstream_worker_steps"]
    return {processes[sample.labels["replica"]]: sample.value for sample in family.samples}


def test_each_pool_is_on_its_own_hardware(ray: Cluster) -> None:
    assert [len(pids(ray, node, "one")) for node in range(4)] == [0, 1, 1, 0]
    assert [len(pids(ray, node, "lookup")) for node in range(4)] == [0, 0, 0, 1]
    assert [len(pids(ray, node, "front")) for node in range(4)] == [0, 1, 0, 0]


def test_the_near_target_is_preferred_until_it_is_busier(
    ray: Cluster, config: dict[str, Any]
) -> None:
    (near,) = pids(ray, 1, "one")
    for _ in range(6):
        ask(config, "one", max_tokens=8)
    # What has not been counted yet is not shown.
    assert set(steps(ray, config)) == {near}
    long = {"max_tokens": 400, "ignore_eos": True}
    threads = [
        threading.Thread(target=lambda: ask(config, "one", **long)) for _ in range(2 * PENALTY + 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(steps(ray, config)) == 2


def test_a_drain_that_takes_too_long_fails_over(ray: Cluster, config: dict[str, Any]) -> None:
    """Answers longer than graceful_shutdown_timeout_s go on elsewhere, token for token."""
    body = {"ignore_eos": True, "max_tokens": 3000, "temperature": 1.0, "seed": 3}
    body["speculation"] = {"enabled": False}
    plain = text(ask(config, "one", **body))
    answers: list[str] = []
    threads = [
        threading.Thread(target=lambda: answers.append(text(ask(config, "one", **body))))
        for _ in range(2 * PENALTY + 2)
    ]
    for thread in threads:
        thread.start()
    time.sleep(1)
    config["applications"][1]["deployments"][0]["num_replicas"] = 1
    ray.deploy(config)
    for thread in threads:
        thread.join(120)
    assert answers == [plain] * len(threads)
    assert faults(config)["target_lost"] >= 1
