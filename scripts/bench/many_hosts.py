"""Very many clients, their server, and its database and object store, on three hosts.

As scripts/bench/many_clients.py, with the same options but --relay and --ledger. The hosts are
network namespaces on one bridge of this machine: the server's, the clients', and one with Postgres
(which holds the ledger) and a server that speaks S3 (which holds parts of 1 MiB and more; plain
HTTP, so its seconds lack TLS). FCIL_S3_SERVER names moto's program; without it no store is used.

unshare -rn .venv/bin/python scripts/bench/many_hosts.py --clients 300 --kilobytes 1200
"""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from many_clients import Places, arguments, measure, raise_limits

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from postgres_kit import programs
from system.hosts.network import Host, Spread, hosts, started_on

PORT, S3_PORT = 7710, 9000
KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "eu-west-1"}


@contextmanager
def s3_on(host: Host) -> Iterator[str]:
    """Yield the URL of an S3 server on a host, with an empty bucket; "": there is none."""
    program = os.environ.get("FCIL_S3_SERVER")
    if not program:
        yield ""
        return
    url = f"http://{host.address}:{S3_PORT}"
    command = [*host.enter, program, "-H", host.address, "-p", str(S3_PORT)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as server:
        try:
            assert server.stderr is not None
            while b"Running on" not in (line := server.stderr.readline()):
                assert line, "it has ended"
            bucket = ["curl", "-sf", "-X", "PUT", f"{url}/bucket"]
            subprocess.run(bucket, check=True, stdout=subprocess.DEVNULL)
            threading.Thread(target=server.stderr.read, daemon=True).start()
            yield url
        finally:
            server.kill()


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
        with hosts(3) as (server, clients, third), s3_on(third) as store:
            (directory / "postgres").mkdir()
            postgres = started_on(third, directory / "postgres", bin_folder)
            try:
                args.ledger = postgres.url
                print("object store: " + (store or "none, since FCIL_S3_SERVER names no server"))
                settings = {"federation.listen": f"{server.address}:{PORT}"}
                settings |= {"parts.store": "s3://bucket/parts"} if store else {}
                env = {**KEYS, "AWS_ENDPOINT_URL": store, "AWS_ALLOW_HTTP": "true"} if store else {}
                federation = Spread(directory, port=PORT, places={"": server})
                measure(args, directory, Places(federation, clients.enter, settings, env))
            finally:
                postgres.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
