"""A parent that is killed with kill -9, and the end of its child."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys


def ends_with_its_parent(script: str, **environment: str) -> None:
    """Kill the process of a script, and wait for the end of its child.

    Args:
        script: starts the child, prints its process id once it works, and goes on.
        environment: variables for the script.
    """
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
    ) as parent:
        child = os.pidfd_open(int(parent.stdout.readline()))
        try:
            parent.kill()
            parent.wait()
            assert select.select([child], [], [], 60)[0], "the child has outlived its parent"
        finally:
            if not select.select([child], [], [], 0)[0]:
                signal.pidfd_send_signal(child, signal.SIGKILL)
            os.close(child)
