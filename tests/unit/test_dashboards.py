"""Dashboards and alerts: what they name is exported, Prometheus parses it, and alerts do what they say."""

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.chart import CHART, ROOT

FILES = CHART / "files"
ALERTS = FILES / "alerts.yaml"
RULE_TESTS = Path(__file__).with_name("alerts_test.yaml")
NAME = re.compile(r"\bray_\w+")
SERVES = {"ray_serve_deployment_status"}
"""Not ours, but needed: tests/e2e/test_dashboards.py sees that Ray exports them."""


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dashboards", ROOT / "k8s" / "dashboards.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script()
DASHBOARDS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text())
    for path in sorted((FILES / "dashboards").glob("*.json"))
}
EXPORTED = {name for metric in script.families() for name in script.exported(metric)}


def queries() -> dict[str, str]:
    """Every expression, by where it is; variables are those of Grafana."""
    found = {
        f"{name}: {panel['title']}: {target['legendFormat']}": target["expr"]
        for name, dashboard in DASHBOARDS.items()
        for panel in dashboard["panels"]
        for target in panel["targets"]
    }
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    return found | {rule["alert"]: rule["expr"] for rule in rules}


def substituted(expression: str) -> str:
    """What Grafana sends, with everything chosen."""
    for variable, value in (("$__rate_interval", "1m"), ("$application", ".*"), ("$model", ".*")):
        expression = expression.replace(variable, value)
    assert "$" not in expression
    return expression


def promtool(*arguments: str) -> str:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed: nobody parses the queries")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_files_are_those_of_the_script() -> None:
    for path, text in script.made().items():
        assert path.read_text() == text, f"{path.name} is stale: run python k8s/dashboards.py"
    assert set(DASHBOARDS) == set(script.DASHBOARDS)


def test_only_metrics_that_are_exported_are_named() -> None:
    for place, expression in queries().items():
        assert set(NAME.findall(expression)) <= EXPORTED | SERVES, place


def test_every_metric_is_on_a_panel() -> None:
    named = {name for expression in queries().values() for name in NAME.findall(expression)}
    for metric in script.families():
        assert named & set(script.exported(metric)), metric.info["name"]


def test_only_labels_that_a_metric_has_are_named() -> None:
    """Those that Ray adds, those of the metric, and `le`."""
    labels = {
        name: {"application", "deployment", "replica", "le", *metric.info["tag_keys"]}
        for metric in script.families()
        for name in script.exported(metric)
    }
    for place, expression in queries().items():
        for name, selector in re.findall(r"\b(ray_slipstream_\w+){(.*?)}", expression):
            found = set(re.findall(r"(\w+)[=!]", selector))
            assert found <= labels[name], f"{place}: {name}"
        every = set.union(*(labels.get(name, set()) for name in NAME.findall(expression)))
        for by in re.findall(r"by \((.*?)\)", expression):
            assert set(filter(None, by.split(", "))) <= every | {"deployment"}, place


def test_prometheus_parses_every_query(tmp_path: Path) -> None:
    records = [
        {"record": f"query_{number}", "expr": substituted(expression)}
        for number, expression in enumerate(queries().values())
    ]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": records}]}))
    assert f"{len(records)} rules found" in promtool("check", "rules", str(path))


def test_alerts_are_rules_and_say_what_to_do() -> None:
    promtool("check", "rules", str(ALERTS))
    for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]:
        assert set(rule["annotations"]) == {"summary", "description", "action"}
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_alerts_fire_when_they_should_and_not_before() -> None:
    promtool("test", "rules", str(RULE_TESTS))
    tests = yaml.safe_load(RULE_TESTS.read_text())["tests"]
    said: dict[str, set[bool]] = {}
    for test in tests:
        for case in test["alert_rule_test"]:
            said.setdefault(case["alertname"], set()).add(bool(case.get("exp_alerts")))
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    assert said == {rule["alert"]: {True, False} for rule in rules}


@pytest.mark.parametrize("name", DASHBOARDS)
def test_grafana_can_show_it(name: str) -> None:
    """Not Grafana's own check, which was not at hand: what its model must have, and that nothing overlaps."""
    dashboard = DASHBOARDS[name]
    assert dashboard["uid"] == f"slipstream-{name}"
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert list(variables) == ["datasource", "application", "model"]
    assert variables["datasource"]["type"] == "datasource"
    places: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in dashboard["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert len(panel["description"]) > 40
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        squares = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not squares & places
        places |= squares
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)
        for target in panel["targets"]:
            by = re.findall(r"by \(((?:\w+(?:, )?)*)\)", target["expr"])
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert shown <= {label for labels in by for label in labels.split(", ")}
