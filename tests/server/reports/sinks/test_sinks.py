"""What sinks are given, that they lack nothing, and that they cost the server nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

import sample_run
from event_files import events
from fcil_protocol.errors import ConfigError
from fcil_server.federation import config as configuration
from fcil_server.ledger.ledger import Ledger
from fcil_server.reports import run_directory
from fcil_server.reports.results.run_data import collect
from fcil_server.reports.sinks import follower as follow
from fcil_server.reports.sinks import process, registry
from fcil_server.reports.sinks.contract import Options
from fcil_server.reports.sinks.follower import Follower, params
from fcil_server.reports.sinks.process import SinkProcess, Sinks
from fcil_server.reports.sinks.registry import Chosen
from orphans import ends_with_its_parent
from sample_run import RUN
from tiers import sampled

ROUNDS, TASKS = 12, 3


class Recorder:
    """A sink that remembers; it raises where it is told to."""

    name, packages, extra, Options = "recorder", (), "", Options

    def __init__(self) -> None:
        self.facts, self.given, self.sure, self.files = None, [], [], None
        self.fails_at = ""

    def open(self, run, _options):
        self.facts, self.given = run, []
        return self

    def scalars(self, values, *, step, at):
        if self.fails_at and self.fails_at in values:
            raise RuntimeError("planted")
        self.given += [(name, step, value, at) for name, value in values.items()]

    def flush(self):
        self.sure += self.given
        self.given = []

    def finish(self, files):
        self.files = [p.name for p in files]

    def close(self):
        self.given = []

    def curve(self, name):
        """Return step -> value; each step must have been given once."""
        found = [(step, value) for n, step, value, _ in self.sure if n == name]
        assert len(dict(found)) == len(found), "given twice"
        return dict(found)


@pytest.fixture
def place(tmp_path):
    """A federation's directory with the sample run in its ledger."""
    sample_run.build(tmp_path / "ledger.sqlite").close()
    return tmp_path


def data_of(place):
    with Ledger(place / "ledger.sqlite", read_only=True) as ledger:
        return collect(ledger, RUN)


def follower_of(place, sink, **options):
    return Follower(place, RUN, Chosen(sink, Options.model_validate(options)))


# --- figures --------------------------------------------------------------------------------


def test_accuracies_are_those_of_the_matrix_as_it_was_after_each_task(place):
    sink = Recorder()
    follower_of(place, sink).catch_up()
    rows = sample_run.MATRIX
    assert sink.curve("clients/accuracy") == pytest.approx(
        {t: sum(row) / len(row) for t, row in enumerate(rows)}
    )
    for i in range(TASKS):
        assert sink.curve(f"clients/accuracy_of_task_{i}") == pytest.approx(
            {t: rows[t][i] for t in range(i, TASKS)}
        )
    # Task 0: 90 - 70 after one task; (90 - 60, 80 - 85) after two.
    assert sink.curve("clients/forgetting") == pytest.approx({0: 0.0, 1: 20.0, 2: 12.5})
    assert not [n for n, *_ in sink.sure if n.startswith("server/")], "it judged nothing"


def test_rounds_say_who_took_part_what_it_took_and_when(place):
    sink = Recorder()
    follower_of(place, sink).catch_up(last=True)
    views = data_of(place).rounds
    assert sink.curve("round/counted") == {v.round.seq: len(v.counted) for v in views}
    assert sum(sink.curve("round/excluded").values()) == 1
    assert sum(sink.curve("round/silent").values()) == 2
    assert set(sink.curve("seconds/aggregate").values()) == {0.25}
    up = sink.curve("bytes/up_true_wire")
    assert up == {v.round.seq: v.up.true_wire for v in views}
    assert sink.curve("bytes/up_so_far")[ROUNDS - 1] == sum(up.values())
    times = [at for name, _, _, at in sink.sure if name == "round/asked"]
    assert times == [v.round.closed_at for v in views]


