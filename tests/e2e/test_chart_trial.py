"""The chart's CPU trial, deployed as KubeRay does it, to nodes that have the labels of its groups."""

from pathlib import Path

import httpx
import pytest

from loadtest.cluster import LOOPBACK, Place, cluster, free_port
from loadtest.server import until_well
from tests.chart import CPU_TRIAL, rayservice, render, serve_config

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_the_cpu_trial_answers(tmp_path: Path) -> None:
    objects = render(CPU_TRIAL)
    config = serve_config(objects)
    # What pods have of their own, and nodes of one machine share.
    token = tmp_path / "token"
    token.write_text("a token of this test")
    config["proxy_location"] = "HeadOnly"
    config["http_options"] |= {"host": LOOPBACK, "port": free_port()}
    config["grpc_options"]["port"] = free_port()
    for application in config["applications"]:
        application["args"]["data_plane"]["token_file"] = str(token)

    groups = rayservice(objects)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    labels = [",".join(f"{k}={v}" for k, v in group["labels"].items()) for group in groups]
    places = [Place(LOOPBACK), *(Place(LOOPBACK, labels=text) for text in labels)]
    with cluster(tmp_path, 2, places, head_cpus=0) as ray:
        ray.deploy(config)
        base = f"http://{LOOPBACK}:{config['http_options']['port']}"
        assert until_well(base, 120)
        homes = {
            title: [len(node.processes(f"ray::ServeReplica:{title}")) for node in ray.nodes]
            for title in ("front", "target-smollm2", "draft-lookup")
        }
        body = {
            "model": "smollm2-135m-instruct",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
            "max_tokens": 24,
            "speculation": {"drafter": ["eagle", "lookup"], "stats": True},
        }
        answer = httpx.post(f"{base}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    assert "Paris" in said["choices"][0]["message"]["content"]
    assert said["speculation"]["drafter"] == "eagle+lookup"
    assert said["speculation"]["accepted_tokens"] > 0
    assert homes == {
        "front": [0, 1, 0],
        "target-smollm2": [0, 1, 0],
        "draft-lookup": [0, 0, 1],
    }
