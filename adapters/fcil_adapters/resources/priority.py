"""Priority of a worker next to other programs.

Torch-free. The work does not depend on it: a system's refusal is ignored.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

AUTOGROUP = Path("/proc/self/autogroup")
# When the machine runs out of memory, the kernel ends the worker, and never the daemon.
OOM_SCORE = "500"


def lower_priority(nice: int) -> None:
    """Let other programs go first, at the processor and at the disk.

    A worker has a session of its own. Where the kernel shares the processor between sessions first
    (autogroup, on most desktops), niceness counts only within one, unless the group has it.

    Args:
        nice: added to this process's niceness, 1 to 19; 0: nothing changes.
    """
    if not nice:
        return
    level = os.nice(nice)
    with contextlib.suppress(OSError):  # another system, or a kernel without it
        AUTOGROUP.write_text(str(level))
    import psutil  # slow; not in every worker

    with contextlib.suppress(AttributeError, OSError, psutil.Error):  # unsupported or not allowed
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, 7)


def raise_oom_score() -> None:
    """Make this process the first that the kernel ends when memory runs out."""
    with contextlib.suppress(OSError):  # not on Linux
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