def test_a_long_backlog_is_stored_page_by_page(place, monkeypatch):
    at_once, paged = Recorder(), Recorder()
    follower_of(place, at_once).catch_up(last=True)
    monkeypatch.setattr(follow, "ROUNDS", 4)
    sizes = []
    monkeypatch.setattr(
        paged, "flush", lambda: (sizes.append(len(paged.given)), Recorder.flush(paged))
    )
    (place / "runs" / RUN / "sinks" / "recorder.json").unlink()
    follower_of(place, paged).catch_up(last=True)
    assert sorted(paged.sure) == sorted(at_once.sure)
    assert len(sizes) == 4, "4 rounds, then 3 more with the bytes of the last, twice, then the rest"
    assert max(sizes) < len(at_once.sure) / 2


def test_bytes_of_the_newest_round_wait_until_all_of_them_are_in_the_ledger(place):
    sink = Recorder()
    follower = follower_of(place, sink)
    follower.catch_up()
    assert len(sink.curve("round/counted")) == ROUNDS
    assert len(sink.curve("bytes/up_true_wire")) == ROUNDS - 1
    follower.catch_up(last=True)
    assert len(sink.curve("bytes/up_true_wire")) == ROUNDS


def test_no_name_of_a_person_a_class_or_a_folder_is_among_them(place):
    data = data_of(place)
    config = configuration.load(
        None, ["run.weights=/srv/eve/vit.safetensors", "run.central_test=/data/cats"]
    )
    sink = Recorder()
    follower_of(place, sink).catch_up(last=True)
    told = json.dumps([n for n, *_ in sink.sure] + [dict(sink.facts.params)])
    told += json.dumps(dict(params(configuration.to_toml(config), {"rank": 4}, {"name": "vit"})))
    names = [c.name for c in data.clients.values()] + [c.name for c in data.classes]
    for word in (*names, "/srv", "/data", "7710"):
        assert word not in told, word
    assert sink.facts.params["method.rank"] == 4
    assert sink.facts.params["backbone"] == "embedded"
    assert (sink.facts.run, sink.facts.method) == (RUN, "pilora")


# --- once, and none is lost -----------------------------------------------------------------


def test_what_a_sink_has_is_not_given_again_by_another_process(place):
    sink = Recorder()
    follower_of(place, sink).catch_up()
    first = len(sink.sure)
    follower_of(place, sink).catch_up()
    assert len(sink.sure) == first > 0
    follower_of(place, sink).catch_up(last=True)
    assert len(sink.sure) == first + 6, "the bytes of the last round"


@pytest.mark.parametrize("where", ["round/asked", "bytes/up_tensor", "clients/accuracy"])
def test_a_sink_that_fails_in_the_middle_gets_all_of_it_later(place, where):
    sink = Recorder()
    sink.fails_at = where
    with pytest.raises(RuntimeError, match="planted"):
        follower_of(place, sink).catch_up(last=True)
    assert sink.sure == []
    sink.fails_at = ""
    follower_of(place, sink).catch_up(last=True)
    assert len(sink.curve("bytes/up_so_far")) == ROUNDS
    assert len(sink.curve("clients/accuracy")) == TASKS


def test_a_sink_with_other_options_begins_anew(place):
    class Named(Options):
        to: str = ""

    sinks = [Recorder(), Recorder()]
    for sink, to in zip(sinks, "ab", strict=True):
        Follower(place, RUN, Chosen(sink, Named(to=to))).catch_up()
    assert sinks[0].sure == sinks[1].sure != []


def test_a_damaged_note_of_what_was_taken_costs_no_figure(place):
    path = place / "runs" / RUN / "sinks" / "recorder.json"
    path.parent.mkdir(parents=True)
    for damage in (b"", b"{", b"[]", b'{"options": 3, "what": 4}'):
        path.write_bytes(damage)
        sink = Recorder()
        follower_of(place, sink).catch_up()
        assert len(sink.curve("round/asked")) == ROUNDS
    assert path.stat().st_mode & 0o77 == 0


