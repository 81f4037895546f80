"""The frozen page: one file that asks nobody for anything and lets nothing else run."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest

import page_kit
import sample_run
from fcil_server.reports.results.run_data import collect
from fcil_server.reports.sections import static_page
from markup import Page
from sample_run import ALICE, HTML_NAME, RUN


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    with sample_run.build(tmp_path_factory.mktemp("frozen") / "l") as ledger:
        return static_page.report(collect(ledger, RUN))


def test_it_asks_for_nothing(text: str) -> None:
    page = Page(text)
    assert page.open == []
    assert {"link", "img", "iframe", "object", "form"}.isdisjoint(t for t, _ in page.tags)
    names = {name for _, attrs in page.tags for name in attrs}
    assert {"src", "srcset", "action", "style"}.isdisjoint(names)
    assert not any(name.startswith("on") for name in names)
    links = [attrs["href"] for _, attrs in page.tags if "href" in attrs]
    assert links
    assert {link[0] for link in links} == {"#"}  # all lead to itself
    assert {link[1:] for link in links} <= set(page.ids)
    outside = re.findall(
        r"url\(([^)]*)\)", re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    )
    assert all(one.startswith("#hatch-") for one in outside)
    assert len(page.ids) == len(set(page.ids))


def test_its_policy_allows_its_own_style_and_scripts_by_their_hashes_alone(text: str) -> None:
    policy = next(a["content"] for t, a in Page(text).tags if a.get("http-equiv"))
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert "unsafe" not in policy
    for tag, rule in (("style", "style-src"), ("script", "script-src")):
        inside = re.findall(rf"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)
        assert inside
        assert rules[rule].split() == [_hash(one) for one in inside]


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_without_scripts_all_numbers_and_charts_are_there(text: str) -> None:
    bare = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    page = Page(bare)
    charts = [a["id"] for a in page.all("figure")]
    assert charts == [
        "chart-accuracy",
        "chart-cost",
        "chart-loss",
        "chart-round-accuracy",
        "chart-bytes",
        "chart-seconds",
    ]
    assert len(page.all("svg")) == len(charts)
    for expected in ("80.0 %", "12.5 pp", "7.87 MB", "alice", "on battery", "prepare 0"):
        assert expected in page.text


def test_what_is_about_the_moment_is_not_in_it(text: str) -> None:
    page = Page(text)
    sections = [a["id"] for a in page.all("section")]
    assert sections == list(static_page.SECTIONS)
    assert "now" not in sections
    attributes = {name for _, attrs in page.tags for name in attrs}
    assert {"data-part", "data-client", "data-act", "data-say"}.isdisjoint(attributes)


def test_a_report_tells_what_went_wrong_and_no_addresses(tmp_path: Path) -> None:
    with page_kit.small(tmp_path / "l") as ledger:
        ledger.events.add("info", "listening", "listening on 192.0.2.7:7788", run=RUN)
        text = Page(static_page.report(collect(ledger, RUN))).text
    assert "the worker ended by signal 9" in text
    assert "192.0.2.7" not in text


def test_words_of_clients_and_configurations_are_escaped(tmp_path: Path) -> None:
    with sample_run.build(tmp_path / "l") as ledger:
        ledger.database.write("UPDATE clients SET name = '<b>x' WHERE client_id = ?", (ALICE,))
        ledger.database.write("UPDATE runs SET config = '</pre><u>', method = '</title><i>'")
        ledger.events.add("error", "x", "<script>alert(1)</script>", run=RUN)
        page = Page(static_page.report(collect(ledger, RUN)))
    for expected in (HTML_NAME, "<b>x", "</pre><u>", "</title><i>", "<script>alert(1)</script>"):
        assert expected in page.text
    assert {"u", "i"}.isdisjoint(t for t, _ in page.tags)
    kinds = [a.get("type") for a in page.all("script")]
    assert kinds.count("application/json") == 6
    assert len(kinds) == 6 + len(static_page.assets.FROZEN_SCRIPTS)


def test_the_report_of_a_long_run_stays_small(tmp_path: Path) -> None:
    with page_kit.long(tmp_path / "l", rounds=400, tasks=8) as ledger:
        long = static_page.report(collect(ledger, page_kit.LONG_RUN))
    with sample_run.build(tmp_path / "s") as ledger:
        short = static_page.report(collect(ledger, RUN))
    assert len(long) < len(short) + 150_000
    assert "Each round is a line of rounds.jsonl" in long
