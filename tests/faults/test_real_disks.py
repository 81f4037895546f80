"""Real disks: a tmpfs that fills up and is freed, a mount that becomes read-only."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes
TESTS = Path(__file__).parents[1]


def may_mount():
    """Whether this system lets a user mount something in a namespace of its own."""
    try:
        done = subprocess.run(
            ["unshare", "-rm", "mount", "-t", "tmpfs", "x", "/mnt"],
            capture_output=True,
            check=False,
        )
    except FileNotFoundError:
        return False
    return done.returncode == 0


@pytest.mark.skipif(not may_mount(), reason="no user namespaces with mounts here")
@pytest.mark.full
@pytest.mark.parametrize("case", ["full_client", "full_server", "read_only_server"])
def test_a_federation_gets_over(case, tmp_path):
    search = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    script = str(TESTS / "faults" / "small_disk.py")
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, script, case, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
