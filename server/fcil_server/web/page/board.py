"""Content of the dashboard: each section's newest HTML, rendered when its data changed.

Only one thread uses it: the ledger's. No section is rendered twice for two dashboards.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fcil_protocol.errors import FcilError
from fcil_protocol.ids import RunId
from fcil_server.ledger.ledger import LEDGER_NAME
from fcil_server.reports.charts.history import History
from fcil_server.reports.charts.render import template
from fcil_server.reports.sections.sections import SECTIONS, Params, section
from fcil_server.web.errors import Faults
from fcil_server.web.event_stream import event
from fcil_server.web.page.access.guard import DEFECT
from fcil_server.web.page.reader import HistoryReader

# These sections also show the server's live answer; the others show only the ledger.
LIVE_SECTIONS = frozenset({"head", "now", "clients"})
READ_LIMIT_S = (
    2.0  # of reading before a partial result is shown; a long history takes several reads
)
KEPT_RUNS = 3  # older runs whose sections are remembered
READS = 2  # further reads of an older run, whose page would otherwise stay without its first rounds

Live = Mapping[str, Any]


@dataclass(frozen=True)
class BoardPiece:
    """A section's current content.

    Attributes:
        version: time of its last change; grows with every change of any section, over restarts,
            too.
        event: the message to open dashboards.
    """

    html: Markup
    version: int
    event: bytes = field(repr=False)


@dataclass(frozen=True)
class Board:
    """The dashboard's content at one moment.

    Attributes:
        history: of the run that is shown; None: nothing could be read yet.
        pieces: section -> its content.
        trouble: why this is not the ledger's newest content, as a sentence; or empty.
        reader: the reader of the history: versions of two readers are not comparable.
    """

    history: History | None = None
    pieces: Mapping[str, BoardPiece] = field(default_factory=dict)
    trouble: str = ""
    reader: HistoryReader | None = field(default=None, repr=False)

    @property
    def run(self) -> str:
        """The run that is shown; empty before the first."""
        return self.history.run.run_id if self.history and self.history.run else ""

    @property
    def newest(self) -> int:
        """The version of the last change."""
        return max((piece.version for piece in self.pieces.values()), default=0)


class Boards:
    """Makes boards of a federation's runs.

    Args:
        directory: of the federation.
        faults: logs our own defects.
        acts: True if a visitor may act: then there are buttons, while the server answers.
        clock: unix seconds.
    """

    def __init__(
        self,
        directory: Path,
        faults: Faults,
        *,
        acts: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = directory / LEDGER_NAME
        self._faults = faults
        self._acts = acts
        self._clock = clock
        self._reader: HistoryReader | None = None
        self._place: tuple[int, int] | None = None
        self._version = 0
        self._newest = Board()
        self._older: dict[str, Board] = {}  # run -> board, the last used one at the end

    def newest(self, live: Live | None) -> Board:
        """Return the newest run's board; if the ledger cannot be read, the last one and the reason.

        Args:
            live: the server's answer about itself; None: it does not answer.
        """
        try:
            history = self.history(None)
        except FcilError as error:
            trouble = f"The ledger cannot be read: {error}"
            self._newest = replace(self._newest, trouble=trouble)
        else:
            self._newest = self._made(self._newest, history, live)
        return self._newest

    def of(self, run: RunId) -> Board:
        """Return an older run's board.

        Raises:
            FcilError: there is no such run, or the ledger cannot be read.
        """
        history = self.history(run)
        for _ in range(READS):
            history = self.history(run) if history.unread else history
        board = self._made(self._older.pop(run, Board()), history, None)
        self._older[run] = board
        while len(self._older) > KEPT_RUNS:
            del self._older[next(iter(self._older))]
        return board

    def part(self, name: str, run: RunId | None, live: Live | None, params: Params) -> Markup:
        """Return one section with the visitor's parameters.

        Raises:
            FcilError: there is no such run, or the ledger cannot be read.
        """
        return section(name, self.history(run), live, params, acts=self._acts and live is not None)

    def history(self, run: RunId | None) -> History:
        """Return a run's current history; None: the newest run's.

        Raises:
            FcilError: there is no such run, or the ledger cannot be read.
        """
        try:
            place = _place(self._path)
            if self._reader is None or place != self._place:
                self.close()  # another file is in its place
                self._reader, self._place = (
                    HistoryReader(self._path, patience_s=READ_LIMIT_S),
                    place,
                )
            return self._reader.read(run)
        except FcilError:
            self.close()  # opened again the next time: it may have been mended
            raise

    def close(self) -> None:
        """Close the ledger."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _made(self, before: Board, history: History, live: Live | None) -> Board:
        old = before.history
        same_run = old is not None and _run_of(old) == _run_of(history)
        comparable = old is not None and same_run and before.reader is self._reader
        changed = history.changed(old.version) if old and comparable else SECTIONS
        pieces = dict(before.pieces) if same_run else {}
        for name in SECTIONS:
            if name in changed or name in LIVE_SECTIONS or name not in pieces:
                html = self._rendered(name, history, live)
                if name not in pieces or pieces[name].html != html:
                    pieces[name] = self._piece(name, history, html)
        return Board(history, pieces, reader=self._reader)

    def _rendered(self, name: str, history: History, live: Live | None) -> Markup:
        try:
            return section(name, history, live, acts=self._acts and live is not None)
        except Exception as error:  # a defect of one section must not affect the others
            self._faults.tell(error, f"section {name}")
            return template("defect.html", id=name, says=DEFECT)

    def _piece(self, name: str, history: History, html: Markup) -> BoardPiece:
        self._version = max(self._version + 1, int(self._clock() * 1000))
        said = {"name": name, "version": self._version, "run": _run_of(history), "html": html}
        return BoardPiece(html, self._version, event("section", said, self._version))


def _run_of(history: History) -> str:
    return history.run.run_id if history.run else ""


def _place(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - once a second
    except OSError:
        return None  # opening it raises the reason
    return found.st_dev, found.st_ino
