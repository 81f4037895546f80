"""The daemon's handle on its worker process: start, call, cancel, release, survive its death.

Torch-free. A worker starts at the first call, and again after its death or release; so every call
carries all that it needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import IO

from fcil_adapters.contract import Progress
from fcil_adapters.resources.memory_limit import own_memory
from fcil_adapters.worker.exit_reason import End, exit_error
from fcil_adapters.worker.loop import SEE_LOG
from fcil_adapters.worker.memory_files import Blob
from fcil_adapters.worker.pipe import AsyncPipe, Blobs, Fields
from fcil_adapters.worker.suspend import Suspension
from fcil_adapters.worker.watchdog import StallTimer, oom_kills
from fcil_protocol.errors import FcilError, InternalError, WireError, WorkerError, from_code
from fcil_protocol.process.children import ChildProcess, module_command
from fcil_protocol.storage.atomic_files import storage_errors

MAX_LOG_BYTES = 1 << 20  # beyond it the log is emptied; one older log is kept
TRACE_S = 0.3  # for a worker that hangs to write its stack
STOP_S = 5.0  # a worker gets this long to end before it is killed
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)

Answer = tuple[Fields, Blobs]
OnRequest = Callable[[Fields], Answer | Awaitable[Answer]]


class WorkerHost:
    """One worker process at a time, and one call at a time; further calls wait.

    Attributes:
        starts, deaths: how many workers started, and how many ended unexpectedly.
        rest: suspends the worker; suspended time is not time without progress.
    """

    def __init__(
        self,
        module: str,
        *,
        name: str,
        env: Mapping[str, str] | None = None,
        threads: int | None = None,
        nice: int = 0,
        memory_bytes: int = 0,
        idle_s: float | None = None,
        stall_s: float | None = None,
        log: Path | None = None,
    ) -> None:
        """Describe a worker; nothing starts yet.

        Args:
            module: run as ``python -m MODULE --fd N``.
            name: its name in messages.
            env: added to this process's environment.
            threads: threads of its numeric libraries; None or 0: theirs to choose.
            nice: added to its niceness.
            memory_bytes: bound on it and this process together; 0: no bound.
            idle_s: seconds without a call after which it is released; None: never.
            stall_s: seconds without a message in a call after which it is ended; None: never.
            log: file (0600) for its output; None: this process's stderr.
        """
        self.name = name
        self._module = module
        self._nice = nice
        self._memory = memory_bytes
        self._idle_s = idle_s
        self._stall_s = stall_s
        self._log = log
        numbers = {} if not threads else dict.fromkeys(_THREAD_VARIABLES, str(threads))
        self._env = {**os.environ, **numbers, **(env or {})}
        self._process: ChildProcess | None = None
        self._pipe: AsyncPipe | None = None
        self._lock = asyncio.Lock()
        self._idle: asyncio.TimerHandle | None = None
        self._stopped_by_us = False
        self._stalled = ""  # why it was ended, if it was silent for too long
        self._said_from = 0  # in its log: words about its end come after
        self._oom_kills: int | None = None  # the system's count when it was started
        self.rest = Suspension()
        self.starts = 0
        self.deaths = 0

    @property
    def pid(self) -> int | None:
        """Process id of a running worker."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    @property
    def busy(self) -> bool:
        """True during a call."""
        return self._lock.locked()

    async def call(
        self,
        op: str,
        fields: Fields,
        payloads: Blobs = (),
        *,
        on_progress: Callable[[Progress], None] | None = None,
        on_request: OnRequest | None = None,
    ) -> tuple[Fields, list[Blob]]:
        """Let the worker carry out one operation.

        A cancelled call kills the worker. An error that ``on_request`` raises goes to the worker,
        which gives up the operation, and is raised here.

        Raises:
            WorkerDied: the process ended without an answer.
            WorkerStalled: it was silent for too long, and was ended.
            OutOfMemory: the kernel ended it for lack of memory.
            FcilError: the error that the worker reported, by its own class.
        """
        async with self._lock:
            self._hold()
            self._rotate()
            try:
                await self.rest.allowed.wait()
            except asyncio.CancelledError:
                self._release_later()
                raise
            stall_timer = StallTimer(self._stall_s or float("inf"))
            watch = asyncio.ensure_future(self._watch(stall_timer)) if self._stall_s else None
            try:
                pipe = self._pipe if self._alive() else None
                if pipe is None:
                    pipe = self._start()
                    stall_timer.heard("starting")
                try:
                    await pipe.send({"op": op, "fields": fields}, payloads)
                except FcilError as error:  # nothing was sent: the worker is as it was
                    raise _Reported(error) from error
                return await self._converse(pipe, stall_timer, on_progress, on_request)
            except _Reported as reported:
                self._said_from = self._log_size()  # what it printed until now is not about its end
                raise reported.cause from None
            except (EOFError, ConnectionError) as error:
                raise await self._died() from error
            except BaseException:
                # Cancelled, or the pipe's contents are unknown: the worker cannot continue.
                self.kill()
                self._forget()
                raise
            finally:
                if watch is not None:
                    watch.cancel()
                self._stalled = ""
                self._release_later()

    async def stop(self) -> None:
        """Wait for the current call, end the worker and wait for its exit."""
        async with self._lock:
            self._hold()
            await self._end()

    def kill(self) -> None:
        """End the worker now; a current call fails. The next call starts another."""
        self._stopped_by_us = True
        process, pipe = self._process, self._pipe
        if pipe is not None:
            pipe.hang_up()
        if process is not None:
            process.kill()
            # The end of a process with much memory takes a while; the event loop does not wait.
            threading.Thread(target=process.wait, daemon=True).start()
        if not self.busy:
            self._forget()

    # --- one conversation -------------------------------------------------------------------

    async def _watch(self, stall_timer: StallTimer) -> None:
        """End a worker that is silent for too long; also one that was stopped (SIGSTOP)."""
        clock = asyncio.get_running_loop().time
        while True:
            before = clock() - self.rest.rested_s
            await asyncio.sleep(stall_timer.step_s)
            if stall_timer.passed(clock() - self.rest.rested_s - before):
                what = f" while {stall_timer.doing}" if stall_timer.doing else ""
                self._stalled = f"made no progress for {stall_timer.allowed_s:.0f} s{what}"
                if self._process is not None:  # its stack goes into its log
                    self._process.send_signal(signal.SIGUSR1)
                    await asyncio.sleep(TRACE_S)
                self.kill()
                return

    async def _converse(
        self,
        pipe: AsyncPipe,
        stall_timer: StallTimer,
        on_progress: Callable[[Progress], None] | None,
        on_request: OnRequest | None,
    ) -> tuple[Fields, list[Blob]]:
        failure: FcilError | None = None
        while True:
            message, payloads = await pipe.recv()
            stall_timer.heard(message.get("alive", ""))
            if self._process is not None:
                self.rest.mark_started(self._process)
            if "alive" in message:
                continue
            if "progress" in message:
                if on_progress is not None:
                    on_progress(Progress(**message["progress"]))
            elif "request" in message:
                blobs: Blobs = ()
                stall_timer.mark_waiting(ours=True)
                try:
                    reply, blobs = await _answer(on_request, message["request"])
                    told: Fields = {"reply": reply}
                except FcilError as error:
                    failure = error
                    told = {"error": error.code, "message": error.message, "action": error.action}
                stall_timer.mark_waiting(ours=False)
                await pipe.send(told, blobs)
            elif "error" in message:
                action = self._with_log(message["action"])
                reported = from_code(message["error"], message["message"], action)
                # The request came ahead of its use, so the worker may report another cause than
                # this failure.
                same = failure is not None and failure.code == reported.code
                raise _Reported(failure if failure is not None and same else reported)
            elif "result" in message:
                return message["result"], payloads
            else:
                raise WireError(f"the {self.name} worker sent a message of no known kind.")

    # --- the process ------------------------------------------------------------------------

    def _alive(self) -> bool:
        """Return True if a worker waits for calls; forget one that died between two."""
        if self._process is not None and (self._process.poll() is not None or self._stopped_by_us):
            self.deaths += not self._stopped_by_us
            self._forget()
        return self._process is not None

    def _start(self) -> AsyncPipe:
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise self._not_started(error) from error
        command = module_command(self._module, "--fd", str(theirs.fileno()))
        if self._nice:
            command += ["--nice", str(self._nice)]
        if self._memory:
            command += ["--memory", str(self._memory), "--others", str(own_memory())]
        self._stopped_by_us, self._stalled, self._oom_kills = False, "", oom_kills()
        self._said_from = self._log_size()
        try:
            with theirs, contextlib.ExitStack() as stack:
                output = self._open_log(stack)
                self._process = ChildProcess(
                    command, env=self._env, stdout=output, stderr=output, fds=(theirs.fileno(),)
                )
        except OSError as error:
            ours.close()
            raise self._not_started(error) from error
        except BaseException:
            ours.close()
            raise
        self.starts += 1
        self._pipe = AsyncPipe(ours)
        return self._pipe

    def _not_started(self, error: OSError) -> WorkerError:
        return WorkerError(
            f"the {self.name} worker cannot be started: {error.strerror}.",
            action="Free memory or processes on this machine, or raise its limit of open files "
            "(ulimit -n).",
        )

    def _open_log(self, stack: contextlib.ExitStack) -> IO[bytes] | int:
        if self._log is None:
            return sys.__stderr__.fileno() if sys.__stderr__ else subprocess.DEVNULL
        with storage_errors("write the worker's log", self._log):
            fd = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            return stack.enter_context(os.fdopen(fd, "ab"))

    def _rotate(self) -> None:
        """Set a long log aside; a running worker appends, so it continues in the empty file."""
        with contextlib.suppress(OSError):  # no log, or one that cannot be copied: it stays
            if self._log is not None and self._log.stat().st_size > MAX_LOG_BYTES:
                shutil.copy2(self._log, self._log.with_name(f"{self._log.name}.1"))
                os.truncate(self._log, 0)
                self._said_from = 0

    def _with_log(self, action: str) -> str:
        """Return a worker's advice with the file that it means; the worker does not know it."""
        return action if self._log is None else action.replace(SEE_LOG, f"See {self._log}.")

    def _log_size(self) -> int:
        with contextlib.suppress(OSError):  # there is none yet
            if self._log is not None:
                return self._log.stat().st_size
        return 0

    async def _died(self) -> WorkerError:
        ours, stalled = self._stopped_by_us, self._stalled
        self.deaths += bool(stalled) or not ours
        process = self._process
        await self._end()
        end = End(
            self.name,
            process.returncode if process is not None else None,
            ours=ours,
            stalled=stalled,
            oom_killed=(oom_kills() or 0) > (self._oom_kills or 0),
            bound=self._memory,
            said_from=self._said_from,
        )
        return exit_error(end, self._log)

    async def _end(self) -> None:
        """Close the pipes, wait for the process, and kill it if it does not end."""
        process, pipe = self._process, self._pipe
        self.rest.release()
        if pipe is not None:
            pipe.hang_up()
        if process is not None:
            await asyncio.to_thread(process.stop, STOP_S)
        self._forget()

    def _forget(self) -> None:
        self.rest.release()
        if self._pipe is not None:
            self._pipe.close()
        self._process, self._pipe = None, None

    # --- idle release -----------------------------------------------------------------------

    def _hold(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _release_later(self) -> None:
        if self._idle_s is not None and self._process is not None:
            loop = asyncio.get_running_loop()
            self._idle = loop.call_later(self._idle_s, self._release)

    def _release(self) -> None:
        """Free the memory of a worker that has been idle for a while."""
        self._idle = None
        if not self.busy:
            self.kill()


class _Reported(Exception):
    """An error that the worker reported; the worker itself continues."""

    def __init__(self, cause: FcilError) -> None:
        super().__init__(cause.message)
        self.cause = cause


async def _answer(on_request: OnRequest | None, fields: Fields) -> Answer:
    if on_request is None:
        raise InternalError("the worker asked for something in a call that offers nothing.")
    answer = on_request(fields)
    return await answer if inspect.isawaitable(answer) else answer
