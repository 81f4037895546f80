"""What is run, kept, run again and left alone; cells are small functions here."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from adapters.picture_kit import png
from fcil_adapters.images.decoding import open_source
from fcil_adapters.worker.feature_folder import file_of
from fcil_protocol.errors import DataError, DiskFull, NotYet, RunFailed
from fcil_server.federation import config as configuration
from fcil_server.lab import cell, data, plan, runner
from fcil_server.lab.cell import CellInputs, Stopped
from fcil_server.lab.data import PartitionImages
from fcil_server.lab.engine import Engine
from fcil_server.lab.progress import HowFar, Show, TimeBudget
from fcil_server.lab.records import of_cells
from fcil_server.lab.results import Results
from server.lab.kit import content, experiment


class Quiet(Show):
    """Keeps what would be said."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def progress(self, *_: object) -> None:
        return


class Lab:
    """An experiment whose cells are computed by `numbers`, and what became of them."""

    def __init__(self, folder, digest: str = "p") -> None:
        self.results = Results(folder)
        self.results.make()
        self.cells = plan.make(experiment())
        self.parts = {
            c.split.slug: PartitionImages(
                folder, digest + c.split.slug, "d", (("a",),), 8, ("few images",)
            )
            for c in self.cells
        }
        self.known = self.results.add_sources("backbone", self.parts)
        self.ran: list[str] = []
        self.known_failures: list[dict[str, str]] = []
        self.show = Quiet()

    def pending(self) -> list[runner.Pending]:
        def work(_cell, key: str) -> CellInputs:
            room = self.results.cell_directory(key)
            return CellInputs(room, room, (("a",),), room, "", room, "")

        return runner.pending_cells(self.cells, self.known, self.results, work)

    def numbers(self, cell, work, stop, tell):
        self.ran.append(cell.name)
        work.room.mkdir()
        tell(HowFar("task 1 of 2", 0.0))
        return content(cell.name, 50.0)

    def run(self, run_cell=None, jobs: int = 1) -> dict[str, str]:
        failed: dict[str, str] = {}
        runner.run(
            self.pending(), self.known, self.results, TimeBudget(jobs), self.show, failed,
            after=lambda: self.after(failed), run_cell=run_cell or self.numbers,
        )  # fmt: skip
        return failed

    def after(self, failed: dict[str, str]) -> None:
        self.known_failures.append(dict(failed))


def test_a_cell_that_has_a_result_is_not_run_again(tmp_path) -> None:
    lab = Lab(tmp_path)
    assert lab.run() == {}
    assert lab.results.load(lab.known.key(lab.cells[0]))["notes"] == ["few images"]
    assert len(lab.ran) == 8  # of ten cells, two pairs of joint ones share a result
    assert set(lab.results.finished(lab.cells, lab.known)) == {c.name for c in lab.cells}
    again = Lab(tmp_path)
    assert again.pending() == []
    assert list((tmp_path / "work").iterdir()) == []


