"""What W&B is given: with a recorder in place of its library, and with the library, offline."""

import json
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import sample_run
from fcil_protocol.errors import ConfigError
from fcil_server.ledger.ledger import Ledger
from fcil_server.reports import run_directory
from fcil_server.reports.sinks import registry
from fcil_server.reports.sinks.follower import Follower
from sample_run import RUN

ROUNDS, TASKS = 12, 3
KEY = "0123456789" * 4


class Session:
    """A run of W&B that remembers what it gets, and writes a folder as the library does."""

    def __init__(self, asked, number):
        self.asked, self.rows, self.over, self.axes = asked, [], False, {}
        self.dir = str(Path(asked["dir"]) / "wandb" / f"run-{number}-{asked['id']}" / "files")
        Path(self.dir).mkdir(parents=True)

    def define_metric(self, name, *, step_metric):
        self.axes[name] = step_metric

    def log(self, row):
        self.rows.append(row)

    def finish(self):
        self.over = True


class Library:
    """Stands in for the module ``wandb``."""

    Settings = SimpleNamespace

    def __init__(self):
        self.sessions, self.ended, self.down = [], 0, False

    def init(self, **asked):
        if self.down:
            raise OSError("no way to the server")
        self.sessions.append(Session(asked, len(self.sessions)))
        return self.sessions[-1]

    def teardown(self):
        assert self.sessions[-1].over
        self.ended += 1


@pytest.fixture
def place(tmp_path):
    sample_run.build(tmp_path / "ledger.sqlite").close()
    return tmp_path


@pytest.fixture
def library(monkeypatch):
    made = Library()
    monkeypatch.setitem(sys.modules, "wandb", made)
    monkeypatch.setattr(registry, "is_installed", lambda _: True)
    for name in ("WANDB_MODE", "WANDB_ERROR_REPORTING", "WANDB_SILENT", "WANDB_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # else what the sink sets would outlive the test
        monkeypatch.delenv(name)
    return made


def follower_of(place, **options):
    return Follower(place, RUN, registry.choose("wandb", options))


def curve(rows, name):
    """Return step -> value; each step must have been given once."""
    found = [(row["step"], row[name]) for row in rows if name in row]
    assert len(dict(found)) == len(found), "given twice"
    return dict(found)


def test_a_session_is_this_run_with_its_numbers_and_nothing_of_the_machine(place, library):
    follower_of(place).catch_up(last=True)
    (session,) = library.sessions
    assert session.over
    assert library.ended == 1
    asked = session.asked
    assert (asked["id"], asked["resume"], asked["mode"]) == (RUN, None, "offline")
    assert asked["config"]["method.rank"] == 4
    assert session.axes == {"*": "step"}
    for name in ("disable_git", "disable_code", "x_disable_meta", "x_disable_machine_info"):
        assert getattr(asked["settings"], name) is True
    assert asked["settings"].host == ""
    means = {t: sum(row) / len(row) for t, row in enumerate(sample_run.MATRIX)}
    assert curve(session.rows, "clients/accuracy") == pytest.approx(means)
    assert curve(session.rows, "clients/forgetting") == pytest.approx({0: 0.0, 1: 20.0, 2: 12.5})
    for name in ("round/asked", "seconds/aggregate", "bytes/up_so_far"):
        assert list(curve(session.rows, name)) == list(range(ROUNDS)), name
    assert curve(session.rows, "training/loss")
    assert curve(session.rows, "training/accuracy")


def test_offline_each_folder_has_the_whole_run_and_replaces_the_one_before(place, library):
    first = follower_of(place)
    first.catch_up()
    first.catch_up(last=True)
    follower_of(place).catch_up(last=True)  # a restart
    assert [len(s.rows) for s in library.sessions] == [26, 27, 27]
    folders = (place / "runs" / RUN / "wandb").glob("run-*")
    assert [p.name for p in folders] == [f"run-2-{RUN}"]


def test_a_complete_run_is_not_written_again(place, library):
    with Ledger(place / "ledger.sqlite", read_only=True) as ledger:
        run_directory.write(ledger, RUN, place / "runs" / RUN, plots=False)
    for _ in range(2):
        follower_of(place).catch_up(last=True)
    assert len(library.sessions) == 1


def test_online_a_session_has_what_is_new_and_a_failed_one_is_made_up_for(place, library):
    library.down = True
    with pytest.raises(OSError, match="no way"):
        follower_of(place, mode="online").catch_up()
    library.down = False
    follower_of(place, mode="online").catch_up()
    follower_of(place, mode="online").catch_up(last=True)
    assert [len(s.rows) for s in library.sessions] == [26, 1]
    assert {(s.asked["mode"], s.asked["resume"]) for s in library.sessions} == {("online", "allow")}


def test_the_network_is_for_those_who_ask_for_it_and_the_key_is_no_option(
    place, library, monkeypatch
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(ConfigError, match="mode is online, but WANDB_MODE is offline"):
        follower_of(place, mode="online").catch_up()
    monkeypatch.setenv("WANDB_MODE", "online")
    follower_of(place).catch_up()
    assert library.sessions[0].asked["mode"] == "offline"
    with pytest.raises(ConfigError, match=r"unknown key 'sinks\.wandb\.api_key'") as caught:
        registry.choose("wandb", {"api_key": KEY})
    assert KEY not in str(caught.value)


def records(path):
    """Return the records of a run's file, which is a log in the format of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, part, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its last part
            found.append(Record.FromString(part))
            part = b""
    return found


def test_the_library_writes_the_curves_without_network_key_or_host(place, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setenv("HOME", str(place / "home"))
    command = [sys.executable, "-m", "fcil_server.reports.sinks.follower"]
    command += ["--dir", str(place), "--run", RUN, "--name", "wandb"]
    done = subprocess.run(command, input=b"{}\n", capture_output=True, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, b"", b"")
    (path,) = (place / "runs" / RUN / "wandb").glob(f"offline-run-*-{RUN}*/*.wandb")
    found = records(path)
    (run,) = [r.run for r in found if r.HasField("run")]
    assert (run.run_id, run.project, run.host, run.resume) == (RUN, "fcil", "", False)
    rows = [
        {item.nested_key[0]: json.loads(item.value_json) for item in r.history.item}
        for r in found
        if r.HasField("history")
    ]
    assert [row["_step"] for row in rows] == list(range(2 * ROUNDS + TASKS))
    assert list(curve(rows, "bytes/up_true_wire")) == list(range(ROUNDS))
    assert curve(rows, "clients/forgetting") == pytest.approx({0: 0.0, 1: 20.0, 2: 12.5})
    assert found[-1].HasField("exit")
    for file in place.rglob("*"):
        if file.is_file():
            assert KEY.encode() not in file.read_bytes(), file
            assert file.stat().st_mode & 0o77 == 0 or "ledger" in file.name, file
    assert not (place / "home").exists()
