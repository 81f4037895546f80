"""How a worker behaves beside other programs.

Torch-free. Nothing here is needed for the work: where a system refuses, it is done without.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

AUTOGROUP = Path("/proc/self/autogroup")
# Of a machine that runs out of memory the kernel ends the worker, and never the daemon.
OOM_SCORE = "500"


def give_way(nice: int) -> None:
    """Let other programs go first, at the processor and at the disk.

    A worker has a session of its own. Where the kernel shares the processor between sessions
    first (autogroup, on most desktops), niceness counts only within one, unless the group has it.

    Args:
        nice: added to this process's niceness, 1 to 19; 0: nothing changes.
    """
    if not nice:
        return
    level = os.nice(nice)
    with contextlib.suppress(OSError):  # another system, or a kernel without it
        AUTOGROUP.write_text(str(level))
    import psutil  # not in every worker

    with contextlib.suppress(AttributeError, OSError, psutil.Error):  # not told, or not allowed
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, 7)


def die_first() -> None:
    """Be the one that the kernel ends when memory runs out."""
    with contextlib.suppress(OSError):  # not on Linux
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