def test_the_end_of_a_run_is_told_once_with_its_reports(place):
    sink = Recorder()
    follower_of(place, sink).catch_up()
    assert sink.files is None, "its reports are not written yet"
    with Ledger(place / "ledger.sqlite", read_only=True) as ledger:
        run_directory.write(ledger, RUN, place / "runs" / RUN, plots=False)
    follower_of(place, sink).catch_up()
    assert sink.files == ["summary.json", "accuracy_matrix.csv", "bytes.csv", "report.html"]
    assert len(sink.curve("bytes/up_true_wire")) == ROUNDS
    sink.files = None
    follower_of(place, sink).catch_up(last=True)
    assert sink.files is None


# --- doors ----------------------------------------------------------------------------------


def test_a_wrong_sink_or_option_is_one_sentence():
    with pytest.raises(ConfigError, match="there is no sink 'tensorbord', did you mean 'tensor"):
        registry.choose("tensorbord", {})
    with pytest.raises(ConfigError, match=r"unknown key 'sinks\.tensorboard\.dir'; it has log_dir"):
        registry.choose("tensorboard", {"dir": "x"})
    with pytest.raises(ConfigError, match=r"sinks\.tensorboard\.log_dir: [^3]*$"):
        registry.choose("tensorboard", {"log_dir": 3})
    with pytest.raises(ConfigError, match=r"sinks\.tensorboard: Input should be a valid dict"):
        configuration.load(None, ["sinks.tensorboard=yes"])


def test_a_sink_without_its_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(registry, "is_installed", lambda _: False)
    with pytest.raises(ConfigError, match="needs the packages mlflow") as caught:
        registry.choose("mlflow", {})
    assert "fcil[mlflow]" in caught.value.action


class Door:
    """An entry point that leads to anything."""

    name = "half"

    def __init__(self, load):
        self.load = load


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (object, "leads to no sink of this name: it lacks name, packages, extra"),
        (Recorder, "leads to no sink of this name: it calls itself 'recorder'"),
        (lambda: sys.exit(3), "the sink 'half' cannot be loaded: SystemExit: 3"),
    ],
)
def test_a_door_that_leads_to_no_sink_is_a_configuration_fault(monkeypatch, load, words):
    monkeypatch.setattr(registry, "entry_points", lambda **_: [Door(load)])
    with pytest.raises(ConfigError, match=words):
        registry.choose("half", {})


def test_a_package_in_another_that_is_not_there_is_missing(monkeypatch):
    monkeypatch.setattr(Recorder, "packages", ("no_such.part", "json"))
    monkeypatch.setattr(Recorder, "name", "half")
    monkeypatch.setattr(registry, "entry_points", lambda **_: [Door(Recorder)])
    with pytest.raises(ConfigError, match=r"needs the packages no_such\.part\."):
        registry.choose("half", {})


def test_sinks_stand_in_the_file_and_come_back_from_it():
    text = configuration.as_file(configuration.load(None, ["sinks.tensorboard.log_dir=/x y"]))
    assert configuration.parse(text).sinks.options == {"tensorboard": {"log_dir": "/x y"}}
    assert configuration.parse(configuration.as_file(configuration.load(None))).sinks.options == {}


# --- TensorBoard ----------------------------------------------------------------------------


def run_once(place, name, options):
    """Run a sink's process as the server does, with a server that is gone at once."""
    command = [sys.executable, "-m", "fcil_server.reports.sinks.follower"]
    command += ["--dir", str(place), "--run", RUN, "--name", name]
    done = subprocess.run(
        command, input=f"{json.dumps(options)}\n".encode(), capture_output=True, check=False
    )
    return done.returncode, done.stderr.decode()


