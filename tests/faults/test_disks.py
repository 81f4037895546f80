"""Every writer of both sides meets a full, a read-only, a forbidding and a faulty disk.

One federation takes all writers in turn: the fault is met twice, somebody says so in a sentence
that names the path, and the rounds go on: by themselves where the daemon lives, after a start
where it ended. At the end nothing acknowledged was lost or counted twice.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from faults.kit import CLIENT, SERVER, Keeper, keeps_its_promises, planted, rule
from fcil_protocol.errors import LinkError
from fcil_server.lab.local.federation import LocalFederation
from system.kit import settings, write_client

pytestmark = pytest.mark.processes

TURNS = 2
WORDS = {
    "ENOSPC": r"is full|no space is left",
    "EROFS": r"read-only|planted EROFS",
    "EACCES": r"permission denied|planted EACCES",
    "EIO": r"reported a fault|planted EIO",
}


@dataclass(frozen=True)
class Writer:
    """One place that writes, and what becomes of the daemon when it cannot."""

    name: str
    op: str
    where: str
    place: str = ""
    ends: bool = False  # the daemon ends with the sentence; else it lives and goes on
    says: bool = True
    waits: bool = False  # for a client's next try; long

    def rule(self, do):
        return rule(self.op, self.where, place=self.place, do=do, name=self.name, depth=5)


SERVER_WRITERS = [
    Writer("spool_append", "write", "spool/", "spool.Spool.append"),
    Writer("spool_sync", "sync", "spool/.*seg", says=False, waits=True),
    # Nothing is appended behind what could not be synced: the next update opens another file.
    Writer("spool_file", "open", "spool/", waits=True),
    Writer("state", "write", "states/.*safetensors", ends=True),
    Writer("state_record", "write", "states/.*json", ends=True),
    Writer("part", "write", "parts/", ends=True),
    Writer("ledger", "sql", "ledger", "reception.Reception.stored", waits=True),
    Writer("ledger_commit", "commit", "ledger", "intake.Intake._commit_few", waits=True),
    Writer("ledger_round", "sql|commit", "ledger", "closing", ends=True),
    Writer("rounds_file", "open", "rounds.jsonl"),
    Writer("spool_removal", "unlink", "spool/", "Spool.remove"),
    Writer("part_removal", "unlink", "parts/", says=False),
    Writer("state_removal", "unlink", "states/", says=False),
    Writer("results", "write", "summary.json", ends=True),
]
CLIENT_WRITERS = [
    Writer("part", "write", "parts/"),
    Writer("journal_sealed", "write", "egress", "SentJournal.sealed"),
    Writer("outbox_update", "write", "outbox/.*update"),
    Writer("journal_sent", "write", "egress", "SentJournal.sent"),
    Writer("journal_acked", "write", "egress", "SentJournal.acked"),
    Writer("outbox_removal", "unlink", "outbox/"),
]
# Without `erase`: it comes before the evaluation, which is not asked for twice.
MASK_WRITERS = [
    *(Writer(place, "write", "masks.json", f"MaskFile.{place}")
      for place in ("begin", "settle_members", "settle_delivered")),
    Writer("hidden", "write", "masked.safetensors", "MaskFile.settle_masked"),
    *(Writer(place, "write", "masks.json", f"MaskFile.{place}")
      for place in ("settle_masked", "settle_survivors")),
]  # fmt: skip
SERVER_START = [
    Writer("directory", "mkdir", "federation$", ends=True),
    Writer("lock", "open", "federation/lock", ends=True),
    Writer("config", "write", "federation.toml", ends=True),
    Writer("ledger", "open", "ledger.sqlite", ends=True),
    Writer("ledger_made", "commit", "ledger.sqlite", ends=True),
    Writer("keys", "write", "keys/", ends=True),
    Writer("run_begun", "sql", "ledger.sqlite", "run_record.begin_row", ends=True),
    Writer("run_directory", "mkdir", "runs/.", ends=True),
    Writer("control_socket", "unlink", "control.sock", ends=True),
    Writer("join_file", "write", "servers/", ends=True),
    Writer("first_state", "write", "states/.*safetensors", ends=True),
    Writer("worker_log", "open", "worker.log", ends=True),
]
CLIENT_START = [
    Writer("directory", "mkdir", "state/fcil/", ends=True),
    Writer("keys", "write", "keys", ends=True),
    Writer("enrolment", "write", "client.json", ends=True),
    Writer("lock", "open", "lock$", ends=True),
    Writer("run", "write", r"\.run\.", ends=True),
    Writer("salt", "write", "salt"),
    Writer("worker_log", "open", "worker.log"),
]


@dataclass
class OnBadDisks(Keeper):
    """Starts again who ended because of a disk, and said so."""

    do: str = ""
    ends: int = 0

    def ended(self, name, code):
        words = self.federation.last_words(name, 3)
        assert code == 1, words
        assert "Traceback" not in words
        assert re.search(WORDS[self.do], words), words
        self.ends += 1


def every_writer(scene, tmp_path, program, writers, do, turns=TURNS):
    extra = {"round__rounds_per_task": 12}
    if scene.has_masks:
        extra = {"round__deadline_s": 4.0, "round__retry_s": 0.5, "round__max_reopens": 20}
    expected = scene.undisturbed(**extra) if program == SERVER or scene.has_masks else ""
    hits = tmp_path / "hits"
    with scene.copy() as federation:
        plan = {
            "program": program,
            "root": str(federation.directory),
            "turns": turns,
            "hits": str(hits),
        }
        env = planted(tmp_path, plan | {"rules": [w.rule(do) for w in writers]})
        side = {"server_env": env} if program == SERVER else {"client_env": env}
        keeper = OnBadDisks(federation, scene, extra=extra, planted_clients=("a",), do=do, **side)
        keeper.run()
        met = hits.read_text().split()
        assert [w.name for w in writers if met.count(w.name) < turns] == []
        keeps_its_promises(federation, expected, excluded=program == CLIENT)
        said = sentences(federation.log("server" if program == SERVER else "a"), do)
    for writer in writers:
        if writer.says:
            found = [s for s in said if re.search(rf"\S*({writer.where})", s)]
            assert found, f"nobody said anything of {writer.name}: {said}"
    assert keeper.ends <= turns * sum(w.ends for w in writers)


def sentences(log, do):
    words = "|".join(WORDS[name] for name in do.split("|"))
    return [line for line in log.read_text().splitlines() if re.search(words, line)]


@pytest.mark.full
def test_every_writer_of_the_server_on_a_full_disk(scene, tmp_path):
    writers = [w for w in SERVER_WRITERS if not w.waits]
    every_writer(scene, tmp_path, SERVER, writers, "ENOSPC", turns=1)


@pytest.mark.full
def test_every_writer_of_a_client_on_a_full_disk(scene, tmp_path):
    every_writer(scene, tmp_path, CLIENT, CLIENT_WRITERS, "ENOSPC")


@pytest.mark.full
@pytest.mark.parametrize("do", ["ENOSPC", "EROFS", "EACCES", "EIO"])
@pytest.mark.parametrize("program", [SERVER, CLIENT])
def test_every_writer_on_other_bad_disks(scene, tmp_path, program, do):
    writers = SERVER_WRITERS if program == SERVER else CLIENT_WRITERS
    every_writer(scene, tmp_path, program, writers, do)


@pytest.mark.full
@pytest.mark.parametrize("do", ["ENOSPC", "EIO"])
def test_every_write_of_secrets_of_masks_on_a_bad_disk(masked_scene, tmp_path, do):
    """Nothing is sent that is not written down; the round is tried again, and none is missing."""
    every_writer(masked_scene, tmp_path, CLIENT, MASK_WRITERS, do)


# --- the first start ------------------------------------------------------------------------


@pytest.mark.parametrize("do", ["ENOSPC", pytest.param("EACCES", marks=pytest.mark.full)])
@pytest.mark.full
def test_a_server_that_cannot_write_at_its_first_start(tmp_path, do):
    hits, ended = tmp_path / "hits", []
    # A long path would move the control socket elsewhere, where no rule holds.
    with (
        tempfile.TemporaryDirectory(prefix="fcil-") as short,
        LocalFederation(Path(short)) as federation,
    ):
        plan = {"program": SERVER, "root": str(federation.directory), "turns": 1, "hits": str(hits)}
        env = planted(tmp_path, plan | {"rules": [w.rule(do) for w in SERVER_START]})
        while len(ended) <= len(SERVER_START):
            try:
                federation.serve(*settings(), env=env)
                federation.until("task_opened")
                break
            except LinkError:
                code, words = federation.server.wait(), federation.last_words("server", 3)
                ended.append(words)
                assert code in (1, 4), words
                assert "Traceback" not in words
                assert re.search(WORDS[do], words), words
        assert hits.read_text().split() == [w.name for w in SERVER_START]


@pytest.mark.parametrize("do", ["ENOSPC", pytest.param("EACCES", marks=pytest.mark.full)])
@pytest.mark.full
def test_a_client_that_cannot_write_at_its_first_start(tmp_path, do):
    hits = tmp_path / "hits"
    folder = write_client(tmp_path / "images", range(2))
    with LocalFederation(tmp_path / "new") as federation:
        federation.serve(*settings())
        plan = {"program": CLIENT, "root": str(federation.directory), "turns": 1, "hits": str(hits)}
        env = planted(tmp_path, plan | {"rules": [w.rule(do) for w in CLIENT_START]})
        for _ in range(len(CLIENT_START)):
            federation.join("a", folder, env=env)
            if met_without_an_end(federation, hits):
                federation.kill_client("a")
                continue
            words = federation.last_words("a", 3)
            assert federation.clients["a"].returncode in (1, 4), words
            assert "Traceback" not in words
            assert re.search(WORDS[do], words), words
        assert hits.read_text().split() == [w.name for w in CLIENT_START]
        federation.join("a", folder, env=env)
        federation.until("announced")


def met_without_an_end(federation, hits):
    """Wait until the client ended, or lives on and has said what it met."""
    met = len(sentences(federation.log("a"), "ENOSPC|EACCES"))
    while federation.clients["a"].poll() is None:
        federation.status()
        if len(sentences(federation.log("a"), "ENOSPC|EACCES")) > met:
            return not ended_soon(federation.clients["a"])
    return False


def ended_soon(process):
    """A process that says why it ends takes a moment to end."""
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        return False
    return True
