"""Charts: picture, data for the browser and table are the same numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

import sample_run
from fcil_server.ledger.ledger import Ledger
from fcil_server.reports.charts import charts
from fcil_server.reports.charts.drawing import draw
from fcil_server.reports.charts.history import History, frozen, round_line
from fcil_server.reports.charts.spec import Chart, Series, X, Y, written
from fcil_server.reports.charts.svg import Span, scale, zoomed
from fcil_server.reports.results.run_data import RunData, collect
from fcil_server.reports.sections.accuracy import cost_by_task
from fcil_server.reports.sections.traffic import accounts, claimed_round_bytes
from markup import Page
from sample_run import RUN

HEIGHT = 220  # of a plot, in the picture's units


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    with sample_run.build(tmp_path_factory.mktemp("charts") / "ledger.sqlite") as opened:
        yield opened


@pytest.fixture(scope="module")
def data(ledger: Ledger) -> RunData:
    return collect(ledger, RUN)


@pytest.fixture(scope="module")
def history(data: RunData) -> History:
    return frozen(data)


def heights(picture: str) -> dict[str, float]:
    """Return style -> sum of the heights of its pieces."""
    found = {}
    for attrs in Page(picture).all("path"):
        style = (attrs.get("class") or "").removeprefix("fill ")
        if attrs.get("class", "").startswith("fill "):
            sizes = [float(v) for v in re.findall(r"v([\d.]+)h-", attrs["d"])]
            found[style] = found.get(style, 0) + sum(sizes)
    return found


def many(history: History, count: int, per_task: int = 1) -> tuple:
    """Return so many copies of a round, in tasks of their own."""
    line = history.rounds[1]
    return tuple(
        replace(line, seq=i, key=line.key._replace(task=i // per_task)) for i in range(count)
    )


def test_bars_are_as_high_as_their_bytes(data: RunData, history: History) -> None:
    """The pieces of a bar add up to what the kernel counted, and each has its cause's height."""
    bars = heights(draw(charts.traffic(history.rounds)))
    top, _ = scale(max(b.true_wire for v in data.rounds for b in (v.up, v.down)))
    wanted = {
        "b": [v.up.wire for v in data.rounds],  # all of it updates
        "a": [v.down.wire for v in data.rounds],  # all of it broadcasts
        "f": [b.rest for v in data.rounds for b in (v.up, v.down)],
    }
    assert set(bars) == set(wanted)
    for style, sizes in wanted.items():
        # Pieces of less than a tenth of a unit are not drawn; coordinates have one digit.
        assert bars[style] == pytest.approx(sum(sizes) / top * HEIGHT, abs=0.2 * len(sizes))


def test_seconds_are_stacked_by_phase(data: RunData, history: History) -> None:
    phases = [v.round.phases for v in data.rounds]
    top, _ = scale(max(sum(p.values()) for p in phases))
    bars = heights(draw(charts.seconds(history.rounds)))
    for style, phase in (("a", "collect_s"), ("b", "aggregate_s")):
        wanted = sum(p[phase] for p in phases) / top * HEIGHT
        assert bars[style] == pytest.approx(wanted, abs=0.2 * len(phases))


def test_a_phase_that_nobody_knows_is_not_left_out(history: History) -> None:
    line = replace(history.rounds[0], phases={"collect_s": 1.0, "shaving_s": 2.5})
    named = {s.name: s.values for s in charts.seconds([line]).series}
    assert named == {"collecting": (1.0,), "the rest": (2.5,)}


def test_accuracy_stands_over_all_bytes_until_then(data: RunData, history: History) -> None:
    points = cost_by_task(history)
    assert [accuracy for _, accuracy in points] == list(data.metrics.task_mean)
    for task, (size, _) in enumerate(points):
        assert size == sum(
            b.wire_kernel for v in data.rounds if v.round.task <= task for b in (v.up, v.down)
        )
    picture = draw(charts.cost([("one", points), ("<two>", points)]))
    assert picture.count("<polyline") == 2
    assert picture.count("<circle") == 2 * len(points)
    assert "<two>" not in picture


