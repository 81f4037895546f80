"""What a sink is: an object under the entry-point group ``fcil.sinks``.

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


class Options(BaseModel):
    """Base of a sink's options: its table in ``[sinks]``; unknown keys are refused.

    They reach the sink's process as JSON, so a pydantic ``SecretStr`` would arrive as stars;
    credentials come from the environment.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class RunFacts:
    """What a sink is told of a run when it opens; nobody's name is in it.

    Attributes:
        run: its id.
        method: that it learns with.
        began: seconds since 1970.
        directory: of the run's files.
        params: configuration of the run, flat: ``method.rank``, ``round.quorum``, ``backbone``.
    """

    run: str
    method: str
    began: float
    directory: Path
    params: Mapping[str, str | int | float | bool]


class Writer(Protocol):
    """An open sink. Whatever it raises is told to the operator; then it is opened again later."""

    def scalars(self, values: Mapping[str, float], *, step: int, at: float) -> None:
        """Take figures.

        Args:
            values: by name, such as ``bytes/up_true_wire``.
            step: the round's number, or the task's.
            at: when it was, in seconds since 1970.
        """

    def flush(self) -> None:
        """Return when all that was taken is where it belongs; it is not offered again."""

    def finish(self, files: Sequence[Path]) -> None:
        """The run is complete; ``files`` are its reports."""

    def close(self) -> None:
        """Let go of everything; the run may go on later."""


class Sink(Protocol):
    """What an entry point of ``fcil.sinks`` names; importing it must load nothing heavy.

    Attributes:
        name: its key in ``[sinks]``.
        packages: modules that must be there.
        extra: of fcil, that brings them; empty: they come with the sink.
        Options: a subclass of `Options`.
    """

    name: str
    packages: tuple[str, ...]
    extra: str
    Options: type[Options]

    def open(self, run: RunFacts, options: Any) -> Writer:
        """Begin, or go on with, what belongs to a run."""
