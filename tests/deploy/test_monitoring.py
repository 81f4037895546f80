"""Alerts and the dashboard ask for figures that there are, by labels that they have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from deploy.kit import COMPOSE, DEPLOY, documents
from fcil_server.federation.addresses import DEFAULT_METRICS
from fcil_server.ledger.enums import Cause, CountSource, Direction
from fcil_server.web.metrics.exposition import CATALOGUE, Snapshot, Usage, render
from fcil_server.web.metrics.totals import TotalsReader
from sample_run import LIVE, build

PROMETHEUS = DEPLOY / "prometheus"
DASHBOARD = DEPLOY / "grafana" / "fcil.json"
SCRAPED = {"job", "instance"}  # what Prometheus itself adds
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")


@pytest.fixture(scope="module")
def figures(tmp_path_factory) -> dict[str, list[dict[str, str]]]:
    """Name -> the labels of each of its samples, as a server shows them that has done some work."""
    path = tmp_path_factory.mktemp("built") / "ledger.sqlite"
    build(path).close()
    with TotalsReader(path, clients=5) as reader:
        totals = reader.read()
    # What this ledger lacks: refused messages, and parts that were fetched late or elsewhere.
    late = (Direction.DOWN, Cause.CATCH_UP, CountSource.PREDICTED)
    elsewhere = (Direction.DOWN, Cause.OBJECT_STORE, CountSource.REPORTED)
    more = {late: (1, 1, 1, 1, 0, 0), elsewhere: (0, 0, 0, 1, 0, 0)}
    counts = replace(totals.counts, flows={**totals.counts.flows, **more})
    totals = replace(totals, refusals={"stale": 1}, counts=counts)
    usage = {name: Usage(80_000_000, 1.5, 30) for name in ("server", "worker", "metrics")}
    text, _ = render(Snapshot("0.1.0", totals, LIVE, usage, (10, 100), 5, 0.01))
    found: dict[str, list[dict[str, str]]] = {"up": [{"job": "fcil", "instance": ""}]}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(dict(sample.labels))
    return found


def rules() -> list[dict[str, Any]]:
    (document,) = documents(PROMETHEUS / "fcil.rules.yml")
    return [rule for group in document["groups"] for rule in group["rules"]]


def panels() -> Iterator[dict[str, Any]]:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", [])


def expressions() -> dict[str, str]:
    """Where it stands -> the expression."""
    found = {rule["alert"]: rule["expr"] for rule in rules()}
    for panel in panels():
        for target in panel.get("targets", []):
            found[f"{panel['title']} {target['refId']}"] = target["expr"]
    return found


def selectors(expression: str) -> Iterator[tuple[str, list[promql_parser.Matcher]]]:
    """Yield (metric, matchers) of an expression."""

    def visit(node) -> Iterator[promql_parser.VectorSelector]:
        if isinstance(node, promql_parser.VectorSelector):
            yield node
        for part in ("lhs", "rhs", "expr", "vector_selector"):
            if hasattr(node, part):
                yield from visit(getattr(node, part))
        for argument in getattr(node, "args", ()):
            yield from visit(argument)

    for selector in visit(promql_parser.parse(expression)):
        yield selector.name, list(selector.matchers.matchers)


def faults(expression: str, figures: dict[str, list[dict[str, str]]]) -> list[str]:
    """Return what an expression asks for that no server has."""
    found, labels = [], set(SCRAPED)
    for name, matchers in selectors(expression):
        if name not in figures:
            found.append(name)
            continue
        known = {label for sample in figures[name] for label in sample}
        labels |= known
        for matcher in matchers:
            if matcher.name not in known | SCRAPED:
                found.append(f"{name}{{{matcher.name}}}")
            elif matcher.name in known and "$" not in matcher.value:
                values = {sample.get(matcher.name, "") for sample in figures[name]}
                wanted = matcher.value.split("|")  # of =~; elsewhere there is none
                found += [f"{name}{{{matcher.name}={v}}}" for v in wanted if v not in values]
    grouped = re.findall(r"\b(?:by|on|without|ignoring|group_left)\s*\(([^)]*)\)", expression)
    used = {word.strip() for words in grouped for word in words.split(",")} - {""}
    return found + sorted(used - labels)


def test_every_expression_asks_for_figures_and_labels_that_there_are(figures):
    found = {w: wrong for w, e in expressions().items() if (wrong := faults(e, figures))}
    assert found == {}
    assert len(expressions()) > 40


@pytest.mark.parametrize(
    ("expression", "wrong"),
    [
        ("fcil_up == 0", []),
        ("fcil_down == 0", ["fcil_down"]),
        ("rate(fcil_round[5m])", ["fcil_round"]),
        ('fcil_members{rank="client"}', ["fcil_members{rank}"]),
        ('fcil_members{role="server"}', ["fcil_members{role=server}"]),
        (
            'fcil_clients_silent_total{answer=~"lost|gone"}',
            ["fcil_clients_silent_total{answer=gone}"],
        ),
        ("sum by (kind) (fcil_up)", ["kind"]),
        ("fcil_up / on (name) fcil_up", ["name"]),
    ],
)
def test_what_there_is_not_is_found(expression, wrong, figures):
    assert faults(expression, figures) == wrong


def test_the_sample_has_every_figure_there_is(figures):
    assert {spec.name for spec in CATALOGUE} <= set(figures)


def test_a_legend_names_labels_that_the_expression_keeps(figures):
    for panel in panels():
        for target in panel.get("targets", []):
            words = set(re.findall(r"{{\s*(\w+)\s*}}", target.get("legendFormat", "")))
            kept = re.search(r"\bby \(([^)]*)\)", target["expr"])
            if kept:
                known = {word.strip() for word in kept[1].split(",")}
            else:
                names = [name for name, _ in selectors(target["expr"])]
                known = {label for name in names for sample in figures[name] for label in sample}
            assert words <= known, panel["title"]


def test_an_alert_says_what_has_happened_and_what_to_do():
    for rule in rules():
        assert set(rule["annotations"]) == {"summary", "action"}
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)


def test_prometheus_and_grafana_find_what_they_are_given():
    (config,) = documents(PROMETHEUS / "prometheus.yml")
    (job,) = config["scrape_configs"]
    assert job["static_configs"][0]["targets"] == [DEFAULT_METRICS]
    assert [(PROMETHEUS / name).is_file() for name in config["rule_files"]] == [True]
    services = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]
    # Where nobody else can ask without a certificate.
    assert services["prometheus"]["network_mode"] == "service:server"
    (sources,) = documents(DEPLOY / "grafana/provisioning/datasources/prometheus.yaml")
    assert sources["datasources"][0]["url"] == "http://server:9090"
    (providers,) = documents(DEPLOY / "grafana/provisioning/dashboards/fcil.yaml")
    place = providers["providers"][0]["options"]["path"]
    assert f"./grafana/fcil.json:{place}/fcil.json:ro" in services["grafana"]["volumes"]


def test_the_panels_of_the_dashboard_stand_beside_each_other():
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids) > 20
    for panel in panels():
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


@needs_promtool
def test_promtool_takes_the_configuration_and_the_alerts_fire_when_they_should(tmp_path):
    assert PROMTOOL is not None
    for words in (
        ["check", "config", str(PROMETHEUS / "prometheus.yml")],
        ["test", "rules", str(Path(__file__).with_name("alerts.test.yml"))],
    ):
        done = subprocess.run([PROMTOOL, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
