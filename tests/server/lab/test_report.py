"""Means, deviations, claims and the report, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from fcil_protocol.errors import ConfigError
from fcil_server.lab import plan, report
from fcil_server.lab.experiment import ClaimSection
from fcil_server.lab.progress import HowFar, TimeBudget, describe_plan
from fcil_server.lab.summary import Stat, entries, judge_claim, mean_matrix
from server.lab.kit import content, experiment

CLAIM = {"text": "NCM wins", "source": "S", "left": "NCM", "right": "Ridge", "partition": "beta=1"}


def test_a_mean_has_a_deviation_only_over_several_seeds() -> None:
    assert Stat.of([10.0, 14.0, None, 12.0]) == Stat(3, 12.0, 2.0)  # sqrt((4 + 4 + 0) / 2)
    assert Stat.of([10.0]) == Stat(1, 10.0, None)
    assert Stat.of([None, float("nan")]) == Stat(0, None, None)


def test_matrices_are_averaged_cell_by_cell() -> None:
    assert mean_matrix([[[90.0], [10.0, None]], [[70.0], [20.0, 40.0]]]) == (
        (80.0,),
        (15.0, 40.0),
    )


def test_a_row_is_summarised_over_its_finished_seeds_with_the_papers_figures() -> None:
    said = [{"source": "S", "setting": "T", "figures": {"NCM": {"beta=1": {"faa": 65.6}}}}]
    found = experiment(papers=said)
    cells = plan.make(found)
    done = {
        "NCM/beta=1/1": content("NCM/beta=1/1", 60.0),
        "NCM/beta=1/2": content("NCM/beta=1/2", 64.0),
        "NCM/alpha=1/2": content("NCM/alpha=1/2", 20.0),
    }
    by_name = {(e.row, e.partition): e for e in entries(found, cells, done)}
    assert len(by_name) == 5
    both, one = by_name["NCM", "beta=1"], by_name["NCM", "alpha=1"]
    assert both.faa == Stat(2, 62.0, pytest.approx(2.0 * 2**0.5))
    assert both.curve == (80.0, 62.0)
    assert both.matrix == ((80.0,), (52.0, 72.0))
    assert [(s, f.faa) for s, f in both.papers] == [("S", 65.6)]
    assert (one.seeds, one.missing, one.faa) == ((2,), (1,), Stat(1, 20.0, None))
    assert by_name["Joint", "beta=1"].faa == Stat(0, None, None)


@pytest.mark.parametrize(
    ("left", "right", "direction", "verdict"),
    [
        ([60.0, 64.0], [50.0, 51.0], "left_higher", "holds"),  # 10 and 13 apart
        ([50.0, 51.0], [60.0, 64.0], "left_higher", "does not hold"),
        ([50.0, 51.0], [60.0, 64.0], "left_lower", "holds"),
        ([60.0, 64.0], [59.5, 60.5], "left_higher", "too close"),  # 0.5, 3.5: 2.0, deviation 2.1
        ([60.0, 64.0], [58.5, 62.0], "left_higher", "holds"),  # 1.5, 2.0, though seeds differ by 4
        ([60.0, 99.0], [62.5], "left_higher", "does not hold"),  # only the first seed is of both
        ([60.0], [58.5], "left_higher", "holds"),  # one seed, of which 2,400 images leave 1.41
        ([60.0], [58.7], "left_higher", "too close"),
        ([58.7], [60.0], "left_higher", "too close"),
        ([58.5], [60.0], "left_higher", "does not hold"),
        ([60.0], [], "left_higher", "not measured"),
    ],
)
def test_a_claim_is_judged_by_difference_and_deviation(
    left: list[float], right: list[float], direction: str, verdict: str
) -> None:
    found = experiment()
    done = {
        f"{row}/beta=1/{seed}": content("", faa)
        for row, values in (("NCM", left), ("Ridge", right))
        for seed, faa in enumerate(values, 1)
    }
    claim = ClaimSection.model_validate({**CLAIM, "direction": direction})
    judged = judge_claim(claim, entries(found, plan.make(found), done))
    assert judged.verdict == verdict
    assert ("one seed" in judged.words) == (min(len(left), len(right)) == 1)


def test_a_claim_about_forgetting_has_no_error_of_the_test_images() -> None:
    found = experiment()
    done = {f"{row}/beta=1/1": content("", 60.0) for row in ("NCM", "Ridge")}
    done["NCM/beta=1/1"]["forgetting"] = {"max": 5.1, "diag": 4.0, "fedmammoth": 2.0}
    claim = ClaimSection.model_validate({**CLAIM, "metric": "forgetting"})
    judged = judge_claim(claim, entries(found, plan.make(found), done))
    assert (judged.verdict, judged.words) == ("holds", "5.1 against 5.0, one seed, so no deviation")


def test_a_claim_tells_means_and_the_difference_over_the_seeds_of_both() -> None:
    found = experiment()
    values = {"NCM": [60.0, 64.0], "Ridge": [58.5, 61.5]}  # 1.5 and 2.5 apart
    done = {f"{r}/beta=1/{s}": content("", v[s - 1]) for r, v in values.items() for s in (1, 2)}
    judged = judge_claim(ClaimSection.model_validate(CLAIM), entries(found, plan.make(found), done))
    assert judged.words == "62.0 against 60.0, +2.0 ± 0.7 over 2 seeds"  # sqrt(0.5)


def test_a_joint_row_has_an_accuracy_and_no_mean_over_tasks() -> None:
    """It has one task; others' means over growing tasks are higher, whatever they know."""
    found = experiment()
    (joint,) = [row for row in found.rows if row.joint]
    cells = plan.make(found)
    done = {c.name: content(c.name, 60.0) for c in cells}
    by_row = {e.row: e for e in entries(found, cells, done)}
    assert by_row[joint.title].faa.mean == 60.0
    assert by_row[joint.title].aia.mean is None
    assert {s.mean for s in by_row[joint.title].forgetting.values()} == {None}
    assert by_row[joint.title].by_seed["aia"] == by_row[joint.title].by_seed["forgetting"] == {}
    assert by_row["NCM"].aia.mean is not None
    for metric in ("aia", "forgetting"):
        with pytest.raises(ConfigError, match=f"compares {metric}, which the joint row"):
            experiment(claims=[{**CLAIM, "right": joint.title, "metric": metric}])


