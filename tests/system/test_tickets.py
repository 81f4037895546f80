"""A new client on another machine: ticket, guest, member, and how that ends."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fcil_protocol.process import control_socket
from fcil_protocol.trust.certificate import Certificate
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import RunStatus, UpdateStatus
from system.kit import open_ledger, settings, write_client

pytestmark = pytest.mark.processes


def command(federation, module, *arguments, state=None, stdin=None):
    """Run a command line to its end; `state` is the state directory of another device."""
    env = federation.environment()
    if state is not None:
        env["XDG_STATE_HOME"] = str(state)
    where = ["--dir", str(federation.federation)] if module == "fcil_server" else []
    return subprocess.run(
        [sys.executable, "-m", module, *arguments, *where],
        env=env, input=stdin, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def enrol(federation, name, *arguments):
    done = command(federation, "fcil_server", "enrol", name, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def join(federation, device, data, ticket):
    """Start a client as another device would: its own state directory, a ticket."""
    path = device / "ticket"
    device.mkdir(exist_ok=True)
    path.write_text(ticket)
    federation.join(
        device.name, data, "--ticket", str(path), env={"XDG_STATE_HOME": str(device / "state")}
    )


def words(federation, name):
    """Wait for a client that ends by itself; return its exit code and its last words."""
    process = federation.clients.pop(name)
    code = process.wait(60)
    return code, federation.last_words(name)


@pytest.mark.full
def test_two_devices_with_tickets_run_a_whole_federation(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve("--until-done", *settings())
        for k, name in enumerate(("camera-1", "camera-2")):
            data = write_client(tmp_path / f"data-{name}", range(4), offset=12 * k)
            join(federation, tmp_path / name, data, enrol(federation, name))
        assert federation.server.wait(120) == 0, federation.last_words("server")
        federation.check_clients()
    with open_ledger(federation) as ledger:
        assert ledger.runs.newest().status is RunStatus.DONE
        assert [c.name for c in ledger.clients.all()] == ["camera-1", "camera-2"]
        assert all(t.client is not None for t in ledger.tickets.all())
    rows = json.loads(command(federation, "fcil_server", "clients", "--json").stdout)["data"]
    assert [(c["name"], c["state"], c["rounds"]) for c in rows["clients"]] == [
        ("camera-1", "away", 4), ("camera-2", "away", 4),
    ]  # fmt: skip
    assert all(c["wire_up"] > 0 and c["wire_down"] > 0 for c in rows["clients"])
    assert rows["tickets"] == []


@pytest.mark.full
def test_every_way_in_which_a_ticket_is_no_good_is_said_in_a_sentence(tmp_path):
    data = write_client(tmp_path / "data", range(2))
    with LocalFederation(tmp_path) as federation, LocalFederation(tmp_path / "other") as other:
        federation.serve(*settings())
        other.serve(*settings())
        good = enrol(federation, "camera", "--expires", "1h")
        join(federation, tmp_path / "first", data, good)
        federation.until("announced")
        cases = {
            "used": (good, "ticket_used"),
            "altered": (good[:-9] + ("A" if good[-9] != "A" else "B") + good[-8:], "bad_ticket"),
            "no ticket": ("hello", "bad_ticket"),
            "withdrawn": (enrol(federation, "late"), "bad_ticket"),
        }
        enrol(federation, "late")
        # The other federation's ticket with this server's address: its key is not this server's.
        strange = _at(enrol(other, "stray"), federation.port)
        cases["another server"] = (strange, "not_trusted")
        for number, (case, (text, code)) in enumerate(cases.items()):
            device = tmp_path / f"device-{number}"
            join(federation, device, data, text)
            returned, said = words(federation, device.name)
            assert returned == 2, (case, said)
            assert f"[{code}]" in said, (case, said)
            assert "Traceback" not in said
        with open_ledger(federation) as ledger:
            assert [c.name for c in ledger.clients.all()] == ["camera"]


def _at(text, port):
    from dataclasses import replace

    from fcil_protocol.trust.ticket import Ticket

    return replace(Ticket.from_text(text), addresses=(f"127.0.0.1:{port}",)).to_text()


@pytest.mark.full
def test_an_expired_ticket_is_judged_by_the_servers_clock(tmp_path):
    data = write_client(tmp_path / "data", range(2))
    with LocalFederation(tmp_path) as federation:
        federation.serve(*settings())
        ticket = enrol(federation, "camera")
        with _ledger_to_write(federation) as ledger:
            ledger.database.write("UPDATE tickets SET expires_at = ?", (ledger.now - 1,))
        join(federation, tmp_path / "device", data, ticket)
        code, said = words(federation, "device")
        assert (code, "[ticket_expired]" in said) == (2, True), said


def _ledger_to_write(federation):
    from fcil_server.ledger.ledger import LEDGER_NAME, Ledger

    return Ledger(federation.federation / LEDGER_NAME)


@pytest.mark.full
def test_a_revoked_client_is_cut_told_why_and_left_out_and_comes_back_with_a_new_ticket(tmp_path):
    with LocalFederation(tmp_path) as federation:
        arguments = settings(round__min_clients=3, tasks__classes=[["0", "1"]], run__evaluate=False)
        federation.serve("--until-done", *arguments)
        data = {
            n: write_client(tmp_path / f"data-{n}", range(2), offset=12 * k)
            for k, n in enumerate("abc")
        }
        for name in "abc":
            join(federation, tmp_path / name, data[name], enrol(federation, name))
        federation.until("announced", text="c holds")
        os.kill(federation.clients["c"].pid, signal.SIGSTOP)  # the round waits for it
        federation.until("update")
        federation.until("update")
        control_socket.ask(federation.federation, "revoke", name="b", why="the device was stolen")
        code, said = words(federation, "b")
        assert code == 2
        assert "[revoked]" in said
        assert "the device was stolen" in said
        join(federation, tmp_path / "b", data["b"], enrol(federation, "b"))  # made anew
        federation.until("announced", text="b holds")
        control_socket.ask(federation.federation, "close_round")
        assert federation.server.wait(120) == 0, federation.last_words("server")
        federation.kill_client("c")
    with open_ledger(federation) as ledger:
        [first] = ledger.rounds.all(ledger.runs.newest().run_id)
        states = [(u.status, u.reason) for u in ledger.updates.of_round(first.key)]
        assert states.count((UpdateStatus.COUNTED, "")) == 1
        [(_, reason)] = [s for s in states if s[0] is UpdateStatus.EXCLUDED]
        assert "revoked" in reason
        members = [(c.name, c.revoked_at is None) for c in ledger.clients.all()]
        assert members == [("a", True), ("b", False), ("c", True), ("b", True)]


@pytest.mark.full
def test_a_ticket_is_made_for_a_stopped_federation_and_kept_private(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve(*settings())
    out = tmp_path / "camera.ticket"
    done = command(federation, "fcil_server", "enrol", "camera", "--out", str(out), "--qr")
    assert done.returncode == 0, done.stderr
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    text = out.read_text().strip()
    assert text not in done.stdout
    assert "\u2588" in done.stdout or "\u2584" in done.stdout  # the QR code
    assert "only this machine's own address" in done.stderr
    for path in federation.directory.rglob("*"):
        if path.is_file() and path != out:
            assert text.encode() not in path.read_bytes(), path
    assert command(federation, "fcil_server", "enrol", "x", "--expires", "soon").returncode == 4


@pytest.mark.full
def test_a_second_start_with_the_same_ticket_goes_on_as_the_same_client(tmp_path):
    data = write_client(tmp_path / "data", range(2))
    with LocalFederation(tmp_path) as federation:
        federation.serve(*settings())
        ticket = enrol(federation, "camera")
        join(federation, tmp_path / "device", data, ticket)
        federation.until("announced")
        federation.kill_client("device")
        federation.until("left")
        join(federation, tmp_path / "device", data, ticket)  # as a service file would
        federation.until("announced")
    with open_ledger(federation) as ledger:
        assert len(ledger.clients.all()) == 1
    assert not list(Path(tmp_path / "device").rglob("keys.next.json"))


@pytest.mark.full
def test_a_client_that_leaves_is_off_the_list_and_its_device_is_clean(tmp_path):
    data = {
        n: write_client(tmp_path / f"data-{n}", range(2), offset=12 * k) for k, n in enumerate("ab")
    }
    with LocalFederation(tmp_path) as federation:
        federation.serve(*settings())
        for name in "ab":
            join(federation, tmp_path / name, data[name], enrol(federation, name))
            federation.until("announced", text=f"{name} holds")
        federation.until("update")
        state = tmp_path / "b" / "state"
        [keys] = state.rglob("keys.json")
        done = command(
            federation, "fcil_client", "leave", "--data", str(data["b"]), "--yes", state=state
        )
        assert done.returncode == 0, done.stderr
        assert "has left" in done.stderr
        assert federation.clients.pop("b").wait(120) == 0  # its daemon was ended
        assert not keys.exists()
        assert {p.name for p in keys.parent.iterdir()} == {"lock", "egress.jsonl", "left.json"}
        assert len(list(data["b"].rglob("*.png"))) == 24  # images stay
        again = command(
            federation, "fcil_client", "leave", "--data", str(data["b"]), "--yes", state=state
        )
        assert again.returncode == 4
        federation.check_clients()  # the other one goes on
    with open_ledger(federation) as ledger:
        states = {c.name: (c.revoked_at is None, c.revoked_why) for c in ledger.clients.all()}
    assert states == {"a": (True, ""), "b": (False, "the client left by itself")}


@pytest.mark.full
def test_keys_change_on_both_sides_and_a_sleeper_finds_the_way_back(tmp_path):
    data = {n: write_client(tmp_path / f"data-{n}", [0], offset=12 * k) for k, n in enumerate("ab")}
    arguments = settings(tasks__schedule="discovered", tasks__classes=[], tasks__settle_s=0.2)
    with LocalFederation(tmp_path) as federation:
        federation.serve(*arguments)
        tickets = {n: enrol(federation, n) for n in "ab"}
        for name in "ab":
            join(federation, tmp_path / name, data[name], tickets[name])
            federation.until("announced", text=f"{name} holds")
        federation.until("task_done", text="task 0")
        federation.kill_client("a")  # it sleeps through everything that follows
        federation.until("left", text="a left")
        before = _public_keys(federation)
        rotated = command(
            federation, "fcil_client", "rotate-keys", "--data", str(data["b"]),
            state=tmp_path / "b" / "state",
        )  # fmt: skip
        assert rotated.returncode == 0, rotated.stderr
        federation.clients.pop("b").wait(120)
        after = _public_keys(federation)
        assert after["a"] == before["a"]
        assert not set(after["b"]) & set(before["b"])
        control_socket.ask(federation.federation, "stop")
        assert federation.server.wait(120) == 0
        done = command(federation, "fcil_server", "rotate-keys")
        assert done.returncode == 0, done.stderr
        federation.serve(*arguments)
        for k, name in enumerate("ab"):
            write_client(data[name], [1], offset=12 * k)  # the next task, for both
            join(federation, tmp_path / name, data[name], tickets[name])
        federation.until("task_done", text="task 1")
        federation.check_clients()
    with open_ledger(federation) as ledger:
        assert [c.name for c in ledger.clients.all()] == ["a", "b"]
        assert [e.action for e in ledger.audit.newest()].count("rotate_keys") == 2
    serials = {_serial(tmp_path / name / "state") for name in "ab"}
    assert len(serials) == 1  # both know the new certificate
    certificate = (federation.federation / "keys" / "certificate").read_bytes()
    assert serials == {Certificate.from_bytes(certificate).serial}


def _public_keys(federation):
    with open_ledger(federation) as ledger:
        return {c.name: (c.curve, c.signing, c.sealing) for c in ledger.clients.all()}


def _serial(state):
    [path] = state.rglob("client.json")
    return Certificate.from_bytes(bytes.fromhex(json.loads(path.read_text())["certificate"])).serial


@pytest.mark.full
def test_a_change_of_keys_whose_answer_was_lost_is_finished_the_next_time(tmp_path):
    data = write_client(tmp_path / "data", range(2))
    with LocalFederation(tmp_path) as federation:
        federation.serve(*settings())
        join(federation, tmp_path / "device", data, enrol(federation, "camera"))
        federation.until("announced")
        state = tmp_path / "device" / "state"
        [path] = state.rglob("keys.json")
        old = path.read_bytes()

        def rotate():
            return command(
                federation, "fcil_client", "rotate-keys", "--data", str(data), state=state
            )

        assert rotate().returncode == 0
        new = path.read_bytes()
        assert new != old
        # As it was when the server had taken the new keys and its answer did not arrive.
        path.replace(path.with_name("keys.next.json"))
        path.write_bytes(old)
        path.chmod(0o600)
        done = rotate()
        assert done.returncode == 0, done.stderr
        assert path.read_bytes() == new
        assert not path.with_name("keys.next.json").exists()
        # The same again, and the client is started instead: it finishes the change by itself.
        path.replace(path.with_name("keys.next.json"))
        path.write_bytes(old)
        path.chmod(0o600)
        federation.join("again", data, env={"XDG_STATE_HOME": str(state)})
        federation.until("announced")
        assert path.read_bytes() == new
        with open_ledger(federation) as ledger:
            assert len(ledger.clients.all()) == 1


@pytest.mark.full
def test_what_is_there_is_not_overwritten_and_no_ticket_is_issued_for_it(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve(*settings())
        there = tmp_path / "there"
        there.write_text("precious")
        for out in (there, tmp_path / "no folder" / "x"):
            done = command(federation, "fcil_server", "enrol", "camera", "--out", str(out))
            assert done.returncode == 4, done.stderr
        assert there.read_text() == "precious"
        with open_ledger(federation) as ledger:
            assert ledger.tickets.all() == []


@pytest.mark.full
def test_an_open_ticket_is_withdrawn_by_its_name(tmp_path):
    data = write_client(tmp_path / "data", range(2))
    with LocalFederation(tmp_path) as federation:
        federation.serve(*settings())
        ticket = enrol(federation, "camera")
        done = command(federation, "fcil_server", "revoke", "camera")
        assert done.returncode == 0, done.stderr
        assert "withdrawn" in done.stderr
        join(federation, tmp_path / "device", data, ticket)
        code, said = words(federation, "device")
        assert (code, "withdrawn" in said) == (2, True), said


@pytest.mark.full
def test_a_server_runs_while_its_root_key_is_kept_elsewhere(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve(*settings())
        control_socket.ask(federation.federation, "stop")
        assert federation.server.wait(120) == 0
        root = federation.federation / "keys" / "root.json"
        root.rename(tmp_path / "root.json")
        federation.serve(*settings())
        assert not root.exists()  # above all, no other root is drawn
        control_socket.ask(federation.federation, "stop")
        assert federation.server.wait(120) == 0
        done = command(federation, "fcil_server", "rotate-keys")
        assert done.returncode == 2
        assert "root.json" in done.stderr


@pytest.mark.full
def test_a_revocation_while_the_server_is_stopped_leaves_the_stored_update_out(tmp_path):
    with LocalFederation(tmp_path) as federation:
        arguments = settings(tasks__classes=[["0", "1"]], run__evaluate=False, round__min_clients=3)
        federation.serve(*arguments)
        data = {n: write_client(tmp_path / f"data-{n}", range(2), offset=12 * k)
                for k, n in enumerate("abc")}  # fmt: skip
        for name in "abc":
            join(federation, tmp_path / name, data[name], enrol(federation, name))
        federation.until("announced", text="c holds")
        os.kill(federation.clients["c"].pid, signal.SIGSTOP)  # the round waits for it
        federation.until("update")
        federation.until("update")
        federation.kill_server()
        federation.kill_client("c")
        done = command(federation, "fcil_server", "revoke", "b", "--why", "stolen")
        assert done.returncode == 0, done.stderr
        with open_ledger(federation) as ledger:
            [row] = ledger.rounds.all(ledger.runs.newest().run_id)
            states = sorted(u.status.value for u in ledger.updates.of_round(row.key))
            assert states == ["accepted", "excluded"]
