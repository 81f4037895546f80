"""Sums of relays: of every method whose updates are sums, the same state as of single updates."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from adapters.kit import Federation, client_id, toy_backbone
from adapters.masks.mask_kit import close_to
from adapters.masks.test_masked_methods import ADDITIVE, CLIENTS, SOLVED, TASKS
from adapters.small import SMALL
from fcil_adapters.contract import Update
from fcil_adapters.contract.half_precision import Forms
from fcil_adapters.numerics.fixed_point import to_fixed_point
from fcil_adapters.numerics.relay_sums import (
    MOST_SUMMED,
    MOST_UPDATES,
    RunningSum,
    SummedAggregator,
    SummedUpdate,
    sum_faults,
    sum_schema,
    updates_of,
)
from fcil_adapters.numerics.update_list import UpdateList
from fcil_protocol.errors import DataError
from fcil_protocol.payloads.builtin import LATE
from fcil_protocol.payloads.payload import Payload, pack, unpack
from fcil_protocol.payloads.schema import Kind


def summed_update(k, payload, **metrics):
    return SummedUpdate(f"{k:064x}", int(payload.i64("n").sum()), payload.tensor_bytes, metrics)


def exchange_of(toy, kind):
    return next(e for e in toy.exchanges if e.kind == kind)


def summed(toy, kind, payloads):
    """Return the sum of some uploads as the server gets it: through bytes, schema and checks."""
    exchange = exchange_of(toy, kind)
    total = RunningSum(exchange.additive, toy.dims)
    for k, payload in payloads.items():
        total.add(toy.forms.widen(payload), summed_update(k, payload))
    payload = unpack(pack(total.payload()))
    dims = {**toy.dims, "most_summed": MOST_SUMMED}
    assert sum_schema(exchange.additive).check_upload(payload, dims) == []
    assert sum_faults(exchange, payload, toy.task) == []
    return payload


def combined(toy, kind, payloads, *, plain=False):
    updates = [Update(client_id(k), toy.forms.widen(p)) for k, p in enumerate(payloads)]
    half = toy.aggregator
    if not plain:
        half = SummedAggregator(half, {e.kind: e for e in toy.exchanges}, toy.dims)
    return half.aggregate(toy.context(kind), toy.state, UpdateList.of(updates))


def uploads(toy, kind):
    """Return what clients send that have an image: others do not count."""
    sent = {k: toy.upload(kind, k) for k in range(len(CLIENTS))}
    return {k: payload for k, payload in sent.items() if payload.i64("n").sum()}


@pytest.fixture(scope="module")
def backbone():
    return toy_backbone()


def opened(name, backbone, **extra):
    toy = Federation.of(name, CLIENTS, backbone, **SMALL[name], **extra)
    toy.open(TASKS[0])
    return toy


@pytest.mark.parametrize("name", ADDITIVE)
def test_relays_change_no_bit_of_the_state_and_single_updates_lead_to_the_same(name, backbone):
    toy = Federation.of(name, CLIENTS, backbone, **SMALL[name])
    for task in TASKS:
        toy.open(task)
        for exchange in toy.exchanges:
            kind, sent = exchange.kind, uploads(toy, exchange.kind)
            plain = combined(toy, kind, sent.values(), plain=True)
            alone = combined(toy, kind, sent.values())
            assert close_to(alone, plain, but=SOLVED.get(name, ())), kind
            for direct in sent:
                one = summed(
                    toy, kind, {k: p for k, p in sent.items() if k != direct or len(sent) < 2}
                )
                rest = [sent[direct]] if len(sent) > 1 else []
                assert pack(combined(toy, kind, [one, *rest])) == pack(alone)
                assert pack(combined(toy, kind, [*rest, one])) == pack(alone)
            toy.state = plain


def test_the_order_of_updates_leaves_no_trace(backbone):
    toy = opened("fedavg_lora", backbone)
    sent = uploads(toy, "train")
    orders = [{k: sent[k] for k in order} for order in permutations(sent)]
    assert len({pack(summed(toy, "train", order)) for order in orders}) == 1


def test_a_sum_of_halves_is_the_sum_in_float64(backbone):
    """By definition: n_k times the tensor, of the numbers that arrived in half precision."""
    toy = opened("fedavg_lora", backbone, forms=Forms(frozenset({Kind.LORA})))
    sent = uploads(toy, "train")
    one = summed(toy, "train", sent)
    specs = {s.name: s for s in exchange_of(toy, "train").additive.sums}
    halves = [name for name in specs if name.startswith("lora.")]
    assert halves
    for name in halves:
        tensors = [p.tensors[name].astype(np.float64) for p in sent.values()]
        assert all(np.array_equal(t, t.astype(np.float16)) for t in tensors)
        products = [p.i64("n")[0] * t for p, t in zip(sent.values(), tensors, strict=True)]
        total = np.ldexp(one.i64(name).astype(np.float64), -specs[name].bits)
        assert np.allclose(total, sum(products), rtol=0, atol=len(sent) * 2.0 ** -specs[name].bits)


def test_the_list_of_updates_comes_back_as_it_was(backbone):
    toy = opened("running_mean", backbone)
    updates = [
        SummedUpdate(f"{9:064x}", 3, 80, {"train_loss": 0.25, "train_accuracy": 0.5}),
        SummedUpdate(f"{3:064x}", 5, 90, {"train_loss": 2.5}),
        SummedUpdate(f"{7:064x}", 2, 70),
    ]
    total = RunningSum(exchange_of(toy, "train").additive, toy.dims)
    for one in updates:
        total.add(toy.upload("train", 0), one)
    by_digest = sorted(updates, key=lambda u: u.digest)
    assert updates_of(unpack(pack(total.payload()))) == by_digest


def twice(tensors):
    return {
        n: a[:1].repeat(len(a), 0) if n.startswith("update.") else a for n, a in tensors.items()
    }


def of_no_update(tensors):
    return {n: a[:0] if n.startswith("update.") else a for n, a in tensors.items()}


def one_image_more(tensors):
    counts = np.array(tensors["update.counts"])
    counts[0, 0] += 1
    return {**tensors, "update.counts": counts}


def one_of_nothing(tensors):
    counts = np.array(tensors["update.counts"])
    counts[0, 0] = 0
    return {**tensors, "update.counts": counts}


def more_images_in_all(tensors):
    changed = one_image_more(tensors)
    return {**changed, "n": tensors["n"] + 1}


def fewer_than_none(tensors):
    count = np.array(tensors["count"])
    count[0], count[1] = -1, count.sum() + 1
    return {**tensors, "count": count}


def beyond_the_bound(tensors):
    return {**tensors, "count": np.full_like(tensors["count"], 2**61)}


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (twice, "names no update, or one twice"),
        (of_no_update, "names no update, or one twice"),
        (one_image_more, "'n' is not the sum of the samples of its updates"),
        (one_of_nothing, "names an update of no samples"),
        (more_images_in_all, "its sums are not of 'n' samples"),
        (fewer_than_none, "a count is negative"),
        (beyond_the_bound, "its bound is"),
    ],
)
def test_what_is_no_sum_of_its_updates_is_refused(spoil, fault, backbone):
    toy = opened("running_mean", backbone)
    good = summed(toy, "train", uploads(toy, "train"))
    (found,) = sum_faults(exchange_of(toy, "train"), Payload(spoil(good.tensors)), toy.task)
    assert fault in found


def test_a_number_too_large_for_fixed_point_is_not_added(backbone):
    toy = opened("fedavg_lora", backbone)
    payload = toy.upload("train", 0)
    name = next(n for n in payload.tensors if n.startswith("lora"))
    huge = Payload({**payload.tensors, name: np.full_like(payload.tensors[name], 1e9)})
    total = RunningSum(exchange_of(toy, "train").additive, toy.dims)
    with pytest.raises(DataError):
        total.add(huge, summed_update(0, huge))
    assert total.updates == []
    total.add(payload, summed_update(1, payload))  # nothing of the other is in it
    assert pack(total.payload()) == pack(summed(toy, "train", {1: payload}))


@pytest.mark.parametrize("name", ADDITIVE)
def test_the_largest_parts_of_all_clients_together_do_not_overflow(name, backbone):
    toy = opened(name, backbone)
    for exchange in toy.exchanges:
        for spec in exchange.additive.sums:
            part = to_fixed_point(np.array([spec.bound / MOST_UPDATES]), spec, MOST_UPDATES)
            assert MOST_UPDATES * int(part[0]) < 2**63


@pytest.mark.parametrize("name", ["analytic", "fedncm", "running_mean"])
def test_late_images_are_not_added_up_by_relays_and_reach_the_method_one_by_one(name, backbone):
    toy = Federation.of(name, CLIENTS, backbone, **SMALL[name], late="count")
    exchanges = {e.kind: e for e in toy.method.exchanges(toy.hparams, backbone.info)}
    assert {kind: e.summable for kind, e in exchanges.items() if e.additive} == {
        kind: kind != LATE for kind, e in exchanges.items() if e.additive
    }
    seen = []

    class Inner:
        def aggregate(self, _ctx, state, updates):
            seen.extend(updates.clients)
            return state

    half = SummedAggregator(Inner(), exchanges, toy.dims)
    updates = UpdateList.of(
        Update(client_id(k), Payload({"n": np.ones(1, np.int64)})) for k in (0, 1)
    )
    half.aggregate(toy.context(LATE), toy.state, updates)
    assert seen == [client_id(0), client_id(1)]
