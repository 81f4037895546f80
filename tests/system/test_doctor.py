"""The doctor beside real daemons: what it finds, and that it disturbs nobody."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from fcil_client.cli import main as cli
from fcil_client.doctor.checks.facts import EngineFacts, TorchFacts
from fcil_client.doctor.probes import engines
from fcil_client.link import connection
from fcil_protocol.errors import WorkerDied
from fcil_protocol.process import control_socket
from fcil_server.lab.local.federation import LocalFederation
from system.kit import settings, write_client

pytestmark = pytest.mark.processes


def by_id(answer):
    return {line["id"]: line for line in json.loads(answer)["data"]["lines"]}


@pytest.fixture
def look(tmp_path, monkeypatch):
    """Ask the doctor in this process, which need not import torch once more in another."""
    torch = EngineFacts(installed={"torch": "2", "timm": "1"}, torch=TorchFacts("2"))
    monkeypatch.setattr(engines, "look", lambda *_args, **_more: torch)

    def die(*_args, **_more):
        raise WorkerDied("the process that tried it was ended by SIGSEGV.")

    monkeypatch.setattr(engines, "ask", die)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def run(*arguments, stdin=None):
        done = CliRunner().invoke(cli.app, ["doctor", *arguments, "--json"], input=stdin)
        assert "Traceback" not in done.output
        lines = by_id(done.stdout)
        failed = [name for name, line in lines.items() if line["state"] == "failure"]
        assert bool(failed) == bool(done.exit_code), done.output
        return lines, failed, done.exit_code

    return run


def enrol(federation, name):
    command = [sys.executable, "-m", "fcil_server", "enrol", name, "--json"]
    command += ["--dir", str(federation.federation)]
    done = subprocess.run(
        command, env=federation.environment(), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)["data"]["ticket"]


@pytest.mark.full
def test_the_doctor_finds_what_is_well_and_what_was_broken(tmp_path, look, monkeypatch):
    data = write_client(tmp_path / "a", range(3))
    with LocalFederation(tmp_path) as federation:
        federation.serve(*settings())
        ticket = enrol(federation, "camera")
        (tmp_path / "ticket").write_text(ticket)

        # A stranger with a ticket: it is looked at, and not used.
        lines, failed, _ = look("--data", str(data), "--ticket", str(tmp_path / "ticket"))
        # No run is known, so the embedded backbone is tried, and its driver crashes.
        assert failed == ["backbone.digest"]
        assert "the server knows it" in lines["membership.ticket"]["text"]
        assert lines["membership.enrolment"]["state"] == "warning"
        assert [p.name for p in (tmp_path / "state" / "fcil").iterdir()] == ["servers"]

        # Somebody runs: it is asked, and stays connected by its one link.
        federation.join("a", data, "--ticket", str(tmp_path / "ticket"))
        federation.until("announced")
        (enrolment,) = (tmp_path / "state" / "fcil").glob("*/*/client.json")
        home = enrolment.parent
        command = [sys.executable, "-m", "fcil_client", "doctor", "--json"]
        done = subprocess.run(
            command, env=federation.environment(), capture_output=True, text=True, check=False
        )
        lines = by_id(done.stdout)
        assert done.returncode == 0, done.stdout
        assert "has a session" in lines["network.server"]["text"]
        assert lines["network.clock"]["state"] == lines["daemon.version"]["state"] == "ok"
        assert lines["backbone.which"]["text"].startswith("the method uses no backbone")
        assert lines["images.sides"]["state"] == "ok"
        assert ticket not in done.stdout + done.stderr
        words = [note["text"] for note in control_socket.ask(home, "status")["notes"]]
        assert not [text for text in words if "connection was lost" in text]
        lines, failed, code = look("--data", str(data), "--ticket", "-", stdin=ticket)
        assert (failed, code) == ([], 0)
        assert "no longer needs it" in lines["membership.ticket"]["text"]

        # On another device the same ticket is worth nothing any more.
        with monkeypatch.context() as patch:
            patch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
            lines, failed, _ = look("--ticket", str(tmp_path / "ticket"))
        assert "membership.ticket" in failed
        assert lines["membership.ticket"]["code"] == "ticket_used"

        # It stops: the server is asked, and its clock is compared.
        federation.clients["a"].terminate()
        assert federation.clients.pop("a").wait(60) == 0
        lines, failed, _ = look("--data", str(data))
        assert failed == []
        assert "accepts this client" in lines["network.server"]["text"]
        assert lines["daemon.running"]["state"] == "warning"
        ahead = connection.time.time() + 864000
        with monkeypatch.context() as patch:
            patch.setattr(connection.time, "time", lambda: ahead)
            lines, failed, _ = look("--data", str(data))
        assert failed == []
        assert "10 days ahead of the server's" in lines["network.clock"]["text"]

        # What was broken is found, each by its own line.
        (home / "keys.json").chmod(0o644)
        (data / "0" / "broken.png").write_bytes(b"no image")
        lines, failed, code = look("--data", str(data))
        assert failed == ["backbone.digest", "membership.keys", "network.server"]
        assert "chmod 600" in lines["membership.keys"]["action"]
        assert lines["images.unreadable"]["state"] == "warning"
        (home / "keys.json").chmod(0o600)
        command = [sys.executable, "-m", "fcil_server", "revoke", "camera"]
        command += ["--dir", str(federation.federation), "--why", "it was stolen"]
        subprocess.run(command, env=federation.environment(), capture_output=True, check=True)
        lines, failed, code = look("--data", str(data))
        assert (failed, code) == (["backbone.digest", "network.server"], 1)
        assert "it was stolen" in lines["network.server"]["text"]
        assert lines["network.server"]["code"] == "revoked"
    lines, failed, code = look("--data", str(data))
    assert (failed, code) == (["backbone.digest", "network.reach"], 1)
    assert "refused" in lines["network.reach"]["text"]
    enrolment.write_bytes(enrolment.read_bytes()[:50])
    lines, failed, code = look("--data", str(data))
    assert (failed, code) == (["backbone.digest", "membership.enrolment"], 1)
    assert lines["membership.keys"]["state"] == "ok"
