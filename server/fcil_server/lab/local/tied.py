"""``python -m fcil_server.lab.local.tied PARENT MODULE ...``: a module that dies with its parent.

The kernel kills this process as soon as the thread that started it is gone, kill -9 included, so
an interrupted experiment leaves no server and no swarm behind; their workers end with their pipes.
"""

from __future__ import annotations

import os
import sys

from fcil_protocol.process.children import die_with_parent, module_command


def tie(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies; end if it is already dead.

    Args:
        parent: process id of this process's parent.
    """
    die_with_parent()
    if os.getppid() != parent:  # it died before the kernel knew
        sys.exit(1)


if __name__ == "__main__":
    tie(int(sys.argv[1]))
    command = module_command(*sys.argv[2:])
    os.execv(command[0], command)  # noqa: S606 (no shell meant)
