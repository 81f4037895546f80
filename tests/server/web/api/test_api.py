"""The API's addresses: each answer as its model says, and a sentence for every bad request."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import BaseModel

import page_kit
from fcil_protocol.errors import (
    DiskFull,
    FcilError,
    InternalError,
    NotNow,
    Timeout,
    UsageError,
    WireError,
    all_errors,
)
from fcil_protocol.process.terminal import SCHEMA_VERSION
from fcil_server.federation.api_tokens import TokenRole, revoke_token
from fcil_server.federation.config import Config, as_file
from fcil_server.federation.directory import CONFIG
from fcil_server.ledger.ledger import LEDGER_NAME
from fcil_server.reports.export_records import ExportRecord
from fcil_server.web.api import app as app_module
from fcil_server.web.api import server as server_module
from fcil_server.web.api.acts import ACT_WAIT_S, ASK_S, LONG_S
from fcil_server.web.api.endpoints import all_endpoints
from fcil_server.web.api.openapi import document
from fcil_server.web.api.readings import FILES, Readings
from fcil_server.web.requests import Pool
from sample_run import ALICE, RUN
from server.api_door import Server, visited
from server.web_kit import ask, get

STATUS = {
    "running": True,
    "federation": {
        "id": "f" * 32,
        "name": "lab",
        "directory": "federation",
        "addresses": ["127.0.0.1:1"],
        "port": 1,
        "metrics": None,
        "page": None,
        "api": {"address": "http://127.0.0.1:2/v1", "pid": 3},
        "up_s": 4.5,
    },
    "run": {
        "id": RUN,
        "status": "running",
        "parent": None,
        "method": "pilora",
        "backbone": "embedded",
        "directory": "runs",
        "state": 9,
        "privacy": {"min_count": 1},
        "budget": None,
        "training": None,
        "promoted": 3,
        "best": {
            "state": 3,
            "task": 1,
            "correct": 3,
            "total": 4,
            "central": True,
            "accuracy": 75.0,
            "tested_by": "server",
        },
    },
    "queue": [
        {
            "number": 7,
            "title": "night",
            "method": None,
            "submitted_at": 1_767_322_800.0,
            "by": "uid 0",
            "refused": None,
        }
    ],
    "now": {
        "phase": "collecting",
        "mode": "running",
        "waiting_for": "",
        "task": 3,
        "kind": "train",
        "round": 0,
        "rounds": 2,
        "remaining_s": 1.5,
        "answers": {ALICE: "updated"},
    },
    "clients": [
        {
            "id": ALICE,
            "name": "alice",
            "state": "ready",
            "why": "",
            "role": "client",
            "via": None,
            "device": "pi",
            "agreement": None,
            "last_seen": 1_767_322_800.0,
            "images": 4,
            "classes": 2,
            "progress": ["train", 1, 2],
            "paused": False,
            "learned_before": [],
            "missed_tasks": [1],
        }
    ],
    "classes": [{"id": 0, "name": "cat", "task": 0, "waiting": False, "admitted": True}],
    "refused": 2,
    "loop": {"loop_lag_max_s": 0.1, "loop_lag_p99_s": 0.0},
    "notes": [{"at": 1_767_322_800.0, "level": "info", "code": "serving", "text": "here"}],
}


EXPORTED = "0123456789abcdef"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    page_kit.small(folder / LEDGER_NAME).close()
    (folder / CONFIG).write_text(as_file(Config()))
    run = folder / "runs" / RUN
    run.mkdir(parents=True)
    (run / "summary.json").write_text('{"a": 1}\n')
    (run / "bytes.csv").symlink_to(folder / CONFIG)
    (run / "final.safetensors").write_bytes(b"model")
    record = ExportRecord(EXPORTED, RUN, "3", "onnx", "me", "done", 1.0, 2.0, "model.onnx", 4)
    record.save(folder)
    (record.folder(folder) / "model.onnx").write_bytes(b"onnx")
    replace(record, id="f" * 16, status="running", name=None, bytes=None).save(folder)
    return folder


@pytest.fixture
def federation(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "federation", symlinks=True))


def extras(model: BaseModel, where: str = "") -> list[str]:
    """Return the fields of an answer that its model does not name."""
    found = [f"{where}.{name}" for name in model.model_extra or {}]
    for name in type(model).model_fields:
        value = getattr(model, name, None)
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, BaseModel):
                found += extras(one, f"{where}.{name}")
    return found


PATHS = {
    "/v1/openapi.json": "",
    "/v1/errors": "",
    "/v1/errors/{code}": "/v1/errors/usage",
    "/v1/clients/{client}": f"/v1/clients/{ALICE}",
    "/v1/methods/{name}": "/v1/methods/pilora",
    "/v1/runs/{run}/files/{name}": "",
    "/v1/runs/{run}/rounds/{seq}": f"/v1/runs/{RUN}/rounds/1",
    "/v1/stream": "",
    "/v1/exports/{id}": f"/v1/exports/{EXPORTED}",
}


def test_every_answer_has_the_fields_of_its_model_and_no_others(federation: Path) -> None:
    endpoints = [e for e in all_endpoints(Readings(federation, Server())) if e.read is not None]

    async def work(api):
        said = {}
        for one in endpoints:
            path = PATHS.get(one.path) or one.path.replace("{run}", RUN)
            status, headers, content = await api.ask(path)
            assert status == 200, (path, content)
            assert headers["cache-control"] == "no-store"
            assert (content["schema_version"], content["status"]) == (SCHEMA_VERSION, "ok")
            said[one.id] = extras(one.answer.model_validate(content["data"]), one.id)
        return said

    said = visited(federation, work, Server(status=STATUS))
    assert len(said) > 15
    assert {name: found for name, found in said.items() if found} == {}


def test_answers_are_those_of_the_commands(federation: Path) -> None:
    async def work(api):
        return [
            (await api.ask(f"/v1/{path}"))[2]["data"]
            for path in ("status", "clients", "runs", "runs/newest", f"runs/{RUN[:6]}/rounds")
        ]

    status, clients, runs, run, rounds = visited(federation, work, Server(status=STATUS))
    assert status["notes"][0]["at"] == "2026-01-02T03:00:00Z"
    assert status["clients"][0]["progress"] == ["train", 1, 2]
    assert {c["name"]: c["state"] for c in clients["clients"]}["alice"] == "ready"
    assert [r["id"] for r in runs["runs"]] == [RUN]
    assert run["accuracy_matrix"] == [[90.0], [70.0, 80.0], [60.0, 85.0, 95.0]]
    assert [r["seq"] for r in rounds["rounds"]] == list(range(rounds["next"]))


def test_lists_come_in_pages(federation: Path) -> None:
    async def pages(api, path, start, name):
        found, after = [], 0
        while True:
            data = (await api.ask(f"{path}?{start}={after}&limit=2"))[2]["data"]
            if not data[name]:
                assert data["next"] == after
                return found
            found += data[name]
            after = data["next"]

    async def work(api):
        rounds = await pages(api, f"/v1/runs/{RUN}/rounds", "since", "rounds")
        events = await pages(api, "/v1/events", "after", "events")
        errors = (await api.ask("/v1/events?level=error"))[2]["data"]["events"]
        return rounds, events, errors

    rounds, events, errors = visited(federation, work)
    assert [r["seq"] for r in rounds] == list(range(13))
    assert [e["id"] for e in events] == sorted(e["id"] for e in events)
    assert [e["level"] for e in events] == ["info", "warning", "error"]
    assert [e["code"] for e in errors] == ["worker"]


def test_only_the_reports_files_can_be_fetched(federation: Path) -> None:
    async def work(api):
        listed = (await api.ask(f"/v1/runs/{RUN}/files"))[2]["data"]["files"]
        good = await api.ask(f"/v1/runs/{RUN}/files/summary.json")
        bad = [
            (await api.ask(f"/v1/runs/{RUN}/files/{name}"))[0]
            for name in ("bytes.csv", "final.safetensors", "..%2f..%2fapi.tokens", "%00", "..")
        ]
        return listed, good, bad

    listed, good, bad = visited(federation, work)
    assert listed == [{"name": "summary.json", "bytes": 9}]
    assert (good[0], good[2]) == (200, {"a": 1})
    assert set(bad) <= {400, 404}
    assert "final.safetensors" not in FILES


def test_an_unknown_client_is_not_found(federation: Path) -> None:
    told = visited(federation, lambda api: api.ask("/v1/clients/nobody"), Server(status=STATUS))
    assert (told[0], told[2]["detail"].startswith("There is no client 'nobody'")) == (404, True)


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/v1/nothing", 404, "the addresses of this API begin with /v1"),
        ("/v2/status", 404, "the addresses of this API begin with /v1"),
        ("/v1/runs/r2020", 404, "No run's id begins with"),
        (f"/v1/runs/{RUN}/rounds/99", 404, "has no round 99"),
        (f"/v1/runs/{RUN}/rounds/-1", 404, "a number from 0 on"),
        ("/v1/clients", 503, "No daemon runs"),  # who is here, only the server knows
        ("/v1/methods/magic", 404, "There is no method 'magic'; known are"),
        ("/v1/errors/none", 404, "There is no such code"),
        ("/v1/events?limit=0", 400, "Parameter limit: input should be greater than"),
        ("/v1/events?limit=1001", 400, "Parameter limit: input should be less than"),
        ("/v1/events?after=x", 400, "Parameter after: input should be a valid integer"),
        ("/v1/events?after=1&after=2", 400, "'after' may be given once"),
        ("/v1/events?level=loud", 400, "Parameter level: input should be 'info', 'warning'"),
        ("/v1/status?x=1", 400, "Unknown parameter x; known here: none"),
        ("/v1/stream?last=abc", 400, "is not the id of an event"),
        (f"/v1/status?x={'y' * 1100}", 414, "may be at most 1024 bytes"),
        (f"/v1/clients/{'y' * 400}", 404, "at most 300 printable characters"),
        ("/v1/status", 503, "No daemon runs"),
    ],
)
def test_a_bad_request_gets_a_sentence_with_a_code(federation, path, status, says) -> None:
    found, headers, content = visited(federation, lambda api: api.ask(path))
    assert (found, content["status"]) == (status, status)
    assert says in content["detail"]
    assert headers["content-type"] == "application/problem+json"
    assert content["type"] == f"/v1/errors/{content['code']}"
    assert content["code"] in {kind.code for kind in all_errors()}


def test_a_reader_too_many_is_told_when_to_come_again(federation, monkeypatch) -> None:
    monkeypatch.setattr(Pool.__init__, "__kwdefaults__", {"threads": 1, "most": 0})

    async def work(api):
        return [await api.ask(f"/v1/{path}") for path in ("runs", "methods")]

    for status, headers, content in visited(federation, work):
        assert (status, content["code"], headers["retry-after"]) == (429, "not_now", "2")
        assert content["title"] == "This cannot be done now; it can be later."
        assert content["detail"] == "Too many requests are under way."


def test_what_the_listener_refuses_is_a_problem_too(federation: Path) -> None:
    async def work(api):
        big = {"Content_Length": str(1 << 30), "Content_Type": "application/json"}
        chunks = {"Transfer_Encoding": "chunked", "Content_Type": "application/json"}
        return [
            await api.ask("/v1/status", host="evil.example"),
            await api.ask("/v1/tickets", method="POST", **big),
            await api.ask("/v1/tickets", method="POST", **chunks),
            await api.ask("/v1/status", method="PUT"),
        ]

    answers = visited(federation, work)
    assert [a[0] for a in answers] == [421, 413, 411, 405]
    assert answers[1][2]["action"] == "Send less."
    assert {a[1]["content-type"] for a in answers} == {"application/problem+json"}
    assert "at most 262144 bytes" in answers[1][2]["detail"]


def test_slow_heads_and_silent_connections_are_cut(federation: Path) -> None:
    async def work(api):
        slow = await ask(api.port, "GET /v1/status HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ")
        return slow, (await api.ask("/v1/token"))[0]

    assert visited(federation, work, first_s=0.2) == ("", 200)


# --- tokens ---------------------------------------------------------------------------------------


def test_every_address_but_three_needs_a_token(federation: Path) -> None:
    endpoints = all_endpoints(Readings(federation, Server()))
    free = {e.path for e in endpoints if e.role is None}
    assert free == {"/v1/openapi.json", "/v1/errors", "/v1/errors/{code}"}

    async def work(api):
        for one in endpoints:
            path = one.path.replace("{", "").replace("}", "")
            for role in (None, "wrong", "fcil_" + "x" * 43, "x" * 5000):
                status, headers, _ = await api.ask(path, method=one.method, role=role)
                assert status == (401 if one.path not in free else status), path
                assert status != 401 or headers["www-authenticate"].startswith("bearer")
        return api.server.asked

    assert visited(federation, work) == []


def test_an_act_needs_its_role(federation: Path) -> None:
    acts = [e for e in all_endpoints(Readings(federation, Server())) if e.act is not None]
    assert {e.role for e in acts} == {TokenRole.OPERATE, TokenRole.ADMINISTER}

    async def work(api):
        for one in acts:
            path = one.path.replace("{client}", "alice")
            for role in TokenRole:
                status, _, content = await api.ask(path, method="POST", role=role.value, body={})
                assert (status == 403) == (not role.allows(one.role)), (path, role)
                assert status != 403 or f"this needs {one.role.value}" in content["detail"]

    visited(federation, work)


def test_a_revoked_token_is_void_at_the_next_request(federation: Path) -> None:
    async def work(api):
        before = (await api.ask("/v1/token"))[2]["data"]
        revoke_token(federation, "read")
        return before, (await api.ask("/v1/token"))[0], (await api.ask("/v1/token", role="operate"))

    before, after, other = visited(federation, work)
    assert (before["name"], before["role"], before["valid"]) == ("read", "read", True)
    assert (after, other[0]) == (401, 200)


def test_a_file_of_tokens_that_cannot_be_used_is_told_to_the_log_alone(federation, capsys) -> None:
    async def work(api):
        path = federation / "api.tokens"
        told = []
        for content in ("{", '{"version": 9, "tokens": []}', "[" * 9000):
            path.write_text(content)
            told.append(await api.ask("/v1/token", role="wrong"))
        path.write_text('{"version": 1, "tokens": []}')
        path.chmod(0o644)
        return [*told, await api.ask("/v1/token")]

    answers = visited(federation, work)
    assert [a[0] for a in answers] == [503] * 4
    assert {a[2]["detail"] for a in answers} == {"No token can be checked now."}
    assert "api.tokens" not in json.dumps([a[2] for a in answers])
    log = capsys.readouterr().err
    assert "version '9', expected 1" in log
    assert "so others can use" in log


def test_no_more_files_are_sent_at_a_time_than_there_are_places(federation, monkeypatch) -> None:
    path = f"/v1/runs/{RUN}/files/summary.json"

    async def work(api):
        monkeypatch.setattr(app_module, "MAX_DOWNLOADS", 1)
        told = [(await api.ask(path))[0] for _ in range(3)]  # each is over before the next
        monkeypatch.setattr(app_module, "MAX_DOWNLOADS", 0)
        return [*told, await api.ask(path)]

    *good, refused = visited(federation, work)
    assert good == [200] * 3
    assert (refused[0], refused[2]["detail"]) == (503, "0 files are being read.")


def test_the_result_of_an_export_is_a_file(federation: Path) -> None:
    async def work(api):
        told = [
            await api.ask(f"/v1/exports/{name}/file", role="administer")
            for name in (EXPORTED, "f" * 16, "0" * 16, "..", "x")
        ]
        return told, await api.ask(f"/v1/exports/{EXPORTED}/file", role="read")

    (whole, *others), reader = visited(federation, work)
    assert (whole[0], whole[2]) == (200, {"text": "onnx"})
    assert whole[1]["content-type"] == "application/octet-stream"
    assert [o[0] for o in others] == [404] * 4
    assert "is running, and has no file" in others[0][2]["detail"]
    assert reader[0] == 403


# --- acts -----------------------------------------------------------------------------------------

EXPORT = {
    "id": "0123456789abcdef",
    "run": RUN,
    "state": "3",
    "format": "onnx",
    "by": "uid 0, api administer",
    "status": "running",
    "started_at": "2026-01-02T03:00:00Z",
    "ended_at": None,
    "name": None,
    "bytes": None,
    "error": None,
}
TOLD = {
    "pause": {"mode": "paused", "round_open": True},
    "resume": {"mode": "running", "round_open": True},
    "drain": {"mode": "draining", "round_open": True},
    "close_round": {},
    "classes": {"names": ["a", "b"]},
    "enrol": {
        "ticket": "FCIL1SECRET",
        "expires": 1_767_322_800.0,
        "addresses": ["127.0.0.1:1"],
        "fingerprint": "ab",
    },
    "revoke": {"client": ALICE, "name": "alice"},
    "promote": {"run": RUN, "state": 3, "task": 1, "promoted": True, "clients": 2},
    "stop_run": {"run": RUN, "next": True},
    "submit_run": {"number": 7, "title": "night", "before": 0, "begins": False},
    "cancel_run": {"number": 7, "title": "night"},
    "export": EXPORT,
    "erase": {
        "client": ALICE,
        "name": "alice",
        "pseudonym": "erased-1",
        "gone": ["x"],
        "stays": [],
    },
}
SETTINGS = {"method": {"name": "fedncm"}, "run": {"seed": 2}}
ACTS = [
    ("rounds/pause", None, {"op": "pause"}, {"mode": "paused", "round_open": True}),
    ("rounds/resume", {}, {"op": "resume"}, {"mode": "running", "round_open": True}),
    ("rounds/drain", None, {"op": "drain"}, {"mode": "draining", "round_open": True}),
    (
        "rounds/close",
        {"rest_of_task": True, "only": {"task": 1, "kind": "train", "round": 0}},
        {
            "op": "close_round",
            "rest_of_task": True,
            "only": {"task": 1, "kind": "train", "round": 0},
        },
        {"says": "The round closes."},
    ),
    (
        "classes/alias",
        {"name": "a", "target": "b"},
        {"op": "classes", "change": "alias", "names": ["a", "b"]},
        {"names": ["a", "b"]},
    ),
    (
        "classes/hide",
        {"names": ["a"], "schema_version": SCHEMA_VERSION},
        {"op": "classes", "change": "hide", "names": ["a"]},
        {"names": ["a", "b"]},
    ),
    (
        "tickets",
        {"name": "cam", "lasts": "2h"},
        {"op": "enrol", "name": "cam", "lasts_s": 7200.0, "relay": False},
        {
            "name": "cam",
            "ticket": "FCIL1SECRET",
            "expires": "2026-01-02T03:00:00Z",
            "addresses": ["127.0.0.1:1"],
            "fingerprint": "ab",
            "run_this": "fcil-client join --data FOLDER --ticket FILE",
        },
    ),
    (
        "clients/alice/revoke",
        {"why": "lost", "keep_update": True},
        {"op": "revoke", "name": "alice", "exact": True, "why": "lost", "keep": True},
        {"client": ALICE, "name": "alice", "withdrawn": False, "behind": [], "tickets": []},
    ),
    (
        "runs/newest/promote",
        {"state": 3},
        {"op": "promote", "state": "3"},
        TOLD["promote"],
    ),
    ("runs/newest/stop", {}, {"op": "stop_run"}, TOLD["stop_run"]),
    (
        "queue",
        {"title": "night", "settings": SETTINGS},
        {"op": "submit_run", "title": "night", "settings": SETTINGS},
        TOLD["submit_run"],
    ),
    (
        "exports",
        {"format": "onnx", "state": "best"},
        {"op": "export", "format": "onnx", "state": "best"},
        EXPORT,
    ),
    ("queue/7/cancel", None, {"op": "cancel_run", "number": 7}, TOLD["cancel_run"]),
    ("clients/alice/erase", {}, {"op": "erase", "name": "alice", "exact": True}, TOLD["erase"]),
]
STATUSES = {"tickets": 201, "queue": 201, "exports": 202}


@pytest.mark.parametrize(("path", "body", "order", "answer"), ACTS, ids=[a[0] for a in ACTS])
def test_an_act_is_the_control_command_of_the_token(federation, path, body, order, answer) -> None:
    async def work(api):
        told = await api.ask(f"/v1/{path}", method="POST", role="administer", body=body)
        return told, api.server.asked

    (status, _, content), asked = visited(federation, work, Server(**TOLD))
    assert (status, content["data"]) == (STATUSES.get(path, 200), answer)
    assert asked == [{**order, "by": "api", "token": "administer"}]


def test_an_answer_after_an_act_knows_of_it(federation: Path) -> None:
    """The server's status is kept for a second, but not over an act."""

    async def work(api):
        told = []
        for act in (None, "rounds/pause", None):
            if act is not None:
                await api.ask(f"/v1/{act}", method="POST", role="administer")
            told.append(await api.ask("/v1/queue"))
        return [t[2]["data"]["queue"][0]["number"] for t in told], api.server.asked

    numbers, asked = visited(federation, work, Server(**TOLD, status=STATUS))
    assert numbers == [7, 7, 7]
    assert [one["op"] for one in asked] == ["status", "pause", "status"]


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("tickets", {}, 400, "Field name: field required"),
        ("tickets", {"name": 3}, 400, "Field name: input should be a valid string"),
        ("tickets", {"name": "a", "lasts": "1y"}, 400, "of 1 minute to 90 days such as 30m, 24"),
        ("tickets", {"name": "a", "x": 1}, 400, "Unknown field x; known here: schema_version"),
        ("tickets", {"name": "a", "schema_version": 3}, 400, "schema_version: input should be 2"),
        ("tickets", "[1]", 400, "Expected a JSON object"),
        ("tickets", "{" * 5000, 400, "Expected a JSON object"),
        ("tickets", '{"name": "\\ud800"}', 400, "Field name: input should be a valid string"),
        ("rounds/close", {"only": {"task": 1}}, 400, "Field only.kind: field required"),
        ("classes/hide", {"names": []}, 400, "Field names: list should have at least 1 item"),
        ("classes/hide", {"names": ["a"] * 201}, 400, "Field names: list should have at most"),
        ("rounds/pause", {"a": 1, "b": 2}, 400, "Unknown field a"),
        ("runs/newest/promote", {"state": "first"}, 400, "Field state: string should match"),
        ("runs/newest/promote", {}, 400, "Field state: field required"),
        ("exports", {"format": "pickle"}, 400, "Field format: input should be 'onnx', 'peft'"),
        ("exports", {"format": "onnx", "state": "-1"}, 400, "Field state: string should match"),
        ("queue", {"title": "a"}, 400, "Field settings: field required"),
        ("queue", {"settings": {"storage": {}}}, 400, "Field settings.storage.[key]: input should"),
        ("queue", {"settings": {"run": 3}}, 400, "Field settings.run: input should be"),
        ("queue/x/cancel", {}, 404, "A run of the queue has a number from 0 on"),
        ("queue/-1/cancel", {}, 404, "A run of the queue has a number from 0 on"),
    ],
)
def test_a_bad_body_does_nothing(federation, path, body, status, says) -> None:
    async def work(api):
        told = await api.ask(f"/v1/{path}", method="POST", role="administer", body=body)
        return told, api.server.asked

    (found, _, content), asked = visited(federation, work, Server(**TOLD))
    assert (found, asked) == (status, [])
    assert says in content["detail"]


