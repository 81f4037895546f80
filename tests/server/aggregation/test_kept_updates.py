"""Counted updates that a run keeps: whole or named, shared with forks, in backups, and no others."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from adapters.kit import client_id, toy_images
from fcil_adapters.contract import TaskInfo
from fcil_protocol.errors import CorruptFile
from fcil_protocol.payloads.payload import pack
from fcil_server.aggregation.kept_updates import KeptUpdates, kept_folder
from fcil_server.federation.directory import Federation
from fcil_server.rounds.asking import list_available
from fcil_server.rounds.schedule import Step
from fcil_server.runs.fork import fork
from fcil_server.runs.resources import RunSetup, make_context
from fcil_server.sessions.peers import Peers
from fcil_server.sessions.run_ports import RunPorts
from fcil_server.storage.backup import backup
from fcil_server.storage.restore import Keys, restore
from server.forget_kit import COLOURS, Here, Story, here, learners
from server.storage_kit import flip

assert here

GROUPS = ((0, 1), (2,))
CLIENTS = [toy_images({0: 3, 1: 2, 2: 2}, 1), toy_images({0: 2, 1: 4}, 2), toy_images({2: 3}, 3)]
ONE, TWO = (hashlib.sha256(text).hexdigest() for text in (b"one", b"two"))


@pytest.fixture
def kept(tmp_path: Path) -> KeptUpdates:
    made = KeptUpdates(tmp_path / "kept")
    made.put([(ONE, b"first"), (TWO, b"second")])
    return made


@pytest.fixture
def story(tmp_path: Path) -> Story:
    method, uploads = learners("fedncm", CLIENTS, GROUPS)
    return Story(tmp_path / "fed", method, GROUPS, uploads).write()


def test_what_was_put_is_there_and_what_is_damaged_or_missing_is_named(kept: KeptUpdates) -> None:
    assert (kept.get(ONE), kept.get(TWO), kept.names()) == (b"first", b"second", sorted([ONE, TWO]))
    flip(kept.path(ONE))
    with pytest.raises(CorruptFile, match="does not match its checksum"):
        kept.get(ONE)
    kept.path(TWO).replace(kept.path(ONE))  # another one under its name
    with pytest.raises(CorruptFile, match="does not match its checksum"):
        kept.get(ONE)
    assert kept.remove([ONE, TWO]) == 1
    with pytest.raises(CorruptFile, match="is missing"):
        kept.get(ONE)


def test_a_fork_shares_the_files_and_has_copies_where_there_are_no_links(
    kept: KeptUpdates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linked, copied = KeptUpdates(tmp_path / "linked"), KeptUpdates(tmp_path / "copied")
    kept.share(linked, [ONE, "f" * 64])

    def no_link(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", no_link)
    kept.share(copied, [ONE])
    assert linked.path(ONE).samefile(kept.path(ONE))
    assert not copied.path(ONE).samefile(kept.path(ONE))
    kept.remove([ONE])
    assert linked.get(ONE) == copied.get(ONE) == b"first"


@pytest.mark.usefixtures("here")
def test_after_a_rollback_a_client_can_be_forgotten_as_before(story: Story) -> None:
    with story.ledger() as ledger:
        row = fork(ledger, story.directory, story.run, 1, actor="me", action="rollback")
    done = story.forget("ann")
    assert (done.parent, done.tasks, done.emptied) == (row.run_id, (0,), (row.run_id, story.run))
    state = story.newest(done.run)
    assert state.i64("task.0.count").tolist() == [2, 4]


@pytest.mark.usefixtures("here")
def test_a_restored_federation_can_forget_too(story: Story, tmp_path: Path) -> None:
    backup(story.directory, tmp_path / "b.tar", passphrase=None)
    keys = Keys(folder=story.directory / "keys")
    restore(tmp_path / "b.tar", tmp_path / "new", keys, actor="me")
    restored = Story(tmp_path / "new", story.method, GROUPS, story.uploads)
    there = restored.forget("ann")
    assert pack(restored.newest(there.run)) == pack(story.newest(story.forget("ann").run))


def kit_of(story: Story, federation: Federation):
    method, config = story.method, story.config
    aggregation = Here(method.method, method.hparams, config, log=story.directory / "worker.log")
    setup = RunSetup(config, method.method, method.hparams, COLOURS.info, "0" * 64, aggregation)
    row = federation.ledger.runs.newest()
    return make_context(federation, row, setup, RunPorts(notify=lambda *_: None, peers=Peers()))


def test_what_a_kill_left_before_its_round_was_committed_goes_at_the_start(story: Story) -> None:
    store = KeptUpdates(kept_folder(story.directory, story.run))
    before = store.names()
    store.put([(ONE, b"of a round that was not committed")])
    federation = Federation.open(story.directory, None, ())
    try:
        kit_of(story, federation).spool.close()
    finally:
        federation.close()
    assert store.names() == before


@pytest.mark.usefixtures("here")
def test_who_was_forgotten_is_not_asked_for_that_task_but_tested_and_asked_for_others(
    story: Story,
) -> None:
    story.forget("ann")
    federation = Federation.open(story.directory, None, ())
    try:
        kit = kit_of(story, federation)
        kit.spool.close()
        everybody = [SimpleNamespace(client=client_id(k), holds=lambda *_: True) for k in range(2)]

        def asked(task: int, kind: str) -> list[bool]:
            at = SimpleNamespace(task=TaskInfo(task, (0, 1)), step=Step(kind, 0, 1))
            return [e.holds for e in list_available(kit, at, everybody, 0.0)]

        assert asked(0, "train") == [False, True]
        assert asked(0, "evaluate") == asked(2, "train") == [True, True]
    finally:
        federation.close()
