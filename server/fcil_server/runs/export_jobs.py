"""Exports for programs: each ``fcil-server export`` in a process of its own, one at a time.

The command computes for minutes; the server only starts it and keeps the record
(`reports.export_records`). The result gets its name when it is complete. The process ends with the
server; after a kill, the server's next start records its export as failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fcil_protocol.errors import FcilError, NotNow, StorageError, UsageError, WorkerDied
from fcil_protocol.process.children import ChildProcess, module_command
from fcil_protocol.storage.atomic_files import storage_errors, sync_data
from fcil_server.ledger.ledger import Ledger
from fcil_server.reports.export_records import (
    FOLDER,
    FOLDERS,
    FORMATS,
    ExportRecord,
    all_records,
    remove_older,
)
from fcil_server.runs.state_choice import LAST, find_state

EXPORTS = FOLDER  # in the federation's directory
NICE = 10  # a round comes first
FINISH_S = 600.0  # for an export under way, before the next run of the queue begins
MOST_OUTPUT = 1 << 20  # bytes of the command's answer
_INTERRUPTED = {
    "code": WorkerDied.code,
    "message": "the server ended before the export was complete.",
    "action": "Ask for it again.",
}


class ExportJobs:
    """Starts exports and keeps their records.

    Args:
        directory: the federation's.
        ledger: its ledger.
        notify: writes a note for the operator: level, code, text.
    """

    def __init__(
        self, directory: Path, ledger: Ledger, notify: Callable[[str, str, str], None]
    ) -> None:
        self._directory = directory
        self._ledger = ledger
        self._notify = notify
        self._process: ChildProcess | None = None
        self._work: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._closing = False

    async def start(self, fields: Mapping[str, Any], by: str) -> dict[str, Any]:
        """Begin an export; return its record.

        Args:
            fields: ``format``, and perhaps ``run`` and ``state``, unchecked.
            by: the operator.

        Raises:
            UsageError: there is no such format, run or state.
            NotNow: another export is under way, or the server ends.
            DiskFull, StorageError: nothing was begun.
        """
        form, state = str(fields.get("format")), str(fields.get("state") or LAST)
        if form not in FORMATS:
            raise UsageError(f"unknown format {form[:40]!r}; expected {', '.join(FORMATS)}.")
        named = fields.get("run")
        row = self._ledger.runs.named(None if named is None else str(named))
        path = self._ledger.path

        def prepare() -> ExportRecord:
            with Ledger(path, read_only=True) as ledger:
                chosen = find_state(ledger, self._directory, row, task=None, state=state)
            record = ExportRecord(
                secrets.token_hex(8), row.run_id, str(chosen.state), form, by, "running",
                time.time(),
            )  # fmt: skip
            self._sweep()
            record.save(self._directory)
            remove_older(self._directory, keep=record.id)
            return record

        async with self._turn:
            if self._closing:
                raise NotNow("the server ends.", action="Ask again once it runs.")
            if self._work is not None and not self._work.done():
                raise NotNow("an export is under way.", action="Wait until it is done.")
            record = await asyncio.to_thread(prepare)
            self._work = asyncio.create_task(self._carry_out(record))
        return asdict(record)

    async def tidy(self) -> None:
        """Record what a killed server left under way as failed, and remove its files.

        For the server's start, which no fault of this folder prevents.
        """

        def work() -> None:
            self._sweep()
            remove_older(self._directory)

        try:
            await asyncio.to_thread(work)
        except StorageError as error:
            self._notify("error", error.code, f"exports: {error}")

    def _sweep(self) -> None:
        """End the records that say running; for when no export is under way.

        A kill leaves one, and so does an end that could not be written.
        """
        for record in all_records(self._directory):
            if record.status == "running":
                _end(record, self._directory, error=_INTERRUPTED)

    async def _carry_out(self, record: ExportRecord) -> None:
        try:
            ended = await asyncio.to_thread(self._run_or_fail, record)
        except FcilError as error:  # the next export, or start, records it as failed
            self._notify("error", error.code, f"export {record.id}: {error}")
            return
        what = f"export {record.id}, {record.format} of state {record.state} of {record.run}"
        if ended.error is None:
            self._notify("info", "exported", f"{what}: done")
        else:
            self._notify("warning", "export_failed", f"{what}: {ended.error['message']}")

    def _run_or_fail(self, record: ExportRecord) -> ExportRecord:
        """Run the command; a fault on this side, such as no memory for it, is an end as well."""
        try:
            with storage_errors("start the export in", record.folder(self._directory)):
                return self._run(record)
        except StorageError as error:
            return _end(record, self._directory, error=_told(error))

    def _run(self, record: ExportRecord) -> ExportRecord:
        """Run the command to its end; runs in a thread."""
        folder = record.folder(self._directory)
        name = FORMATS[record.format]
        target = folder / ("folder" if record.format in FOLDERS else f"new-{name}")
        words = (
            "export", "--dir", str(self._directory), "--run", record.run, "--state", record.state,
            f"--{record.format}", str(target), "--json",
        )  # fmt: skip
        answer = folder / "answer.json"
        with storage_errors("write", answer), answer.open("wb") as out:
            command = module_command("fcil_protocol.process.child", "fcil_server", *words)
            self._process = ChildProcess(command, stdout=out, stderr=subprocess.DEVNULL)
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._process.pid, NICE)
            if self._closing:
                self._process.kill()
            code = self._process.wait()
        told = _answer(answer)
        if code == 0:
            try:
                with storage_errors("store", folder):
                    if record.format in FOLDERS:
                        target = _archive(target, folder / f"new-{name}")
                    target.chmod(0o600)
                    with target.open("rb") as file:  # a name after a power cut means all of it
                        sync_data(file.fileno())
                    target.replace(folder / name)
            except StorageError as error:
                told = _told(error)
            else:
                return _end(record, self._directory, name=name)
        fault = {key: str(told.get(key) or "") for key in ("code", "message", "action")}
        if not fault["message"]:
            ended = {"message": f"the export ended with code {code}."}
            fault = {**_INTERRUPTED, **({} if self._closing else ended)}
        return _end(record, self._directory, error=fault)

    async def finish(self, hurry: asyncio.Event) -> None:
        """Wait for an export under way, at most `FINISH_S`, and not if there is a hurry."""
        if self._work is not None:
            hurried = asyncio.create_task(hurry.wait())
            await asyncio.wait(
                (self._work, hurried), timeout=FINISH_S, return_when=asyncio.FIRST_COMPLETED
            )
            hurried.cancel()

    async def close(self) -> None:
        """End an export under way, and begin no other."""
        self._closing = True
        async with self._turn:  # one that is being prepared has its work after this
            pass
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        if self._work is not None:
            await asyncio.gather(self._work, return_exceptions=True)


def _end(
    record: ExportRecord,
    directory: Path,
    *,
    name: str | None = None,
    error: dict[str, str] | None = None,
) -> ExportRecord:
    """Record the end of an export, and remove all but its result."""
    folder = record.folder(directory)
    with storage_errors("tidy", folder):
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in (name, "record.json"):
                path.unlink()
        size = None if name is None else (folder / name).stat().st_size
    ended = replace(
        record,
        status="failed" if name is None else "done",
        ended_at=time.time(),
        name=name,
        bytes=size,
        error=error,
    )
    ended.save(directory)
    return ended


def _told(error: FcilError) -> dict[str, str]:
    """Return an error as a record has it."""
    return {"code": error.code, "message": error.message, "action": error.action or ""}


def _answer(path: Path) -> dict[str, Any]:
    """Return the data of the command's answer; empty: there is none."""
    try:
        with path.open("rb") as file:
            data = json.loads(file.read(MOST_OUTPUT))["data"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _archive(folder: Path, target: Path) -> Path:
    """Put a folder into a zip, without compression: weights do not shrink."""
    # Not strict: a machine without a clock dates files before 1980, which a zip cannot.
    with zipfile.ZipFile(target, "w", strict_timestamps=False) as file:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                file.write(path, path.relative_to(folder))
    return target