def test_a_body_of_another_type_is_refused(federation: Path) -> None:
    async def work(api):
        form = {"Content_Type": "text/plain", "Content_Length": "2"}
        return await api.ask("/v1/rounds/pause", method="POST", role="operate", **form)

    assert visited(federation, work, Server(**TOLD))[0] in (400, 415)


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (UsageError("no round is under way."), 409, "No round is under way."),
        (NotNow("another round."), 409, "Another round."),
        (Timeout("the daemon at /secret did not answer."), 503, "the act may still happen"),
        (InternalError("x"), 500, "X"),
    ],
)
def test_what_the_server_refuses_comes_with_its_code(federation, error, status, says) -> None:
    def work(api):
        return api.ask("/v1/rounds/close", method="POST", role="operate")

    found, _, content = visited(federation, work, Server(close_round=error))
    assert (found, content["code"]) == (status, error.code)
    assert says in content["detail"]
    assert "/secret" not in json.dumps(content)


def test_a_defect_is_logged_and_says_nothing_more(federation, capsys) -> None:
    server = Server(status={"running": True})
    found, _, content = visited(federation, lambda api: api.ask("/v1/status"), server)
    assert (found, content["code"]) == (500, "internal")
    assert "the API failed at GET /v1/status" in capsys.readouterr().err


