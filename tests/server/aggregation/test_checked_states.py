"""No state is committed whose broadcast clients would refuse; whose update made it so is named."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from adapters import half_method
from adapters.kit import Federation, client_id, make_tasks, toy_images
from fcil_adapters.contract import Context, State, Update, registry
from fcil_adapters.contract.backbone_info import NO_BACKBONE
from fcil_adapters.contract.registry import load_half
from fcil_adapters.numerics.outliers import OutlierRule, screen
from fcil_adapters.numerics.update_list import UpdateList
from fcil_protocol.errors import WorkerError
from fcil_protocol.payloads.payload import Payload, pack, unpack
from fcil_server.aggregation.aggregation import Aggregation
from fcil_server.aggregation.combining import Combined
from fcil_server.aggregation.staleness import NO_OLDER_STATES
from fcil_server.federation.config import load
from server.update_rows import update_row

TASK = make_tasks([0, 1, 2])[0]
FAST = {"rank": 2, "blocks": [0, 1], "epochs": 1, "lr_head": 0.1, "augment": "none"}
CLIENTS = [toy_images({0: 4, 1: 3}, k) for k in range(4)]


class Here:
    """The worker's part in this process: a method's own halves, through bytes."""

    def __init__(self, method, context_):
        self.method, self.context = method, context_
        self.half = load_half(method.aggregator)

    async def call(self, op, fields, payloads=(), *, on_request=None, on_progress=None):
        ctx = self.context()
        state = unpack(pack(payloads[0]))
        if op == "broadcast":
            parts = self.half.broadcast(ctx, state)
            return {"parts": [p.name for p in parts]}, [pack(p.payload) for p in parts]
        assert op == "aggregate"
        exchange = registry.find_exchange(self.method, ctx.hparams, ctx.backbone_info, ctx.kind)
        sent = []
        for number, client in enumerate(fields["clients"]):
            _, (data,) = await on_request({"updates": [number]})
            sent.append(Update(client, unpack(data)))
        excluded = screen(OutlierRule(**fields["outliers"]), UpdateList.of(sent), exchange.upload)
        updates = UpdateList.of(u for u in sent if u.client not in excluded)
        combined = self.half.aggregate(ctx, state, updates)
        return {"excluded": excluded, "far_apart": []}, [pack(combined)]


def aggregate(method, hparams, context_, state, sent, tmp_path, settings=()):
    """Aggregate payloads as the server does; return what it comes to, and the server's half."""
    made = Aggregation(method, hparams, load(None, settings), log=tmp_path / "worker.log")
    made._host = Here(method, context_)
    made.use(context_().backbone_info, None, None, trials=tmp_path / "trials.json")
    made._shared = lambda rows: [pack(sent[row.client]) for row in rows]
    rows = [update_row(c, samples=int(sent[c].i64("n")[0])) for c in sent]
    return asyncio.run(made.aggregate(context_(), state, rows, NO_OLDER_STATES)), made


def test_a_sum_reaches_the_worker_once_and_its_fate_is_that_of_all_its_updates(tmp_path):
    fed = Federation.of("fedavg_lora", CLIENTS[:1], **FAST)
    made = Aggregation(fed.method, fed.hparams, load(None, ()), log=tmp_path / "worker.log")
    made.use(fed.backbone.info, None, None, trials=tmp_path / "trials.json")
    a, b, c = (client_id(k) for k in range(3))
    asked = []

    async def combine(_ctx, _state, updates, _older):
        asked.append([(u.client, u.record, u.samples) for u in updates])
        return Combined(State(), (), {a: "too far"})

    made._combine = combine
    rows = [
        update_row(a, samples=3, sum_id="s"),
        update_row(b, samples=2),
        update_row(c, samples=4, sum_id="s"),
    ]
    combined = asyncio.run(made.aggregate(fed.context("train"), State(), rows, NO_OLDER_STATES))
    assert asked == [[(a, "s", 7), (b, f"u{b}", 2)]]
    assert combined.excluded == {a: "too far", c: "too far"}


def packed(fed, state):
    parts = fed.aggregator.broadcast(fed.context("train"), state)
    return {p.name: pack(p.payload) for p in parts}


# A dense residual is a product of two factors; the factors of a factored one grow as they do.
HUGE = {"dense": 300, "factored": 9999}


