"""Halves between the two sides: what workers take and give, what is told, who is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from adapters import half_method, worker_kit
from adapters.half_method import METHOD
from adapters.worker_kit import Direct, context, fields_of, fill
from fcil_adapters.contract import registry
from fcil_adapters.contract.backbone_info import NO_BACKBONE
from fcil_adapters.contract.half_precision import Forms, describe_rounding_loss
from fcil_client.link.handshake import read_terms
from fcil_client.rounds.worker import ClientWorker
from fcil_protocol.errors import DoesNotFit, InternalError, MethodMismatch
from fcil_protocol.messages.messages import Welcome
from fcil_protocol.payloads.payload import Payload, pack
from fcil_protocol.payloads.schema import Kind
from fcil_server.aggregation.worker import ServerWorker
from fcil_server.sessions.handshake import RunTerms, welcome

HALF = Forms(frozenset({Kind.LORA}))
TRAVELS = registry.with_forms(METHOD, HALF)
THIRD = np.float32(np.float16(1 / 3))
OFF = {"factor": 0, "min_clients": 5}


@pytest.fixture(autouse=True)
def method(monkeypatch):
    for module in (registry, worker_kit):
        monkeypatch.setattr(module, "load_method", lambda _name: METHOD)


@pytest.fixture
def run(tmp_path):
    """Let a client's worker run a round; the parts are given as they travel."""

    def call(parts=(), **options):
        folder = fill(tmp_path / "data", "train", "cat", range(8))
        (tmp_path / "cache").mkdir(exist_ok=True)
        ctx = context("half_method", options=options, forms=HALF)
        fields = fields_of(
            "half_method", ctx, classes={"cat": 0}, parts=["current"][: len(parts)],
            data=str(folder), cache=str(tmp_path / "cache"), salt=b"s" * 16,
            memory_bytes=1 << 20, min_count=1,
        )  # fmt: skip
        return Direct(ClientWorker())("run", fields, [Payload(), *parts])

    return call


def dtypes(payload):
    return {name: array.dtype.str for name, array in payload.tensors.items()}


def test_a_clients_worker_gives_its_upload_as_it_travels(run):
    reply, (_, upload) = run()
    assert dtypes(upload) == {"lora.x": "<f2", "mean": "<f4", "n": "<i8"}
    assert TRAVELS.exchanges(None, NO_BACKBONE)[0].upload.check(upload, {}) == []
    assert reply["lost"] == {}  # there is nothing that it started from


def test_it_takes_parts_as_they_travel_and_says_what_rounding_lost(run):
    mean = np.zeros(2, np.float32)
    part = Payload({"lora.x": np.ones(4, np.float16), "mean": mean})
    reply, (_, upload) = run([part], value=0.25)
    assert upload.f32("lora.x").tolist() == [1.25] * 4
    assert reply["lost"] == {"lora": 0}
    reply, (_, upload) = run([part], value=1e-4)  # below half of the last bit of 1
    assert upload.f32("lora.x").tolist() == [1] * 4
    assert reply["lost"]["lora"] == pytest.approx(1, abs=1e-3)


def test_people_are_told_of_it_only_if_it_is_much():
    (said,) = describe_rounding_loss({"lora": 0.6, "head": 0.01})
    assert said.startswith("half precision drops 60% of this round's step of lora (told from 25%")
    assert "[wire] half" in said


def test_a_number_that_does_not_fit_leaves_no_upload(run):
    with pytest.raises(DoesNotFit, match="tensor 'lora.x' .* holds 1e"):
        run(value=1e5)


def aggregated(value, aggregator="Aggregator", clients=2):
    """Let a server's worker combine equal uploads; return its worker, fields, and the state."""
    worker = Direct(ServerWorker())
    fields = fields_of("half_method", context("half_method", forms=HALF))
    _, (state,) = worker("init", fields)
    upload = Payload(
        {
            "lora.x": np.full(4, value, np.float16),
            "mean": np.full(2, 1 / 3, np.float32),
            "n": np.array([3]),
        }
    )
    names = [letter * 26 for letter in "ab"[:clients]]
    asked = {**fields, "outliers": OFF, "clients": names, "samples": [3] * clients}
    answers = [({"reply": {}}, [pack(upload)]) for _ in names]
    registry_half = registry.load_half
    path = f"adapters.half_method:{aggregator}"
    registry.load_half = lambda _path: registry_half(path)
    try:
        _, (state,) = worker("aggregate", asked, [state], answers)
    finally:
        registry.load_half = registry_half
    return worker, fields, state


