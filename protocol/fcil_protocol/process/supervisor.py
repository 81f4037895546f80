"""A daemon's interface to its system: signals, and systemd's notices.

The first SIGINT or SIGTERM asks the daemon to end once pending writes are complete; a second one
ends it at once, like a crash, which costs no acknowledged update. SIGHUP reopens the log file;
without a log file and a supervisor, a closed terminal sent it, and it stops the daemon like Ctrl-C.
Under ``nohup`` it does not stop it, but still reopens a log file.

systemd's notices are datagrams to the socket that it names in the environment; if it names none, no
notices are sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import platform
import signal
import socket
import time
from collections.abc import Callable, MutableMapping

from fcil_protocol.errors import FcilError, StorageError
from fcil_protocol.process.log_file import LogFile
from fcil_protocol.process.terminal import printable

MAX_STATUS = 300  # characters of the one line
SUPERVISOR_WAIT_S = 1.0  # for the supervisor to take a datagram
HEAPS = 2  # of a process: with one it had no less, docs/benchmarks/round-speed.md
_ARENA_MAX = -8  # M_ARENA_MAX of mallopt(3)
HURRIED = 128  # exit code: this and the signal's number, as shells count


def share_heaps() -> None:
    """Let this process's threads share two heaps.

    glibc gives each thread one of its own and keeps in it what it frees: a daemon that handles
    payloads of some MB in several threads would keep many times their size. With other C libraries
    nothing changes.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    with contextlib.suppress(OSError, AttributeError):  # an interpreter that is linked statically
        ctypes.CDLL(None).mallopt(_ARENA_MAX, HEAPS)


class Notifier:
    """Reports the daemon's state to systemd; without systemd it does nothing.

    Attributes:
        watchdog_s: systemd restarts a daemon after this many silent seconds; 0: never.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        """Take systemd's variables out of the environment: they are not for child processes."""
        self._address = environ.pop("NOTIFY_SOCKET", "")
        microseconds = environ.pop("WATCHDOG_USEC", "")
        pid = environ.pop("WATCHDOG_PID", "")
        mine = self.active and microseconds.isdecimal() and pid in ("", str(os.getpid()))
        self.watchdog_s = int(microseconds) / 1e6 if mine else 0.0
        self._status = ""

    @property
    def active(self) -> bool:
        """True if systemd has named a socket."""
        return self._address[:1] in ("/", "@")

    def send(self, *lines: str) -> None:
        """Send one notice; a supervisor that cannot be reached does not affect the daemon."""
        if not self.active:
            return
        name = self._address
        address = "\0" + name[1:] if name.startswith("@") else name  # abstract: no file
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.settimeout(SUPERVISOR_WAIT_S)
            try:
                sock.sendto("\n".join(lines).encode(errors="replace"), address)
            except OSError:
                return  # it is gone, or does not read

    def status(self, text: str) -> None:
        """Report the daemon's activity in one line, if it has changed."""
        # A line break would begin another notice, and names in it come from other machines.
        line = printable(text)[:MAX_STATUS]
        if line != self._status:
            self._status = line
            self.send(f"STATUS={line}")


class Service:
    """One daemon's lifecycle, from start to end.

    Args:
        log: the file that SIGHUP reopens.
        environ: environment in which systemd names its socket.
    """

    def __init__(
        self, log: LogFile | None = None, environ: MutableMapping[str, str] | None = None
    ) -> None:
        share_heaps()
        self._log = log
        self._notifier = Notifier(os.environ if environ is None else environ)
        self._stop: Callable[[], None] = _nothing
        self._drain: Callable[[], None] | None = None
        self._notify: Callable[[str], None] = _discard_line
        self._describe: Callable[[], str] = str
        self._stopping = False
        self._asked = False  # by a signal
        self._asked_to_drain = False
        self._watchdog: asyncio.TimerHandle | None = None

    def catch(
        self,
        stop: Callable[[], None],
        notify: Callable[[str], None],
        drain: Callable[[], None] | None = None,
    ) -> None:
        """Install signal handlers, in a running event loop.

        Args:
            stop: asks the daemon to end.
            notify: shows a sentence at the terminal, or in the log.
            drain: asks it to end when the current work is over: the effect of the first SIGTERM.
        """
        self._stop, self._notify, self._drain = stop, notify, drain
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._end, number)
        # nohup: the signal that would stop the daemon is ignored; reopening its log is not.
        if self._log is not None or signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        if self._asked:  # while another part of the daemon's life had the signals
            stop()
        elif self._asked_to_drain and drain is not None:
            self._drain = None
            drain()

    def ready(self, describe: Callable[[], str]) -> None:
        """Report that the daemon works now; ``describe`` returns its activity at any moment."""
        self._describe = describe
        self.over()  # of an earlier state, such as waiting for a server
        self._notifier.send("READY=1")
        self.news()
        if self._notifier.watchdog_s:
            self._alive()

    def news(self) -> None:
        """Update the supervisor's status line."""
        if self._notifier.active:
            self._notifier.status(self._describe())

    def _alive(self) -> None:
        """Send the watchdog notice from the event loop itself, so that a stuck loop is detected."""
        self._notifier.send("WATCHDOG=1")
        self.news()
        loop = asyncio.get_running_loop()
        self._watchdog = loop.call_later(self._notifier.watchdog_s / 2, self._alive)

    def stopping(self) -> None:
        """Report that the daemon ends; running work is finished first."""
        if not self._stopping:
            self._stopping = True
            self._describe = lambda: "stopping"
            self._notifier.send("STOPPING=1")
            self.news()

    def over(self) -> None:
        """Stop the watchdog."""
        if self._watchdog is not None:
            self._watchdog.cancel()

    def _end(self, number: signal.Signals) -> None:
        if self._asked:
            self._notify("stopped immediately by a second signal")
            os._exit(HURRIED + number)  # like a crash: every acknowledged update is on disk
        if number is signal.SIGTERM and self._drain is not None:
            drain, self._drain = self._drain, None  # the next signal asks to end now
            self._asked_to_drain = True
            self._notify(
                "SIGTERM: stopping after the current round; send the signal again to stop sooner"
            )
            drain()
            return
        self._asked = True
        self._notify(
            f"{number.name}: finishing writes, then stopping; "
            "send the signal again to stop immediately"
        )
        self._stop()

    def _hang_up(self) -> None:
        if self._log is None and not self._notifier.active:
            self._end(signal.SIGHUP)
            return
        # systemd requires the moment, in microseconds of the monotonic clock.
        self._notifier.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            self._reopen()
        finally:
            self._notifier.send("READY=1")

    def _reopen(self) -> None:
        if self._log is None:
            self._notify(
                "SIGHUP: there is no log file to reopen; settings are read only at startup"
            )
            return
        try:
            self._log.reopen()
        except (FcilError, OSError) as error:
            self._notify(str(error) if isinstance(error, StorageError) else f"the log: {error}")
        else:
            self._notify("SIGHUP: reopened the log file; settings are read only at startup")


def _nothing() -> None:
    """Stand in for a daemon that cannot be stopped yet."""


def _discard_line(_text: str) -> None:
    """Stand in for a terminal before there is one."""
