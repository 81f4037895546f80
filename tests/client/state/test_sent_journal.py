"""The journal of what leaves a client: nothing goes out that is not written down first."""

import errno
import json
import os
import stat
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from client.daemon_kit import RUN, order
from client.round_kit import KEYS, SERVER, TERMS
from fcil_client.daemon.transfers import Transfers
from fcil_client.data.inventory import Inventory
from fcil_client.link.connection import Connection
from fcil_client.notes import Notes
from fcil_client.rounds.round_work import ClientOptions, RoundWork
from fcil_client.session.events import Acked, Nacked, OfferFailed
from fcil_client.state import sent_journal as egress
from fcil_client.state.outbox import Outbox
from fcil_client.state.sent_journal import SentJournal
from fcil_protocol.errors import DiskFull, StorageError
from fcil_protocol.messages.messages import Ack, Chunk, Decline, Nack, Update, Want
from fcil_protocol.storage import append_log


def events(directory):
    """Return (event, digest) of every line, in order."""
    lines = [line for path in egress.files(directory) for line in path.read_text().splitlines()]
    return [(e["event"], e["digest"]) for e in map(json.loads, lines)]


def test_a_round_leaves_its_trace(play):
    async def scenario(server, running):
        await server.greet()
        names = await server.inventory(names=["cat"])
        server.say(Ack(digest=names))
        server.say(order())
        digest, payload = await server.envelope()
        server.say(Nack(code="round_closed", text="too late", digest=digest))
        await running.until(lambda: running.said("too late"))
        directory = running.home.directory
        assert events(directory) == [
            ("sealed", names), ("sent", names), ("acked", names),
            ("sealed", digest), ("sent", digest), ("refused", digest),
        ]  # fmt: skip
        path = directory / egress.NAME
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert "cat" not in path.read_text()
        assert "made" not in path.read_text()
        (first, second), damaged = egress.read(directory)
        assert damaged == 0
        assert (first["answer"], second["answer"], second["code"]) == (
            "acked", "refused", "round_closed",
        )  # fmt: skip
        assert second["run"] == RUN
        assert second["tensor_bytes"] == payload.tensor_bytes == 16
        assert second["fields"] == [{"name": "names", "type": "class_names", "values": 1}]
        assert second["tensors"][0] == {
            "name": "test", "kind": "count", "shape": [1], "dtype": "I64", "bytes": 8,
        }  # fmt: skip

    play(scenario)


def test_the_line_is_on_disk_before_the_first_byte_is_sent(play, monkeypatch):
    seen = []
    synced = []
    send, sync = Connection.send, append_log.sync_data

    def watch_sync(fd):
        sync(fd)
        synced.append(os.pread(fd, 1 << 20, 0))

    def watch_send(self, message, *blobs):
        if isinstance(message, Update | Chunk):
            last = json.loads(synced[-1].splitlines()[-1])
            seen.append((last["event"], last["digest"] == message.digest))
        return send(self, message, *blobs)

    monkeypatch.setattr(append_log, "sync_data", watch_sync)
    monkeypatch.setattr(Connection, "send", watch_send)

    async def scenario(server, running):
        await server.take_in()
        server.say(order())
        await server.envelope()

    play(scenario)
    assert seen == [("sent", True)] * 4


class Disk:
    """Lets the journal's lines of one event find no room while ``full``."""

    def __init__(self, monkeypatch, event):
        self.full = False
        self._event = b'"event":"%s"' % event.encode()
        self._write = append_log.write_all
        monkeypatch.setattr(append_log, "write_all", self)

    def __call__(self, fd, data):
        if self.full and self._event in data:
            self._write(fd, data[:20])
            raise OSError(errno.ENOSPC, "no space left")
        self._write(fd, data)


def test_one_sync_of_the_journal_and_one_of_the_outbox_are_made_for_an_update(play, monkeypatch):
    synced = []
    for name in ("fdatasync", "fsync"):
        real = getattr(os, name)

        def noted(fd, real=real):
            synced.append(os.readlink(f"/proc/self/fd/{fd}").rpartition("/")[2])
            real(fd)

        monkeypatch.setattr(os, name, noted)

    async def scenario(server, running):
        await server.take_in()
        server.say(order())
        digest, _ = await server.envelope()
        server.say(Ack(digest=digest))
        await running.until(lambda: not running.home.outbox())
        synced.clear()
        server.say(order(1))
        digest, _ = await server.envelope()
        server.say(Ack(digest=digest))
        await running.until(lambda: not running.home.outbox())
        temporary, folder, journal = synced
        assert temporary.startswith(f".{digest}.update")
        assert (folder, journal) == ("outbox", egress.NAME)

    play(scenario)


