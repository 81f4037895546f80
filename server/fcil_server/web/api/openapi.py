"""The OpenAPI document, made from the endpoints and the models that make the answers."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from fcil_protocol.process.terminal import SCHEMA_VERSION
from fcil_server.web.api.endpoints import JSON, Endpoint
from fcil_server.web.api.past_acts import MAX_KEY
from fcil_server.web.api.problems import PROBLEM, Problem

OPENAPI = "3.1.0"
KEY_HEADER = "Idempotency-Key"
_REF = "#/components/schemas/{model}"
_ABOUT = """\
Reads and operates one federation. Answers have the data of the commands with `--json`; errors are \
`application/problem+json` with the codes of docs/errors.md. docs/api.md has examples."""
_KEY = {
    "name": KEY_HEADER,
    "in": "header",
    "required": False,
    "description": "a repeated request with the same key gets the first one's answer, for a day",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY, "pattern": "^[ -~]+$"},
}


def document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Return the document of these endpoints."""
    paths: dict[str, dict[str, Any]] = {}
    for one in endpoints:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one)
    return {
        "openapi": OPENAPI,
        "info": {"title": "fcil", "version": version("fcil"), "description": _ABOUT},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": _schemas(endpoints),
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "fcil-server token new NAME --role read|operate|administer",
                }
            },
        },
        "security": [{"token": []}],
    }


def _schemas(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    answers: set[type[BaseModel]] = {Problem}
    answers |= {e.answer for e in endpoints if e.answer is not None}
    bodies: set[type[BaseModel]] = {e.body for e in endpoints if e.body is not None}
    wanted: list[tuple[type[BaseModel], Literal["serialization", "validation"]]] = []
    wanted += [(model, "serialization") for model in sorted(answers, key=_name)]
    wanted += [(model, "validation") for model in sorted(bodies, key=_name)]
    _, found = models_json_schema(wanted, ref_template=_REF)
    schemas: dict[str, Any] = found["$defs"]
    return schemas


def _name(model: type[BaseModel]) -> str:
    return model.__name__


def _operation(one: Endpoint) -> dict[str, Any]:
    made: dict[str, Any] = {
        "operationId": one.id,
        "summary": one.summary,
        "parameters": [*_variables(one), *_query(one), *([_KEY] if one.act else [])],
        "responses": {str(int(one.status)): _answer(one), "default": _problem()},
    }
    if one.role is None:
        made["security"] = []
    else:
        made["description"] = f"Needs the role {one.role.value}."
    if one.body is not None:
        needed = any(field.is_required() for field in one.body.model_fields.values())
        content = {JSON: {"schema": _ref(one.body)}}
        made["requestBody"] = {"required": needed, "content": content}
    return made


def _variables(one: Endpoint) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "description": one.about[name],
            "schema": {"type": "string", "minLength": 1},
        }
        for name in one.variables
    ]


def _query(one: Endpoint) -> list[dict[str, Any]]:
    schema = one.query.model_json_schema()
    return [
        {
            "name": name,
            "in": "query",
            "required": False,
            "description": field.get("description", ""),
            "schema": {k: v for k, v in field.items() if k not in ("description", "title")},
        }
        for name, field in schema.get("properties", {}).items()
    ]


def _answer(one: Endpoint) -> dict[str, Any]:
    schema: dict[str, Any] = {} if one.answer is None else _ref(one.answer)
    if one.enveloped and one.answer is not None:
        schema = {
            "type": "object",
            "required": ["schema_version", "status", "data"],
            "properties": {
                "schema_version": {"const": SCHEMA_VERSION},
                "status": {"const": "ok"},
                "data": schema,
            },
        }
    return {
        "description": one.summary,
        "content": {kind: {"schema": _schema_of(one, kind, schema)} for kind in one.media},
    }


def _schema_of(one: Endpoint, kind: str, schema: dict[str, Any]) -> dict[str, Any]:
    if one.answer is not None:
        return schema
    return {"type": "object"} if kind == JSON else {"type": "string"}


def _problem() -> dict[str, Any]:
    return {"description": "An error.", "content": {PROBLEM: {"schema": _ref(Problem)}}}


def _ref(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": _REF.format(model=model.__name__)}
