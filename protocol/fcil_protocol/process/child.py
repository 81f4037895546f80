"""A child process's side: its pipe from its parent, its end with it, and its limits.

``python -m fcil_protocol.process.child MODULE ...`` runs a program, such as a daemon of a local
federation, that ends with the process which started it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import runpy
import signal
import sys
import threading

MEMORY_BYTES = 512 << 20  # beyond it the process ends, and is restarted
NICE = 5  # a round comes first
GONE = 143  # exit code of a child without a parent: as if SIGTERM had ended it
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def parent_pipe() -> int:
    """Take the pipe from the parent, which was standard input; it is at its end with the parent.

    Standard input is empty from here on: what a library reads or closes there, or a process that it
    starts inherits, is not the pipe.
    """
    pipe = os.dup(0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return pipe


def read_line(pipe: int) -> bytes:
    """Read a line from a pipe, byte by byte: what follows it stays there."""
    with open(pipe, "rb", buffering=0, closefd=False) as file:
        return file.readline()


def end_with_parent(pipe: int) -> None:
    """End this process at once, in the middle of any work, when the parent is gone."""

    def watch() -> None:
        while os.read(pipe, 4096):
            pass
        os._exit(GONE)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def die_with_parent() -> None:
    """Let the kernel kill this process when the parent's thread ends; Linux only.

    For a process that is stopped (SIGSTOP) at times, and then reads no pipe.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def limit(files: int) -> None:
    """Limit the use of the machine by this process, which stands next to a server.

    Args:
        files: open files allowed, connections among them.
    """
    os.nice(NICE)
    for what, most in ((resource.RLIMIT_DATA, MEMORY_BYTES), (resource.RLIMIT_NOFILE, files)):
        _, hard = resource.getrlimit(what)
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(what, (bound, bound))


def main() -> None:
    """Run a module with its arguments, as ``python -m`` does."""
    end_with_parent(parent_pipe())
    # Ray's processes block Ctrl-C's signal, and their children with them.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