def test_the_cache_of_frozen_features_says_what_it_was_used_for(tmp_path) -> None:
    lab = Lab(tmp_path)
    used = {"read": 1200, "computed": 30, "removed": 0, "faults": ["the disk is full."]}
    none = {"read": 0, "computed": 0, "removed": 0, "faults": []}

    def run_cell(cell, work, stop, tell):
        found = {"Joint": none, "Ridge": used | {"removed": 7}, "NCM": used}[cell.row]
        return {**lab.numbers(cell, work, stop, tell), "features": found}

    lab.run(run_cell)
    said = lab.show.lines  # in any order: cells run side by side
    whole = "NCM/beta=1/1: FAA 50.0 %, AIA 50.0 %, 10.0 s, features 1,200 read and 30 computed"
    assert any(line.endswith(whole) for line in said)
    assert any(line.endswith("Joint/alpha=1/1: FAA 50.0 %, AIA 50.0 %, 10.0 s") for line in said)
    assert lab.show.lines.count("Ridge/beta=1/2: the disk is full.") == 1
    engine = Engine(experiment(), lab.cells, lab.cells, lab.results, "")
    file_of(lab.results.features, 1).parent.mkdir()
    file_of(lab.results.features, 1).write_bytes(bytes(12_000))
    keys = list(dict.fromkeys(lab.known.key(c) for c in lab.cells))
    engine._say_features(keys, lab.show)
    assert lab.show.lines[-1] == (
        "frozen features of 6 cells: 7,200 read from the cache, 180 computed; "
        "it has 12.0 kB of at most 1,000 MB; 14 of the least used made room for others"
    )
    records = {r["row"]: r for r in of_cells(lab.cells, lab.results.finished(lab.cells, lab.known))}
    assert (records["NCM"]["features_read"], records["NCM"]["features_computed"]) == (1200, 30)
    text = "".join(p.read_text() for p in engine.write_report())
    assert "8 of 10 cells read frozen features" not in text
    assert "6 of 10 cells read frozen features that other cells had computed" in text


def test_cells_share_one_folder_of_features_within_the_bound_of_the_toml(tmp_path) -> None:
    lab = Lab(tmp_path)
    places = []
    for megabytes in (5, 0):
        told = experiment(budget={"cell_s": 10, "feature_cache_mb": megabytes})
        engine = Engine(told, lab.cells, lab.cells, lab.results, "")
        work = engine._work(SimpleNamespace(source=tmp_path, test=tmp_path), lab.parts, "")
        places.append([work(cell, f"key{i}").features for i, cell in enumerate(lab.cells)])
    with_cache, without = places
    assert without == [None] * len(lab.cells)
    assert {(p.folder, p.most_bytes) for p in with_cache} == {
        (tmp_path / "work/features", 5_000_000)
    }
    assert with_cache[1].counts == tmp_path / "work" / "key1" / "features.jsonl"


def test_a_partition_is_drawn_and_never_an_older_file(tmp_path) -> None:
    source = tmp_path / "images"
    for n in range(40):
        path = source / "train" / f"digit-{n % 10}" / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(n))
    split = plan.make(experiment(data={"name": "digits", "classes": 10, "tasks": 2}))[1].split
    images = data.Images(source, source)
    made = data.partition(images, split, tmp_path)
    whole = made.path.read_bytes()
    older = whole.replace(made.digest.encode(), b"0" * len(made.digest))
    assert older != whole
    for other in (whole[:300], b"[]", b'{"digest": 3}', older):
        made.path.write_bytes(other)
        assert data.partition(images, split, tmp_path) == made
        assert made.path.read_bytes() == whole


def test_a_partition_that_cannot_be_drawn_is_refused_in_the_commands_own_words(tmp_path) -> None:
    source = tmp_path / "images" / "train" / "digit-0"
    source.mkdir(parents=True)
    (source / "0.png").write_bytes(png())
    split = plan.make(experiment(data={"name": "digits", "classes": 10, "tasks": 2}))[1].split
    images = data.Images(tmp_path / "images", tmp_path / "images")
    with pytest.raises(DataError, match="seed 1 .*: 1 class cannot make 2 tasks") as told:
        data.partition(images, split, tmp_path)
    assert told.value.action.startswith("Ask for fewer tasks: --tasks N The experiment's TOML")


def test_results_of_another_data_set_are_not_in_the_same_table(tmp_path) -> None:
    lab = Lab(tmp_path)
    lab.run()
    some = dict(list(lab.parts.items())[:1])
    assert lab.results.add_sources("backbone", some).partitions == lab.known.partitions
    other = {slug: replace(one, source="other") for slug, one in some.items()}
    assert set(lab.results.add_sources("backbone", other).partitions) == set(some)


def test_another_partition_file_makes_every_cell_new(tmp_path) -> None:
    Lab(tmp_path).run()
    assert len(Lab(tmp_path, digest="q").pending()) == 8