@pytest.mark.parametrize("left", [0, 99, -1])
def test_an_update_whose_line_a_power_cut_took_is_dropped(home, enrolment, tmp_path, left):
    """It never left: the line is on the disk before a byte goes out."""
    work = RoundWork(home, enrolment, KEYS, ClientOptions(tmp_path))
    sealed, digest = work.seal_inventory(TERMS, SERVER.public, Inventory({"made": 1}))
    work.outbox.put(digest, sealed)
    notes = Notes(lambda _note: None)
    line = SimpleNamespace(send=None)
    restart = (home, enrolment, KEYS, line, SentJournal(home.directory), notes, None)
    assert Transfers(*restart, Outbox(home)).waiting()[1] == digest
    path = home.directory / egress.NAME
    path.write_bytes(path.read_bytes()[:left])
    assert Transfers(*restart, Outbox(home)).waiting() == (None, "")
    assert home.outbox() == []


@pytest.mark.parametrize("event", ["sealed", "sent"])
def test_on_a_full_disk_the_round_is_declined_and_nothing_leaves(play, monkeypatch, event):
    disk = Disk(monkeypatch, event)

    async def scenario(server, running):
        await server.take_in()
        disk.full = True
        server.say(order())
        decline = await server.hear(Decline)
        assert (decline.round, decline.reason) == (0, "disk_full")
        assert running.said("cannot write the journal of what leaves")
        assert running.home.outbox() == []
        disk.full = False
        server.say(order(1))
        digest, _ = await server.envelope()
        server.say(Ack(digest=digest))
        await running.until(lambda: not running.home.outbox())
        rows, damaged = egress.read(running.home.directory)
        assert (rows[-1]["digest"], rows[-1]["answer"]) == (digest, "acked")
        assert damaged == 1, "of the line that found no room"

    play(scenario)


@pytest.mark.parametrize("event", ["sealed", "sent"])
def test_on_a_full_disk_no_class_is_announced_until_there_is_room(play, monkeypatch, event):
    disk = Disk(monkeypatch, event)
    disk.full = True

    async def scenario(server, running):
        await server.greet()
        await running.until(lambda: len(running.said("classes cannot be announced")) == 3)
        assert running.client.status()["link"] == "announcing"
        disk.full = False
        server.say(Ack(digest=await server.inventory(names=["cat"])))
        await running.until(lambda: running.client.status()["link"] == "ready")

    play(scenario)


def test_an_answer_that_cannot_be_written_down_is_said_and_all_goes_on(play, monkeypatch):
    """What left is in the journal; only the answer is missing."""
    disk = Disk(monkeypatch, "acked")

    async def scenario(server, running):
        await server.take_in()
        disk.full = True
        server.say(order())
        digest, _ = await server.envelope()
        server.say(Ack(digest=digest))
        await running.until(lambda: not running.home.outbox())
        assert running.said("cannot write the journal of what leaves")

    play(scenario)