# --- repeated requests ------------------------------------------------------------------------------


def test_a_repeated_request_gets_the_first_ones_answer(federation: Path) -> None:
    async def work(api):
        def enrol(name, key, role="administer"):
            body = {"name": name}
            return api.ask("/v1/tickets", method="POST", role=role, body=body, Idempotency_Key=key)

        first, again = await enrol("cam", "k"), await enrol("cam", "k")
        other, bad = await enrol("dog", "k"), await enrol("cam", "k" * 201)
        return first, again, other, bad, len(api.server.asked)

    first, again, other, bad, asked = visited(federation, work, Server(**TOLD))
    assert (first[0], again[0], first[2]) == (201, 201, again[2])
    assert (other[0], bad[0], asked) == (409, 400, 1)
    assert "SECRET" not in (federation / "api.requests").read_text()


def test_the_file_of_acts_names_no_client(federation: Path) -> None:
    """So an erased one is not in it either."""

    async def work(api):
        for path, body, _, _ in ACTS:
            given = {"method": "POST", "role": "administer", "body": body}
            told = [await api.ask(f"/v1/{path}", **given, Idempotency_Key=path) for _ in range(2)]
            assert told[0] == told[1]

    visited(federation, work, Server(**TOLD))
    written = (federation / "api.requests").read_text()
    assert len(json.loads(written)["acts"]) == len(ACTS)
    assert not [word for word in ("alice", ALICE, "cam", "SECRET") if word in written]


