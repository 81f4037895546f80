"""A second server takes over a federation whose first one ends, and the round goes on."""

import contextlib
import json
import socket
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

import postgres_kit
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.databases.opening import location_of
from fcil_server.ledger.ledger import LEDGER_NAME
from system.hosts.network import why_no_hosts
from system.kit import open_ledger, settings, until_log
from system.test_intake_pool import ARGUMENTS, check_rounds, join_all

pytestmark = pytest.mark.processes
GIVEN = settings(**ARGUMENTS | {"federation__intake": 0, "round__rounds_per_task": 8})


@pytest.fixture
def url():
    with postgres_kit.cluster() as cluster:
        yield cluster.url


def start_standby(federation, *more, port=None):
    """Start a second server in the same directory; return it when it waits."""
    place = ["--dir", str(federation.federation), "--port", str(port or federation.port)]
    command = ["fcil_server", "serve", "--standby", *place, *GIVEN, *more]
    started = federation._start("standby", command, None)
    until_log(federation, "standby", "this one takes over when it ends")
    return started


def take_over(federation, standby):
    """Wait for the end of the first server; from now on the second one is asked."""
    first = federation.server
    first.wait(120)
    federation.server, federation._heard = standby, 0
    return first.returncode


def move_ledger(federation, to):
    command = [sys.executable, "-m", "fcil_server", "move-ledger", to]
    return subprocess.run(
        [*command, "--dir", str(federation.federation)],
        check=False,
        capture_output=True,
        text=True,
        env=federation.environment(),
    )


def test_a_killed_servers_round_goes_on_with_the_one_that_waited(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve(*GIVEN)
        join_all(federation, tmp_path)
        standby = start_standby(federation)
        federation.until("update")
        federation.server.kill()
        take_over(federation, standby)
        federation.until("run_done")
    check_rounds(federation)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return bound.getsockname()[1]


def test_clients_find_the_other_address_of_two(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.port, other = free_port(), free_port()
        both = [f"127.0.0.1:{port}" for port in (federation.port, other)]
        advertised = ["-c", f"federation.advertise={json.dumps(both)}"]
        federation.serve(*GIVEN, *advertised)
        join_all(federation, tmp_path)
        standby = start_standby(federation, *advertised, port=other)
        federation.until("update")
        federation.server.kill()
        take_over(federation, standby)
        federation.until("run_done")
        assert federation.status()["federation"]["port"] == other
    check_rounds(federation)


def test_a_server_that_loses_its_ledger_ends_and_the_other_one_goes_on(tmp_path, url):
    with LocalFederation(tmp_path) as federation:
        federation.serve(*GIVEN)
        refused = move_ledger(federation, url)
        assert refused.returncode == 2, refused.stderr
        assert "is in use by" in refused.stderr
        federation.kill_server()
        moved = move_ledger(federation, url)
        assert moved.returncode == 0, moved.stderr
        place = location_of(federation.federation / LEDGER_NAME)
        assert str(place) in moved.stdout
        federation.serve(*GIVEN)
        join_all(federation, tmp_path)
        standby = start_standby(federation)
        federation.until("update")
        with contextlib.closing(psycopg.connect(url, autocommit=True)) as db:
            db.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_locks "
                "WHERE locktype = 'advisory' AND granted"
            )
        assert take_over(federation, standby) == 1
        assert "Nothing that was acknowledged is lost" in federation.log("server").read_text()
        federation.until("run_done")
        with open_ledger(federation) as ledger:
            assert ledger.database.place == str(place)
        check_rounds(federation)
        standby.terminate()
        standby.wait(60)
        back = move_ledger(federation, "file")
        assert back.returncode == 0, back.stderr
        assert location_of(federation.federation / LEDGER_NAME) is None
        check_rounds(federation)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lost", ["server", "database"])
def test_a_host_is_lost_without_a_word(tmp_path, lost):
    """No packet tells anyone: clients, Postgres and the standby find out by themselves."""
    if why := why_no_hosts():
        pytest.skip(f"no namespaces or no bridge here: {why}")
    script = Path(__file__).parent / "hosts" / "lost.py"
    # All that it starts ends with it.
    apart = ["unshare", "-rmn", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command = [*apart, sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(
        [*command, str(postgres_kit.programs()), lost],
        capture_output=True, check=False, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    # A connection that were closed by a packet would be missed at once.
    assert (said["worked_s"] if lost == "server" else said["ended_s"]) > 10
