"""The process of one sink.

Its command is ``python -m fcil_server.reports.sinks.follower --dir DIR --run RUN --name NAME``.

All input comes on standard input: the first line is the sink's options (they may hold an address
with a password, so they are no process argument), each further byte reports news in the ledger, and
its end the server's end. Progress is saved after the sink has stored the metrics, so after a kill
some metrics may be offered twice and none is lost.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fcil_protocol.errors import EXIT_INTERNAL, ConfigError, FcilError
from fcil_protocol.ids import RunId, digest_of
from fcil_protocol.process.child import limit, parent_pipe, read_line
from fcil_protocol.storage.atomic_files import storage_errors, write_atomic
from fcil_server.federation import config as configuration
from fcil_server.ledger.enums import CENTRAL
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.reports import run_directory
from fcil_server.reports.results.round_views import RoundReader
from fcil_server.reports.sinks import registry, scalars, spans
from fcil_server.reports.sinks.contract import RunFacts, RunNote, Writer
from fcil_server.reports.sinks.registry import Chosen

FILES = 256  # open files allowed
NOTES = 1000  # read at a time
ROUNDS = 50  # given to a sink between two flushes, so that a long backlog is not kept in memory
LEFT_S = 20.0  # for the last metrics of a killed server; a live one kills the process earlier
REPORTS = ("summary.json", "accuracy_matrix.csv", "bytes.csv", "report.html")
# Sections about how a run learns; those of paths and addresses are excluded.
PARAMS = ("run", "method", "round", "wire", "privacy", "trust")
PLACES = ("run.weights", "run.central_test", "run.init_from")


@dataclass(frozen=True)
class Taken:
    """Progress of a sink.

    Attributes:
        options: digest of its options when it was opened; with others it starts from scratch.
        seq: the newest round; -1: none.
        bytes_seq: the newest round of which it has the bytes.
        up, down: true bytes of all rounds up to that.
        clients, server: evaluated tasks, by the owner of the test images.
        finished: it knows that the run is complete.
        note: id of the newest note; 0: none.
    """

    options: str
    seq: int = -1
    bytes_seq: int = -1
    up: int = 0
    down: int = 0
    clients: int = 0
    server: int = 0
    finished: bool = False
    note: int = 0


class Follower:
    """Gives one sink the news of the ledger.

    Args:
        directory: of the federation.
        run: the run.
        chosen: the sink.
    """

    def __init__(self, directory: Path, run: RunId, chosen: Chosen) -> None:
        self._ledger = directory / LEDGER_NAME
        self._run = run
        self._chosen = chosen
        self._directory = directory / "runs" / run
        self._path = self._directory / "sinks" / f"{chosen.sink.name}.json"
        self._taken = self._read()
        self._writer: Writer | None = None

    def catch_up(self, *, last: bool = False) -> None:
        """Give the sink all missing metrics, and save its progress after each page of them.

        Args:
            last: the server has made its last writes.

        Raises:
            The sink's errors; the progress before the last page is saved then.
        """
        while self._take_page(last=last):
            pass

    def _take_page(self, *, last: bool) -> bool:
        """Give one page of the missing metrics, and save it; return True if more may be."""
        complete = run_directory.is_complete(
            self._directory
        )  # first: if it is complete, its bytes are in the ledger
        with Ledger(self._ledger, read_only=True) as ledger:
            writer = self._open(ledger)
            settled = complete or last
            taken, more = self._rounds(ledger, writer, self._taken, settled=settled)
            if not more:
                taken = self._tasks(ledger, writer, taken)
                taken, more = self._notes(ledger, writer, taken)
        if complete and not taken.finished and not more:
            writer.finish([p for name in REPORTS if (p := self._directory / name).exists()])
            taken = replace(taken, finished=True)
        if taken != self._taken:
            writer.flush()
            with storage_errors("create", self._path.parent):
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(self._path, json.dumps(asdict(taken)).encode())
            self._taken = taken
        return more

    def close(self) -> None:
        """Close the sink."""
        if self._writer is not None:
            self._writer.close()

    def _open(self, ledger: Ledger) -> Writer:
        if self._writer is None:
            row = ledger.runs.get(self._run)
            if row is None:
                raise ConfigError(f"there is no run {self._run} in {self._ledger}.")
            facts = RunFacts(
                run=row.run_id,
                method=row.method,
                began=row.created_at,
                directory=self._directory,
                params=dict(params(row.config, row.hparams, row.backbone)),
            )
            self._writer = self._chosen.sink.open(facts, self._chosen.options)
            if getattr(self._writer, "from_start", False) and not self._taken.finished:
                self._taken = Taken(self._taken.options)
        return self._writer

    def _rounds(
        self, ledger: Ledger, writer: Writer, taken: Taken, *, settled: bool
    ) -> tuple[Taken, bool]:
        """Give a page of closed rounds; return True if there may be more.

        The ledger gets the bytes of a round after it is closed, and before the next one is: those
        of the newest one are given only if they are ``settled``.
        """
        lacking = ledger.rounds.all(self._run, min(taken.seq, taken.bytes_seq) + 1, ROUNDS)
        rows = [row for row in lacking if row.closed_at is not None]
        take = getattr(writer, "spans", None)
        for row in rows:
            assert row.closed_at is not None, "all of them are closed"
            view = RoundReader(ledger.database).view(row)
            if row.seq > taken.seq:
                writer.scalars(scalars.of_round(view), step=row.seq, at=row.closed_at)
                if take is not None:
                    updates = ledger.updates.of_round(row.key)
                    take(spans.of_round(row, updates, ledger.answers.of_round(row.key)))
                taken = replace(taken, seq=row.seq)
            if row.seq > taken.bytes_seq and (settled or row is not rows[-1]):
                up, down = taken.up + view.up.true_wire, taken.down + view.down.true_wire
                taken = replace(taken, bytes_seq=row.seq, up=up, down=down)
                values = scalars.bytes_of_round(view, up, down)
                writer.scalars(values, step=row.seq, at=row.closed_at)
        return taken, len(lacking) == ROUNDS

    def _tasks(self, ledger: Ledger, writer: Writer, taken: Taken) -> Taken:
        """Give the accuracies of evaluated tasks; those of earlier ones are read only then.

        The server evaluates a task after the clients, and before the next one begins.
        """
        since = max(taken.clients, taken.server)
        clients = ledger.evaluations.tasks(self._run, since, central=False)
        since = max(taken.clients - 1, taken.server)
        server = ledger.evaluations.tasks(self._run, since, central=True)
        if not clients and not server:
            return taken
        classes = [task.class_ids for task in ledger.tasks.all(self._run)]
        rows = ledger.evaluations.all(self._run)
        ends = {
            r.task: r.closed_at for r in ledger.rounds.all(self._run) if r.closed_at is not None
        }
        for judge, tasks in (("clients", clients), ("server", server)):
            found = [row for row in rows if (row.client == CENTRAL) == (judge == "server")]
            for task in tasks:
                values = scalars.of_task(found, classes, task, judge)
                writer.scalars(values, step=task, at=ends[task])
        return replace(
            taken,
            clients=max(clients, default=taken.clients - 1) + 1,
            server=max(server, default=taken.server - 1) + 1,
        )

    def _notes(self, ledger: Ledger, writer: Writer, taken: Taken) -> tuple[Taken, bool]:
        """Give a page of notes to a sink that wants them; return True if there may be more."""
        take = getattr(writer, "notes", None)
        if take is None or not getattr(writer, "wants_notes", False):
            return taken, False
        found = ledger.events.after(taken.note, limit=NOTES)
        own = [event for event in found if event.run == self._run]
        if own:
            before = ledger.rounds.begun_by(self._run, own[0].at)
            rounds = ledger.rounds.all(self._run, 0 if before is None else before.seq)
            take([RunNote(*pair) for pair in zip(own, spans.rounds_of(own, rounds), strict=True)])
        newest = found[-1].id if found else taken.note
        return replace(taken, note=newest), len(found) == NOTES

    def _read(self) -> Taken:
        """Return the sink's progress; none, if its options were different."""
        new = Taken(digest_of(self._chosen.options.model_dump(mode="json")))
        try:
            taken = Taken(**json.loads(self._path.read_bytes()))
        except (OSError, ValueError, TypeError):
            return new
        return taken if taken.options == new.options else new


