"""Child processes of fcil, from their parent's side: the command, the pipe to it, and its end.

One rule ends every child with its parent, kill -9 included: its standard input is a pipe whose
writing end only the parent holds. The kernel closes that end with the parent, and the child ends
when it reads the end of file (`process.child` is its side).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import IO

LAUNCHER = "fcil_protocol.process.child"  # runs a module that has no part in the rule
KILLED_S = 5.0  # until a killed process is gone; one that hangs in the kernel may never be

_started: weakref.WeakSet[ChildProcess] = weakref.WeakSet()


def module_command(module: str, *words: str) -> list[str]:
    """Return the command that runs a module in a process of its own, with this Python.

    ``python -m`` alone puts the current directory before all installed packages, so a ``PIL.py`` or
    ``json.py`` in it (part of a data set) would run as this user. ``-P`` leaves the directory out.

    Args:
        module: found among installed packages, or in ``PYTHONPATH``.
        words: its arguments.
    """
    return [sys.executable, "-P", "-m", module, *words]


class ChildProcess(subprocess.Popen[bytes]):
    """A child process, which ends with this one or with the last reference to this object.

    Attributes:
        pipe: the writing end of its standard input.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdout: IO[bytes] | int = subprocess.DEVNULL,
        stderr: IO[bytes] | int | None = None,
        fds: Sequence[int] = (),
    ) -> None:
        """Start a command (`module_command`), with these descriptors besides the three.

        Raises:
            OSError: it cannot be started.
        """
        super().__init__(
            command,
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            env=env,
            pass_fds=fds,
            start_new_session=True,  # Ctrl-C is for the parent, which then ends its children
        )
        assert self.stdin is not None
        self.pipe = self.stdin
        weakref.finalize(self, self.pipe.close)
        _started.add(self)

    def tell(self, words: bytes) -> None:
        """Write to the pipe; nothing, if the child has ended."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self.pipe.fileno(), words)

    def ask(self) -> None:
        """Ask it to end: close the pipe, as this process's end would."""
        self.pipe.close()

    def stop(self, wait_s: float) -> None:
        """Ask it to end, and kill it if it has not ended after ``wait_s`` seconds."""
        self.ask()
        wait_or_kill(self, wait_s)

    async def ended(self) -> int:
        """Wait for its end; return its exit code, or minus the signal that ended it."""
        loop, over = asyncio.get_running_loop(), asyncio.Event()

        def watch() -> None:
            self.wait()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(over.set)

        threading.Thread(target=watch, daemon=True).start()
        await over.wait()
        return int(self.returncode)


def wait_or_kill(process: subprocess.Popen[bytes], wait_s: float) -> None:
    """Wait for the end of a process that was asked, and kill it if it takes longer.

    Returns after at most ``wait_s`` and `KILLED_S`.
    """
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_S)


def _let_go() -> None:
    """Close a forked process's copies of the pipes: they would outlive the parent with it."""
    for child in list(_started):
        child.ask()


os.register_at_fork(after_in_child=_let_go)
