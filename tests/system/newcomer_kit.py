"""Commands as a document prints them, and an empty place in which a newcomer types them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from watchfiles import watch

PORTS = (7710, 7780, 9464)  # what bare commands listen on
WAIT_S = 600.0  # of silence, from commands that say something every few seconds when undisturbed
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A namespace with its own loopback, held open until the shell that holds it is ended.
HOLD = (
    "import fcntl, socket, struct, sys\n"
    "s = socket.socket(); name = struct.pack('16sH', b'lo', 0x1 | 0x40)\n"  # IFF_UP, IFF_RUNNING
    "fcntl.ioctl(s, 0x8914, name)\n"  # SIOCSIFFLAGS
    "print('up', flush=True); sys.stdin.read()\n"
)


def fences(text: str, language: str) -> list[str]:
    """Return the fenced blocks of one language, in order."""
    return [body for kind, body in FENCE.findall(text) if kind == language]


def commands(text: str) -> list[str]:
    """Return the commands of all ``bash`` blocks, in order, as printed; the comments too."""
    found: list[str] = []
    for body in fences(text, "bash"):
        lines = body.replace("\\\n", "\\\0").splitlines()
        found += [line.replace("\0", "\n") for line in lines if line.strip()]
    return found


def bare(command: str) -> str:
    """Return a command without its comment, on one line."""
    return " ".join(re.sub(r"\s#\s.*", "", command).replace("\\\n", " ").split())


def shape(text: str) -> set[str]:
    """Return the parts of an output without their numbers and their order, which may differ."""
    words = re.sub(r"\d+(?:[.,]\d+)*", "N", text.strip())
    return set(re.split(r"[:,] ", words))


@dataclass
class Background:
    """A command that stays, and what it has said."""

    command: str
    process: subprocess.Popen[bytes]
    log: Path

    def interrupt(self) -> None:
        """Press Ctrl-C, and wait until it has ended."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
            self.process.wait(WAIT_S)

    def until(self, words: str) -> None:
        """Wait until it has said these words, for as long as it keeps saying something."""
        ends, heard = time.monotonic() + WAIT_S, ""
        for _ in watch(self.log, rust_timeout=500, yield_on_timeout=True, force_polling=None):
            said = self.log.read_text(errors="replace")
            if words in said:
                return
            code = self.process.poll()
            assert code is None, f"ended with code {code}: {said}"
            if said != heard:
                ends, heard = time.monotonic() + WAIT_S, said
            assert time.monotonic() < ends, f"did not say {words!r}: {said}"


@dataclass
class Place:
    """An empty directory, a home of its own and, if the machine permits, a network of its own."""

    directory: Path
    enter: list[str]
    temporary: Path  # short: sockets may lie there
    started: list[Background] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("work", "home"):
            (self.directory / name).mkdir(parents=True)
        venv = self.work / ".venv"
        if (Path(sys.prefix) / "bin" / "activate").exists():
            venv.symlink_to(sys.prefix)
        else:
            (venv / "bin").mkdir(parents=True)
            folder = Path(sys.executable).parent
            (venv / "bin" / "activate").write_text(f"PATH={folder}:$PATH\n")

    @property
    def work(self) -> Path:
        """Where commands are typed."""
        return self.directory / "work"

    def environment(self) -> dict[str, str]:
        """Return what every shell has: a home, and nothing that is fcil's."""
        kept = ("PATH", "LANG", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "COVERAGE_PROCESS_START")
        given = {name: os.environ[name] for name in kept if name in os.environ}
        return {
            **given,
            "HOME": str(self.directory / "home"),
            "TMPDIR": str(self.temporary),
        }

    def _command(self, text: str) -> list[str]:
        return [*self.enter, "bash", "-c", f"source .venv/bin/activate\n{text}\n"]

    def run(self, text: str, *, code: int = 0) -> str:
        """Type a command, and return what it says when it has ended with this code."""
        done = subprocess.run(
            self._command(text), cwd=self.work, env=self.environment(), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=WAIT_S, check=False,
        )  # fmt: skip
        said = done.stdout.decode()
        assert done.returncode == code, f"{text}: code {done.returncode}: {said}"
        assert "Traceback" not in said, said
        return said

    def start(self, text: str) -> Background:
        """Type a command in a terminal of its own, where it stays."""
        log = self.directory / f"terminal-{len(self.started) + 1}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                self._command(f"exec {text}"), cwd=self.work, env=self.environment(),
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip
        self.started.append(Background(text, process, log))
        return self.started[-1]

    def close(self) -> None:
        """End what stays, as Ctrl-C does, the newest first; kill what does not end."""
        for number in (signal.SIGINT, signal.SIGKILL):
            for one in reversed(self.started):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(one.process.pid, number)
            for one in self.started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    one.process.wait(20)


def own_network() -> subprocess.Popen[bytes] | None:
    """Return the holder of a network of its own; None if the machine does not permit that."""
    if shutil.which("unshare") is None or shutil.which("nsenter") is None:
        return None
    holder = subprocess.Popen(
        ["unshare", "-rn", sys.executable, "-c", HOLD],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert holder.stdout is not None
    if holder.stdout.readline() == b"up\n":
        return holder
    _end(holder)
    return None


def _end(holder: subprocess.Popen[bytes]) -> None:
    assert holder.stdin is not None
    assert holder.stdout is not None
    holder.stdin.close()
    holder.wait(20)
    holder.stdout.close()


@contextlib.contextmanager
def place(directory: Path) -> Iterator[Place | None]:
    """Make an empty place; None where its ports are taken and the machine permits no other ones.

    Without a network of its own, a lock keeps the tests that run beside each other apart.
    """
    holder = own_network()
    with contextlib.ExitStack() as stack:
        enter: list[str] = []
        if holder is not None:
            stack.callback(_end, holder)
            enter = ["nsenter", "--preserve-credentials", "-U", "-n", "-t", str(holder.pid)]
        else:
            lock = stack.enter_context((Path(tempfile.gettempdir()) / "fcil-ports.lock").open("a"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not all(free(port) for port in PORTS):
                yield None
                return
        temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="fcil-"))
        made = Place(directory, enter, Path(temporary))
        stack.callback(made.close)
        yield made


def free(port: int) -> bool:
    """Say whether nobody listens on a port of loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
