"""What a server takes of a partition, and when it refuses to learn it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sample_run
from fcil_protocol.errors import ConfigError, CorruptFile, DataError, UsageError
from fcil_server.federation.config import Config, load, to_toml
from fcil_server.federation.partition_plan import (
    PartitionPlan,
    check_fits,
    check_resumes,
    plan_settings,
    read_plan,
)
from fcil_server.ledger.enums import RunStatus
from fcil_server.ledger.ledger import Ledger

TASKS = [["cat", "großer Hund"], ['"\\ 🐦 #']]


def write(path: Path, *, seal: bool = True, **changed: Any) -> Path:
    """Write what the server reads of a partition, and some of the rest."""
    fields = {
        "format": 1, "kind": "quantity", "clients": 3, "tasks": TASKS, "images": {"train": {}},
        "rounds": [], **changed,
    }  # fmt: skip
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    fields["digest"] = hashlib.sha256(text.encode()).hexdigest() if seal else "0" * 64
    path.write_text(json.dumps(fields, indent=1), encoding="utf-8")
    return path


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.sqlite") as opened:
        yield opened


def plan(**changed: Any) -> PartitionPlan:
    return PartitionPlan(
        **{"path": Path("p.json"), "tasks": TASKS, "clients": 3, "rounds": None} | changed
    )


def config(*more: str, of: PartitionPlan | None = None) -> Config:
    return load(None, (*plan_settings(of or plan()), *more))


def test_it_takes_the_tasks_in_their_order_whatever_the_names_hold(tmp_path: Path) -> None:
    found = read_plan(write(tmp_path / "p.json"))
    assert (found.tasks, found.clients, found.rounds) == (TASKS, 3, None)
    taken = load(None, plan_settings(found))
    assert (taken.tasks.schedule, taken.tasks.classes) == ("listed", TASKS)
    assert taken.round.min_clients == 3, "a round without one would learn another division"


def test_it_knows_for_how_many_rounds_a_hepco_partition_was_drawn(tmp_path: Path) -> None:
    drawn = [[[{}], [{}]], [[{}], [{}]]]
    assert read_plan(write(tmp_path / "p.json", rounds=drawn)).rounds == 2


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"seal": False}, "does not match its digest"),
        ({"format": 2}, "format 2, expected 1"),
        ({"tasks": None}, "has not the form of a partition"),
    ],
)
def test_a_file_that_is_no_intact_partition_is_refused(
    changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(CorruptFile, match=said) as error:
        read_plan(write(tmp_path / "p.json", **changed))
    assert "fcil-client split" in error.value.action


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000, '{"digest": 1}'])
def test_another_file_is_refused_in_a_sentence(text: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(CorruptFile, match="cannot be used"):
        read_plan(path)


def test_no_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no partition"):
        read_plan(tmp_path / "p.json")


def test_settings_that_fit_are_taken(ledger: Ledger) -> None:
    for one in (plan(), plan(rounds=5)):
        fitting = config("round.min_clients=2", "round.rounds_per_task=5", of=one)
        check_fits(one, fitting)
        check_resumes(one, ledger)


@pytest.mark.parametrize(
    ("setting", "said", "remedy"),
    [
        ('tasks.classes=[["cat"]]', "set to other tasks", "--partition out"),
        ("round.min_clients=4", "no round would ever open", "-c round.min_clients=3"),
        ("round.rounds_per_task=6", "clients would decline", "split --rounds 6"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_the_remedy(
    setting: str, said: str, remedy: str, ledger: Ledger
) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        check_fits(plan(rounds=5), config(setting))
    assert remedy in error.value.action


@pytest.mark.parametrize(
    ("status", "tasks", "fits"),
    [
        (RunStatus.RUNNING, [["cat"]], False),
        (RunStatus.DONE, [["cat"]], False),
        (RunStatus.STOPPED, [["cat"]], True),
        (RunStatus.RUNNING, TASKS, True),
    ],
)
def test_a_run_that_goes_on_has_these_tasks(
    status: RunStatus, tasks: list[list[str]], fits: bool
) -> None:
    own = to_toml(config(f"tasks.classes={json.dumps(tasks, ensure_ascii=False)}"))
    row = SimpleNamespace(run_id=sample_run.RUN, status=status, config=own)
    ledger: Any = SimpleNamespace(runs=SimpleNamespace(newest=lambda: row))
    if fits:
        check_resumes(plan(), ledger)
        return
    with pytest.raises(ConfigError, match="has other tasks than p.json") as error:
        check_resumes(plan(), ledger)
    assert "--new-run" in error.value.action


def test_a_plan_travels_in_a_command_and_nothing_else_is_taken_for_one() -> None:
    for one in (plan(), plan(rounds=5)):
        assert PartitionPlan.of(json.loads(json.dumps(one.to_fields()))) == one
    for other in (None, [], {}, {**plan().to_fields(), "clients": "3"}):
        with pytest.raises(UsageError, match="a partition has"):
            PartitionPlan.of(other)
