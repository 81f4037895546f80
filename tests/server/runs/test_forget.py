"""A run that forgot a client is, to the bit, the run in which that client never took part."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from adapters.frozen_kit import WIDTH, exact_analytic, pooled
from adapters.kit import client_id, toy_images
from fcil_adapters.contract.forgetting import cannot_forget_reason
from fcil_adapters.contract.privacy import Privacy
from fcil_adapters.toolkit.closed_form.lift import make_lift
from fcil_adapters.toolkit.closed_form.solving import solve
from fcil_adapters.toolkit.closed_form.sums import ProductSums
from fcil_protocol.errors import CorruptFile, DiskFull, UsageError
from fcil_protocol.ids import RoundKey
from fcil_protocol.payloads.payload import pack
from fcil_protocol.storage.spool import Spool
from fcil_server.aggregation.kept_updates import KeptUpdates, kept_folder
from fcil_server.aggregation.store import states_folder
from fcil_server.cli.forget import _erase
from fcil_server.federation.allow_list import AllowList
from fcil_server.federation.directory import Federation
from fcil_server.federation.roster import Roster, ever_named
from fcil_server.ledger.databases.sqlite import SqliteDatabase
from fcil_server.ledger.enums import RunStatus, UpdateStatus
from fcil_server.ledger.rounds import FORGOTTEN
from fcil_server.ledger.runs import Forks
from fcil_server.runs import forget_offline
from fcil_server.runs.forget import Forgetting, finish_emptying, plan
from fcil_server.storage.check import check
from fcil_server.storage.findings import Severity
from server.forget_kit import COLOURS, Story, here, learners
from server.storage_kit import flip

pytestmark = pytest.mark.usefixtures("here")
assert here

GROUPS = ((0, 1), (2, 3), (4,))
# The third client alone has images of class 3; the first has nothing of the last task.
CLIENTS = [
    toy_images({0: 5, 1: 2, 2: 3}, 1),
    toy_images({0: 2, 2: 4, 4: 3}, 2),
    toy_images({1: 6, 2: 1, 3: 2, 4: 5}, 3),
]
ANALYTIC = {"projection": 20, "precision": "double", "rho": 1e-3}
VARIANTS = {
    "analytic": ("analytic", ANALYTIC, ()),
    "of all images alike": ("analytic", ANALYTIC | {"form": "ridge", "balance": "plain"}, ()),
    "single precision": ("analytic", {"projection": 20}, ()),
    "capped": ("analytic", ANALYTIC | {"weights": "capped"}, ("trust.max_weight_share=0.4",)),
    "truncated": ("analytic", ANALYTIC | {"truncate": 2}, ()),
    "fedncm": ("fedncm", {}, ()),
    "gaussian_head": ("gaussian_head", {"min_count_upload": 1, "server_epochs": 1}, ()),
    "running_mean": ("running_mean", {"side": 4}, ()),
}  # fmt: skip


def story(directory: Path, variant: str = "analytic", **more) -> Story:
    name, options, settings = VARIANTS[variant]
    method, uploads = learners(name, CLIENTS, GROUPS, **options)
    return Story(directory, method, GROUPS, uploads, **{"settings": settings, **more})


def without(other: Story, directory: Path, gone: int) -> Story:
    """Write the run in which a client never took part, of the same uploads of the others."""
    uploads = {(t, k): p for (t, k), p in other.uploads.items() if k != gone}
    return Story(directory, other.method, GROUPS, uploads, settings=other.settings).write()


@pytest.mark.parametrize(
    ("variant", "pruned"), [*((v, False) for v in VARIANTS), ("analytic", True), ("fedncm", True)]
)
def test_what_is_left_is_to_the_bit_what_the_others_alone_have(variant, pruned, tmp_path):
    whole = story(tmp_path / "whole", variant).write(pruned=pruned)
    done = whole.forget("cat")
    others = without(whole, tmp_path / "others", 2)
    assert pack(whole.newest(done.run)) == pack(others.newest(others.run))
    with whole.ledger() as mine, others.ledger() as theirs:
        digests = [row.digest for row in mine.states.all(done.run)]
        assert digests == [row.digest for row in theirs.states.all(others.run)]
    assert (done.updates, done.images, done.tasks) == (3, 14, (0, 1, 2))


def test_it_is_the_solution_of_one_machine_with_the_images_of_the_others(tmp_path):
    whole = story(tmp_path).write()
    done = whole.forget("cat")
    state, h, data = whole.newest(done.run), whole.method.hparams, pooled(CLIENTS[:2])
    phi = make_lift(h, WIDTH, state.i64("seed"))(COLOURS.features(data.pictures))
    classes, expected, _ = exact_analytic(h, phi, data.labels)
    found = solve(h, ProductSums.read(state.tensors, "total"))
    assert found.classes.tolist() == classes.tolist() == [0, 1, 2, 4]
    assert np.abs(found.weight - expected).max() < 1e-9 * np.abs(expected).max()
    assert np.abs(state.f32("weight") - expected).max() < 1e-6 * np.abs(expected).max()


def test_noise_that_was_drawn_for_the_others_stays(tmp_path):
    method, uploads = learners(
        "analytic", CLIENTS, GROUPS, privacy=Privacy(noise_multiplier=0.01, clip=1.0), **ANALYTIC
    )
    whole = Story(tmp_path / "whole", method, GROUPS, uploads).write()
    done = whole.forget("ann")
    others = without(whole, tmp_path / "others", 0)
    assert pack(whole.newest(done.run)) == pack(others.newest(others.run))


def test_a_lie_beyond_all_measure_leaves_no_trace(tmp_path):
    """Subtracted from double sums, 10^11 would leave errors of 10^-4 in those of the others."""
    method, uploads = learners("analytic", CLIENTS, GROUPS, **ANALYTIC)
    for key, payload in uploads.items():
        if key[1] == 1:
            huge = np.where(payload.i64("count")[:, None] > 0, np.float32(1e11), np.float32(0))
            lie = np.broadcast_to(huge, payload.f32("sum").shape).copy()
            uploads[key] = replace(payload, tensors={**payload.tensors, "sum": lie})
    whole = Story(tmp_path / "whole", method, GROUPS, uploads).write()
    done = whole.forget("ben")
    others = without(whole, tmp_path / "others", 1)
    assert pack(whole.newest(done.run)) == pack(others.newest(others.run))


def test_one_after_the_other_can_be_forgotten_down_to_nobody(tmp_path):
    whole = story(tmp_path).write()
    runs = [whole.forget(name).run for name in ("cat", "ann", "ben")]
    last = whole.newest(runs[-1])
    assert last.f32("weight").shape == (0, 26)
    assert not last.f32("total.triangle").any()
    with whole.ledger() as ledger:
        assert [r.emptied_at is None for r in ledger.runs.all()] == [False, False, False, True]


def test_a_round_that_has_too_few_updates_without_the_client_makes_no_state(tmp_path):
    """As if it had never been there: such a round would have been skipped."""
    whole = story(tmp_path, settings=("round.min_updates=3",)).write()
    done = whole.forget("ann")
    with whole.ledger() as ledger:
        keys = [RoundKey(done.run, task, "train", 0) for task in range(3)]
        counted = [len(ledger.updates.accepted(key)) for key in keys]
    # Of the last task it had nothing; what was counted under an earlier setting stays.
    assert counted == [0, 0, 2]
    assert len(done.left_out) == 4
    assert all("min_updates" in why for _, why in done.left_out)


def test_the_ledger_says_what_happened_and_asks_no_more_for_those_tasks(tmp_path):
    whole = story(tmp_path).write()
    done = whole.forget("cat")
    assert done.vanished == ("class 3",)
    with whole.ledger() as ledger:
        old, new = ledger.runs.all()
        assert (new.run_id, new.parent_run, new.parent_state) == (done.run, whole.run, 5)
        assert (old.status, new.status) == (RunStatus.STOPPED, RunStatus.RUNNING)
        assert ledger.updates.forgotten(done.run) == {(client_id(2), t) for t in range(3)}
        rows = ledger.updates.of_client(done.run, client_id(2))
        assert {(r.status, r.reason) for r in rows} == {(UpdateStatus.EXCLUDED, FORGOTTEN)}
        assert {e.client for e in ledger.evaluations.all(done.run)} == {client_id(0), client_id(1)}
        entry = ledger.audit.newest()[-1]
        assert (entry.actor, entry.action) == ("me", "forget")
        assert "cat" not in entry.detail, "who is erased later is not named here for ever"
        assert ledger.clients.by_name("cat") is not None, "it stays a member"


def test_in_an_older_run_it_says_which_one_is_the_newest_now(tmp_path):
    old = story(tmp_path).write()
    new = old.again()
    done = old.forget("cat", run=old.run)
    assert done.overtaken == (new.run, 5)
    assert done.elsewhere == {new.run: 3}
    assert old.forget("cat", run=new.run).overtaken == (done.run, 5)


def test_with_revoke_its_membership_ends_too(tmp_path):
    whole = story(tmp_path).write()
    assert whole.forget("cat", revoke=True).member is False
    with whole.ledger() as ledger:
        assert ledger.clients.by_name("cat") is None
    assert whole.forget(
        "ben"
    ).member  # and what is revoked is no member: it can be named all the same
    with pytest.raises(UsageError, match="no update of 'cat' is in the states"):
        whole.forget("cat")


def test_nothing_of_the_client_stays_in_the_federations_directory(tmp_path):
    whole = story(tmp_path).write()
    with whole.ledger() as ledger:
        ids = [u.update_id for u in ledger.updates.of_client(whole.run, client_id(2))]
    kept = KeptUpdates(kept_folder(tmp_path, whole.run))
    needles = [kept.get(i)[-400:] for i in ids]
    needles.append(pack(whole.newest(whole.run))[-400:])
    assert all(anywhere(tmp_path, needle) for needle in needles)
    done = whole.forget("cat")
    assert not [needle for needle in needles if anywhere(tmp_path, needle)]
    assert not list(states_folder(tmp_path, whole.run).parent.glob("*/*"))
    assert len(KeptUpdates(kept_folder(tmp_path, done.run)).names()) == 5
    found = check(tmp_path)
    assert [f.text for f in found if f.level is not Severity.OK] == []


def test_a_fork_that_a_fault_left_is_no_place_where_somebody_stays(tmp_path, monkeypatch):
    whole = story(tmp_path).write()
    with whole.ledger() as ledger:
        ids = [u.update_id for u in ledger.updates.of_client(whole.run, client_id(2))]
    kept = KeptUpdates(kept_folder(tmp_path, whole.run))
    needles = [kept.get(i)[-400:] for i in ids]
    monkeypatch.setattr(Forgetting, "commit", Mock(side_effect=RuntimeError))
    with pytest.raises(RuntimeError):
        whole.forget("ben")
    assert len(list((tmp_path / "runs").iterdir())) == 2, "the fork has them too"
    assert _erase(tmp_path, client_id(2))["name"] == "cat"
    assert not [needle for needle in needles if anywhere(tmp_path, needle)]
    assert [p.name for p in (tmp_path / "runs").iterdir()] == [whole.run]


def anywhere(directory: Path, needle: bytes) -> bool:
    return any(needle in p.read_bytes() for p in directory.rglob("*") if p.is_file())


class TestRefusals:
    def test_a_run_that_keeps_nothing_says_so_and_what_can_be_done(self, tmp_path):
        whole = story(tmp_path, keep=False).write()
        with pytest.raises(UsageError) as caught:
            whole.forget("ben")
        assert "keep_updates was false as it began" in caught.value.message
        assert f"rollback {whole.run} --to-state 0" in caught.value.action

    def test_a_method_whose_clients_train_says_so_and_what_can_be_done(self, tmp_path, monkeypatch):
        monkeypatch.setattr(
            forget_offline.registry,
            "with_forms",
            lambda method, _: replace(method, forgets=cannot_forget_reason),
        )
        whole = story(tmp_path).write()
        with pytest.raises(UsageError, match="train on what the server broadcast") as caught:
            whole.forget("ben")
        assert "serve --new-run" in caught.value.action
        assert whole.newest(whole.run)

    @pytest.mark.parametrize(("trains", "refused"), [("train", True), ("prepare", False)])
    def test_who_has_trained_stays_and_who_has_not_can_go(self, tmp_path, trains, refused):
        """Of a method that trains in some of its rounds."""
        whole = story(tmp_path).write()
        with whole.ledger() as ledger:
            run, client = ledger.runs.named(None), ledger.clients.by_name("cat")
            if not refused:
                assert len(plan(ledger, tmp_path, run, client, "", {trains}).mine) == 3
                return
            with pytest.raises(UsageError, match="its 3 updates that trained are counted"):
                plan(ledger, tmp_path, run, client, "", {trains})

    def test_a_client_that_never_took_part_is_no_reason_for_a_fork(self, tmp_path):
        whole = story(tmp_path).write()
        with pytest.raises(UsageError, match="no update of 'dan' is in the states"):
            whole.forget("dan")
        with whole.ledger() as ledger:
            assert len(ledger.runs.all()) == 1

    def test_without_the_updates_of_the_others_nobody_can_be_forgotten(self, tmp_path):
        whole = story(tmp_path).write()
        with whole.ledger() as ledger:
            (gone, *_) = ledger.updates.of_client(whole.run, client_id(0))
        KeptUpdates(kept_folder(tmp_path, whole.run)).remove([gone.update_id])
        with pytest.raises(UsageError, match=r"not kept any more \(ann\)"):
            whole.forget("ben")
        texts = [f.text for f in check(tmp_path) if f.level is Severity.WARNING]
        assert texts == [f"kept updates: {gone.update_id[:16]} is missing"]

    def test_a_damaged_kept_update_is_found_and_the_run_stays(self, tmp_path):
        whole = story(tmp_path).write()
        with whole.ledger() as ledger:
            (one, *_) = ledger.updates.of_client(whole.run, client_id(0))
        flip(KeptUpdates(kept_folder(tmp_path, whole.run)).path(one.update_id))
        with pytest.raises(CorruptFile, match="does not match its checksum"):
            whole.forget("ben", revoke=True)
        with whole.ledger() as ledger:
            assert ledger.clients.by_name("ben") is not None, "nor has its membership ended"
            assert len(ledger.runs.all()) == 1
            assert ledger.runs.all()[0].emptied_at is None
        assert "damaged" in " ".join(f.text for f in check(tmp_path) if f.level is Severity.WARNING)

    def test_a_damaged_update_of_its_own_is_no_obstacle(self, tmp_path):
        whole = story(tmp_path / "whole").write()
        with whole.ledger() as ledger:
            (one, *_) = ledger.updates.of_client(whole.run, client_id(2))
        flip(KeptUpdates(kept_folder(whole.directory, whole.run)).path(one.update_id))
        done = whole.forget("cat", revoke=True)
        others = without(whole, tmp_path / "others", 2)
        assert pack(whole.newest(done.run)) == pack(others.newest(others.run))

    def test_with_revoke_it_is_both_or_neither(self, tmp_path, monkeypatch):
        whole = story(tmp_path).write()
        monkeypatch.setattr(Forks, "leave_out", lambda *_: (_ for _ in ()).throw(DiskFull("full.")))
        with pytest.raises(DiskFull):
            whole.forget("cat", revoke=True)
        with whole.ledger() as ledger:
            assert ledger.clients.by_name("cat").may_join(ledger.now)
            assert len(ledger.runs.all()) == 1

    def test_weights_that_have_moved_and_another_device_are_taken(self, tmp_path, monkeypatch):
        whole = story(tmp_path).write()
        with whole.ledger() as ledger:
            text = ledger.runs.get(whole.run).config
            gpu = text.replace('device = "auto"', 'device = "cuda"')
            assert gpu != text
            ledger.database.write("UPDATE runs SET config = ?", (gpu,))
        seen = []
        init = forget_offline.Aggregation.__init__
        monkeypatch.setattr(
            forget_offline.Aggregation, "__init__",
            lambda self, m, h, config, **k: (seen.append(config), init(self, m, h, config, **k))[1],
        )  # fmt: skip
        whole.forget("cat")
        assert seen[0].run.device == "auto", "the run began on a GPU, which is gone"
        assert seen[0].run.keep_updates is True
        assert seen[0].method.name == "analytic"


def test_a_run_that_opens_purges_what_an_interrupted_erasure_left_in_its_spool(
    tmp_path, monkeypatch
):
    whole = story(tmp_path).write()
    folder, others = tmp_path / "runs" / whole.run / "spool", "1" * 64
    federation = Federation.open(tmp_path, None, ())
    try:
        cat = ever_named(federation.ledger, "cat")
        (mine, *_) = federation.ledger.updates.of_client(whole.run, cat.client_id)
        folder.mkdir(mode=0o700, exist_ok=True)
        spool = Spool(folder)
        for update in (str(mine.update_id), others):
            spool.append(update, b"sealed" * 100)
        spool.sync()
        spool.close()
        Roster(federation, AllowList()).erase(cat, "me")  # and killed
    finally:
        federation.close()
    monkeypatch.setattr(Forgetting, "run", Mock(side_effect=DiskFull("full.")))
    with pytest.raises(DiskFull):
        whole.forget("ann")  # opens the run as a server does
    again = Spool(folder)
    assert again.keys() == [others]
    again.close()
    assert sum(p.read_bytes().count(b"sealed") for p in folder.iterdir()) == 100


# --- kill -9 ---------------------------------------------------------------------------------

_CALLS = ("open", "fchmod", "write", "fsync", "fdatasync", "replace", "mkdir", "unlink", "link",
          "rmdir")  # fmt: skip


def killed_at(point: int, work, *, commits: bool) -> bool:
    """Do something in a process that kills itself at its n-th step towards the disk.

    A step is a call that changes a file or a name, or the moment before and after a commit of
    the ledger (``commits``: these alone). Says whether it did; False: it came to its end before.
    """
    pid = os.fork()
    if not pid:
        try:
            _plant(point, commits=commits)
            work()
            os._exit(0)
        except BaseException:
            os._exit(3)
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL), status
    return status != 0


def _plant(point: int, *, commits: bool) -> None:
    left = point

    def step() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def planted(real):
        def call(*args, **more):
            step()
            return real(*args, **more)

        return call

    def execute(self, sql, args=(), real=SqliteDatabase.execute):
        if sql != "COMMIT":
            return real(self, sql, args)
        step()
        result = real(self, sql, args)
        step()
        return result

    SqliteDatabase.execute = execute
    for name in () if commits else _CALLS:
        setattr(os, name, planted(getattr(os, name)))


@pytest.fixture(scope="module")
def fedncm(tmp_path_factory):
    """Return a federation to copy, and the newest state as it is and as it is to be."""
    place = tmp_path_factory.mktemp("kills")
    whole = story(place / "whole", "fedncm").write()
    others = without(whole, place / "others", 2)
    return whole, pack(whole.newest(whole.run)), pack(others.newest(others.run))


def points() -> list:
    """Return all points for the full suite; around commits and some more for the quick one."""
    every = [pytest.param(n, False, marks=pytest.mark.full) for n in range(125) if n % 25]
    return [*((n, True) for n in range(4)), *((n, False) for n in range(0, 126, 25)), *every]


@pytest.mark.ledger_file
@pytest.mark.parametrize(("point", "commits"), points())
def test_killed_at_any_moment_it_is_the_old_run_or_the_new_one(fedncm, point, commits, tmp_path):
    whole, before, after = fedncm
    copy = replace(whole, directory=tmp_path / "fed")
    shutil.copytree(whole.directory, copy.directory)
    done = not killed_at(point, lambda: copy.forget("cat"), commits=commits)
    with copy.ledger() as ledger:
        newest = ledger.runs.newest().run_id
    assert pack(copy.newest(newest)) == (before if newest == whole.run else after)
    assert not done or newest != whole.run
    if newest == whole.run:
        assert pack(copy.newest(copy.forget("cat").run)) == after
    with copy.ledger() as ledger:
        finish_emptying(ledger, copy.directory)  # as the next start does
    assert not anywhere(copy.directory, before[-400:])
    assert [f.text for f in check(copy.directory) if f.level is not Severity.OK] == []