def test_event_files_hold_the_runs_curves_at_the_time_of_its_rounds(place):
    assert run_once(place, "tensorboard", {}) == (0, "")
    folder = place / "runs" / RUN / "tensorboard"
    found = events(folder)
    for view in data_of(place).rounds:
        value, at = found["bytes/down_true_wire", view.round.seq]
        assert value == view.down.true_wire
        assert at == view.round.closed_at
    for task, row in enumerate(sample_run.MATRIX):
        value, _ = found["clients/accuracy", task]
        assert value == pytest.approx(sum(row) / len(row))
    assert all(p.stat().st_mode & 0o77 == 0 for p in folder.iterdir())
    assert run_once(place, "tensorboard", {"log_dir": str(place / "all")}) == (0, "")
    assert events(place / "all" / RUN) == found


KILLED = """
import os, sys
from pathlib import Path
from fcil_server.reports.sinks.contract import RunFacts
from fcil_server.reports.sinks.tensorboard import TensorBoardWriter

run = RunFacts(run="r", method="m", began=1.0, directory=Path(sys.argv[1]), params={})
writer = TensorBoardWriter(run.directory, run)
for step in range(50):
    writer.scalars({"a": 0.5}, step=step, at=2.0)
writer.flush()
os._exit(0)
"""


def test_a_process_that_is_killed_at_once_leaves_the_runs_parameters_and_the_next_adds_none(
    tmp_path,
):
    at_once = KILLED.partition("for step")[0] + "os._exit(0)"
    for _ in range(2):
        subprocess.run([sys.executable, "-c", at_once, str(tmp_path / "curves")], check=True)
    held = b"".join(p.read_bytes() for p in sorted((tmp_path / "curves").iterdir()))
    assert held.count(b"run/text_summary") == 1


def test_what_was_flushed_is_in_the_file_when_the_process_is_killed(tmp_path):
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "curves")], check=True)
    assert events(tmp_path / "curves") == {("a", step): (0.5, 2.0) for step in range(50)}


def test_a_sink_that_cannot_work_says_why_in_one_line(place):
    (place / "file").write_text("")
    code, said = run_once(place, "tensorboard", {"log_dir": str(place / "file")})
    assert code == 1
    assert said.startswith("NotADirectoryError: ")
    assert len(said.splitlines()) == 1


# --- its process -----------------------------------------------------------------------------


def test_a_process_hears_its_server_and_ends_after_it_whatever_its_sink_does(monkeypatch):
    gone = threading.Event()
    monkeypatch.setattr(follow, "LEFT_S", 0.0)
    monkeypatch.setattr(follow.os, "_exit", lambda _: gone.set())
    reading, writing = os.pipe()
    calls = follow.Calls(reading)
    os.write(writing, b"\n")
    assert calls.wait(), "something is new"
    assert not gone.is_set()
    os.close(writing)
    assert not calls.wait(), "the server is gone"
    assert gone.wait(60), "nobody has ended the process"
    os.close(reading)


# --- the server's side ----------------------------------------------------------------------

SITE = """
import json, os, signal, subprocess, sys
from pathlib import Path
from fcil_server.reports.sinks.contract import Options

class Noted:
    name, packages, extra, Options = "noted", (), "", Options
    def open(self, run, options):
        self.room = Path(os.environ["NOTED"])
        word, _, rest = (self.room / "words").read_text().partition(" ")
        (self.room / "words").write_text(rest)
        with open(self.room / "fifo", "w") as fifo:  # whoever waits knows that it lives
            fifo.write(f"{os.getpid()}\\n")
        if word == "fail":
            raise OSError("the tracker is down")
        if word == "exit":
            sys.exit(0)
        if word == "shout":
            sys.stderr.write("x" * 1_000_000)
            raise OSError("\\nno way to http://eve:se/cr@et@tracker")
        if word == "child":
            subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
            raise OSError("it has a child")
        self.hangs = word == "hang"
        return self
    def scalars(self, values, *, step, at):
        with open(self.room / "taken", "a") as file:
            file.writelines(f"{name} {step}\\n" for name in values)
    def flush(self):
        if self.hangs:
            signal.pause()
    def finish(self, files):
        pass
    def close(self):
        pass

SINK = Noted()
"""


