"""The Helm chart: every set of values makes what Kubernetes, KubeRay and Serve take; what is wrong is named.

`CRD` names the schema of the RayService CRD as JSON (`make chart CRD=path`).
"""

import copy
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from deployments import check
from tests.chart import (
    CHART,
    CPU_TRIAL,
    ROOT,
    VALUES,
    of_kind,
    pods,
    rayservice,
    render,
    run_helm,
    serve_config,
    template,
)

KUBERNETES = ("1.27", "1.37")
"""The oldest that Chart.yaml admits, and the newest whose schemas are here."""

# Not part of Kubernetes: checked by their own tests.
CUSTOM = {"RayService", "PodMonitor", "PrometheusRule"}

every_set = pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)


def write(folder: Path, values: dict[str, Any]) -> Path:
    path = folder / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def set_at(path: str, value: Any) -> dict[str, Any]:
    """Values with one at a path; "/" separates keys."""
    for key in reversed(path.split("/")):
        value = {key: value}
    return dict(value)


def core_problems(made: dict[str, Any]) -> list[str]:
    """What Kubernetes would not take of an object of its own."""
    problems = []
    for version in KUBERNETES:
        try:
            kubernetes_validate.validate(made, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            problems.append(f"{version}: {'.'.join(map(str, error.path))}: {error.message}")
    return problems


def strict(schema: Any) -> Any:
    """A CRD's schema that refuses unknown properties, as the API server warns of them."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(part) for key, part in schema.items()}
    if isinstance(made.get("properties"), dict) and "type" in made:
        made.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        made["type"] = ["integer", "string"]
    return made


@pytest.fixture(scope="module")
def crd() -> dict[str, Any]:
    path = os.environ.get("CRD")
    if not path:
        pytest.skip("CRD is not set: the RayService is not held against KubeRay's schema")
    schema: dict[str, Any] = strict(json.loads((ROOT / path).read_text()))
    # Every object has these, and the CRD leaves them to Kubernetes.
    schema["properties"] |= {"apiVersion": {}, "kind": {}, "metadata": {}}
    return schema


def crd_problems(crd: dict[str, Any], made: dict[str, Any]) -> list[str]:
    found = jsonschema.Draft202012Validator(crd).iter_errors(made)
    return [f"{error.json_path}: {error.message}" for error in found]


@every_set
def test_helm_finds_nothing_to_complain_of(values: Path) -> None:
    done = run_helm("lint", "--strict", str(CHART), "--values", str(values))
    assert done.returncode == 0, done.stdout + done.stderr


@every_set
def test_kubernetes_takes_every_object(values: Path) -> None:
    objects = render(values)
    parts = [made for made in objects if made["kind"] not in CUSTOM]
    assert parts
    parts += [
        {"apiVersion": "v1", "kind": "Pod", **pod, "metadata": {**pod["metadata"], "name": "x"}}
        for pod in pods(objects).values()
    ]
    service = rayservice(objects)["spec"]["serveService"]
    parts.append({"apiVersion": "v1", "kind": "Service", **service})
    for part in parts:
        assert core_problems(part) == []


@every_set
def test_kuberay_takes_the_rayservice(values: Path, crd: dict[str, Any]) -> None:
    assert crd_problems(crd, rayservice(render(values))) == []


@every_set
def test_serve_takes_the_config(values: Path) -> None:
    assert check.check(serve_config(render(values))) == []


def test_a_typo_in_the_rayservice_is_caught(crd: dict[str, Any]) -> None:
    made = rayservice(render(CPU_TRIAL))
    for path, key in (
        ((), "rayClusterDeletionDelaySeconds"),
        (("rayClusterConfig",), "rayVersion"),
        (("rayClusterConfig", "workerGroupSpecs", 0), "minReplicas"),
        (("rayClusterConfig", "headGroupSpec", "template", "spec"), "securityContext"),
        (("serveService", "spec", "ports", 1), "appProtocol"),
    ):
        wrong = copy.deepcopy(made)
        place = wrong["spec"]
        for part in path:
            place = place[part]
        place[f"{key}x"] = place.pop(key)
        assert any(f"{key}x" in problem for problem in crd_problems(crd, wrong)), key


def test_a_typo_in_a_core_object_is_caught() -> None:
    objects = render(ROOT / "k8s" / "values" / "l4-h100.yaml")
    for kind, key in (
        ("NetworkPolicy", "policyTypes"),
        ("PodDisruptionBudget", "minAvailable"),
    ):
        made = copy.deepcopy(of_kind(objects, kind)[0])
        made["spec"][f"{key}x"] = made["spec"].pop(key)
        assert any(f"{key}x" in problem for problem in core_problems(made))


def test_a_typo_in_the_serve_config_is_caught() -> None:
    config = serve_config(render(CPU_TRIAL))
    for path, key in (
        (("http_options",), "port"),
        (("applications", 0), "route_prefix"),
        (("applications", 1, "deployments", 0), "max_replicas_per_node"),
        (("applications", 1, "args", "drafts", 0), "model"),
        (("applications", 2, "args"), "max_sessions"),
        (("applications", 0, "deployments", 0, "user_config"), "request_limit_s"),
    ):
        wrong = copy.deepcopy(config)
        place: Any = wrong
        for part in path:
            place = place[part]
        place[f"{key}x"] = place.pop(key)
        assert any(f"{key}x" in problem for problem in check.check(wrong)), key


ENV = [{"name": "REDIS_PASSWORD", "value": "x"}]


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        # What the values' schema says.
        ("modles", {}, "'modles' not allowed"),
        ("head/resorces", {}, "'resorces' not allowed"),
        ("models/smollm2/target/arg", {}, "'arg' not allowed"),
        ("models/smollm2/target/args/dtyp", "auto", "'dtyp' not allowed"),
        ("models/smollm2/target/args/dtype", "float8", "'bfloat16'"),
        ("models/smollm2/target/args/device", "cuda", "'device' not allowed"),
        ("models/smollm2/drafters", [{"name": "a", "kind": "lokup"}], "'lookup', 'suffix'"),
        ("drafts/lookup/drafters", [{"name": "a", "kind": "lookup", "widht": 1}], "'widht'"),
        ("drafts/lookup/drafters", [{"name": "a", "kind": "model"}], "'model'"),
        ("drafts/lookup/replicas", {"min": 1, "maks": 2}, "'maks' not allowed"),
        ("drafts/Lookup", {}, "invalid propertyName 'Lookup'"),
        ("coordinators/thresholds/request_limit", 1, "'request_limit' not allowed"),
        ("serve/httpOptions/prot", 1, "'prot' not allowed"),
        ("upgradeStrategy/type", "Recreate", "'NewCluster', 'None'"),
        # KubeRay's rules.
        ("fullnameOverride", "x" * 48, "48 characters, and KubeRay takes 47"),
        ("fullnameOverride", "9lives", '"9lives" is no DNS label'),
        ("serve/httpOptions/ssl_keyfile", "/key", "TLS in Serve"),
        ("head/containerEnv", ENV, "REDIS_PASSWORD is set, and KubeRay refuses"),
        ("common/containerEnv", ENV, "REDIS_PASSWORD is set, and KubeRay refuses"),
        ("head/rayStartParams/redis-password", "x", "set gcsFaultTolerance.redisPassword"),
        ("head/rayStartParams/labels", "a=b", "KubeRay refuses Ray's labels there"),
        ("annotations", {"ray.io/ft-enabled": "true"}, "ray.io/ft-enabled is set"),
        (
            "drafts/lookup",
            {"replicas": {"min": 1, "max": 2}, "restartPolicy": "Always"},
            "restartPolicy of draft-lookup: Always",
        ),
        # Values that need each other.
        ("rayClusterDeletionDelaySeconds", 60, "60 seconds are less than"),
        ("gracefulShutdownTimeoutSeconds", 60, "60 seconds are less than"),
        ("coordinators/thresholds/request_limit_s", 900, "(900): answers would be cut"),
        ("gcsFaultTolerance/enabled", True, "give host:port"),
        ("dataPlane/tokenSecret", "", "kubectl create secret generic"),
        ("podMonitor/enabled", True, "networkPolicy.scrapers"),
        ("service", {"type": "NodePort", "headless": True}, "take headless out"),
        ("models/smollm2/drafts", ["lokup"], 'no pool "lokup" under drafts (there are: lookup)'),
        ("drafts/lookup/target", "smolm", 'no model "smolm" under models (there are: smollm2)'),
        ("models/smollm2/drafters", [{"name": "lookup", "kind": "lookup"}], "must differ"),
        ("coordinators/replicas", {"min": 1, "max": 2}, "set coordinators.placement to own"),
        ("drafts/lookup/replicas", {"min": 3, "max": 2}, "min 3 is above max 2"),
        ("models/smollm2/target/resources/limits/cpu", "500m", "ask for 1.5"),
        ("models/smollm2/target/gpus", 2, "ask for 2.5"),
        ("models/smollm2/target/resources/limits", {"nvidia.com/gpu": 1}, "set gpus instead"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, path: str, value: Any, complaint: str) -> None:
    done = template(CPU_TRIAL, write(tmp_path, set_at(path, value)))
    assert done.returncode != 0, "nothing was refused"
    assert complaint in done.stderr


def test_a_pod_without_a_limit_of_cpus_is_refused(tmp_path: Path) -> None:
    values = yaml.safe_load(CPU_TRIAL.read_text())
    del values["models"]["smollm2"]["target"]["resources"]["limits"]["cpu"]
    assert "target-smollm2: no limits.cpu" in template(write(tmp_path, values)).stderr


def test_a_chart_without_values_says_where_to_begin() -> None:
    assert "k8s/values/cpu-trial.yaml" in template().stderr


def test_the_schema_of_the_values_is_that_of_the_configs() -> None:
    spec = importlib.util.spec_from_file_location("values_schema", ROOT / "k8s/values_schema.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.text() == module.PATH.read_text(), "stale: run python k8s/values_schema.py"


@every_set
def test_replicas_fit_their_pods(values: Path) -> None:
    """Selectors lead to a group, which has the GPUs of a replica, and a pod for each."""
    objects = render(values)
    cluster = rayservice(objects)["spec"]["rayClusterConfig"]
    groups = cluster["workerGroupSpecs"]
    for group in groups:
        assert group["minReplicas"] == group["replicas"] <= group["maxReplicas"]
    used = set()
    for application in serve_config(objects)["applications"]:
        (deployment,) = application["deployments"]
        options = deployment["ray_actor_options"]
        bundles = deployment.get("placement_group_bundles", [])
        (selector,) = deployment.get(
            "placement_group_bundle_label_selector", [options.get("label_selector")]
        )
        homes = [g for g in groups if selector.items() <= g["labels"].items()]
        assert homes, f"{application['name']} selects {selector}, which no pod has"
        scaling = deployment.get("autoscaling_config", {})
        most = scaling.get("max_replicas", deployment.get("num_replicas"))
        least = scaling.get("min_replicas", deployment.get("num_replicas"))
        if deployment["name"] == "Coordinator":
            assert most <= sum(group["maxReplicas"] for group in homes)
            continue
        (home,) = homes
        used.add(home["groupName"])
        assert (home["minReplicas"], home["maxReplicas"]) == (least, most)
        limits = home["template"]["spec"]["containers"][0]["resources"]["limits"]
        gpus = sum(bundle["GPU"] for bundle in bundles) or options.get("num_gpus", 0)
        assert gpus == limits.get("nvidia.com/gpu", 0)
        config = application["args"].get("target")
        if isinstance(config, dict):
            assert config["tensor_parallel_size"] == max(1, gpus)
            assert config["device"] == ("cuda" if gpus else "cpu")
        for drafter in application["args"].get("drafts", []):
            assert drafter.get("device", "none") in ("none", "cuda" if gpus else "cpu")
        # Without GPUs to run out of, only this keeps a pod to one replica.
        assert bundles or deployment["max_replicas_per_node"] == 1
    assert used == {g["groupName"] for g in groups} - {"coordinators"}
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


@every_set
def test_answers_outlive_a_switch_of_clusters(values: Path) -> None:
    objects = render(values)
    applications = serve_config(objects)["applications"]
    limit = applications[0]["deployments"][0]["user_config"]["request_limit_s"]
    assert rayservice(objects)["spec"]["rayClusterDeletionDelaySeconds"] >= limit
    for application in applications:
        assert application["deployments"][0]["graceful_shutdown_timeout_s"] >= limit


@every_set
def test_pods_run_as_nobody_special_and_write_only_where_they_may(values: Path) -> None:
    for pod in pods(render(values)).values():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        (container,) = spec["containers"]
        assert container["securityContext"] == {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        writable = {m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")}
        assert writable == {"/tmp", "/cache"}
        folders = {e["name"]: e["value"] for e in container["env"] if "value" in e}
        for name in ("HF_HOME", "SLIPSTREAM_CACHE", "XDG_CACHE_HOME", "TRITON_CACHE_DIR"):
            assert str(Path(*Path(folders[name]).parts[:2])) in writable
        assert {m["name"] for m in container["volumeMounts"]} == {
            v["name"] for v in spec["volumes"]
        }


@every_set
def test_files_of_the_config_are_mounted_where_they_are_read(values: Path) -> None:
    objects = render(values)
    config = serve_config(objects)
    groups = rayservice(objects)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    for application in config["applications"]:
        (deployment,) = application["deployments"]
        plane = application["args"]["data_plane"]
        assert plane["host"] == "node"
        files = [plane.get("token_file"), plane.get("tls_folder")]
        files.append(deployment.get("user_config", {}).get("api_keys_file"))
        options = deployment["ray_actor_options"]
        (selector,) = deployment.get(
            "placement_group_bundle_label_selector", [options.get("label_selector")]
        )
        for group in groups:
            if selector.items() <= group["labels"].items():
                (container,) = group["template"]["spec"]["containers"]
                mounts = [Path(m["mountPath"]) for m in container["volumeMounts"]]
                for file in filter(None, files):
                    assert {Path(file), Path(file).parent} & set(mounts), file


def test_the_front_door_has_both_ports() -> None:
    objects = render(CPU_TRIAL)
    config = serve_config(objects)
    ports = {"serve": config["http_options"]["port"], "serve-grpc": config["grpc_options"]["port"]}
    for pod in pods(objects).values():
        named = {p["name"]: p["containerPort"] for p in pod["spec"]["containers"][0]["ports"]}
        assert ports.items() <= named.items()
    service = {p["name"]: p for p in rayservice(objects)["spec"]["serveService"]["spec"]["ports"]}
    assert {name: port["port"] for name, port in service.items()} == ports
    assert service["serve-grpc"]["appProtocol"] == "kubernetes.io/h2c"
    # A worker without a proxy would never be ready.
    assert config["proxy_location"] == "EveryNode"


def test_a_worker_is_ready_while_its_proxy_answers() -> None:
    found = {}
    for group, pod in pods(render(CPU_TRIAL)).items():
        (container,) = pod["spec"]["containers"]
        for kind in ("livenessProbe", "readinessProbe"):
            probe = container[kind]
            checks = probe["exec"]["command"][-1].split(" && ")
            found[group, kind] = [int(re.findall(r"localhost:(\d+)/", one)[0]) for one in checks]
            # Each check has its own time, and the probe that of all.
            seconds = [int(re.findall(r"-T (\d+)", one)[0]) for one in checks]
            assert probe["timeoutSeconds"] == sum(seconds)
    agent, dashboard, serve = 52365, 8265, 8000
    for group in ("target-smollm2", "draft-lookup"):
        assert found[group, "livenessProbe"] == [agent]
        assert found[group, "readinessProbe"] == [agent, serve]
    assert found["head", "livenessProbe"] == found["head", "readinessProbe"] == [agent, dashboard]


@every_set
def test_only_own_pods_reach_every_port(values: Path) -> None:
    objects = render(values)
    (policy,) = of_kind(objects, "NetworkPolicy")
    own = policy["spec"]["podSelector"]["matchLabels"]
    for pod in pods(objects).values():
        assert own.items() <= pod["metadata"]["labels"].items()
    everything = [rule for rule in policy["spec"]["ingress"] if "ports" not in rule]
    assert everything == [{"from": [{"podSelector": {"matchLabels": own}}]}]
    for rule in policy["spec"]["ingress"]:
        assert rule["from"]
        reached = {port["port"] for port in rule.get("ports", [])}
        assert not reached & {"client", "gcs-server", 10001, 6379}


@every_set
def test_a_budget_lets_one_pod_of_a_group_go(values: Path) -> None:
    objects = render(values)
    groups = rayservice(objects)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    expected = {g["groupName"]: g["minReplicas"] - 1 for g in groups if g["minReplicas"] > 1}
    found = {
        budget["spec"]["selector"]["matchLabels"]["slipstream/pool"]: budget["spec"]["minAvailable"]
        for budget in of_kind(objects, "PodDisruptionBudget")
    }
    assert found == expected


def test_the_autoscaler_runs_where_a_group_can_grow() -> None:
    grows = {values.stem: autoscaling(values) for values in VALUES}
    assert grows == {
        "cpu-trial": False,
        "one-node": False,
        "l4-h100": True,
        "several-models": True,
    }


def autoscaling(values: Path) -> bool:
    cluster = rayservice(render(values))["spec"]["rayClusterConfig"]
    assert ("autoscalerOptions" in cluster) == cluster["enableInTreeAutoscaling"]
    return bool(cluster["enableInTreeAutoscaling"])


def test_prometheus_finds_every_pod() -> None:
    objects = render(ROOT / "k8s" / "values" / "l4-h100.yaml")
    (monitor,) = of_kind(objects, "PodMonitor")
    chosen = monitor["spec"]["selector"]["matchLabels"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for pod in pods(objects).values():
        assert chosen.items() <= pod["metadata"]["labels"].items()
        (container,) = pod["spec"]["containers"]
        assert endpoint["port"] in {port["name"] for port in container["ports"]}


def test_alerts_and_dashboards_are_there_for_who_wants_them(tmp_path: Path) -> None:
    kinds = {"PrometheusRule", "ConfigMap"}
    assert not kinds & {made["kind"] for made in render(CPU_TRIAL)}
    changes = {
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboards": {"enabled": True},
    }
    objects = render(CPU_TRIAL, write(tmp_path, changes))
    (rule,) = of_kind(objects, "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    (shown,) = of_kind(objects, "ConfigMap")
    assert core_problems(shown) == []
    assert shown["metadata"]["labels"]["grafana_dashboard"] == "1"
    files = (CHART / "files" / "dashboards").glob("*.json")
    assert shown["data"] == {path.name: path.read_text() for path in files}


def test_no_pod_changes_with_the_chart_or_the_models(tmp_path: Path) -> None:
    """A change of pods is a new cluster; one of arguments and thresholds is made in place."""
    before = render(CPU_TRIAL)
    changes = {
        "models": {"smollm2": {"target": {"args": {"max_num_seqs": 8}}}},
        "coordinators": {"thresholds": {"request_limit_s": 300}},
    }
    after = render(CPU_TRIAL, write(tmp_path, changes))
    spec, old = rayservice(after)["spec"], rayservice(before)["spec"]
    assert spec["serveConfigV2"] != old["serveConfigV2"]
    assert spec["rayClusterConfig"] == old["rayClusterConfig"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    for pod in pods(after).values():
        assert f"slipstream-{chart['version']}" not in pod["metadata"]["labels"].values()


def test_redis_a_models_volume_and_secrets_reach_the_cluster(tmp_path: Path) -> None:
    password = {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}}
    changes = {
        "gcsFaultTolerance": {
            "enabled": True,
            "redisAddress": "redis:6379",
            "redisPassword": password,
        },
        "auth": {"secretName": "ray-token"},
        "apiKeys": {"secretName": "keys", "key": "second.yaml"},
        "modelStore": {
            "cache": {"existingClaim": "cache"},
            "volume": {"existingClaim": "weights", "mountPath": "/models"},
            "hubTokenSecret": "hub",
        },
    }
    objects = render(CPU_TRIAL, write(tmp_path, changes))
    cluster = rayservice(objects)["spec"]["rayClusterConfig"]
    assert cluster["gcsFaultToleranceOptions"] == {
        "backend": "redis",
        "redisAddress": "redis:6379",
        "redisPassword": password,
    }
    assert cluster["authOptions"] == {"mode": "token", "secretName": "ray-token"}
    front = serve_config(objects)["applications"][0]["deployments"][0]
    assert front["user_config"]["api_keys_file"] == "/etc/slipstream/api-keys/second.yaml"
    for pod in pods(objects).values():
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert volumes["models"]["persistentVolumeClaim"]["claimName"] == "weights"
        assert volumes["cache"]["persistentVolumeClaim"]["claimName"] == "cache"
        env = {variable["name"]: variable for variable in pod["spec"]["containers"][0]["env"]}
        assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == "hub"
    with_keys = {
        name
        for name, pod in pods(objects).items()
        if any(volume["name"] == "api-keys" for volume in pod["spec"]["volumes"])
    }
    assert with_keys == {"target-smollm2"}


@pytest.mark.parametrize("file", ["Dockerfile", "chart/templates/_helpers.tpl"])
def test_ray_is_the_one_that_is_pinned(file: str) -> None:
    pinned = re.search(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned
    assert pinned[1] in (ROOT / "k8s" / file).read_text()


def copied() -> list[str]:
    """The paths that the Dockerfile copies."""
    lines = (ROOT / "k8s" / "Dockerfile").read_text().splitlines()
    words = [line.split() for line in lines if line.startswith("COPY ")]
    return [word for line in words for word in line[1:-1] if not word.startswith("--")]


def test_the_dockerfile_has_no_faults() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [str(hadolint), "k8s/Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (ROOT / "k8s" / "Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("USER")][-1] == "USER 1000:100"
    ignored = (ROOT / "k8s" / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == set(copied())


def test_what_the_dockerfile_copies_makes_the_whole_package(tmp_path: Path) -> None:
    """The image itself is not built here; the package in it is, from the same files."""
    context = tmp_path / "context"
    context.mkdir()
    for path in copied():
        source = ROOT / path
        if source.is_dir():
            shutil.copytree(source, context / path, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, context / path)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "-w", str(tmp_path), str(context)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    needed = {
        str(path.relative_to(context))
        for package in ("deployments", "protos", "workers")
        for path in (context / package).rglob("*")
        # Stubs are for editors.
        if path.is_file() and path.suffix != ".pyi"
    }
    assert {".c", ".h", ".safetensors"} <= {Path(path).suffix for path in needed}
    assert needed - held == set()
