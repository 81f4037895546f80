"""Reading of a federation: the running server's answers, and the ledger, opened read-only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from fcil_protocol.errors import UsageError
from fcil_server.federation.members import member_rows, ticket_rows
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.reports import run_directory
from fcil_server.reports.export_records import ExportRecord, all_records, find_record
from fcil_server.reports.results.round_views import RoundReader
from fcil_server.reports.results.run_data import collect, round_rows, run_rows
from fcil_server.rounds.class_changes import class_list
from fcil_server.web.api import inputs
from fcil_server.web.api.file_answer import is_plain, open_plain
from fcil_server.web.child import Fresh
from fcil_server.web.requests import Pool, RefusedRequest

THREADS = 2  # for the ledger: a long run takes a second, and others need not wait for it
NEWEST = "newest"  # in an address: the newest run
# Files of a run that may be fetched; the model leaves by `fcil-server export`.
FILES = {
    "accuracy_matrix.csv": "text/csv; charset=utf-8",
    "bytes.csv": "text/csv; charset=utf-8",
    "environment.json": "application/json",
    "report.html": "text/html; charset=utf-8",
    "rounds.jsonl": "application/jsonl",
    "summary.json": "application/json",
}
EXPORTED = "application/octet-stream"
_HEADLINE = (
    "faa", "aia", "forgetting", "accuracy_matrix", "best_state", "evaluation", "central_evaluation",
)  # fmt: skip

T = TypeVar("T")


class Readings:
    """Reads one federation.

    Args:
        directory: of the federation.
        ask: asks the running server: ``ask(op)``.
    """

    def __init__(self, directory: Path, ask: Callable[[str], dict[str, Any]]) -> None:
        self._directory = directory
        self._pool = Pool("ledger", threads=THREADS)
        self._aside = Pool("aside")  # predictions of bytes take seconds
        self._status: Fresh[dict[str, Any]] = Fresh(functools.partial(ask, "status"))

    # --- the server's answers -------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        """Return the federation's state, at most a second old.

        Raises:
            Unreachable, Timeout: the server does not answer.
        """
        return await self._status.get()

    def expire(self) -> None:
        """Ask the server again for the next answer: an act has changed something."""
        self._status.expire()

    async def federation(self) -> dict[str, Any]:
        """Return the federation and its server."""
        found: dict[str, Any] = (await self.status())["federation"]
        return found

    async def queue(self) -> dict[str, Any]:
        """Return the runs that wait."""
        return {"queue": (await self.status())["queue"]}

    async def members(self) -> dict[str, Any]:
        """Return members and open tickets.

        Raises:
            Unreachable, Timeout: the server, which knows who is connected, does not answer.
        """
        live = {c["id"]: c["state"] for c in (await self.status())["clients"]}
        return await self._read(
            lambda ledger: {"clients": member_rows(ledger, live), "tickets": ticket_rows(ledger)}
        )

    async def member(self, client: str) -> dict[str, Any]:
        """Return one member by its id or its name; the newest of this name.

        Raises:
            RefusedRequest: there is none.
        """
        rows = (await self.members())["clients"]
        found = [row for row in rows if client in (row["id"], row["name"])]
        if not found:
            raise missing(f"there is no client {client[:80]!r}.", "GET /v1/clients lists them.")
        return dict(found[-1])

    # --- the ledger -----------------------------------------------------------------------------

    async def runs(self) -> dict[str, Any]:
        """Return the runs, the oldest first."""
        return await self._read(lambda ledger: {"runs": run_rows(ledger)})

    async def run(self, run: str) -> dict[str, Any]:
        """Return a run's results.

        Args:
            run: its id, the beginning of it, or `NEWEST`.

        Raises:
            RefusedRequest: there is no such run.
        """
        return await self._read(functools.partial(_summary, run=run))

    async def accuracy(self, run: str) -> dict[str, Any]:
        """Return a run's accuracies."""
        data = await self.run(run)
        return {"run": data["run"], **{name: data[name] for name in _HEADLINE}}

    async def tasks(self, run: str) -> dict[str, Any]:
        """Return a run's tasks."""
        return _part(await self.run(run), "tasks")

    async def bytes(self, run: str) -> dict[str, Any]:
        """Return a run's bytes."""
        return _part(await self.run(run), "bytes")

    async def classes(self, run: str) -> dict[str, Any]:
        """Return a run's class names."""

        def read(ledger: Ledger) -> dict[str, Any]:
            found = _run_of(ledger, run)
            return {"run": found, "classes": class_list(ledger, found)}

        return await self._read(read)

    async def rounds(self, run: str, page: inputs.RoundsPage) -> dict[str, Any]:
        """Return a page of a run's rounds."""

        def read(ledger: Ledger) -> dict[str, Any]:
            found = _run_of(ledger, run)
            rows = round_rows(ledger, found, since=page.since, limit=page.limit)
            after = rows[-1]["seq"] + 1 if rows else page.since
            return {"run": found, "rounds": rows, "next": after}

        return await self._read(read)

    async def round(self, run: str, seq: int) -> dict[str, Any]:
        """Return one round.

        Raises:
            RefusedRequest: there is no such run or round.
        """

        def read(ledger: Ledger) -> dict[str, Any]:
            reader = RoundReader(ledger.database)
            rows = reader.rounds.all(_run_of(ledger, run), seq, 1)
            if not rows or rows[0].seq != seq:
                raise missing(
                    f"run {run[:40]!r} has no round {seq}.", "GET /v1/runs/RUN/rounds lists them."
                )
            return reader.view(rows[0]).line()

        return await self._read(read)

    async def events(self, page: inputs.EventsPage) -> dict[str, Any]:
        """Return a page of events, the oldest first."""

        def read(ledger: Ledger) -> dict[str, Any]:
            found = ledger.events.after(page.after, limit=page.limit, level=page.level)
            after = found[-1].id if found else page.after
            return {"events": [vars(event) for event in found], "next": after}

        return await self._read(read)

    async def files(self, run: str) -> dict[str, Any]:
        """Return the names and sizes of a run's files."""

        def read(ledger: Ledger) -> dict[str, Any]:
            found = _run_of(ledger, run)
            folder = self._directory / "runs" / found
            files = [
                {"name": name, "bytes": path.stat().st_size}
                for name in FILES
                if is_plain(path := folder / name)
            ]
            return {"run": found, "files": files}

        return await self._read(read)

    async def file(self, run: str, name: str) -> tuple[BinaryIO, str]:
        """Open one of a run's files; return its type, too.

        Raises:
            RefusedRequest: there is no such run or file.
        """

        def read(ledger: Ledger) -> tuple[BinaryIO, str]:
            folder = self._directory / "runs" / _run_of(ledger, run)
            file = open_plain(folder / name) if name in FILES else None
            if file is None:
                listed = ", ".join(FILES)
                raise missing(
                    f"run {run[:40]!r} has no file {name[:40]!r}; there may be: {listed}.",
                    "GET /v1/runs/RUN/files lists them; the server writes them as tasks end.",
                )
            return file, FILES[name]

        return await self._read(read)

    async def exports(self) -> dict[str, Any]:
        """Return the newest exports."""

        def read() -> dict[str, Any]:
            return {"exports": [asdict(record) for record in all_records(self._directory)]}

        return await self._pool.do(read)

    async def export(self, name: str) -> dict[str, Any]:
        """Return an export by its id.

        Raises:
            RefusedRequest: there is none.
        """
        return asdict(await self._pool.do(lambda: self._export(name)))

    async def exported(self, name: str) -> tuple[BinaryIO, str]:
        """Open the result of an export; return its type, too.

        Raises:
            RefusedRequest: there is none, or it is not complete.
        """

        def read() -> tuple[BinaryIO, str]:
            record = self._export(name)
            path = record.folder(self._directory) / (record.name or "none")
            file = open_plain(path)
            if file is None:
                raise missing(
                    f"export {name} is {record.status}, and has no file.",
                    "GET /v1/exports/ID says what became of it.",
                )
            return file, "application/zip" if path.suffix == ".zip" else EXPORTED

        return await self._pool.do(read)

    def _export(self, name: str) -> ExportRecord:
        record = find_record(self._directory, name)
        if record is None:
            raise missing(f"there is no export {name[:40]!r}.", "GET /v1/exports lists them.")
        return record

    # --- without a federation -------------------------------------------------------------------

    async def methods(self, name: str | None, setting: inputs.MethodsSetting) -> dict[str, Any]:
        """Return the installed methods, or one of them, with this federation's options.

        Raises:
            RefusedRequest: there is no such method.
        """

        def read() -> dict[str, Any]:
            from fcil_adapters.contract import registry
            from fcil_server.reports.traffic.method_list import describe_methods

            if name is not None and name not in registry.method_names():
                known = ", ".join(registry.method_names())
                raise missing(f"there is no method {name[:40]!r}; known are {known}.")
            given = setting.model_dump()
            return {"methods": describe_methods(name, directory=self._directory, **given)}

        return await self._aside.do(read)

    async def _read(self, work: Callable[[Ledger], T]) -> T:
        def read() -> T:
            with Ledger(self._directory / LEDGER_NAME, read_only=True) as ledger:
                return work(ledger)

        return await self._pool.do(read)


def missing(sentence: str, action: str = "") -> RefusedRequest:
    """Return the refusal of a request for something that does not exist."""
    return RefusedRequest(404, UsageError(sentence, action=action))


def _run_of(ledger: Ledger, run: str) -> Any:
    try:
        return ledger.runs.named(None if run == NEWEST else run).run_id
    except UsageError as error:
        raise RefusedRequest(404, UsageError(error.message, action=_LIST_RUNS)) from error


_LIST_RUNS = "GET /v1/runs lists them."


def _summary(ledger: Ledger, run: str) -> dict[str, Any]:
    data: dict[str, Any] = run_directory.summary(collect(ledger, _run_of(ledger, run)))["data"]
    return data


def _part(data: dict[str, Any], name: str) -> dict[str, Any]:
    return {"run": data["run"], name: data[name]}