class Stage:
    """A sink of another's, installed, and what the server's side says of it."""

    def __init__(self, place, monkeypatch):
        self.place, self.said, self.heard = place, [], asyncio.Event()
        self.reader = self.pipe = None
        site = place / "site"
        info = site / "noted-1.0.dist-info"
        info.mkdir(parents=True)
        (site / "noted_sink.py").write_text(textwrap.dedent(SITE))
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: noted\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[fcil.sinks]\nnoted = noted_sink:SINK\n")
        monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
        monkeypatch.setenv("NOTED", str(place))
        monkeypatch.syspath_prepend(str(site))
        os.mkfifo(place / "fifo")
        self.do("")
        self.chosen = registry.choose("noted", {})

    def do(self, words):
        """Say what each life of it does, one after the other; then it works."""
        (self.place / "words").write_text(words)

    async def listen(self) -> None:
        """Let the sink open; before, it waits for whoever wants to know."""
        if self.reader is None:
            self.reader = asyncio.StreamReader()
            end = os.open(self.place / "fifo", os.O_RDWR | os.O_NONBLOCK)  # never at its end
            self.pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(self.reader), os.fdopen(end, "rb", 0)
            )

    async def lives(self) -> int:
        """Wait until the sink opens; return its process."""
        await self.listen()
        return int(await self.reader.readline())

    def say(self, level, code, text):
        assert (level, code) == ("warning", "sink")
        self.said.append(text)
        self.heard.set()

    @property
    def taken(self):
        path = self.place / "taken"
        lines = path.read_text().splitlines() if path.exists() else []
        return sum(line.startswith("round/asked ") for line in lines)

    @property
    def rounds_taken(self):
        """Of how many rounds it has figures, however often each was given."""
        path = self.place / "taken"
        lines = path.read_text().splitlines() if path.exists() else []
        return len({line for line in lines if line.startswith("round/asked ")})

    def sinks(self):
        return Sinks([SinkProcess(self.place, RUN, self.chosen, self.say)])


@pytest.fixture
def stage(place, monkeypatch):
    monkeypatch.setattr(process, "BACK_OFF_S", (0.0,))
    return Stage(place, monkeypatch)


def play(stage, story):
    async def whole():
        try:
            await asyncio.wait_for(story(), 120)
        finally:
            if stage.pipe is not None:
                stage.pipe.close()

    asyncio.run(whole())


def test_at_the_servers_end_a_sink_has_everything(stage):
    async def story():
        sinks = stage.sinks()
        sinks.start()
        await stage.lives()
        sinks.wake()
        await sinks.end()
        assert (stage.taken, stage.said) == (ROUNDS, [])

    play(stage, story)


def test_a_server_that_ends_as_it_begins_gives_its_sinks_all_the_same(stage):
    async def story():
        await stage.listen()
        sinks = stage.sinks()
        sinks.start()
        await sinks.end()
        assert (stage.taken, stage.said) == (ROUNDS, [])

    play(stage, story)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.full
def test_a_sink_that_waits_to_be_tried_again_is_tried_at_the_end(stage, monkeypatch, again):
    async def story():
        monkeypatch.setattr(process, "BACK_OFF_S", (1e6,))
        stage.do("fail fail" if again else "fail")
        await stage.listen()
        sinks = stage.sinks()
        sinks.start()
        await stage.heard.wait()
        await sinks.end()
        assert stage.taken == (0 if again else ROUNDS)
        assert (
            stage.said[1:]
            == [
                (
                    "sink noted: OSError: the tracker is down. It resumes when the server is "
                    "restarted."
                )
            ]
            * again
        )

    play(stage, story)


