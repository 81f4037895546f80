"""One part down and one update up over links of all sorts: seconds, and bytes that it took.

One client behind a proxy that is a bad link (tests/system/bad_link.py). Seconds are from when
the client is asked until the server has the update on disk; bytes are all that the link
carried in that direction, joining included, over those of the tensors: what exceeds 1 is
headers, sessions, and what was sent again.

.venv/bin/python scripts/bench/links.py [--only WORD] [--tree DIRECTORY]

DIRECTORY is another copy of this project, to compare with.
"""

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from fcil_server.lab.local.federation import LocalFederation  # noqa: E402
from system.bad_link import DOWN, UP, BadLink, Link  # noqa: E402
from system.kit import write_client  # noqa: E402
from system.payload_kit import ENV, one_round  # noqa: E402
from system.test_wire import free_port  # noqa: E402

PACKAGES = ("protocol", "adapters", "client", "server")
GIVE_UP_S = 400.0


@dataclass(frozen=True)
class Case:
    """One row of the table; without a link the client connects directly."""

    words: str
    kilobytes: int
    link: Link | None


SLOW, FAR = 20_000, 1_000_000
CASES = (
    Case("loopback", 30_000, None),
    Case("loopback", 100_000, None),
    Case("1 MB/s, 200 ms", 300, Link(FAR, 0.1)),
    Case("1 MB/s, 200 ms", 3_000, Link(FAR, 0.1)),
    Case("1 MB/s, 200 ms", 10_000, Link(FAR, 0.1)),
    Case("1 MB/s, 200 ms, cut every 3 s", 10_000, Link(FAR, 0.1, cut_s=3)),
    Case("no limit, 4 s", 3_000, Link(0, 2.0)),
    Case("20 kB/s", 300, Link(SLOW)),
    Case("20 kB/s, cut every 10 s", 300, Link(SLOW, cut_s=10)),
    Case("20 kB/s, cut every 30 s", 600, Link(SLOW, cut_s=30)),
    Case("5 kB/s", 100, Link(5_000)),
)


def run(case: Case, environment: dict[str, str]) -> str:
    """Return the row of a case."""
    port = free_port()
    with (
        tempfile.TemporaryDirectory() as directory,
        BadLink(port, case.link or Link()) as bad,
        LocalFederation(Path(directory), port=port) as federation,
    ):
        reached = bad.port if case.link else port
        told = [f"127.0.0.1:{reached}"]
        arguments = one_round(case.kilobytes, federation__advertise=told)
        federation.serve(*arguments, "-c", "round.deadline_s=3600", env=environment)
        folder = write_client(Path(directory) / "data", (0, 1))
        federation.join("a", folder, env=environment)
        while "asked for" not in federation.log("a").read_text():
            time.sleep(0.01)
        began = time.monotonic()
        try:
            federation.until("update", timeout_s=GIVE_UP_S)
        except Exception as error:
            return f"| {case.words} | {case.kilobytes} | {type(error).__name__} | | | {bad.cuts} |"
        seconds = time.monotonic() - began
        size = case.kilobytes * 1000
        ratios = f"{bad.carried[DOWN] / size:.3f} | {bad.carried[UP] / size:.3f}"
        ratios = ratios if case.link else " | "
    return f"| {case.words} | {case.kilobytes} | {seconds:.1f} | {ratios} | {bad.cuts} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases with this word")
    parser.add_argument("--tree", type=Path, default=ROOT)
    options = parser.parse_args()
    paths = [str(options.tree.resolve() / package) for package in PACKAGES]
    environment = {"PYTHONPATH": os.pathsep.join([*paths, ENV["PYTHONPATH"]])}
    print("| link | kB each way | seconds | down / tensors | up / tensors | cuts |")
    print("|---|---|---|---|---|---|")
    for case in CASES:
        if options.only in case.words:
            print(run(case, environment), flush=True)


if __name__ == "__main__":
    main()
