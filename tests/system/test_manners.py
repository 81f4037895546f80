"""How the daemons behave: signals, logs, closed terminals, and what systemd hears."""

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys

import pytest

from fcil_protocol.process import control_socket
from fcil_server.lab.local.federation import LocalFederation
from system.kit import open_ledger, settings, write_client

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True, scope="module")
def hang_ups_are_heard():
    """Daemons inherit what is ignored: under nohup, which the whole suite may run under, SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


class Supervisor:
    """Hears what a daemon tells systemd."""

    def __init__(self, path):
        self.path = path
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(str(path))

    def environment(self, **extra):
        return {"NOTIFY_SOCKET": str(self.path), **extra}

    def hear(self, timeout_s=60.0):
        self.sock.settimeout(timeout_s)
        return self.sock.recv(4096).decode()

    def until(self, beginning):
        """Return everything that is heard up to a notice that begins so."""
        heard = [self.hear()]
        while not heard[-1].startswith(beginning):
            heard.append(self.hear())
        return heard

    def forget(self):
        """Leave out what has been sent up to now."""
        self.sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self.sock.recv(4096)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.sock.close()


def until_it_answers(federation):
    """Wait for a server that the test started by hand."""
    while federation.status() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            federation.server.wait(0.05)
            pytest.fail(federation.last_words("server") or "the server ended")


def without_status(heard):
    return [n.partition("\n")[0] for n in heard if not n.startswith(("STATUS=", "WATCHDOG="))]


def wait_until_stopped(pid):
    _, status = os.waitpid(pid, os.WUNTRACED)  # a stop is reported, the process stays
    assert os.WIFSTOPPED(status)


@pytest.mark.full
def test_systemd_hears_of_server_and_client_from_ready_to_stopping(tmp_path):
    with (
        Supervisor(tmp_path / "s") as server,
        Supervisor(tmp_path / "c") as client,
        LocalFederation(tmp_path / "f") as federation,
    ):
        federation.serve(*settings(), env=server.environment())
        heard = server.until("STATUS=task 0, train 0, gathering")
        assert heard[0] == "READY=1"
        data = write_client(tmp_path / "a", range(4))
        federation.join("a", data, env=client.environment())
        # Ready before it has a session: a server that is away does not fail its start.
        assert client.until("STATUS=link ready; idle")[:2] == [
            "READY=1", "STATUS=link offline; idle; 0 updates counted",
        ]  # fmt: skip
        assert "waits for" in server.until("STATUS=task 0, train 0, gathering; 1 client ready")[-1]
        federation.server.send_signal(signal.SIGHUP)
        heard = server.until("RELOADING=1") + server.until("READY=1")
        assert without_status(heard) == ["RELOADING=1", "READY=1"]
        assert "\nMONOTONIC_USEC=" in next(n for n in heard if n.startswith("RELOADING"))
        federation.clients["a"].send_signal(signal.SIGTERM)
        assert without_status(client.until("STOPPING=1")) == ["STOPPING=1"]
        assert federation.clients.pop("a").wait(120) == 0
        federation.server.send_signal(signal.SIGTERM)
        assert without_status(server.until("STOPPING=1")) == ["STOPPING=1"]
        assert federation.server.wait(120) == 0


@pytest.mark.full
def test_the_watchdog_hears_nothing_from_a_daemon_that_is_stuck(tmp_path):
    with Supervisor(tmp_path / "s") as supervisor, LocalFederation(tmp_path / "f") as federation:
        period_s = 0.2
        environment = supervisor.environment(WATCHDOG_USEC=str(int(period_s * 2e6)))
        federation.serve(*settings(), env=environment)
        supervisor.until("WATCHDOG=1")
        supervisor.until("WATCHDOG=1")
        federation.server.send_signal(signal.SIGSTOP)
        wait_until_stopped(federation.server.pid)
        supervisor.forget()
        with pytest.raises(TimeoutError):
            supervisor.hear(timeout_s=10 * period_s)
        federation.server.send_signal(signal.SIGCONT)
        supervisor.until("WATCHDOG=1")


@pytest.mark.full
def test_a_second_signal_ends_at_once_and_costs_no_acknowledged_update(tmp_path):
    with LocalFederation(tmp_path) as federation:
        arguments = settings(tasks__classes=[["0", "1"]], round__rounds_per_task=2)
        federation.serve("--until-done", *arguments)
        federation.join("a", write_client(tmp_path / "a", range(2)))
        federation.join("b", write_client(tmp_path / "b", range(2), offset=12))
        federation.until("update")
        stopped = [federation.server, federation.clients["a"]]
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
            wait_until_stopped(process.pid)
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)
        for process in stopped:
            assert process.wait(120) in (128 + signal.SIGINT, 128 + signal.SIGTERM)
        with open_ledger(federation) as ledger:
            run = ledger.runs.newest().run_id
            accepted = {
                u.update_id for r in ledger.rounds.all(run) for u in ledger.updates.of_round(r.key)
            }
        assert accepted
        federation.serve("--until-done", *arguments)
        federation.join("a", tmp_path / "a")
        assert federation.server.wait(120) == 0, federation.last_words("server")
    with open_ledger(federation) as ledger:
        counted = [
            u.update_id
            for r in ledger.rounds.all(run)
            for u in ledger.updates.of_round(r.key)
            if u.status.value == "counted"
        ]
    assert accepted <= set(counted)
    assert len(counted) == len(set(counted)) == 6  # two clients in two rounds and an evaluation
    for name in ("server", "a"):
        words = federation.log(name).read_text()
        assert "stopped immediately" in words
        assert "Traceback" not in words


@pytest.mark.full
def test_a_hang_up_reopens_the_log_and_settings_are_not_read_again(tmp_path):
    with LocalFederation(tmp_path) as federation:
        log, old = tmp_path / "server.log", tmp_path / "server.log.old"
        mine = tmp_path / "a.log"
        federation.serve("--log", str(log), "--log-format", "jsonl", *settings())
        federation.join("a", write_client(tmp_path / "a", range(4)), "--log", str(mine))
        federation.until("announced")
        log.rename(old)
        federation.server.send_signal(signal.SIGHUP)
        federation.until("signal", text="reopened the log")
        assert stat.S_IMODE(log.stat().st_mode) == 0o600
        last = [json.loads(line) for line in old.read_text().splitlines()]
        assert {n["code"] for n in last} >= {"serving", "task_opened", "announced"}
        assert [json.loads(n)["code"] for n in log.read_text().splitlines()] == ["signal"]
        federation.clients["a"].send_signal(signal.SIGHUP)  # it lives on, and ends when asked
        federation.clients["a"].send_signal(signal.SIGTERM)
        assert federation.clients.pop("a").wait(120) == 0
    assert "SIGHUP: reopened the log file" in mine.read_text()
    assert federation.log("server").read_text() == ""  # no terminal: said once, in the log


def serve_by_hand(federation, **streams):
    listen = ["--dir", str(federation.federation), "--port", "0"]
    command = [sys.executable, "-m", "fcil_server", "serve", *listen, *settings()]
    return subprocess.Popen(command, env=federation.environment(), **streams)


@pytest.mark.full
def test_a_reader_that_goes_away_changes_nothing_and_a_closed_terminal_is_a_ctrl_c(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.server = serve_by_hand(federation, stderr=subprocess.PIPE)
        with federation.server.stderr as words:  # `serve 2>&1 | head -1`
            assert b"begins" in words.readline()
        until_it_answers(federation)
        federation.join("a", write_client(tmp_path / "a", range(4)))
        federation.until("announced")  # it had a lot to say since
        for process in (federation.clients.pop("a"), federation.server):
            process.send_signal(signal.SIGHUP)
            assert process.wait(120) == 0


@pytest.mark.full
def test_without_any_stream_and_under_nohup_the_server_serves(tmp_path):
    with LocalFederation(tmp_path) as federation:
        closed = 'trap "" HUP; exec "$@" <&- >&- 2>&-'
        listen = ["--dir", str(federation.federation), "--port", "0"]
        command = [sys.executable, "-m", "fcil_server", "serve", *listen, *settings()]
        federation.server = subprocess.Popen(
            ["sh", "-c", closed, "sh", *command], env=federation.environment()
        )
        until_it_answers(federation)
        # A socket or a database under one of these numbers would get a library's complaints.
        for number in range(3):
            assert os.readlink(f"/proc/{federation.server.pid}/fd/{number}") == os.devnull
        federation.server.send_signal(signal.SIGHUP)
        assert federation.status() is not None
        federation.server.send_signal(signal.SIGTERM)
        assert federation.server.wait(120) == 0


@pytest.mark.full
def test_under_nohup_a_hang_up_still_opens_the_log_anew_and_refuses_a_pipe(tmp_path):
    with LocalFederation(tmp_path) as federation:
        log, old, pipe = (tmp_path / name for name in ("server.log", "old.log", "pipe.log"))
        listen = ["--dir", str(federation.federation), "--port", "0", "--log", str(log)]
        command = [sys.executable, "-m", "fcil_server", "serve", *listen, *settings()]
        federation.server = subprocess.Popen(
            ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *command], env=federation.environment()
        )
        until_it_answers(federation)
        log.rename(old)
        os.mkfifo(log)
        federation.server.send_signal(signal.SIGHUP)
        federation.until("signal", text="expected a file, got a pipe")
        log.rename(pipe)
        federation.server.send_signal(signal.SIGHUP)
        federation.until("signal", text="reopened the log")
        federation.server.send_signal(signal.SIGTERM)
        assert federation.server.wait(120) == 0
    assert "expected a file, got a pipe" in old.read_text()
    assert "SIGHUP: reopened the log file" in log.read_text()


@pytest.mark.full
def test_output_that_nobody_reads_or_that_does_not_fit_is_no_defect(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve(*settings())
        look = [sys.executable, "-m", "fcil_server", "status", "--dir", str(federation.federation)]
        read, write = os.pipe()
        os.close(read)
        with os.fdopen(write, "wb") as unread:
            done = subprocess.run(look, stdout=unread, stderr=subprocess.PIPE, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
        with open("/dev/full", "wb") as full:
            for form in ("text", "json"):
                command = [*look, "--format", form]
                done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
                assert done.returncode == 1
                assert b"standard output cannot be written to" in done.stderr
                assert b"Traceback" not in done.stderr


@pytest.mark.full
def test_status_says_so_if_the_daemon_hangs(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve(*settings())
        federation.join("a", write_client(tmp_path / "a", range(4)))
        federation.until("announced")
        [enrolment] = (tmp_path / "state" / "fcil").glob("*/*/client.json")
        hung = [federation.server, federation.clients["a"]]
        for process in hung:
            # A client whose server hangs answers; then it is stopped too.
            assert control_socket.ask(enrolment.parent, "status")["name"].endswith("a")
            process.send_signal(signal.SIGSTOP)
            wait_until_stopped(process.pid)
        looks = [
            [sys.executable, "-m", "fcil_server", "status", "--dir", str(federation.federation)],
            [sys.executable, "-m", "fcil_client", "status"],
        ]
        running = [
            subprocess.Popen(
                look,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=federation.environment(),
                text=True,
            )
            for look in looks
        ]
        server, client = ((*p.communicate(timeout=60), p.returncode) for p in running)
        for process in hung:
            process.send_signal(signal.SIGCONT)
    assert server[2] == 3
    assert "did not answer within 5 s" in server[1]
    assert client[2] == 0
    assert "does not answer" in client[0]