class TestTransfers:
    """One update in the outbox of a client that has just started."""

    @pytest.fixture
    def notes(self):
        return []

    @pytest.fixture
    def kit(self, home, enrolment, tmp_path, notes):
        work = RoundWork(home, enrolment, KEYS, ClientOptions(tmp_path))
        sealed, digest = work.seal_inventory(TERMS, SERVER.public, Inventory({"made": 1}))
        Outbox(home).put(digest, sealed)
        sent, fed = [], []
        line = type("Line", (), {"send": lambda _self, message, *_blobs: sent.append(message)})()
        journal, box, say = work.journal, Outbox(home), Notes(notes.append)
        transfers = Transfers(home, enrolment, KEYS, line, journal, say, fed.append, box)
        return transfers, digest, sent, fed

    def test_what_was_not_offered_is_not_sent_to_a_server_that_asks_for_it(self, kit):
        """Its line would be missing: the offer writes it."""
        transfers, digest, sent, _ = kit
        transfers.send_requested(Want(digest=digest, chunks=[0]))
        assert sent == []
        transfers.offer(digest)
        transfers.send_requested(Want(digest=digest, chunks=[0]))
        assert [type(m) for m in sent] == [Update, Chunk, Chunk]

    @pytest.mark.parametrize(
        ("ask_first", "sent_at_once"), [(False, [Update, Chunk]), (True, [Update])]
    )
    def test_a_server_that_asks_first_gets_no_chunk_before_it_asks(
        self, kit, ask_first, sent_at_once
    ):
        transfers, digest, sent, _ = kit
        transfers.fetch(order().model_copy(update={"ask_first": ask_first}))
        transfers.offer(digest)
        assert [type(m) for m in sent] == sent_at_once
        transfers.send_requested(Want(digest=digest, chunks=[0]))
        assert [type(m) for m in sent] == [*sent_at_once, Chunk]

    @pytest.mark.parametrize("ask", ["want", "watch"])
    def test_an_update_that_cannot_be_read_now_is_offered_again_later(self, kit, monkeypatch, ask):
        """Too many open files, say: what was trained is not given up for that."""
        transfers, digest, sent, fed = kit
        transfers.offer(digest)

        def fails(*_args, **_options):
            raise StorageError("too many files are open.")

        with monkeypatch.context() as patch:
            patch.setattr(transfers._outbox, "_envelope", fails)
            if ask == "want":
                transfers.send_requested(Want(digest=digest, chunks=[0]))
            else:
                transfers._say_again(digest)
        assert fed == [Nacked(digest, "storage_failed")]  # passes: `RetryDue` offers it again
        before = len(sent)
        transfers.offer(digest)
        assert type(sent[before]) is Update

    @pytest.mark.parametrize("ask", ["want", "watch"])
    def test_an_update_that_is_damaged_is_given_up(self, kit, home, ask):
        transfers, digest, _, fed = kit
        transfers.offer(digest)
        transfers._outbox._open = None
        home.outbox_path(digest).write_bytes(b"cut")
        if ask == "want":
            transfers.send_requested(Want(digest=digest, chunks=[0]))
        else:
            transfers._say_again(digest)
        assert fed == [Nacked(digest, "corrupt_file")]

    def test_every_offer_is_written_down(self, kit, home):
        transfers, digest, _, _ = kit
        transfers.offer(digest)
        transfers.offer(digest)  # on its way already
        assert events(home.directory) == [("sealed", digest), ("sent", digest)]
        transfers.on_connection_lost()
        transfers.offer(digest)
        assert events(home.directory) == [("sealed", digest), ("sent", digest), ("sent", digest)]

    def test_an_answer_is_written_down_once(self, kit, home):
        """A server cannot fill the disk with answers."""
        transfers, digest, _, fed = kit
        transfers.acked("9" * 64)
        transfers.offer(digest)
        for _ in range(3):
            transfers.acked(digest)
        assert events(home.directory)[-2:] == [("sent", digest), ("acked", digest)]
        assert len(events(home.directory)) == 3
        assert fed[-1] == Acked(digest)

    def test_a_damaged_update_is_not_said_to_have_been_sent(self, kit, home):
        transfers, digest, sent, _ = kit
        home.outbox_path(digest).write_bytes(b"cut")
        transfers.offer(digest)
        assert sent == []
        assert events(home.directory) == [("sealed", digest)]

    def test_an_update_whose_file_is_gone_is_declined(self, kit, home):
        transfers, digest, sent, fed = kit
        home.outbox_path(digest).unlink()
        transfers.offer(digest)
        assert sent == []
        assert type(fed[-1]) is OfferFailed