@pytest.mark.parametrize(
    ("unsure", "status"),
    [
        (Timeout("late."), 503),
        (WireError("the answer is no JSON object."), 500),
        (DiskFull("no room."), 503),
    ],
)
def test_what_was_refused_may_be_repeated_and_what_is_unsure_is_not(
    federation: Path, unsure: FcilError, status: int
) -> None:
    says: list = [UsageError("no round."), {}, unsure]
    server = Server(close_round=lambda: says.pop(0))

    async def work(api):
        return [
            await api.ask("/v1/rounds/close", method="POST", role="operate", Idempotency_Key=key)
            for key in ("a", "a", "a", "b", "b")
        ]

    told = visited(federation, work, server)
    assert [a[0] for a in told] == [409, 200, 200, status, 409]
    assert "may have been carried out; its answer was lost" in told[4][2]["detail"]
    assert len(server.asked) == 3


def test_all_that_an_act_waits_for_ends_before_its_request_is_cut() -> None:
    assert server_module.LIMITS.request_s > ACT_WAIT_S + max(LONG_S, ASK_S)


# --- the document -----------------------------------------------------------------------------------


def test_the_document_names_every_endpoint_and_only_models_that_it_has(federation: Path) -> None:
    endpoints = all_endpoints(Readings(federation, Server()))
    made = document(endpoints)
    listed = {(m.upper(), p) for p, methods in made["paths"].items() for m in methods}
    assert listed == {(e.method, e.path) for e in endpoints}
    text = json.dumps(made)
    names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= set(made["components"]["schemas"])
    ids = [op["operationId"] for methods in made["paths"].values() for op in methods.values()]
    assert len(ids) == len(set(ids))
    for methods in made["paths"].values():
        for operation in methods.values():
            assert "application/problem+json" in operation["responses"]["default"]["content"]