def test_the_papers_figure_is_a_line_only_where_it_is_comparable(
    data: RunData, history: History
) -> None:
    assert claimed_round_bytes(history) is None  # the run is not in the paper's setting
    assert "the paper counts" not in draw(charts.traffic(history.rounds))
    assert "the paper counts 300 kB" in draw(charts.traffic(history.rounds, 300_000))
    same = frozen(
        replace(
            data,
            run=replace(data.run, method="hgp", backbone={"name": "vit_base_patch16_224.dino"}),
            tasks=tuple(replace(t, class_ids=tuple(range(10))) for t in data.tasks),
        )
    )
    asked = max(len(v.round.asked) for v in data.rounds)
    assert claimed_round_bytes(same) == 307_240 * asked
    rounds = many(history, charts.MAX_BARS + 1, per_task=50)
    assert charts.traffic(rounds, 300_000).level is None  # a bar is a whole task


def test_the_papers_figures_stand_beside_the_true_ones(data: RunData) -> None:
    hgp = frozen(replace(data, run=replace(data.run, method="hgp", hparams={})))
    ways = accounts(hgp)
    assert "Gaussians" in hgp.paper.claim.leaves_out
    assert (ways[0].up, ways[0].down) == (307_240, 584_080)
    assert ways[1].up > ways[0].up  # with the Gaussians
    train = [v for v in data.rounds if v.round.kind == "train"]  # of these papers speak
    updates = sum(len(v.counted) + len(v.excluded) for v in train)
    assert ways[-3].up == sum(v.up.tensor for v in train) / updates
    assert ways[-2].up == sum(v.up.wire_kernel for v in train) / updates
    assert ways[-1].up == sum(v.up.wire_kernel for v in data.rounds) / updates
    unknown = frozen(replace(data, run=replace(data.run, method="of another package")))
    assert unknown.paper.claim is None
    assert len(accounts(unknown)) == 3


@pytest.mark.parametrize(("count", "per_task"), [(201, 10), (5000, 1), (5000, 5000), (399, 3)])
def test_no_chart_has_more_bars_than_can_be_told_apart(
    history: History, count: int, per_task: int
) -> None:
    rounds = many(history, count, per_task)
    for chart in (charts.traffic(rounds), charts.seconds(rounds)):
        assert 1 <= len(chart.x.labels) <= charts.MAX_BARS
        for way in ("up", "total"):
            shown = sum(sum(s.values) for s in chart.series if s.stack == way)
            line = history.rounds[1]
            one = {"up": line.up.true_wire, "total": sum(line.phases.values())}[way]
            assert shown in (0, pytest.approx(count * one))


@pytest.mark.parametrize("name", ["accuracy", "cost", "bytes", "seconds"])
def test_the_table_has_the_numbers_of_the_data(history: History, name: str) -> None:
    chart = {
        "accuracy": charts.accuracy(history.metrics),
        "cost": charts.cost([("<run>", cost_by_task(history))]),
        "bytes": charts.traffic(history.rounds),
        "seconds": charts.seconds(history.rounds),
    }[name]
    html = str(charts.figure(chart))
    page = Page(html)
    assert page.open == []
    spec = json.loads(re.search(r'class="spec">(.*?)</script>', html)[1])
    assert spec == json.loads(json.dumps(chart.to_json()))
    cells = re.findall(r"<td>(.*?)</td>", html)
    if name == "cost":
        points = [p for s in spec["series"] for p in reversed(s["points"])]
        assert cells == [t for x, y in points for t in (written(x, "B"), written(y, "%"))]
    else:
        places = reversed(range(len(spec["x"]["labels"])))  # the newest first
        values = [s["values"][i] for i in places for s in spec["series"]]
        assert cells == [written(v, spec["y"]["unit"]) for v in values]


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ((87.0, 92.0), [86, 88, 90, 92]),
        ((0.0, 100.0), [0, 20, 40, 60, 80, 100]),
        ((2.31, 2.34), [2.3, 2.35]),
        ((90.0,), [88, 90]),
        ((100.0, 100.0), [98, 100]),
        ((0.0,), [0, 0.2]),
        ((), [0, 0.2, 0.4, 0.6, 0.8, 1]),
        ((1e-11,), [9.8e-12, 1e-11]),
        ((5e-324,), [0, 0.2]),
        ((260_000, 1_900_000), [0, 500_000, 1_000_000, 1_500_000, 2_000_000]),
    ],
)
def test_a_zoomed_axis_has_round_ends_near_its_values(values: tuple, ticks: list) -> None:
    assert zoomed(values) == ticks


