"""Runs wait in the order of their submission, begin once, and never stop a server when damaged."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fcil_protocol.errors import ConfigError, UsageError
from fcil_server.federation.config import Config, load
from fcil_server.federation.partition_plan import PartitionPlan
from fcil_server.federation.sections import RunSection
from fcil_server.ledger.enums import RunStatus
from fcil_server.ledger.ledger import Ledger
from fcil_server.runs import run_queue, run_record
from fcil_server.runs.run_queue import FACT, QueuedRun, RunQueue, config_for, next_run

NCM = {"method": {"name": "fedncm"}}


@pytest.fixture
def queue(tmp_path: Path) -> RunQueue:
    return RunQueue(tmp_path)


def submit(queue: RunQueue, *titles: str, settings: Any = NCM) -> list[QueuedRun]:
    run_queue.check_whole(settings, load(None), None)
    return [queue.append(title, settings, "uid 1") for title in titles]


def add_run(ledger: Ledger, facts: dict[str, Any], status: RunStatus) -> str:
    run = f"r20260101-000000-{len(ledger.runs.all()):04x}"
    ledger.runs.add(
        run, method="fedncm", method_version="1", config="", hparams={}, backbone={},
        schema_digest="", seed=1, environment=facts,
    )  # fmt: skip
    ledger.runs.set_status(run, status)
    return run


@pytest.fixture
def ledger(tmp_path: Path) -> Any:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        yield ledger


def test_entries_keep_their_order_over_cancellations_and_processes(
    queue: RunQueue, tmp_path: Path
) -> None:
    assert RunQueue(tmp_path).entries() == []
    one, two, three = submit(queue, "one", "two", "three")
    assert queue.cancel(2) == two
    assert RunQueue(tmp_path).entries() == [one, three]
    queue.cancel(3)
    (four,) = submit(queue, "four")
    assert [e.number for e in queue.entries()] == [1, 4], "no number is given twice"
    assert four.settings == NCM
    with pytest.raises(UsageError, match=r"number 2 waits.*There are: 1, 4"):
        queue.cancel(2)
    assert (tmp_path / "queue").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "queue" / "000001.json").stat().st_mode & 0o777 == 0o600


def deep(levels: int) -> list[Any]:
    """Return a list in a list in a list."""
    inner: list[Any] = []
    for _ in range(levels):
        inner = [inner]
    return inner


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"federation": {"listen": "0.0.0.0:1"}}, r"\[federation\] is no section of a single run"),
        ({"sinks": {}}, r"\[sinks\] is no section"),
        ({"method": {"name": "fedncn"}}, "fedncn"),
        ({"method": {"name": "fedncm", "lr": 1}}, "lr"),
        ({"tasks": {"schedule": "listed"}}, r"tasks\.classes is empty"),
        ({"round": {"rounds_per_tasks": 2}}, r"did you mean 'round\.rounds_per_task'"),
        ({"method": "fedncm"}, "method is a section"),
        ({"run": [1]}, "run is a section"),
        ({"wire": {"window_mb": 32}}, "window_mb belongs to the server"),
        ({"wire": 5}, "wire is a section"),
        ({"run": {"weights": "\ud800"}}, "text that cannot be stored"),
        ({"run": {"weights": "a\0b"}}, "text that cannot be stored"),
        ({"run": {"x": deep(900)}}, "more than 8 levels"),
        ({"run": {"seed": 10**30}}, r"run\.seed"),
        ({"run": {f"k{n}": 1 for n in range(500)}}, "unknown key 'run.k0'.*and 480 more"),
    ],
)
def test_wrong_settings_are_refused_when_they_are_submitted(
    queue: RunQueue, tmp_path: Path, settings: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        submit(queue, "", settings=settings)
    assert not (tmp_path / "queue").exists()


def test_a_run_has_the_federations_settings_but_those_of_its_method_and_tasks() -> None:
    base = load(
        None,
        ["method.name=pilora", "method.preset=short", "run.seed=7", "round.min_clients=3"],
    )
    settings = {"method": {"name": "fedncm"}, "round": {"rounds_per_task": 2}}
    found = run_queue.check(settings, base)
    assert (found.method.name, found.method.options) == ("fedncm", {})
    assert (found.run.seed, found.round.min_clients, found.round.rounds_per_task) == (7, 3, 2)
    assert run_queue.check({}, base) == base
    listed = run_queue.check({"tasks": {"schedule": "listed", "classes": [["a"]]}}, base)
    assert (listed.tasks.classes, listed.method.name) == ([["a"]], "pilora")


def test_the_next_run_begins_when_the_one_before_it_is_over(
    queue: RunQueue, ledger: Ledger
) -> None:
    one, two = submit(queue, "one", "two")
    assert next_run(queue, ledger, new=False) == (None, one)
    assert next_run(queue, ledger, new=True) == (None, None)
    run = add_run(ledger, {FACT: one.facts()}, RunStatus.RUNNING)
    row, entry = next_run(queue, ledger, new=False)
    assert (row and row.run_id, entry) == (run, None)
    assert queue.entries() == [two], "its run is in the ledger, so it has begun"
    for status, expected in (
        (RunStatus.FAILED, (run, None)),
        (RunStatus.STOPPED, (None, two)),
        (RunStatus.DONE, (run, None)),  # its results are still to be written
    ):
        ledger.runs.set_status(run, status)
        row, entry = next_run(queue, ledger, new=False)
        assert (row and row.run_id, entry) == expected, status
    results = ledger.path.parent / "runs" / run / "summary.json"
    results.parent.mkdir(parents=True)
    results.write_text('{"data": {"run_status": "done"}}')
    assert next_run(queue, ledger, new=False) == (None, two)
    queue.cancel(2)
    row, entry = next_run(queue, ledger, new=False)
    assert (row and row.run_id, entry) == (run, None), "a complete run stays open"
    ledger.runs.set_status(run, RunStatus.STOPPED)
    assert next_run(queue, ledger, new=False) == (None, None)


def test_a_resumed_run_gets_the_settings_of_its_submission(ledger: Ledger) -> None:
    base: Config = load(None, ["method.name=pilora"])
    entry = QueuedRun(1, "ab", "", 1.0, "uid 1", NCM)
    add_run(ledger, {FACT: entry.facts()}, RunStatus.RUNNING)
    assert config_for(ledger.runs.newest(), None, base).method.name == "fedncm"
    assert config_for(None, entry, base).method.name == "fedncm"
    assert config_for(None, None, base) == base
    moved = ["run.device=cpu", "run.seed=9", "method.name=pilora", "round.deadline_s=5"]
    found = config_for(ledger.runs.newest(), None, base, moved)
    assert (found.run.device, found.run.seed, found.method.name) == ("cpu", 1993, "fedncm")
    add_run(ledger, {}, RunStatus.RUNNING)
    assert config_for(ledger.runs.newest(), None, base) == base


def test_a_copied_entry_is_no_second_run(queue: RunQueue, tmp_path: Path) -> None:
    (one,) = submit(queue, "one")
    folder = tmp_path / "queue"
    (folder / "000777.json").write_bytes((folder / "000001.json").read_bytes())
    assert queue.waiting() == [one]
    assert queue.next() == one
    assert "its number is 1" in queue.entries()[1].refused


@pytest.mark.parametrize(
    "field",
    [{"number": "1"}, {"settings": {"method": []}}, {"settings": []}, {"title": 3}, {"x": 1}],
)
def test_an_entry_with_fields_of_another_kind_is_damaged(
    queue: RunQueue, tmp_path: Path, field: dict[str, Any]
) -> None:
    submit(queue, "one")
    path = tmp_path / "queue" / "000001.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **field}))
    (found,) = queue.entries()
    assert found.refused.startswith("queue/000001.json is damaged")
    assert run_queue.describe_waiting(tmp_path)[0]["number"] == 1


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b"{}", b'{"format": 2}', b"\xff", b"null", b'"x"', b"[" * 99_999]
)
def test_a_damaged_entry_is_named_and_the_next_one_has_its_turn(
    queue: RunQueue, ledger: Ledger, tmp_path: Path, damage: bytes
) -> None:
    _, two = submit(queue, "one", "two")
    (tmp_path / "queue" / "000001.json").write_bytes(damage)
    first, second = queue.entries()
    assert first.refused.startswith("queue/000001.json is damaged")
    assert second == two
    assert next_run(queue, ledger, new=False) == (None, two)
    queue.cancel(1)
    assert queue.entries() == [two]


def test_a_refused_entry_stays_with_its_reason_and_its_settings(queue: RunQueue) -> None:
    one, two = submit(queue, "one", "two")
    queue.refuse(one, ConfigError("no such weights."))
    assert queue.entries() == [dataclasses.replace(one, refused="no such weights."), two]
    assert queue.waiting() == [two]
    assert queue.next() == two


def test_foreign_files_in_the_folder_are_left_alone(queue: RunQueue, tmp_path: Path) -> None:
    (one,) = submit(queue, "one")
    for name in ("notes.txt", "1.json", ".000002.json.1-abcdabcd.tmp", "0000001.json"):
        (tmp_path / "queue" / name).write_text("x")
    assert queue.entries() == [one]


def test_a_title_cannot_write_to_the_terminal_and_the_queue_has_an_end(
    queue: RunQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = submit(queue, " a\x1b[2J\nb " + "x" * 500)
    assert "\x1b" not in one.title
    assert "\n" not in one.title
    assert len(one.title) == run_queue.MAX_TITLE
    monkeypatch.setattr(run_queue, "MAX_QUEUED", 1)
    with pytest.raises(UsageError, match=r"run cancel NUMBER"):
        submit(queue, "two")


def test_the_submission_in_the_ledger_is_what_was_submitted(queue: RunQueue) -> None:
    (one,) = submit(queue, "one")
    assert json.loads(json.dumps(one.facts())) == {
        "number": 1, "id": one.id, "title": "one", "at": one.at, "by": "uid 1", "settings": NCM,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({"central_test": "/no/such/images"}, r"run\.central_test: there is no folder or file"),
        ({"init_from": "/no/such/adapter"}, "fedncm cannot begin with an adapter"),
    ],
)
def test_what_a_run_needs_and_is_not_there_is_said_at_once(
    queue: RunQueue, run: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        submit(queue, "x", settings={**NCM, "run": run})
    assert queue.entries() == []


def test_a_file_that_holds_no_images_is_said_at_once(queue: RunQueue, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no images")
    settings = {**NCM, "run": {"central_test": str(tmp_path / "notes.txt")}}
    with pytest.raises(ConfigError, match=r"run\.central_test: .*notes\.txt"):
        submit(queue, "x", settings=settings)


def test_a_folder_with_more_files_than_test_images_have_is_refused(
    queue: RunQueue, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "tree" / "below").mkdir(parents=True)
    for number in range(4):
        (tmp_path / "tree" / "below" / f"{number}.txt").touch()
    monkeypatch.setattr(run_record, "MOST_LOOKED_AT", 4)
    settings = {**NCM, "run": {"central_test": str(tmp_path / "tree")}}
    with pytest.raises(ConfigError, match=r"run\.central_test: .* more than 4 files and folders"):
        submit(queue, "x", settings=settings)


def test_a_look_at_test_images_ends_once_its_caller_is_cancelled(tmp_path: Path) -> None:
    run = RunSection(central_test=str(tmp_path))
    begun = threading.Event()
    refused: list[str] = []

    def look(abandoned: Callable[[], bool]) -> None:
        begun.set()
        while not abandoned():
            pass
        try:
            run_record.check_central_test(run, abandoned)
        except ConfigError as error:
            refused.append(error.message)

    async def leave() -> None:
        task = asyncio.create_task(run_record.in_thread(look))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())  # waits for the thread
    assert refused == ["run.central_test: the server ends before it has seen the images."]


def test_an_adapter_that_is_not_there_is_said_at_once(queue: RunQueue) -> None:
    settings = {"method": {"name": "fedavg_lora"}, "run": {"init_from": "/no/such/adapter"}}
    with pytest.raises(ConfigError, match=r"run\.init_from: there is no folder"):
        submit(queue, "x", settings=settings)


def test_a_run_whose_partition_it_would_never_learn_is_not_taken(tmp_path: Path) -> None:
    plan = PartitionPlan(Path("p.json"), [["cat"]], 3, 2)
    settings = {
        **NCM,
        "tasks": {"schedule": "listed", "classes": plan.tasks},
        "round": {"min_clients": 9, "rounds_per_task": 2},
    }
    fields = {"title": "x", "settings": settings, "partition": plan.to_fields()}
    with pytest.raises(ConfigError, match="no round would ever open"):
        run_queue.submit(tmp_path, load(None), fields, "uid 1")
    settings["round"] = {"min_clients": 3, "rounds_per_task": 5}
    with pytest.raises(ConfigError, match="clients would decline the others"):
        run_queue.submit(tmp_path, load(None), fields, "uid 1")
    settings["round"] = {"min_clients": 3, "rounds_per_task": 2}
    assert run_queue.submit(tmp_path, load(None), fields, "uid 1").number == 1


def test_a_run_that_has_begun_does_not_need_the_places_of_its_beginning(queue: RunQueue) -> None:
    settings = {"method": {"name": "fedavg_lora"}, "run": {"init_from": "/gone/since"}}
    assert run_queue.check(settings, load(None)).run.init_from == "/gone/since"


def test_no_number_is_given_twice_after_a_restore(queue: RunQueue, ledger: Ledger) -> None:
    """A backup has no file of the last one."""
    (first,) = submit(queue, "night")
    add_run(ledger, {FACT: {**first.facts(), "number": 7}}, RunStatus.DONE)
    queue.keep_numbers(ledger)
    assert submit(queue, "next")[0].number == 8
