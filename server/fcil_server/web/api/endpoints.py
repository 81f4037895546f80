"""The endpoints: one table, from which the routes and the OpenAPI document are made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, BinaryIO, cast

from pydantic import BaseModel

from fcil_server.federation.api_tokens import ApiToken, TokenRole
from fcil_server.web.api import acts, answers, inputs, results
from fcil_server.web.api.acts import Act
from fcil_server.web.api.inputs import NoParameters
from fcil_server.web.api.problems import error_rows
from fcil_server.web.api.readings import EXPORTED, FILES, NEWEST, Readings, missing

JSON = "application/json"
EVENTS = "text/event-stream"
READ, OPERATE, ADMINISTER = TokenRole
_WHERE = {
    "run": f"a run's id, the beginning of it, or `{NEWEST}`",
    "seq": "the round's ordinal in its run, from 0",
    "client": "a member's id or name, or the name of an open ticket",
    "name": "its name",
    "code": "a code of docs/errors.md",
    "number": "the run's number in the queue",
    "id": "the export's id",
}


@dataclass(frozen=True)
class Asked:
    """A checked request.

    Attributes:
        token: of the request; None: the endpoint needs none.
        path: variables of the address, by name.
        query, body: its input, of the endpoint's models.
    """

    token: ApiToken | None
    path: Mapping[str, str]
    query: inputs.InputModel
    body: inputs.ActBody


FindFile = Callable[[Asked], Awaitable[tuple[BinaryIO, str]]]


@dataclass(frozen=True)
class Endpoint:
    """One method of one address.

    Attributes:
        role: that it needs; None: no token.
        summary: one line about it.
        answer: model of the answer's data; None: the answer is no JSON of ours.
        query, body: models of its input.
        read: makes the data. act: makes the act. file: opens a file, and names its type. Exactly
            one of the three; for `EVENTS` and the document, which have handlers of their own, none.
        media: types of the answer.
        status: of the answer.
        enveloped: the data is within ``{"schema_version", "status", "data"}``.
    """

    method: str
    path: str
    role: TokenRole | None
    summary: str
    answer: type[BaseModel] | None = None
    query: type[inputs.InputModel] = NoParameters
    body: type[inputs.ActBody] | None = None
    read: Callable[[Asked], Awaitable[dict[str, Any]]] | None = None
    act: Callable[[Asked], Act] | None = None
    file: FindFile | None = None
    media: tuple[str, ...] = (JSON,)
    status: int = HTTPStatus.OK
    enveloped: bool = True
    about: Mapping[str, str] = field(default_factory=lambda: _WHERE)

    @property
    def variables(self) -> list[str]:
        """Names of the variables in the address."""
        return [part[1:-1] for part in self.path.split("/") if part.startswith("{")]

    @property
    def id(self) -> str:
        """Its unique name, for generated clients."""
        words = [w.strip("{}").replace(".", "_") for w in self.path.split("/")[2:]]
        return "_".join([self.method.lower(), *words])


def all_endpoints(readings: Readings) -> list[Endpoint]:
    """Return every endpoint, in the order of the document."""
    return [*_own(), *_federation(readings), *_runs(readings), *_exports(readings), *_acts()]


def _get(path: str, summary: str, answer: type[BaseModel] | None, **more: Any) -> Endpoint:
    more.setdefault("role", READ)
    return Endpoint("GET", path, summary=summary, answer=answer, **more)


def _own() -> list[Endpoint]:
    async def errors(_: Asked) -> dict[str, Any]:
        return {"errors": error_rows()}

    async def error(asked: Asked) -> dict[str, Any]:
        found = [row for row in error_rows() if row["code"] == asked.path["code"]]
        if not found:
            raise missing("there is no such code.", "GET /v1/errors lists them.")
        return found[0]

    async def own_token(asked: Asked) -> dict[str, Any]:
        assert asked.token is not None, "the endpoint needs one"
        return asked.token.row(asked.token.made_at)  # it is valid: it was just checked

    return [
        _get("/v1/openapi.json", "This document.", None, role=None, enveloped=False),
        _get("/v1/errors", "All codes of errors.", answers.ErrorsAnswer, role=None, read=errors),
        _get(
            "/v1/errors/{code}",
            "The meaning of a code.",
            answers.ErrorAnswer,
            role=None,
            read=error,
        ),
        _get("/v1/token", "The token of this request.", answers.OwnTokenAnswer, read=own_token),
    ]


def _federation(readings: Readings) -> list[Endpoint]:
    def events(asked: Asked) -> Awaitable[dict[str, Any]]:
        return readings.events(cast("inputs.EventsPage", asked.query))

    def methods(asked: Asked) -> Awaitable[dict[str, Any]]:
        return readings.methods(None, cast("inputs.MethodsSetting", asked.query))

    async def method(asked: Asked) -> dict[str, Any]:
        setting = cast("inputs.MethodsSetting", asked.query)
        found: dict[str, Any] = (await readings.methods(asked.path["name"], setting))["methods"][0]
        return found

    return [
        _get(
            "/v1/federation",
            "The federation and its server.",
            answers.FederationAnswer,
            read=lambda _: readings.federation(),
        ),
        _get(
            "/v1/status",
            "The current state, as `fcil-server status --json`.",
            answers.StatusAnswer,
            read=lambda _: readings.status(),
        ),
        _get(
            "/v1/clients",
            "Members and open tickets, as `fcil-server clients --json`.",
            answers.MembersAnswer,
            read=lambda _: readings.members(),
        ),
        _get(
            "/v1/clients/{client}",
            "One member.",
            answers.MemberAnswer,
            read=lambda asked: readings.member(asked.path["client"]),
        ),
        _get(
            "/v1/queue",
            "The runs that wait, as `fcil-server run queue --json`.",
            answers.QueueAnswer,
            read=lambda _: readings.queue(),
        ),
        _get(
            "/v1/events",
            "Notes, warnings and errors, in pages.",
            answers.EventsAnswer,
            query=inputs.EventsPage,
            read=events,
        ),
        _get(
            "/v1/stream",
            "News as they come, as server-sent events; `Last-Event-ID` resumes.",
            None,
            query=inputs.StreamStart,
            media=(EVENTS,),
        ),
        _get(
            "/v1/methods",
            "The installed methods, as `fcil-server methods --json`.",
            answers.MethodsAnswer,
            query=inputs.MethodsSetting,
            read=methods,
        ),
        _get(
            "/v1/methods/{name}",
            "One installed method.",
            answers.MethodAnswer,
            query=inputs.MethodsSetting,
            read=method,
        ),
    ]


def _runs(readings: Readings) -> list[Endpoint]:
    def rounds(asked: Asked) -> Awaitable[dict[str, Any]]:
        return readings.rounds(asked.path["run"], cast("inputs.RoundsPage", asked.query))

    def one(asked: Asked) -> Awaitable[dict[str, Any]]:
        number = _number(asked.path["seq"], "a round's ordinal is")
        return readings.round(asked.path["run"], number)

    parts: dict[str, tuple[str, type[BaseModel], Callable[[str], Awaitable[dict[str, Any]]]]] = {
        "": ("A run's results.", results.RunAnswer, readings.run),
        "/tasks": ("A run's tasks.", results.TasksAnswer, readings.tasks),
        "/classes": ("A run's class names.", results.ClassesAnswer, readings.classes),
        "/accuracy": ("A run's accuracies.", results.AccuracyAnswer, readings.accuracy),
        "/bytes": ("A run's bytes.", results.ByteSumsAnswer, readings.bytes),
        "/files": ("The files of a run's results.", results.FilesAnswer, readings.files),
    }

    def of_run(
        read: Callable[[str], Awaitable[dict[str, Any]]],
    ) -> Callable[[Asked], Awaitable[dict[str, Any]]]:
        return lambda asked: read(asked.path["run"])

    return [
        _get(
            "/v1/runs",
            "The runs, as `fcil-server run ls --json`.",
            answers.RunListAnswer,
            read=lambda _: readings.runs(),
        ),
        *(
            _get(f"/v1/runs/{{run}}{path}", summary, answer, read=of_run(read))
            for path, (summary, answer, read) in parts.items()
        ),
        _get(
            "/v1/runs/{run}/files/{name}",
            f"One file of a run's results: {', '.join(FILES)}.",
            None,
            file=lambda asked: readings.file(asked.path["run"], asked.path["name"]),
            media=tuple(dict.fromkeys(kind.partition(";")[0] for kind in FILES.values())),
        ),
        _get(
            "/v1/runs/{run}/rounds",
            "A run's rounds, in pages, as `fcil-server rounds --json`.",
            results.RoundsAnswer,
            query=inputs.RoundsPage,
            read=rounds,
        ),
        _get("/v1/runs/{run}/rounds/{seq}", "One round.", results.RoundAnswer, read=one),
    ]


def _exports(readings: Readings) -> list[Endpoint]:
    return [
        _get(
            "/v1/exports",
            "The newest exports.",
            answers.ExportsAnswer,
            read=lambda _: readings.exports(),
        ),
        _get(
            "/v1/exports/{id}",
            "What became of an export.",
            answers.ExportAnswer,
            read=lambda asked: readings.export(asked.path["id"]),
        ),
        _get(
            "/v1/exports/{id}/file",
            "The result of an export: a file, or a folder as a zip.",
            None,
            role=ADMINISTER,
            file=lambda asked: readings.exported(asked.path["id"]),
            media=(EXPORTED, "application/zip"),
        ),
    ]


def _acts() -> list[Endpoint]:
    def post(
        path: str,
        role: TokenRole,
        summary: str,
        answer: type[BaseModel],
        body: type[inputs.ActBody],
        make: Callable[[Any, Mapping[str, str]], Act],
        status: int = 200,
    ) -> Endpoint:
        return Endpoint(
            "POST",
            path,
            role,
            summary,
            answer,
            body=body,
            act=lambda asked: make(asked.body, asked.path),
            status=status,
        )

    def mode(op: str, summary: str) -> Endpoint:
        empty = inputs.EmptyBody
        act = acts.set_mode(op)
        return post(f"/v1/rounds/{op}", OPERATE, summary, answers.ModeAnswer, empty, lambda *_: act)

    def classes(
        change: str,
        summary: str,
        body: type[inputs.ActBody],
        names: Callable[[Any], list[str]],
    ) -> Endpoint:
        return post(
            f"/v1/classes/{change}",
            OPERATE,
            summary,
            answers.NamesAnswer,
            body,
            lambda given, _: acts.change_classes(change, names(given)),
        )

    return [
        mode("pause", "Open no further round until resume; the current one completes."),
        mode("resume", "Resume rounds after pause, or cancel a drain that has not finished."),
        mode("drain", "Stop the server, and this API, when the current round is complete."),
        post(
            "/v1/rounds/close",
            OPERATE,
            "Close the current round with the updates received so far.",
            answers.DoneAnswer,
            inputs.CloseRoundBody,
            lambda body, _: acts.close_round(body),
        ),
        classes("admit", "Admit new names to tasks.", inputs.AdmitBody, lambda b: list(b.names)),
        classes(
            "alias",
            "Make a name an alias of a class.",
            inputs.AliasBody,
            lambda b: [b.name, b.target],
        ),
        classes("rename", "Rename a class.", inputs.RenameBody, lambda b: [b.name, b.new]),
        classes(
            "hide", "Exclude names from future tasks.", inputs.NamesBody, lambda b: list(b.names)
        ),
        classes("show", "Undo hide.", inputs.NamesBody, lambda b: list(b.names)),
        post(
            "/v1/runs/newest/promote",
            OPERATE,
            "Let clients use the model of one state, while rounds continue.",
            answers.PromotedAnswer,
            inputs.PromoteBody,
            lambda body, _: acts.promote(body),
        ),
        post(
            "/v1/runs/newest/stop",
            ADMINISTER,
            "End the newest run for good; the next one begins, or the server and this API stop.",
            answers.StoppedRunAnswer,
            inputs.EmptyBody,
            lambda *_: acts.stop_run(),
        ),
        post(
            "/v1/exports",
            ADMINISTER,
            "Begin an export of a model for another program, as `fcil-server export`.",
            answers.ExportAnswer,
            inputs.ExportBody,
            lambda body, _: acts.export(body),
            HTTPStatus.ACCEPTED,
        ),
        post(
            "/v1/queue",
            ADMINISTER,
            "Let a run begin once those before it are complete or stopped.",
            answers.SubmittedAnswer,
            inputs.SubmitBody,
            lambda body, _: acts.submit(body),
            HTTPStatus.CREATED,
        ),
        post(
            "/v1/queue/{number}/cancel",
            ADMINISTER,
            "Remove a waiting run from the queue.",
            answers.CancelledAnswer,
            inputs.EmptyBody,
            lambda _, path: acts.cancel(_number(path["number"], "a run of the queue has")),
        ),
        post(
            "/v1/tickets",
            ADMINISTER,
            "Make a ticket that lets one new client (or relay) join, once.",
            answers.TicketAnswer,
            inputs.EnrolBody,
            lambda body, _: acts.enrol(body),
            HTTPStatus.CREATED,
        ),
        post(
            "/v1/clients/{client}/revoke",
            ADMINISTER,
            "Revoke a member now, or withdraw an open ticket.",
            answers.RevokedAnswer,
            inputs.RevokeBody,
            lambda body, path: acts.revoke(path["client"], body),
        ),
        post(
            "/v1/clients/{client}/erase",
            ADMINISTER,
            "End a membership and remove all that identifies the client, for good.",
            answers.ErasedAnswer,
            inputs.EmptyBody,
            lambda _, path: acts.erase(path["client"]),
        ),
    ]


def _number(text: str, what: str) -> int:
    """Return the number in an address.

    Raises:
        RefusedRequest: it is not one.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise missing(f"{what} a number from 0 on.")
    return int(text)