def test_a_damaged_result_is_computed_again(tmp_path) -> None:
    lab = Lab(tmp_path)
    lab.run()
    first, second, third, *_ = sorted((tmp_path / "cells").iterdir())
    first.write_bytes(first.read_bytes()[:100])
    second.rename(tmp_path / "cells" / f"{'0' * 24}.json")
    third.write_text(json.dumps({**json.loads(third.read_text()), "version": 0}))
    assert len(Lab(tmp_path).pending()) == 3


def test_a_failed_cell_is_named_and_the_others_go_on(tmp_path) -> None:
    lab = Lab(tmp_path)

    def run_cell(cell, work, stop, tell):
        if cell.row == "Ridge":
            raise RunFailed("the swarm ended with code 1: no memory")
        if cell.name == "NCM/alpha=1/2":
            raise ZeroDivisionError("by zero")
        return lab.numbers(cell, work, stop, tell)

    failed = lab.run(run_cell)
    assert sorted(failed) == ["NCM/alpha=1/2", "Ridge/beta=1/1", "Ridge/beta=1/2"]
    assert "no memory" in failed["Ridge/beta=1/1"]
    assert "ZeroDivisionError" in failed["NCM/alpha=1/2"]
    assert len(lab.ran) == 5
    assert len(Lab(tmp_path).pending()) == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_what_runs_and_keeps_what_is_done(tmp_path, number) -> None:
    lab = Lab(tmp_path)
    two_begun = threading.Barrier(2)

    def run_cell(cell, work, stop, tell):
        if cell.name == "NCM/alpha=1/1":
            return lab.numbers(cell, work, stop, tell)
        if two_begun.wait(30) == 0:
            signal.pthread_kill(threading.main_thread().ident, number)
        assert stop.wait(30)
        raise Stopped

    with pytest.raises(KeyboardInterrupt):
        lab.run(run_cell, jobs=2)
    assert len(Lab(tmp_path).pending()) == 7
    assert lab.show.lines[0] == "begins: NCM/alpha=1/1"