def test_the_document_is_served_to_all_and_asks_for_nothing_elsewhere(federation: Path) -> None:
    async def work(api):
        return await ask(api.port, get("/v1/openapi.json"))

    answer = visited(federation, work)
    assert answer.startswith("HTTP/1.1 200")
    assert "http://" not in answer
    assert "https://" not in answer


# --- the stream -------------------------------------------------------------------------------------


async def events_of(port: int, token: str, count: int, path="/v1/stream", **headers: str):
    """Return the first events of a stream."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = get(path, Authorization=f"Bearer {token}", **headers)
    writer.write(request.replace("Connection: close\r\n", "").encode())
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)).decode()
    assert "200 OK" in head, head
    text, found = b"", []
    while len(found) < count:
        size = int(await asyncio.wait_for(reader.readline(), 60), 16)
        text += (await asyncio.wait_for(reader.readexactly(size + 2), 60))[:-2]
        while b"\n\n" in text:
            one, text = text.split(b"\n\n", 1)
            found.append(dict(line.split(": ", 1) for line in one.decode().split("\n")))
    writer.close()
    return found


def test_a_stream_resumes_after_the_last_event_that_was_received(federation: Path) -> None:
    async def work(api):
        token = api.tokens["read"]
        start = {"Last_Event_ID": "0.0..-1"}
        all_news = await events_of(api.port, token, 18, **start)
        rest = await events_of(api.port, token, 13, Last_Event_ID=all_news[4]["id"])
        by_query = await events_of(api.port, token, 1, f"/v1/stream?last={all_news[4]['id']}")
        return all_news, rest, by_query

    found, rest, by_query = visited(federation, work)
    news = [e for e in found if "id" in e]
    kinds = [e["event"] for e in news]
    assert kinds.count("round_closed") == 12
    assert kinds.count("client_refused") == 3
    assert kinds.count("note") == 3
    assert [e for e in rest if "id" in e][:13] == news[5:18]
    assert by_query[0]["id"] == news[5]["id"]
    closed = [json.loads(e["data"]) for e in news if e["event"] == "round_closed"]
    assert [c["seq"] for c in closed] == list(range(12))


def test_a_new_stream_begins_with_progress_and_hears_of_a_server_that_is_gone(
    federation: Path,
) -> None:
    live = {**page_kit.live(), "asked": 3, "answered": 1}
    says: list = [live]
    server = Server(gauges=lambda: says.pop(0) if says else Timeout("late."))

    async def work(api):
        return await events_of(api.port, api.tokens["read"], 2)

    progress, gone = visited(federation, work, server)
    assert (progress["event"], gone["event"]) == ("progress", "gone")
    assert json.loads(progress["data"])["phase"] == live["phase"]


def test_a_stream_ends_when_its_token_is_revoked(federation: Path) -> None:
    live = {**page_kit.live(), "asked": 3}
    numbers = iter(range(10_000))
    server = Server(gauges=lambda: {**live, "answered": next(numbers)})

    async def work(api):
        reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
        writer.write(get("/v1/stream", Authorization=f"Bearer {api.tokens['read']}").encode())
        await reader.readuntil(b"event: progress")
        revoke_token(federation, "read")
        await asyncio.wait_for(reader.read(), 60)  # until it ends
        writer.close()
        return True

    assert visited(federation, work, server)