def params(
    config: str, hparams: Mapping[str, Any], backbone: Mapping[str, Any]
) -> Iterator[tuple[str, str | int | float | bool]]:
    """Yield a run's parameters, flat, without paths of this machine."""
    fields = configuration.parse(config).model_dump(mode="json")
    fields["method"] |= hparams
    for section in PARAMS:
        for key, value in fields[section].items():
            name = f"{section}.{key}"
            if name not in PLACES and value is not None:
                yield name, value if isinstance(value, bool | int | float) else _text(value)
    yield "backbone", str(backbone.get("name", ""))
    yield "backbone.digest", str(backbone.get("digest", ""))


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


class Calls:
    """The server's messages in the pipe, read by a separate thread.

    A sink may hang: the process ends all the same when the server is gone.

    Args:
        fd: the reading end of the pipe.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._news = threading.Event()
        self._over = False
        threading.Thread(target=self._hear, daemon=True).start()

    def _hear(self) -> None:
        while os.read(self._fd, 4096):
            self._news.set()
        self._over = True
        self._news.set()
        time.sleep(LEFT_S)
        os._exit(EXIT_INTERNAL)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for news, or for some seconds; False: the server is gone."""
        self._news.wait(timeout_s)
        self._news.clear()
        return not self._over


def serve(directory: Path, run: RunId, name: str, pipe: int) -> None:
    """Follow a run until the pipe closes, and take the last news then."""
    given = json.loads(read_line(pipe))
    calls = Calls(pipe)
    with closing(Follower(directory, run, registry.choose(name, given))) as follower:
        follower.catch_up()
        while calls.wait():
            follower.catch_up()
        follower.catch_up(last=True)


def main() -> int:
    """Run the process."""
    parser = argparse.ArgumentParser(prog="fcil_server.reports.sinks.follower")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--run", type=RunId, required=True)
    parser.add_argument("--name", required=True)
    args = parser.parse_args()
    limit(FILES)
    os.umask(0o077)  # its files are for no other user, like the server's
    try:
        serve(args.dir, args.run, args.name, parent_pipe())
    except FcilError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the server reads it
        return error.exit_code
    except (Exception, SystemExit) as error:  # a sink is foreign code
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201 - the same
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