def test_both_forms_of_the_report_show_the_same_and_say_what_is_missing(tmp_path) -> None:
    papers = [{"source": "S", "setting": "T <b>", "figures": {"NCM": {"beta=1": {"faa": 65.6}}}}]
    found = experiment(papers=papers, claims=[CLAIM], differences=["fewer images"])
    cells = plan.make(found)
    done = {
        name: content(name, faa)
        for name, faa in (("NCM/beta=1/1", 60.0), ("NCM/beta=1/2", 64.0), ("Ridge/beta=1/1", 50.0))
    }
    done["Ridge/beta=1/1"]["notes"] = ["class 'a' has only 3 train images"]
    failed = {"Joint/beta=1/1": "the swarm ended with code 1"}
    paths = report.write(tmp_path, found, cells, done, failed, "scripts/reproduce X")
    text, page, lines = (path.read_text() for path in paths)
    assert lines.splitlines()[1].startswith("NCM,beta=1,1,fedncm,60.0,50.0,5.0,100,")
    assert len(lines.splitlines()) == 4
    for words in ("62.0 ± 2.8 (65.6)", "7 of 10 cells", "the swarm ended", "fewer images",
                  "scripts/reproduce X", "NCM wins", "holds"):  # fmt: skip
        assert words in text, words
        assert words in page, words
    assert "T &lt;b&gt;" in page
    assert page.count("<svg") == 1  # beta=1 alone has curves
    assert "accuracy over all classes seen, mean over seeds, percent: drawn in report.html" in text
    assert "n = 1 or 2 seeds" in text
    assert "- Ridge/beta=1/1: class 'a' has only 3 train images" in text
    assert "60.0 against 50.0, one seed; standard error of the test images 1.4" in text
    assert "| row | partition | update |" in text  # a connection has no bytes of its own
    assert "<script" not in page
    assert "| after | task 0 | task 1 |" in text
    assert '<td class="h' in page


def test_time_left_follows_what_was_measured() -> None:
    a, b, *_, joint = plan.make(experiment())
    budget = TimeBudget(jobs=2)
    assert budget.left([a, b, joint]) == 15.0  # three of ten seconds, two at a time
    budget.measured(a, 40.0)
    assert budget.of(b) == 40.0  # of the same row
    assert budget.of(joint) == 40.0  # another one: 10 s expected, four times as slow
    budget.measured(b, 20.0)
    assert budget.of(a) == 30.0
    assert budget.left([], [(a, 25.0, HowFar())]) == 5.0
    assert budget.left([], [(a, 100.0, HowFar())]) == 10.0  # overdue: never "no time left"
    quarter = HowFar(share=0.25, at_s=20.0)
    assert budget.left([], [(a, 25.0, quarter)]) == 5.0  # its row's time is known
    assert budget.left([], [(a, 32.0, quarter)]) == 48.0  # and over: its own pace
    assert budget.left([], [(joint, 22.0, quarter)]) == 58.0  # no time is known of its row
    assert budget.left([], [(joint, 90.0, quarter)]) == 7.0  # nothing new for 70 s
    assert (
        describe_plan(3, 5, 15.0, 2)
        == "3 cells to run (2 of 5 are there already), about 15.0 s, 2 at a time"
    )


def test_a_report_says_once_what_has_no_result(tmp_path) -> None:
    said = [{"source": "S", "setting": "T", "figures": {"Joint": {"beta=1": {"faa": 65.6}}}}]
    found = experiment(papers=said, claims=[CLAIM, {**CLAIM, "text": "NCM wins again"}])
    done = {"NCM/beta=1/1": content("NCM/beta=1/1", 60.0)}
    report.write(tmp_path, found, plan.make(found), done, {}, "scripts/reproduce X")
    text = (tmp_path / "report.md").read_text()
    assert "No result yet, in no partition: Ridge." in text
    assert "| Ridge |" not in text
    assert "| Joint | - | - (65.6) |" in text, "the paper's figure stays where ours is missing"
    assert text.count("no seed of both rows is finished") == 1
    assert "- NCM wins (NCM / Ridge, beta=1, FAA)\n- NCM wins again (NCM / Ridge" in text
    assert "| here | claim |" not in text
