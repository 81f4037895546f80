"""A fork begins where its parent stood: with all of it up to a state, and nothing more."""

from __future__ import annotations

from pathlib import Path

import pytest

from fcil_protocol.errors import CorruptFile, DiskFull, UsageError
from fcil_protocol.ids import RunId
from fcil_server.aggregation import start
from fcil_server.aggregation.store import kept_states
from fcil_server.ledger.enums import OPENING, RunStatus
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import RunRow
from fcil_server.ledger.runs import Forks
from fcil_server.runs import fork as module
from fcil_server.runs.forget import finish_emptying
from fcil_server.runs.fork import choose_state, fork
from fcil_server.storage.check import check
from fcil_server.storage.findings import Severity
from server.storage_kit import ALICE, BOB, TASKS, Built, build, flip, killed_at, tree
from tiers import sampled


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build(tmp_path / "fed")


def forked(built: Built, state: int) -> RunRow:
    with built.ledger() as ledger:
        return fork(ledger, built.directory, built.run, state, actor="me", action="rollback")


def rounds(ledger: Ledger, run: RunId) -> list[tuple[int, str, int]]:
    return [(r.task, r.kind, r.round) for r in ledger.rounds.all(run)]


def test_a_fork_at_the_end_of_a_task_has_the_task_and_its_results(built: Built) -> None:
    row = forked(built, 2)
    with built.ledger() as ledger:
        old, new = ledger.runs.all()
        assert new == row
        assert (new.parent_run, new.parent_state, new.inherited) == (built.run, 2, 3)
        assert (old.status, new.status) == (RunStatus.STOPPED, RunStatus.RUNNING)
        assert new.config == old.config
        assert rounds(ledger, new.run_id) == [(0, "train", 0), (0, "train", 1), (0, "evaluate", 0)]
        assert [s.state for s in ledger.states.all(new.run_id)] == [0, 1, 2]
        (task,) = ledger.tasks.all(new.run_id)
        assert task.closed_at is not None
        assert {e.task for e in ledger.evaluations.all(new.run_id)} == {0}
        for entry in ledger.rounds.all(new.run_id):
            assert {u.client for u in ledger.updates.of_round(entry.key)} == {ALICE, BOB}
        assert ledger.rounds.current(new.run_id) is None
        assert ledger.rounds.current(built.run) is not None  # the old run is as it was
    kept = sorted(p.name for p in module.states_folder(built.directory, row.run_id).iterdir())
    assert kept == [f"{n:06d}.{s}" for n in range(3) for s in ("json", "safetensors")]


def test_names_of_later_tasks_wait_again_and_get_the_same_ids(built: Built) -> None:
    row = forked(built, 2)
    with built.ledger() as ledger:
        registry = module_registry(ledger, row.run_id)
        assert [c.key for c in registry.pending()] == ["cat", "dog", "eel", "fox"]
        assert registry.names() == {0: "ant", 1: "bee"}
        assert registry.open_task(1, only={"eel"}).classes == (2,)


def test_a_listed_plan_stays(tmp_path: Path) -> None:
    built = build(tmp_path / "fed", schedule="listed")
    row = forked(built, 2)
    with built.ledger() as ledger:
        registry = module_registry(ledger, row.run_id)
        assert registry.listed_tasks() == len(TASKS)
        assert registry.open_task(1).classes == (2, 3)


def module_registry(ledger: Ledger, run: RunId):
    from fcil_server.rounds.classes import ClassRegistry

    return ClassRegistry(ledger, run)


@pytest.mark.parametrize(
    ("state", "closed", "tested"),
    [
        (0, [], set()),
        (1, [(0, "train", 0)], set()),
        (3, [(0, "train", 0), (0, "train", 1), (0, "evaluate", 0)], {0}),
        (4, [(0, "train", 0), (0, "train", 1), (0, "evaluate", 0), (1, "train", 0)], {0}),
    ],
)
def test_a_fork_in_the_middle_goes_on_in_the_middle(
    built: Built, state: int, closed: list[tuple[int, str, int]], tested: set[int]
) -> None:
    row = forked(built, state)
    with built.ledger() as ledger:
        assert rounds(ledger, row.run_id) == closed
        assert {e.task for e in ledger.evaluations.all(row.run_id)} == tested
        ends = [t.closed_at is not None for t in ledger.tasks.all(row.run_id)]
        assert ends == [True] * (len(ends) - 1) + [False]
        assert ledger.states.newest(row.run_id).state == state
        assert ledger.database.faults() == []


def test_what_was_copied_is_counted_once_over_all_runs(built: Built) -> None:
    with built.ledger() as ledger:
        before = ledger.updates.rounds_by_client(), ledger.bytes.by_client()
    row = forked(built, 5)
    with built.ledger() as ledger:
        assert (ledger.updates.rounds_by_client(), ledger.bytes.by_client()) == before
        mine = [b for b in ledger.bytes.all(row.run_id) if b.task == 1]
        assert sum(b.wire for b in mine) == 3 * 2 * 2 * 1000  # the fork's own report has them


def test_a_fork_of_a_fork_counts_nothing_twice(built: Built) -> None:
    with built.ledger() as ledger:
        before = ledger.updates.rounds_by_client()
        first = fork(ledger, built.directory, built.run, 5, actor="me", action="rollback")
        second = fork(ledger, built.directory, first.run_id, 2, actor="me", action="rollback")
        assert second.inherited == 3
        assert ledger.updates.rounds_by_client() == before
        assert ledger.runs.all()[1].status is RunStatus.STOPPED


