"""Models of the API's input: parameters of an address, and bodies of acts.

Unknown names are refused.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from fcil_server.federation.roster import MAX_WHY

MOST_ROWS = 1000
MOST_NAMES = 200
MAX_NAME = 256  # characters of a class name; the server has the exact rule
MOST_NUMBER = 2**53 - 1  # that JSON keeps exactly


def _whole(value: object) -> object:
    """Return a number without a fraction as JSON means it: 3.0 is an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _as_text(value: object) -> object:
    """Return a number of a state as a text; anything else stays as it is."""
    whole = _whole(value)
    return str(whole) if isinstance(whole, int) and not isinstance(whole, bool) else value


ClassName = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
ClassNames = Annotated[list[ClassName], Field(max_length=MOST_NAMES)]
Number = Annotated[int, Field(ge=0, le=MOST_NUMBER), BeforeValidator(_whole)]
_STATE = {"type": "string", "pattern": r"^(best|last|[0-9]{1,9})$"}
_STATE_NUMBER = {"type": "integer", "minimum": 0, "maximum": 999_999_999}
StateChoice = Annotated[
    str,
    Field(pattern=_STATE["pattern"]),
    BeforeValidator(_as_text),
    WithJsonSchema({"anyOf": [_STATE, _STATE_NUMBER]}),
]
Section = Literal["run", "method", "tasks", "round", "wire", "privacy", "trust"]


# 1 minute to 90 days, as `operator_text.seconds` reads it.
_LASTS = r"^([1-9][0-9]{0,3}m|[1-9][0-9]{0,2}h|([1-9]|[1-8][0-9]|90)d)$"


def _duration(value: str) -> str:
    """Refuse other texts with a sentence; a pattern would be answered as it is written."""
    if re.fullmatch(_LASTS, value) is None:
        raise ValueError(
            f"expected a duration of 1 minute to 90 days such as 30m, 24h or 7d, got {value[:40]!r}"
        )
    return value


Duration = Annotated[
    str, AfterValidator(_duration), WithJsonSchema({"type": "string", "pattern": _LASTS})
]


class InputModel(BaseModel):
    """Base of all input."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class NoParameters(InputModel):
    """An address without parameters."""


class RoundsPage(InputModel):
    """The page of rounds."""

    since: Number = Field(0, description="ordinal of the first round")
    limit: int = Field(100, ge=1, le=MOST_ROWS)


class EventsPage(InputModel):
    """The page of events."""

    after: Number = Field(0, description="only events with a greater id")
    limit: int = Field(100, ge=1, le=MOST_ROWS)
    level: Literal["info", "warning", "error"] | None = Field(
        None, description="only events of this level"
    )


class MethodsSetting(InputModel):
    """The setting for which a method's traffic is predicted: its first task.

    Later tasks can take minutes to predict: `fcil-server methods --past`.
    """

    classes: int = Field(10, ge=1, le=1000, description="per task")
    clients: int = Field(10, ge=1, le=10_000, description="that answer each round")


class StreamStart(InputModel):
    """The beginning of a stream."""

    last: str = Field(
        "",
        max_length=200,
        description="the id of the last event that was received, for programs that cannot send "
        "`Last-Event-ID`; empty: from now on",
    )


class ActBody(InputModel):
    """Base of the bodies of acts."""

    # `terminal.SCHEMA_VERSION`; a body of another version is refused.
    schema_version: Literal[2] | None = Field(None, description="the version of the body")


class EmptyBody(ActBody):
    """An act without fields; the body may be missing."""


class EnrolBody(ActBody):
    """A ticket for one new client or relay."""

    name: str = Field(min_length=1, max_length=128, description="of the new member")
    lasts: Duration = Field("24h", description="1 minute to 90 days")
    relay: bool = Field(False, description="enrol a relay for a site, not a client")
    via: str | None = Field(None, max_length=128, description="the relay it connects to")


class RevokeBody(ActBody):
    """The end of a membership."""

    why: str = Field("", max_length=MAX_WHY, description="the client reads it")
    keep_update: bool = Field(False, description="still count its update to the open round")


class SubmitBody(ActBody):
    """A run for the queue."""

    title: str = Field("", max_length=128, description="a name for the run")
    settings: dict[Section, dict[str, Any]] = Field(
        description="sections of a configuration, as in the file of `fcil-server run submit`; "
        "files are paths on the server's machine"
    )


class ExportBody(ActBody):
    """A model for another program."""

    format: Literal["onnx", "peft", "timm", "statistics", "mlflow"]
    run: str | None = Field(
        None, max_length=64, description="a run's id, or the beginning of it; default: the newest"
    )
    state: StateChoice = Field("last", description="best, last or a number")


class PromoteBody(ActBody):
    """The state whose model clients use."""

    state: StateChoice = Field(description="best, a number, or last: the newest from now on")


class RoundPlace(InputModel):
    """A round by its place in the newest run."""

    task: Number
    kind: str = Field(max_length=64)
    round: Number


class CloseRoundBody(ActBody):
    """The early end of the round under way."""

    rest_of_task: bool = Field(False, description="also skip the remaining rounds of its task")
    only: RoundPlace | None = Field(None, description="do nothing unless this round is under way")


class AdmitBody(ActBody):
    """Names that tasks may take."""

    names: ClassNames = Field([], description="none: all that wait for it")


class AliasBody(ActBody):
    """A further name of a class."""

    name: ClassName
    target: ClassName = Field(description="the class that it means")


class RenameBody(ActBody):
    """A new name of a class."""

    name: ClassName
    new: ClassName


class NamesBody(ActBody):
    """Class names of the run."""

    names: Annotated[ClassNames, Field(min_length=1)]
