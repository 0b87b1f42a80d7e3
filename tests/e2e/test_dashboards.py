"""Two replicas of each: their metrics agree with what clients were told, and fill every panel of Grafana."""

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from loadtest.cluster import EXPORT_SECONDS, Cluster, cluster, free_port
from loadtest.server import until_well
from tests import tiny
from tests.e2e.conftest import ROOT
from tests.e2e.test_pools import PROMPT, app_of, base_of, draft_app, target_app
from tests.unit.test_dashboards import ALERTS, DASHBOARDS, EXPORTED, SERVES, substituted

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RESTLESS = "slipstream_coordinator_cpu_seconds_total"
"""It counts whoever looks."""

POOLS = (("front", "Coordinator"), ("one", "Target"), ("drafts", "Draft"))

ASKED: tuple[dict[str, Any], ...] = (
    {"speculation": {"drafter": "self"}},
    {"speculation": {"drafter": "lookup"}, "stream": True},
    {"speculation": {"drafter": ["lookup", "self"]}, "temperature": 1.0, "seed": 1},
    {"speculation": {"enabled": False}},
    {"speculation": {"drafter": "self"}, "stream": True, "n": 2},
    {},
)


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    folder = tiny.llama()
    small = {"model": str(folder), "dtype": "float32", "num_threads": 1}
    drafts = [{"name": "lookup", "kind": "lookup"}, {"name": "self", "kind": "model", **small}]
    options: dict[str, Any] = yaml.safe_load((ROOT / "docs" / "pools.yaml").read_text())
    options["http_options"]["port"] = free_port()
    options["grpc_options"]["port"] = free_port()
    front = options["applications"][0]
    pools = [{"app": "drafts", "drafters": ["lookup", "self"]}]
    front["args"]["models"] = [{"model_id": "one", "target": "one", "drafts": pools}]
    thresholds = {"request_limit_s": 60, "failover_wait_s": 1}
    front["deployments"][0] |= {"num_replicas": 2, "user_config": thresholds}
    options["applications"] = [
        front,
        target_app("one", folder, num_replicas=2),
        draft_app("drafts", drafts, folder),
    ]
    app_of(options, "drafts")["deployments"][0]["num_replicas"] = 2
    return options


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any]) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster"), num_cpus=8) as made:
        made.deploy(config)
        assert until_well(base_of(config), 60)
        yield made


def ask(config: dict[str, Any], asked: dict[str, Any], max_tokens: int = 48) -> Counter[str]:
    """What a client was told of its answers. Raises httpx.HTTPError if there is none."""
    body = {"model": "one", "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0}
    body |= {"ignore_eos": True, **asked}
    body["speculation"] = {**asked.get("speculation", {}), "stats": True}
    if asked.get("stream"):
        body["stream_options"] = {"include_usage": True}
    told: Counter[str] = Counter(answers=asked.get("n", 1))
    url = f"{base_of(config)}/v1/completions"
    answer = httpx.post(url, json=body, timeout=120).raise_for_status()
    lines = answer.text.splitlines() if asked.get("stream") else [f"data: {answer.text}"]
    for line in lines:
        if line.startswith("data: {"):
            chunk = json.loads(line.removeprefix("data: "))
            told["tokens"] += (chunk.get("usage") or {}).get("completion_tokens", 0)
            for name in ("rounds", "draft_tokens", "accepted_tokens"):
                told[name] += (chunk.get("speculation") or {}).get(name, 0)
    return told


Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: str, applications: set[str]) -> Samples:
    """Of an exposition, metrics of ours under their own names, without the labels of Ray's exporter."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("ray_")
            if name == RESTLESS:
                continue
            if f"ray_{name}" in EXPORTED and sample.labels.get("application") in applications:
                labels = {key: value for key, value in sample.labels.items() if key[0].islower()}
                labels = {k: v for k, v in labels.items() if not k.startswith("otel_")}
                found[name, frozenset(labels.items())] = sample.value
    return found


def exported(ray: Cluster, applications: set[str]) -> Samples:
    """What Prometheus finds where Ray's dashboard sends it."""
    headers = {"Authorization": f"Bearer {ray.token}"}
    (found,) = httpx.get(f"{ray.dashboard}/api/prometheus/sd", headers=headers).json()
    everything: Samples = {}
    for address in found["targets"]:
        # Ray's own autoscaler is named, too, whether it is there or not.
        with contextlib.suppress(httpx.ConnectError):
            everything |= samples(httpx.get(f"http://{address}/metrics").text, applications)
    return everything