def test_a_fork_carries_the_states_that_one_may_go_back_to(built: Built) -> None:
    for number in (0, 1, 3):
        built.state(number).unlink()
    row = forked(built, 5)
    with built.ledger() as ledger:
        kept = kept_states(ledger, built.directory, row.run_id)
        assert [(s.state, s.kind) for s in kept] == [(2, "train"), (4, "train"), (5, "train")]


@pytest.mark.parametrize("how", ["damaged", "missing", "another"])
def test_a_state_that_is_not_whole_is_never_forked(built: Built, how: str) -> None:
    if how == "damaged":
        flip(built.state(4))
    elif how == "missing":
        built.state(4).unlink()
    else:  # a whole state with a fitting record, but not what the ledger has
        for suffix in (".safetensors", ".json"):
            text = built.state(3).with_suffix(suffix).read_bytes()
            built.state(4).with_suffix(suffix).write_bytes(
                text.replace(b'"number": 3', b'"number": 4')
            )
    before = tree(built.directory / "runs")
    with built.ledger() as ledger, pytest.raises(CorruptFile):
        fork(ledger, built.directory, built.run, 4, actor="me", action="rollback")
    with built.ledger() as ledger:
        assert len(ledger.runs.all()) == 1
        assert 4 not in [s.state for s in kept_states(ledger, built.directory, built.run)]
    assert tree(built.directory / "runs") == before


def test_a_kill_between_files_and_ledger_changes_no_run(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Forks, "begin", lambda *_: (_ for _ in ()).throw(DiskFull("full.")))
    with built.ledger() as ledger:
        with pytest.raises(DiskFull):
            fork(ledger, built.directory, built.run, 4, actor="me", action="rollback")
        (run,) = ledger.runs.all()
        assert run.status is RunStatus.RUNNING
        assert "rollback" not in [a.action for a in ledger.audit.newest()]


def test_what_a_run_began_with_goes_with_the_fork_and_with_what_a_kill_left_of_one(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    module.states_folder(built.directory, built.run).with_name(start.NAME).write_bytes(b"weights")
    row = forked(built, 4)
    copy = module.states_folder(built.directory, row.run_id).with_name(start.NAME)
    assert copy.read_bytes() == b"weights"
    folders = sorted(p.name for p in (built.directory / "runs").iterdir())
    monkeypatch.setattr(Forks, "begin", lambda *_: (_ for _ in ()).throw(DiskFull("full.")))
    with built.ledger() as ledger:
        with pytest.raises(DiskFull):
            fork(ledger, built.directory, built.run, 4, actor="me", action="rollback")
        (left,) = {p.name for p in (built.directory / "runs").iterdir()} - {*folders}
        half = built.directory / "runs" / left / f".{start.NAME}.77-ab12.tmp"
        half.write_bytes(b"wei")
        finish_emptying(ledger, built.directory)  # as the next start does
    assert sorted(p.name for p in (built.directory / "runs").iterdir()) == folders


@pytest.mark.ledger_file
@pytest.mark.parametrize("call", sampled([0, 10, 25, 40, 55, 70], (10, 55)))
def test_a_kill_at_any_moment_leaves_the_runs_as_before_or_complete(
    built: Built, call: int
) -> None:
    place = f"P({str(built.directory)!r})"
    killed_at(
        call,
        f"ledger = Ledger({place} / 'ledger.sqlite')\n"
        f"fork(ledger, {place}, {built.run!r}, 5, actor='me', action='rollback')",
    )
    with built.ledger() as ledger:
        runs = ledger.runs.all()
        assert [r.status for r in runs[:1]] == [
            RunStatus.RUNNING if len(runs) == 1 else RunStatus.STOPPED
        ]
        assert ledger.database.faults() == []
    assert not [f for f in check(built.directory) if f.level is Severity.FAILURE]
    forked(built, 5)  # and it can be done now


class TestChoosing:
    def test_a_task_means_its_last_state(self, built: Built) -> None:
        with built.ledger() as ledger:
            assert choose_state(ledger, built.directory, built.run, task=1, state=None) == 5
            assert choose_state(ledger, built.directory, built.run, task=None, state=4) == 4

    @pytest.mark.parametrize(
        ("task", "state", "said"),
        [
            (2, None, "not learned to its end; those that are: 0, 1"),
            (None, 9, r"there are: 0 \(task 0\), 1 \(task 0\), 2 \(task 0\), 3 \(task 1\), 5"),
            (None, 4, r"state 4 .* is not kept"),
            (1, 2, "one of them only"),
            (None, None, "one of them only"),
        ],
    )
    def test_what_is_not_there_is_refused_with_what_is(
        self, built: Built, task: int | None, state: int | None, said: str
    ) -> None:
        flip(built.state(4))
        with built.ledger() as ledger, pytest.raises(UsageError, match=said):
            choose_state(ledger, built.directory, built.run, task=task, state=state)


def test_the_opening_of_a_task_is_a_state_of_its_own(built: Built) -> None:
    with built.ledger() as ledger:
        kinds = [s.kind for s in ledger.states.all(built.run)]
    assert kinds == [OPENING, "train", "train"] * 2 + [OPENING]


def test_a_fork_keeps_the_adapter_that_the_run_began_with(built: Built) -> None:
    """Its first opening can be computed again, too."""
    source = module.states_folder(built.directory, built.run).parent
    (source / module.start.NAME).write_bytes(b"LoRA")
    row = forked(built, 2)
    copy = module.states_folder(built.directory, row.run_id).parent / module.start.NAME
    assert copy.read_bytes() == b"LoRA"
