"""Very many clients, their server, and its database and object store, on three hosts.

As scripts/bench/many_clients.py, with the same options but --relay and --ledger. The hosts are
network namespaces on one bridge of this machine: the server's, the clients', and one with Postgres
(which holds the ledger) and a server that speaks S3 (which holds parts of 1 MiB and more; plain
HTTP, so its seconds lack TLS). FCIL_S3_SERVER names moto's program; without it no store is used.

unshare -rn .venv/bin/python scripts/bench/many_hosts.py --clients 300 --kilobytes 1200
"""

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from many_clients import Places, arguments, measure, raise_limits

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from postgres_kit import programs
from s3_kit import PROGRAM, environment, s3_server
from system.hosts.network import Spread, hosts, started_on

PORT, S3_PORT = 7710, 9000


def main() -> None:
    parser = arguments(__doc__)
    args = parser.parse_args()
    if args.relay or args.ledger:
        parser.error("--relay and --ledger are for many_clients.py")
    try:
        bin_folder = programs()
    except pytest.skip.Exception as missing:
        parser.error(str(missing))
    raise_limits()
    directory = Path(tempfile.mkdtemp(prefix="fcil-hosts-"))
    try:
        with contextlib.ExitStack() as stack:
            server, clients, third = stack.enter_context(hosts(3))
            store = ""
            if PROGRAM in os.environ:
                there = s3_server(third.address, S3_PORT, third.enter)
                store = stack.enter_context(there)
            (directory / "postgres").mkdir()
            postgres = started_on(third, directory / "postgres", bin_folder)
            try:
                args.ledger = postgres.url
                print("object store: " + (store or "none, since FCIL_S3_SERVER names no server"))
                settings = {"federation.listen": f"{server.address}:{PORT}"}
                settings |= {"parts.store": "s3://bucket/parts"} if store else {}
                env = environment(store) if store else {}
                federation = Spread(directory, port=PORT, places={"": server})
                measure(args, directory, Places(federation, clients.enter, settings, env))
            finally:
                postgres.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
