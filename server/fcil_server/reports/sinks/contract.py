"""Interface of a sink: an object under the entry-point group ``fcil.sinks``.

::

    class Csv:
        name = "csv"
        packages = ()
        extra = ""
        Options = CsvOptions  # a pydantic model

        def open(self, run: RunFacts, options: CsvOptions) -> CsvWriter: ...

    SINK = Csv()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict

from fcil_protocol.ids import RoundKey
from fcil_server.ledger.rows import Event


class Options(BaseModel):
    """Base of a sink's options: its table in ``[sinks]``; unknown keys are refused.

    They reach the sink's process as JSON, so a pydantic ``SecretStr`` would arrive as stars;
    credentials come from the environment.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run for a sink that opens, without names of people or clients.

    Attributes:
        run: its id.
        method: its method.
        began: seconds since 1970.
        directory: of the run's files.
        params: configuration of the run, flat: ``method.rank``, ``round.quorum``, ``backbone``.
    """

    run: str
    method: str
    began: float
    directory: Path
    params: Mapping[str, str | int | float | bool]


@dataclass(frozen=True)
class RunNote:
    """A note for the operator.

    Attributes:
        event: the note, as the ledger has it.
        round: the round in which it was made; None: it was made between two.
    """

    event: Event
    round: RoundKey | None


class Writer(Protocol):
    """An open sink. Its errors are reported to the operator; then it is opened again later.

    A writer with a method ``spans`` gets each closed round as a list of `TraceSpan`, too.
    One with a method ``notes`` and a true attribute ``wants_notes`` gets the run's notes for the
    operator as a list of `RunNote`; their sentences name clients and classes.
    A writer with a true attribute ``from_start`` gets the whole run each time that it is opened,
    until the run is complete.
    """

    def scalars(self, values: Mapping[str, float], *, step: int, at: float) -> None:
        """Take metrics.

        Args:
            values: by name, such as ``bytes/up_true_wire``.
            step: the round's number, or the task's.
            at: time of the event, in seconds since 1970.
        """

    def flush(self) -> None:
        """Return when all metrics taken are safely stored; they are not offered again."""

    def finish(self, files: Sequence[Path]) -> None:
        """Take the reports ``files`` of a completed run."""

    def close(self) -> None:
        """Release all resources; the run may resume later."""


class Sink(Protocol):
    """The object that an entry point of ``fcil.sinks`` names; its import must load nothing heavy.

    Attributes:
        name: its key in ``[sinks]``.
        packages: modules that must be there.
        extra: extra of fcil that installs them; empty: they come with the sink.
        Options: a subclass of `Options`.
    """

    name: str
    packages: tuple[str, ...]
    extra: str
    Options: type[Options]

    def open(self, run: RunFacts, options: Any) -> Writer:
        """Open a run's metrics, new or resumed."""
