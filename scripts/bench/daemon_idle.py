"""Memory and CPU of an idle federation: a server and one client daemon after a run, no torch.

.venv/bin/python scripts/bench/daemon_idle.py [--seconds 20]
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

from processes import cpu_s, status_mb

from fcil_server.lab.local.demo import write_digits
from fcil_server.lab.local.federation import LocalFederation

SETTINGS = {
    "method.name": "running_mean",
    "tasks.schedule": "listed",
    "tasks.classes": '[["0", "1"], ["2", "3"]]',
    "round.rounds_per_task": "1",
    "round.min_clients": "1",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20)
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="fcil-idle-"))
    try:
        [data] = write_digits(directory / "data", 1)
        with LocalFederation(directory) as federation:
            federation.serve(*(a for k, v in SETTINGS.items() for a in ("-c", f"{k}={v}")))
            federation.join("client", data)
            federation.until("run_done")
            assert federation.server is not None
            pids = {"server": federation.server.pid, "client": federation.clients["client"].pid}
            before = {name: cpu_s(pid) for name, pid in pids.items()}
            time.sleep(args.seconds)
            for name, pid in pids.items():
                used = (cpu_s(pid) - before[name]) / args.seconds
                print(f"{name}: {status_mb(pid):.0f} MB resident, {100 * used:.2f} % of a core")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
