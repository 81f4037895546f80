"""A federation on four hosts, one of which is lost in the middle of a round.

    unshare -rn python tests/system/hosts/lost.py DIRECTORY POSTGRES server|database

Two servers (one works, one waits), the clients, and Postgres. Their file system is this
machine's: it stands for one that has noticed the loss. "server": the first server's host loses
its line, and is then without power. "database": Postgres's host loses its line until the first
server has ended. Prints a line of JSON: seconds from the loss until the second server worked.
"""

import json
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tests"))

from system.hosts.network import Spread, hosts, started_on  # noqa: E402
from system.kit import open_ledger, settings  # noqa: E402
from system.test_intake_pool import ARGUMENTS, check_rounds, join_all  # noqa: E402
from system.test_standby import move_ledger, start_standby, take_over  # noqa: E402

PORT = 7710
PATIENCE_S = 120.0


def main(directory, programs, lost):
    with (
        hosts(4) as (first, second, clients, database),
        tempfile.TemporaryDirectory(prefix="pg-", dir="/tmp") as folder,
    ):
        postgres = started_on(database, folder, Path(programs))
        try:
            for host in (second, clients, database):
                host.reach_for_ever(first)
            places = {"server": first, "standby": second, "": clients}
            with Spread(directory, port=PORT, places=places) as federation:
                course(federation, postgres.url, first, second, database, lost)
        finally:
            database.plug_in()
            postgres.stop()


def course(federation, url, first, second, database, lost):
    both = [f"{host.address}:{PORT}" for host in (first, second)]
    given = ARGUMENTS | {"federation__intake": 0, "round__rounds_per_task": 60}
    given |= {"federation__advertise": both, "federation__heartbeat_s": 5.0}
    here, there = (settings(**given, federation__listen=address) for address in both)
    federation.serve(*here)
    federation.kill_server()
    moved = move_ledger(federation, url)
    assert moved.returncode == 0, moved.stderr
    federation.serve(*here)
    join_all(federation, federation.directory)
    standby = start_standby(federation, *there)
    federation.until("update")
    began, lost_at = time.monotonic(), time.time()
    if lost == "server":
        first.unplug()
        federation.server.kill()
    else:
        database.unplug()
    code = take_over(federation, standby)
    if lost == "database":
        assert code == 1, federation.last_words("server")
        assert "Nothing that was acknowledged is lost" in federation.log("server").read_text()
        ended = time.monotonic()
        database.plug_in()
    else:
        assert code == -signal.SIGKILL
        ended = began
    federation.until("serving", timeout_s=PATIENCE_S)
    worked = time.monotonic()
    federation.until("run_done", timeout_s=2 * PATIENCE_S)
    check_rounds(federation)
    with open_ledger(federation) as ledger:
        rows = ledger.rounds.all(ledger.runs.newest().run_id)
    assert sum(row.closed_at > lost_at for row in rows) > 1, "it was over before"
    print(json.dumps({"ended_s": round(ended - began, 1), "worked_s": round(worked - ended, 1),
                      "done_s": round(time.monotonic() - began, 1)}))  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