def test_metrics_agree_with_what_clients_were_told(ray: Cluster, config: dict[str, Any]) -> None:
    requests = [asked for asked in ASKED for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        told = sum(pool.map(lambda asked: ask(config, asked), requests), Counter())
    applications = {application for application, _ in POOLS}
    before: Samples = {}
    while (shown := samples(httpx.get(f"{base_of(config)}/metrics").text, applications)) != before:
        before = shown
        time.sleep(3 * EXPORT_SECONDS)
    assert shown == exported(ray, applications)

    def total(name: str, by: str = "") -> Any:
        found: Counter[str] = Counter()
        for (sample, labels), value in shown.items():
            if sample == f"slipstream_{name}":
                found[dict(labels).get(by, "")] += int(value)
        return found if by else found[""]

    spec = "spec_decode_num"
    assert total("answers_total", "finish_reason") == {"length": told["answers"]}
    assert total("rounds_total") == told["rounds"] > 0
    assert total(f"{spec}_draft_tokens_total") == told["draft_tokens"] > 0
    assert total(f"{spec}_accepted_tokens_total") == told["accepted_tokens"] > 0
    assert total(f"{spec}_accepted_tokens_per_pos_total") == told["accepted_tokens"]
    # The first token of an answer comes from its prefill.
    assert total("committed_tokens_total") + told["answers"] == told["tokens"]
    assert told["tokens"] == 48 * told["answers"]
    for name in ("queue", "time_to_first_token", "time_per_output_token", "request"):
        assert total(f"{name}_seconds_count") == told["answers"]
    assert total("accepted_length_count") == told["answers"]
    # What the workers say of the same.
    assert total("worker_tokens_drafted_total") == told["draft_tokens"]
    assert total("worker_tokens_accepted_total") == told["accepted_tokens"]
    assert total("worker_step_seconds_count") == total("worker_steps_total")
    proposals = total("worker_proposals_total", "deployment")
    assert proposals["Draft"] >= total("proposals_total") > 0
    # And nobody was left out.
    fronts, targets, drafts = (set(ray.replicas(*pool)) for pool in POOLS)
    assert [len(pool) for pool in (fronts, targets, drafts)] == [2, 2, 2]
    assert set(total("answers_total", "replica")) == fronts
    assert set(total("worker_steps_total", "replica")) == targets
    assert set(total("worker_leases", "replica")) == targets | drafts


@contextlib.contextmanager
def prometheus(ray: Cluster, folder: Path) -> Iterator[httpx.Client]:
    """Prometheus with the config of the docs, but for addresses and intervals."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed: nobody answers the panels")
    options = yaml.safe_load((ROOT / "docs" / "prometheus.yml").read_text())
    (rules,) = options["rule_files"]
    assert (ROOT / "docs" / rules).resolve() == ALERTS
    options["rule_files"] = [str(ALERTS)]
    options["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    ((discovery,),) = (job["http_sd_configs"] for job in options["scrape_configs"])
    discovery["url"] = discovery["url"].replace("http://127.0.0.1:8265", ray.dashboard)
    (folder / discovery["authorization"]["credentials_file"]).write_text(ray.token)
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(options))
    address = f"127.0.0.1:{free_port()}"
    argv = [program, f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}"]
    log = (folder / "prometheus.log").open("w")
    with (
        log,
        subprocess.Popen(
            [*argv, f"--web.listen-address={address}"], stdout=log, stderr=subprocess.STDOUT
        ) as process,
        httpx.Client(base_url=f"http://{address}/api/v1", timeout=30) as client,
    ):
        try:
            deadline = time.monotonic() + 30
            while True:
                with contextlib.suppress(httpx.ConnectError):
                    if client.get(f"http://{address}/-/ready").is_success:
                        break
                assert time.monotonic() < deadline
                time.sleep(0.2)
            yield client
        finally:
            process.kill()


def results(client: httpx.Client, expression: str) -> list[dict[str, Any]]:
    answer = client.get("/query", params={"query": expression}).raise_for_status().json()
    return list(answer["data"]["result"])


def without_data(client: httpx.Client) -> list[str]:
    """The queries of panels that answer with nothing, or with something that is no number."""
    return [
        f"{name}: {panel['title']}: {target['expr']}"
        for name, dashboard in DASHBOARDS.items()
        for panel in dashboard["panels"]
        for target in panel["targets"]
        if not (found := results(client, substituted(target["expr"])))
        or any(not math.isfinite(float(result["value"][1])) for result in found)
    ]


def now(client: httpx.Client, title: str) -> dict[str, float]:
    """The values of a panel of the overview, by the label in its legend."""
    (panel,) = (p for p in DASHBOARDS["overview"]["panels"] if p["title"] == title)
    (target,) = panel["targets"]
    (label,) = re.findall(r"{{(\w+)}}", target["legendFormat"]) or [""]
    found = results(client, substituted(target["expr"]))
    return {r["metric"].get(label, ""): float(r["value"][1]) for r in found}


def test_prometheus_answers_every_panel(
    ray: Cluster, config: dict[str, Any], tmp_path: Path
) -> None:
    """Under load, and with both targets killed in the middle of answers."""
    stop = threading.Event()
    failed: list[int] = []

    def load(first: int) -> None:
        for asked in itertools.cycle((*ASKED[first:], *ASKED[:first])):
            if stop.is_set():
                return
            try:
                ask(config, asked, max_tokens=400)
            except httpx.HTTPStatusError as error:
                failed.append(error.response.status_code)

    with prometheus(ray, tmp_path) as client, ThreadPoolExecutor(6) as pool:
        loads = [pool.submit(load, first) for first in range(6)]
        try:
            deadline = time.monotonic() + 90
            while not results(client, "ray_slipstream_worker_steps_total"):
                assert time.monotonic() < deadline
                time.sleep(1)
            time.sleep(10)
            for pid in ray.replicas("one", "Target").values():
                os.kill(pid, signal.SIGKILL)
                time.sleep(0.2)
            deadline = time.monotonic() + 90
            while not ray.healthy():
                assert time.monotonic() < deadline
                time.sleep(0.5)
            # Faults are counted when their answers end.
            while (missing := without_data(client)) or not now(client, "Faults").get("target_lost"):
                assert time.monotonic() < deadline, "\n".join(missing)
                time.sleep(1)
        finally:
            stop.set()
        for done in loads:
            done.result(60)
        assert failed
        assert 0 < now(client, "Answers that failed")[""] < 1
        for name in SERVES:
            assert results(client, name), name
        rules = client.get("/rules").json()["data"]["groups"][0]["rules"]
        assert {rule["health"] for rule in rules} == {"ok"}
        for variable in DASHBOARDS["overview"]["templating"]["list"][1:]:
            selector, label = re.findall(
                r"label_values\((.*), (\w+)\)", variable["query"]["query"]
            )[0]
            chosen = {"match[]": substituted(selector)}
            values = client.get(f"/label/{label}/values", params=chosen).json()["data"]
            assert (
                set(values) == {"application": {"front", "one", "drafts"}, "model": {"one"}}[label]
            )