@pytest.mark.parametrize("loss", [1e-12, 1e-200, 5e-324, -1e6, 1e6])
def test_any_single_loss_that_a_client_can_report_is_drawn(loss: float) -> None:
    ticks = zoomed([loss])
    assert 0 <= Span(ticks[0], ticks[-1]).part(loss) <= 1
    assert Span(loss, loss).part(loss) == 0.5


def test_lines_are_drawn_around_their_values_and_bars_from_zero(history: History) -> None:
    lines = charts.over_tasks("some", "Some", [("one", "a", (87.0, 92.0))])
    at = [float(a["cy"]) for a in Page(draw(lines)).all("circle")]
    assert at[0] - at[1] > HEIGHT / 2
    assert not charts.seconds(history.rounds).y.zoom
    assert not charts.traffic(history.rounds).y.zoom


def test_what_is_unknown_is_a_gap_and_no_zero() -> None:
    chart = charts.over_tasks("some", "Some", [("one", "a", (50.0, None, 70.0))])
    assert draw(chart).count("<circle") == 2
    assert draw(chart).count("<polyline") == 2  # no line leads over it
    assert chart.to_json()["series"][0]["values"] == (50.0, None, 70.0)


def test_hostile_names_stay_text_in_picture_data_and_table() -> None:
    hostile = "</script><script>alert(1)</script><!--"
    series = (Series(hostile, "a", points=((1, 2),)),)
    chart = Chart("bad", "xy", hostile, X(hostile, unit="B"), Y("%", 100), series)
    html = str(charts.figure(chart))
    page = Page(html)
    assert page.open == []
    assert len(page.all("script")) == 1
    assert hostile in json.loads(re.search(r'class="spec">(.*?)</script>', html)[1])["title"]


def test_each_kind_of_bar_has_a_look_of_its_own_beside_its_colour(history: History) -> None:
    picture = Page(draw(charts.traffic(history.rounds)))
    fills = {a["class"] for a in picture.all("path") if "fill" in (a.get("class") or "")}
    hatched = {a["id"].rpartition("-")[2] for a in picture.all("pattern")}
    assert fills == {"fill a", "fill b", "fill f"}
    assert hatched == {"b", "f"}  # the first is plain


def test_learning_curves_have_the_rounds_that_tell_something_and_marks_between_tasks(tmp_path):
    with sample_run.build(tmp_path / "l") as ledger:
        views = collect(ledger, sample_run.RUN).rounds
    lines = [round_line(view, {}) for view in views]
    told = [line for line in lines if line.training.loss is not None]
    assert 0 < len(told) < len(lines)
    loss, accuracy = charts.training(lines)
    assert loss.series[0].values == tuple(float(f"{r.training.loss:.5g}") for r in told)
    assert [mark.text for mark in loss.marks] == ["task 1", "task 2"]
    assert [s.name for s in accuracy.series] == ["on the clients' training images"]
    assert set(accuracy.series[0].values) == {50.0}
    assert charts.training([line for line in lines if line not in told]) == []