@pytest.mark.parametrize(
    ("word", "why"),
    sampled(
        [
            ("shout", "no way to http://...@tracker."),
            ("exit", "SystemExit: 0."),
            ("child", "OSError: it has a child."),
        ],
        ("shout",),
    ),
)
def test_whatever_a_sink_does_it_is_started_again_and_its_secrets_are_not_told(stage, word, why):
    async def story():
        stage.do(word)
        sinks = stage.sinks()
        sinks.start()
        await stage.lives()
        await stage.lives()
        await sinks.end()
        assert stage.taken == ROUNDS
        assert stage.said == [
            f"sink noted: {why} It is retried, and then gets the missing metrics."
        ]

    play(stage, story)


def test_a_sink_that_fails_is_told_of_once_tried_again_and_gets_what_it_lacks(stage):
    async def story():
        stage.do("fail fail")
        sinks = stage.sinks()
        sinks.start()
        for _ in range(3):
            await stage.lives()
        await sinks.end()
        assert stage.taken == ROUNDS
        assert stage.said == [
            (
                "sink noted: OSError: the tracker is down. It is retried, and then gets the missing "
                "metrics."
            )
        ]

    play(stage, story)


def test_a_sink_that_was_up_in_between_is_told_of_again(stage, monkeypatch):
    async def story():
        monkeypatch.setattr(process, "STEADY_S", -1.0)
        stage.do("fail fail")
        sinks = stage.sinks()
        sinks.start()
        for _ in range(3):
            await stage.lives()
        await sinks.end()
        assert [text.partition(" It is")[0] for text in stage.said] == [
            "sink noted: OSError: the tracker is down."
        ] * 2

    play(stage, story)


def test_a_sinks_process_that_is_killed_is_started_again(stage):
    async def story():
        sinks = stage.sinks()
        sinks.start()
        os.kill(await stage.lives(), signal.SIGKILL)
        await stage.lives()
        await sinks.end()
        # It may have taken all of them before it was killed, and not have written that down.
        assert stage.rounds_taken == ROUNDS
        assert "its process ended with code -9" in stage.said[0]
        assert len(stage.said) == 1

    play(stage, story)


def test_a_sink_that_hangs_keeps_nobody_waiting(stage, monkeypatch):
    async def story():
        monkeypatch.setattr(process, "END_S", 0.1)
        stage.do("hang")
        one = SinkProcess(stage.place, RUN, stage.chosen, stage.say)
        one.start()
        pid = await stage.lives()
        for _ in range(100_000):  # more than a pipe holds
            one.wake()
        assert one._pipe.get_write_buffer_size() <= 1
        await one.end()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert stage.said == [
            (
                "sink noted: the sink did not take all metrics within 0.1 s. It resumes when the server is "
                "restarted."
            )
        ]
        assert not (stage.place / "runs" / RUN / "sinks").exists(), "nothing is for sure"

    play(stage, story)


def test_what_continues_in_the_next_run_does_not_hold_it_up(stage, monkeypatch):
    async def story():
        monkeypatch.setattr(process, "NEXT_RUN_S", 0.1)
        stage.do("hang")
        one = SinkProcess(stage.place, RUN, stage.chosen, stage.say)
        one.outlives_runs = True
        one.start()
        pid = await stage.lives()
        await one.end(next_run=True)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert stage.said == [], "it resumes by itself"

    play(stage, story)


SERVER = """
import asyncio
from pathlib import Path
from fcil_server.reports.sinks import registry
from fcil_server.reports.sinks.process import SinkProcess

place = Path({place!r})

async def serve():
    SinkProcess(place, {run!r}, registry.choose("noted", {{}}), print).start()
    print(await asyncio.to_thread((place / "fifo").read_text), flush=True)
    await asyncio.Event().wait()

asyncio.run(serve())
"""


@pytest.mark.processes
def test_a_sink_takes_the_last_news_and_ends_with_a_server_that_is_killed(stage):
    ends_with_its_parent(SERVER.format(place=str(stage.place), run=RUN))
    assert stage.rounds_taken == ROUNDS