class TestFedTalora:
    """Entries of LoRA that are within an upload's limit make residuals that are not in theirs."""

    def federation(self, count, residual):
        fed = Federation.of("fed_talora", CLIENTS[:count], residual=residual, **FAST)
        fed.open(TASK)
        return fed, {client_id(k): fed.upload("train", k) for k in range(count)}

    def lie(self, fed, sent, residual):
        rng = np.random.default_rng(0)
        lora = {
            n: (HUGE[residual] * rng.choice([-1, 1], a.shape)).astype(np.float32)
            for n, a in sent.tensors.items()
            if n.startswith("lora.")
        }
        told = replace(sent, tensors={**sent.tensors, **lora})
        assert fed.exchanges[0].upload.check(told, fed.dims) == [], "intake accepts it"
        return told

    def faults(self, fed, state):
        schemas = fed.method.broadcast(fed.hparams, fed.backbone.info)
        parts = fed.aggregator.broadcast(fed.context("train"), state)
        return [f for p in parts for f in schemas[p.kind].check(p.payload, fed.dims)]

    def aggregate(self, fed, sent, tmp_path):
        given = (fed.method, fed.hparams, lambda: fed.context("train"), fed.state, sent, tmp_path)
        return aggregate(*given)[0]

    @pytest.mark.parametrize(
        ("residual", "count", "liar"), [("dense", 3, 0), ("dense", 4, 3), ("factored", 3, 2)]
    )
    def test_the_one_whose_factors_break_the_residual_is_named_and_the_others_count(
        self, residual, count, liar, tmp_path
    ):
        fed, honest = self.federation(count, residual)
        sent = {**honest, client_id(liar): self.lie(fed, honest[client_id(liar)], residual)}
        together = fed.aggregate("train", UpdateList.of(Update(c, p) for c, p in sent.items()))
        assert "exceeds" in self.faults(fed, together)[0], "a state that nobody could take"

        combined = self.aggregate(fed, sent, tmp_path)
        assert combined.failure is None
        assert list(combined.excluded) == [client_id(liar)]
        assert "every client would refuse" in combined.excluded[client_id(liar)]
        others = UpdateList.of(Update(c, p) for c, p in honest.items() if c != client_id(liar))
        assert pack(combined.state) == pack(fed.aggregate("train", others))
        assert self.faults(fed, combined.state) == []
        assert {p.name: pack(p.payload) for p in combined.parts} == packed(fed, combined.state)

    def test_of_two_clients_neither_is_blamed_and_nothing_is_made(self, tmp_path):
        """Each works alone, since a sole client leaves no residual."""
        fed, sent = self.federation(2, "dense")
        sent[client_id(0)] = self.lie(fed, sent[client_id(0)], "dense")
        combined = self.aggregate(fed, sent, tmp_path)
        assert (combined.state, dict(combined.excluded)) == (None, {})
        assert "every client would refuse" in combined.failure.message


class Breaking(half_method.Aggregator):
    """Somebody's method: what it makes of values beyond 2 is no float, or has another shape."""

    how = "nan"

    def broadcast(self, ctx, state):
        (part,) = super().broadcast(ctx, state)
        values = state.f32("lora.x")
        if values.max() <= 2:
            return (part,)
        bad = {
            "nan": values * np.float32("nan"),
            "huge": values * np.float32(1e31),
            "shape": values[:-1],
        }[self.how]
        return (replace(part, payload=State({**state.tensors, "lora.x": bad})),)


@pytest.fixture
def breaking():
    return replace(half_method.METHOD, name="breaking", aggregator=f"{__name__}:Breaking")


def of_tests():
    return Context(
        kind="train", task=TASK, round=0, rounds=1, hparams=half_method.Options(),
        backbone_info=NO_BACKBONE, seed=(1993,),
    )  # fmt: skip


def say(value, n=3):
    x = np.full(4, value, np.float32)
    return Payload({"lora.x": x, "mean": np.full(2, 0.5, np.float32), "n": np.array([n])})


def of_breaking(method, values, tmp_path, settings=()):
    ctx = of_tests()
    state = Breaking().init(ctx)
    sent = {client_id(k): say(v) for k, v in enumerate(values)}
    return aggregate(method, ctx.hparams, lambda: ctx, state, sent, tmp_path, settings)


@pytest.mark.parametrize("how", ["nan", "huge", "shape"])
def test_a_method_that_breaks_its_own_broadcast_has_the_culprit_named(
    breaking, monkeypatch, how, tmp_path
):
    monkeypatch.setattr(Breaking, "how", how)
    combined, _ = of_breaking(breaking, [1, 20, 1], tmp_path)
    assert list(combined.excluded) == [client_id(1)]
    assert combined.state.f32("lora.x").tolist() == [1] * 4
    assert [p.name for p in combined.parts] == ["current"]


def test_or_nobody_where_all_do(breaking, tmp_path):
    combined, _ = of_breaking(breaking, [20, 30, 40], tmp_path)
    assert (combined.state, dict(combined.excluded)) == (None, {})
    assert combined.failure.message.startswith("method breaking made a state whose broadcast")
    assert combined.failure.code == "worker_failed", "it is no defect of fcil"
    assert combined.failure.action.startswith("Correct the method's aggregator")


def test_a_state_with_a_nan_is_the_methods_fault(breaking, monkeypatch, tmp_path):
    none = State({"lora.x": np.full(4, np.nan, np.float32), "mean": np.zeros(2, np.float32)})
    monkeypatch.setattr(Breaking, "aggregate", lambda *_: none)
    combined, _ = of_breaking(breaking, [1, 1], tmp_path)
    assert combined.failure.code == "worker_failed"
    assert combined.failure.message == (
        "method breaking made a state that holds NaN or infinity in lora.x."
    )


def test_a_broadcast_larger_than_a_client_takes_is_a_failure_like_any_other(breaking, tmp_path):
    combined, made = of_breaking(breaking, [1, 1], tmp_path, ["wire.max_payload_mb=1e-5"])
    assert "wire.max_payload_mb" in combined.failure.message
    with pytest.raises(WorkerError, match="every client would refuse: part 'current'") as at:
        asyncio.run(made.broadcast(of_tests(), say(1)))
    assert "wire.max_payload_mb" in at.value.action