def test_an_interruption_waits_until_a_result_is_saved(tmp_path, monkeypatch) -> None:
    lab = Lab(tmp_path)
    save = Results.save

    def run_cell(cell, work, stop, tell):
        if cell.name == "NCM/alpha=1/1":
            return lab.numbers(cell, work, stop, tell)
        assert stop.wait(30)
        raise Stopped

    def interrupted(self, *result) -> None:
        signal.raise_signal(signal.SIGINT)
        save(self, *result)

    monkeypatch.setattr(Results, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lab.run(run_cell)
    assert len(Lab(tmp_path).pending()) == 7
    assert "done:   NCM/alpha=1/1: FAA 50.0 %, AIA 50.0 %, 10.0 s" in lab.show.lines
    assert list((tmp_path / "work").iterdir()) == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interruption_at_the_very_end_is_not_lost(tmp_path, monkeypatch) -> None:
    end = runner.ThreadPoolExecutor.shutdown

    def interrupted(self, **options) -> None:
        end(self, **options)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(runner.ThreadPoolExecutor, "shutdown", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Lab(tmp_path).run()
    assert Lab(tmp_path).pending() == []


def test_a_second_interruption_acts_at_once(tmp_path, monkeypatch) -> None:
    def interrupted(_results, *_result) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("went on")

    monkeypatch.setattr(Results, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Lab(tmp_path).run()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


class Declined:
    """A federation whose clients have all declined: the server would ask again for hours."""

    def __init__(self) -> None:
        process = SimpleNamespace(poll=lambda: None, pid=os.getpid(), wait=time.sleep)
        self.server, self.clients = process, {"swarm": process}

    def status(self) -> dict[str, object]:
        waits = "clients that have declined to be able to take part"
        return {"now": {"phase": "collecting", "waiting_for": waits, "task": None}}

    def last_words(self, name: str, _lines: int) -> str:
        return {"server": "all have declined", "swarm": "half precision holds 1e+30"}[name]


def test_a_cell_whose_clients_all_decline_fails_with_their_reason(tmp_path) -> None:
    work = CellInputs(tmp_path, tmp_path, (("a",),), tmp_path, "", tmp_path, "")
    with pytest.raises(RunFailed, match=r"all have declined \| half precision holds 1e\+30"):
        cell._watch(Declined(), work, threading.Event(), lambda _: None, 1)


def test_a_report_is_told_of_failures_as_they_come_and_its_own_stops_no_cell(tmp_path) -> None:
    lab = Lab(tmp_path)
    first = lab.cells[0].name

    def run_cell(cell, work, stop, tell):
        if cell.name == first:
            raise RunFailed("boom.")
        return lab.numbers(cell, work, stop, tell)

    def after(failed):
        Lab.after(lab, failed)
        raise DiskFull("no room.")

    lab.after = after
    failed = lab.run(run_cell)
    assert failed.keys() == {first}
    assert lab.known_failures[0].keys() == {first}
    assert len(lab.ran) == 7
    assert lab.show.lines.count("after 1 cells: no room.") == 1


def test_a_run_that_ended_early_or_on_other_code_is_no_result(tmp_path, monkeypatch) -> None:
    central = SimpleNamespace(tasks=1, task_mean=[90.0])
    short = SimpleNamespace(central=central, tasks=[()])
    with pytest.raises(RunFailed, match="without an accuracy after each task"):
        cell.numbers(short, 2)

    class Ended(Declined):
        def __init__(self, _room) -> None:
            super().__init__()
            self.federation = tmp_path

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def serve(self, *_, **__):
            pass

        swarm = serve

    lab = Lab(tmp_path / "lab")
    room = tmp_path / "room"
    work = CellInputs(
        room, room, tuple(("a", f"b{t}") for t in range(2)), room, "", room, source="d" * 64
    )
    found = {"environment": {"source_digest": "d" * 64}, "seconds": {}}
    monkeypatch.setattr(cell, "LocalFederation", Ended)
    monkeypatch.setattr(cell, "_watch", lambda *_: cell.Used())
    monkeypatch.setattr(cell, "server_config", lambda *_, **__: configuration.load(None, ()))
    monkeypatch.setattr(cell, "collect", lambda *_: None)
    newest = SimpleNamespace(newest=lambda: SimpleNamespace(run_id=""))
    opened = contextlib.nullcontext(SimpleNamespace(runs=newest))
    monkeypatch.setattr(cell, "Ledger", lambda *_, **__: opened)
    monkeypatch.setattr(cell, "numbers", lambda *_: found)

    def run(now: str):
        monkeypatch.setattr(cell.source_code, "tree_digest", lambda: now)
        return cell.run(lab.cells[0], work, threading.Event(), lambda _: None)

    assert run("d" * 64) is found
    with pytest.raises(RunFailed, match="code changed after this experiment was started"):
        run("e" * 64)
    found["environment"]["source_digest"] = "e" * 64
    with pytest.raises(RunFailed, match="code changed"):
        run("d" * 64)
    found["environment"]["source_digest"] = "d" * 64
    now = iter(["d" * 64, "e" * 64])  # while it ran
    monkeypatch.setattr(cell.source_code, "tree_digest", lambda: next(now))
    with pytest.raises(RunFailed, match="code changed"):
        cell.run(lab.cells[0], work, threading.Event(), lambda _: None)


def test_a_folder_without_results_says_so(tmp_path) -> None:
    with pytest.raises(NotYet, match="no results yet"):
        Results(tmp_path).known()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(NotYet, match="cannot be read"):
        Results(tmp_path).known()


def test_test_images_are_the_same_in_every_experiment_and_of_every_class(tmp_path) -> None:
    source = data.write_digits(tmp_path / "digits")
    wanted = experiment(data={"name": "digits", "classes": 10, "tasks": 5, "test_per_class": 3})
    first = data.find(wanted, None, tmp_path).test
    names = sorted(p.relative_to(first).as_posix() for p in first.rglob("*.png"))
    assert len(names) == 30
    assert {n.partition("/")[0] for n in names} == {str(i) for i in range(10)}
    other = tmp_path / "other"
    other.mkdir()
    second = data.find(wanted, None, other).test
    same = [(first / n).read_bytes() == (second / n).read_bytes() for n in names]
    assert all(same)
    trained = {p.read_bytes() for p in (source / "train").rglob("*.png")}
    assert not trained & {p.read_bytes() for p in first.rglob("*.png")}
    too_many = experiment(data={"name": "digits", "classes": 10, "tasks": 5, "test_per_class": 50})
    with pytest.raises(DataError, match="has 3. test images, not 50"):
        data.find(too_many, None, tmp_path)


def test_images_come_in_every_form_and_by_name(tmp_path, monkeypatch) -> None:
    """The laboratory opens what a client opens; its own copies of test images are class folders."""
    monkeypatch.setenv("FCIL_DATASETS", str(tmp_path / "sets"))
    wanted = experiment(data={"name": "pets", "classes": 2, "tasks": 2, "test_per_class": 1})
    with pytest.raises(DataError, match="cifar100 is not on this machine"):
        data.find(wanted, Path("cifar100"), tmp_path)
    rows = ["path,label,split"]
    for number, label in enumerate(("cat", "dog") * 2):
        (tmp_path / f"{number}").write_bytes(png(number))
        rows.append(f"{number},{label},test")
    (tmp_path / "list.csv").write_text("\n".join(rows))
    found = data.find(wanted, tmp_path / "list.csv", tmp_path)
    assert found.source == tmp_path / "list.csv"
    listing = open_source(found.test).listing()
    assert [e.class_name for e in listing.entries] == ["cat", "dog"]


def test_a_cells_share_counts_the_rounds_that_are_over() -> None:
    now = {"task": 4, "kind": "train", "round": 2, "rounds": 5}
    assert cell._how_far(now, 10) == ("task 5 of 10, train round 3 of 5", pytest.approx(0.44), 0.0)
    one = {"task": 4, "kind": "collect", "round": 0, "rounds": 1}
    assert cell._how_far(one, 10) == ("task 5 of 10", pytest.approx(0.4), 0.0)
    keys = {"task": 4, "kind": "keys", "round": 1, "rounds": 2}  # of rounds whose number is unknown
    assert cell._how_far(keys, 10).share == pytest.approx(0.4)
    assert cell._how_far({"task": None}, 10) == HowFar()


def test_a_cells_share_never_falls_and_keeps_the_time_of_its_last_rise() -> None:
    far = HowFar().then(HowFar("train", 0.4), 40.0).then(HowFar("train", 0.4), 45.0)
    assert far == ("train", 0.4, 40.0)
    assert far.then(HowFar("finish", 0.3), 50.0) == ("finish", 0.4, 40.0)
    assert far.then(HowFar(), 50.0).then(HowFar("train", 0.5), 60.0) == ("train", 0.5, 60.0)


def test_the_time_left_follows_how_far_a_running_cell_is(tmp_path) -> None:
    lab, seen = Lab(tmp_path), []

    class Budget(TimeBudget):
        def left(self, waiting, running=()):
            seen.extend(far for _, _, far in running)
            return 0.0

    def run_cell(cell, work, stop, tell):
        work.room.mkdir()
        tell(HowFar("half", 0.5))
        while not any(far.share for far in seen):
            assert not stop.wait(0.01)
        return content(cell.name, 50.0)

    runner.run(
        lab.pending()[:1], lab.known, lab.results, Budget(), lab.show, {},
        after=lambda: None, run_cell=run_cell,
    )  # fmt: skip
    assert {far.text for far in seen} == {"half"}
    assert all(0.0 <= far.at_s < 60.0 for far in seen)