def test_a_servers_worker_computes_in_float32_and_broadcasts_its_state_to_the_bit():
    worker, fields, state = aggregated(1 / 3)
    assert dtypes(state) == {"lora.x": "<f4", "mean": "<f4"}
    assert set(state.f32("lora.x").tolist()) == {THIRD}
    _, (part,) = worker("broadcast", fields, [state])
    assert dtypes(part) == {"lora.x": "<f2", "mean": "<f4"}
    np.testing.assert_array_equal(part.f32("lora.x"), state.f32("lora.x"))
    np.testing.assert_array_equal(part.f32("mean"), np.full(2, 1 / 3, np.float32))


def test_what_a_method_did_not_commit_is_not_broadcast():
    worker, fields, state = aggregated(1, "Careless", clients=1)
    with pytest.raises(InternalError, match="'lora.x' .* must commit"):
        worker("broadcast", fields, [state])


# --- what the two sides tell each other -----------------------------------------------------


def said(method=TRAVELS, **changes):
    """Return the Welcome of a server that runs a method in some forms."""
    hparams = METHOD.hparams()
    digest = registry.schema_digest(method, hparams, NO_BACKBONE)
    terms = RunTerms(
        federation="f" * 32, certificate=b"", run="r20260102-030405-0a0b", method=method,
        hparams=hparams, info=NO_BACKBONE, probe=None, schema_digest=digest, max_payload_bytes=1,
        credit=1, package="9", method_package="fcil 9",
    )  # fmt: skip
    told = welcome(terms, nonce=bytes(16), ready=False, verdict=None)
    return Welcome.model_validate({**told.model_dump(), **changes})


def test_a_client_comes_to_the_servers_schemas():
    terms = read_terms(said())
    assert terms.method.forms == HALF
    assert [t.dtype for t in terms.upload_schema("train").tensors] == ["F16", "F32", "I64"]


def test_without_halves_a_welcome_is_what_it_always_was():
    assert said(METHOD).half == []
    assert read_terms(said(METHOD)).method.forms == Forms()


@pytest.mark.parametrize("half", [[], ["head"], ["lora", "prompt"]])
def test_a_client_that_understands_something_else_is_told_what_to_install(half):
    """With an empty list: one of a version that does not know the field."""
    if half == ["lora", "prompt"]:  # of a kind that the method lacks: the same schemas
        assert read_terms(said(half=half)).schema_digest == said().schema_digest
        return
    with pytest.raises(MethodMismatch, match="its schemas differ") as caught:
        read_terms(said(half=half))
    assert caught.value.action.startswith("Install the server's fcil 9 on the client")


def test_a_kind_of_a_later_version_is_named():
    with pytest.raises(MethodMismatch, match="kinds lora, adapters in half precision") as caught:
        read_terms(said(half=["lora", "adapters"]))
    assert caught.value.action.startswith("Install the server's fcil 9")


def test_an_upload_of_the_other_form_stays_on_the_device(run):
    terms = read_terms(said())
    _, (_, upload) = run()
    task = context("half_method").task
    assert terms.check_upload("train", upload, task) == []
    wide = Payload({**upload.tensors, "lora.x": upload.f32("lora.x")})
    assert terms.check_upload("train", wide, task) == [
        "tensor 'lora.x': expected dtype float16, got float32"
    ]


def test_a_methods_own_checks_see_float32():
    seen = []

    def check(payload, _task):
        seen.append(dtypes(payload))
        return []

    (exchange,) = METHOD.exchanges(None, NO_BACKBONE)
    checked = replace(METHOD, exchanges=lambda _h, _b: (replace(exchange, check=check),))
    (travels,) = registry.with_forms(checked, HALF).exchanges(None, NO_BACKBONE)
    sent = Payload({"lora.x": np.zeros(4, np.float16), "mean": np.zeros(2, np.float32)})
    assert travels.check(sent, context("half_method").task) == []
    assert seen == [{"lora.x": "<f4", "mean": "<f4"}]
    assert half_method.NUMBERS[0].dtype == "F32"
