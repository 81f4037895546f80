"""Runs side by side on the page: of this federation and of places beside it."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest

import page_kit
import sample_run
from fcil_protocol.errors import CorruptFile, NotYet, StorageError, UsageError
from fcil_protocol.ids import RunId
from fcil_server.ledger.enums import RunStatus
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.reports import comparison
from fcil_server.web.page import compare_view
from fcil_server.web.page.compare_view import FRESH_S, KEPT_S, MAX_RUNS, Comparison, RunPlace, Runs
from fcil_server.web.page.compared import Compared, differences, settings, warnings
from fcil_server.web.page.reader import HistoryReader
from sample_run import RUN

OTHER = RunId("r20260104-000000-cafe")


class Clock:
    """Seconds that pass only when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a federation with two runs, and another one beside it with one."""
    own, beside = (tmp_path_factory.mktemp(name) for name in ("own", "beside"))
    with sample_run.build(own / LEDGER_NAME) as ledger:
        ledger.runs.add(
            OTHER,
            method="fedncm",
            method_version="2",
            config='[method]\nname = "fedncm"\n[round]\ndeadline_s = 5\n',
            hparams={"rank": 4, "more": {"deep": True}},
            backbone={"name": "embedded", "dim": 192, "digest": "ab"},
            schema_digest="0" * 64,
            seed=7,
        )
    sample_run.build(beside / LEDGER_NAME).close()
    (beside / "runs" / RUN).mkdir(parents=True)
    return own, beside


def cells(html: str, label: str) -> list[list[str]]:
    """Return a table's rows by its region's label."""
    table = html.partition(f'aria-label="{label}"')[2].partition("</table>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]


def chosen(html: str) -> list[str]:
    return re.findall(r'value="([^"]*)" checked', html)


def test_headlines_are_those_of_the_report(places: tuple[Path, Path]) -> None:
    own, _ = places
    html = str(Comparison(own).html([RUN]))
    (expected,) = comparison.rows(comparison.read([own / "runs" / RUN]))
    assert cells(html, "Headlines of the runs")[1] == list(expected)


def test_accuracy_over_bytes_is_a_line_for_each_run(places: tuple[Path, Path]) -> None:
    own, beside = places
    html = str(Comparison(own, [beside]).html([RUN, f"@{beside.name}"]))
    found = re.search(r'class="spec">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    spec = json.loads(found[1])
    assert spec["kind"] == "xy"
    ((_, data),) = comparison.read([own / "runs" / RUN])
    expected = [[size, round(accuracy, 3)] for size, accuracy in comparison.cost_by_task(data)]
    assert [line["points"] for line in spec["series"]] == [expected, expected]
    assert spec["series"][0]["name"] != spec["series"][1]["name"]


def test_only_what_differs_is_told(places: tuple[Path, Path]) -> None:
    own, _ = places
    table = cells(str(Comparison(own).html([RUN, OTHER])), "In what the runs differ")
    rows = {name: values for name, *values in table[1:]}
    assert rows["method"] == ["pilora", "fedncm"]
    assert rows["seed"] == ["1993", "7"]
    assert rows["tasks"] == ["3", "0"]
    assert rows["option lr"] == ["0.002", "-"]
    assert rows["option more deep"] == ["-", "true"]
    assert rows["[round] deadline_s"] == ["-", "5"]
    assert not {"option rank", "backbone name", "backbone dim"} & set(rows)


def test_a_run_directory_stands_for_its_run_and_a_federation_for_its_newest(places) -> None:
    own, beside = places
    view = Comparison(beside, [own, beside / "runs" / RUN])
    html = str(view.html([f"@{own.name}", f"@{RUN}"]))
    assert f"fedncm, running ({OTHER})" in html
    assert f"pilora, done ({RUN})" in html


def test_who_chooses_nothing_sees_a_few_of_the_newest(places: tuple[Path, Path]) -> None:
    own, beside = places
    assert chosen(str(Comparison(own, [beside]).html([]))) == [OTHER, RUN, f"@{beside.name}"]


def test_places_of_one_name_are_told_apart(places: tuple[Path, Path]) -> None:
    own, beside = places
    html = str(Comparison(own, [beside, beside]).html([]))
    assert f'value="@{beside.name}"' in html
    assert f'value="@{beside.name}-2"' in html


def test_what_is_wrong_with_a_place_stands_beside_its_name(places, tmp_path: Path) -> None:
    own, beside = places
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / LEDGER_NAME).write_bytes(b"x" * 9000)
    missing = tmp_path / "<missing>"
    view = Comparison(own, [missing, damaged, beside])
    html = str(view.html([RUN, "@damaged", f"@{beside.name}"]))
    assert "&lt;missing&gt; is neither a federation&#39;s directory" in html  # though not chosen
    line = next(line for line in html.splitlines() if 'value="@damaged"' in line)
    assert "damaged" in line.partition('class="badge bad"')[2]
    assert len(cells(html, "Headlines of the runs")) == 1 + 2


def test_a_configuration_that_is_none_is_what_is_wrong_with_its_place(places) -> None:
    with Ledger(places[0] / LEDGER_NAME, read_only=True) as ledger:
        run = ledger.runs.newest()
    with pytest.raises(CorruptFile, match=f"the configuration of run {run.run_id} is damaged"):
        settings(replace(run, config="no configuration"), 1)


@pytest.mark.parametrize(
    "wanted",
    [["r20260102"], ["../../etc"], ["@nobody"], [""], ["x" * 9000], [RUN, "' OR 1=1 --"]],
)
def test_what_is_not_offered_cannot_be_compared(places, wanted: list[str]) -> None:
    with pytest.raises(UsageError, match="there is no run"):
        Comparison(places[0], [places[1]]).html(wanted)


def test_at_most_a_dozen_are_compared(places: tuple[Path, Path]) -> None:
    view = Comparison(places[0], [places[1]] * (MAX_RUNS + 1))
    keys = [f"@{places[1].name}", *(f"@{places[1].name}-{i}" for i in range(2, MAX_RUNS + 2))]
    with pytest.raises(UsageError, match="at most 12 runs"):
        view.html(keys)
    html = str(view.html(keys[:MAX_RUNS] + keys[:1]))  # one that is named twice counts once
    assert len(cells(html, "Headlines of the runs")) == 1 + MAX_RUNS


def test_without_a_ledger_the_comparison_says_so(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no ledger"):
        Comparison(tmp_path).html([])


def test_of_many_runs_the_newest_are_offered(places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_view, "MAX_OWN", 1)
    html = str(Comparison(places[0]).html([]))
    assert f'value="{RUN}"' not in html
    assert "1 older runs" in html
    assert chosen(str(Comparison(places[0]).html([RUN]))) == [RUN]  # whoever knows its id


def test_a_run_is_read_again_only_when_its_time_is_over(places, monkeypatch) -> None:
    read: list[str] = []

    class Counting(HistoryReader):
        def read(self, run=None):
            read.append(str(run))
            return super().read(run)

    monkeypatch.setattr(compare_view, "HistoryReader", Counting)
    clock = Clock()
    view = Comparison(places[0], clock=clock)
    view.html([RUN, OTHER])
    view.html([RUN, OTHER])
    assert read == [RUN, OTHER]
    clock.now = FRESH_S
    view.html([RUN, OTHER])
    assert read == [RUN, OTHER, OTHER]  # the one that goes on
    clock.now = KEPT_S
    view.html([RUN])
    assert read[-1] == RUN


def test_a_ledger_that_takes_long_to_read_holds_nobody_up(places, monkeypatch) -> None:
    may_go_on = threading.Event()

    class Slow(HistoryReader):
        def read(self, run=None):
            may_go_on.wait()
            return super().read(run)

    monkeypatch.setattr(compare_view, "HistoryReader", Slow)
    clock = Clock()
    runs, place = Runs(clock), RunPlace(RUN, places[0], RUN)
    with pytest.raises(NotYet, match="still being read"):
        runs.get(place, 0.0)
    may_go_on.set()
    first = runs.get(place, 60.0)  # what was begun is waited for
    may_go_on.clear()
    clock.now = KEPT_S
    assert runs.get(place, 0.0) is first  # what was kept serves until it is read anew
    may_go_on.set()
    assert "still being read" not in str(Comparison(places[0], patience_s=60.0).html([RUN]))


def test_a_ledger_that_takes_long_is_said_to_be_read(places, monkeypatch) -> None:
    may_go_on = threading.Event()
    monkeypatch.setattr(compare_view.Runs, "_read", lambda *_: may_go_on.wait())
    html = str(Comparison(places[0], patience_s=0.0).html([RUN]))
    may_go_on.set()
    assert "its ledger is long, and still being read" in html


def test_names_from_clients_and_configurations_are_text(tmp_path: Path) -> None:
    with page_kit.crowd(tmp_path / LEDGER_NAME, members=20) as ledger:
        ledger.runs.add(
            RunId("r20260105-000000-aaaa"),
            method="<b>evil</b>",
            method_version='"><img src=x>',
            config='["<script>"]\n"<i>" = "</td><script>alert(1)</script>"\n',
            hparams={"<u>": "<u>"},
            backbone={"name": "<b>"},
            schema_digest="",
            seed=1,
        )
    html = str(Comparison(tmp_path).html([]))
    assert "&lt;b&gt;evil" in html
    assert not re.search(r"<(b|i|u|img|script(?! type=\"application/json\"))[ >]", html)


# --- what may not be comparable ---------------------------------------------------------------


def run_of(
    tasks: tuple[tuple[str, ...], ...] = (("cat", "dog"), ("elk",)),
    *,
    images: int = 100,
    pooled: bool = True,
    status: RunStatus = RunStatus.DONE,
) -> Compared:
    return Compared(RUN, "m", status, (), ((1.0, 50.0),), {"seed": "1"}, tasks, images, pooled)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (run_of((("cat",), ("dog", "elk"))), "not learn the same classes"),
        (run_of((("cat", "dog"),)), "different numbers of tasks"),
        (run_of(images=99), "different numbers of images"),
        (run_of(pooled=False), "others on the server's folder"),
        (run_of(status=RunStatus.RUNNING), "still in progress"),
    ],
)
def test_runs_of_unlike_data_are_warned_of(other: Compared, words: str) -> None:
    (found,) = warnings([run_of(), other])
    assert words in found


def test_a_run_that_has_just_begun_does_not_hide_that_others_are_unlike() -> None:
    found = warnings([run_of(()), run_of(), run_of((("cat",), ("dog", "elk")))])
    assert any("not learn the same classes" in sentence for sentence in found)


def test_runs_of_like_data_and_settings_have_nothing_to_warn_of() -> None:
    assert warnings([run_of(), run_of()]) == []
    assert differences([run_of(), run_of()]) == []