class TestFile:
    def test_half_a_line_spoils_no_other(self, tmp_path):
        journal = SentJournal(tmp_path)
        journal.sent("1" * 64)
        with (tmp_path / egress.NAME).open("ab") as file:
            file.write(b'{"event":"sent","ti')
        journal.sent("2" * 64)
        rows, damaged = egress.read(tmp_path)
        assert [row["digest"][0] for row in rows] == ["1", "2"]
        assert damaged == 1

    @pytest.mark.parametrize(
        "line",
        [b"\xff\xfe", b"[]", b"{}", b'{"event":"sent","time":"yesterday","digest":"1"}',
         b'{"event":"sent","time":1,"digest":"1"}',
         b'{"event":"sent","time":"2026-01-01","digest":[]}', b"[" * 100_000],
        ids=["bytes", "list", "empty", "time", "number", "digest", "deep"],
    )  # fmt: skip
    def test_a_damaged_line_is_counted_and_the_others_are_read(self, tmp_path, line):
        (tmp_path / egress.NAME).write_bytes(line + b"\n")
        SentJournal(tmp_path).sent("1" * 64)
        rows, damaged = egress.read(tmp_path)
        assert [row["digest"] for row in rows] == ["1" * 64]
        assert damaged == 1

    def test_a_full_file_gets_a_number_and_nothing_is_lost(self, tmp_path, monkeypatch):
        monkeypatch.setattr(egress, "SEGMENT_BYTES", 1)
        journal = SentJournal(tmp_path)
        digests = [f"{n:064x}" for n in range(12)]
        for digest in digests:
            journal.sent(digest)
            journal.acked(digest)
        names = [path.name for path in egress.files(tmp_path)]
        assert names[:2] == ["egress.0001.jsonl", "egress.0002.jsonl"]
        assert names[-2:] == ["egress.0011.jsonl", "egress.jsonl"]
        rows, _ = egress.read(tmp_path)
        assert [row["digest"] for row in rows] == digests
        assert {row["answer"] for row in rows} == {"acked"}

    def test_a_full_file_is_on_the_disk_before_it_gets_its_number(self, tmp_path, monkeypatch):
        """Its last line may be a `sealed`, which waits for the sync of the next `sent`."""
        monkeypatch.setattr(egress, "SEGMENT_BYTES", 1)
        did = []

        def watch_sync(fd):
            did.append(os.pread(fd, 1 << 20, 0).count(b"\n"))
            os.fdatasync(fd)

        def watch_rename(path, target):
            did.append("renamed")
            path.replace(target)

        monkeypatch.setattr(append_log, "sync_data", watch_sync)
        monkeypatch.setattr(Path, "rename", watch_rename)
        journal = SentJournal(tmp_path)
        journal.sent("1" * 64)
        journal.acked("1" * 64)
        journal.sent("2" * 64)
        assert did == [1, 2, "renamed", 1]

    def test_another_file_in_the_directory_is_not_taken_for_a_full_one(self, tmp_path, monkeypatch):
        monkeypatch.setattr(egress, "SEGMENT_BYTES", 1)
        (tmp_path / "egress.old.jsonl").write_text("mine")
        (tmp_path / "egress.\N{ARABIC-INDIC DIGIT NINE}.jsonl").write_text("mine")
        journal = SentJournal(tmp_path)
        journal.sent("1" * 64)
        journal.sent("2" * 64)
        assert [p.name for p in egress.files(tmp_path)] == ["egress.0001.jsonl", "egress.jsonl"]
        assert (tmp_path / "egress.old.jsonl").read_text() == "mine"

    def test_threads_do_not_write_over_each_other(self, tmp_path, monkeypatch):
        monkeypatch.setattr(egress, "SEGMENT_BYTES", 1)
        monkeypatch.setattr(append_log, "sync_data", lambda _fd: None)
        journal = SentJournal(tmp_path)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)

        def write(first):
            for n in range(first, first + 25):
                journal.sent(f"{n:064x}")

        threads = [threading.Thread(target=write, args=(100 * i,)) for i in range(4)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
        rows, damaged = egress.read(tmp_path)
        assert (len(rows), damaged) == (100, 0)

    def test_no_room_and_no_access_are_sentences(self, tmp_path, monkeypatch):
        def full(_fd):
            raise OSError(errno.ENOSPC, "x")

        with monkeypatch.context() as patch:
            patch.setattr(append_log, "sync_data", full)
            with pytest.raises(DiskFull, match="cannot write the journal of what leaves"):
                SentJournal(tmp_path).sent("1" * 64)
        with pytest.raises(StorageError, match="there is no folder"):
            SentJournal(tmp_path / "gone").sent("1" * 64)
