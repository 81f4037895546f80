"""Kinds in half precision: schemas, the way there and back, and what a server's state holds."""

from __future__ import annotations

import numpy as np
import pytest

from adapters.kit import Federation, client_id, toy_backbone, toy_images
from adapters.methods.fed_talora.test_residual import exact_or_not, noisy_updates, weights_of
from adapters.methods.fed_talora.test_residual import federation as talora
from adapters.methods.test_contract_kit import CASES, CLIENTS, TASKS
from fcil_adapters.contract import Update
from fcil_adapters.contract.half_precision import EXACT, EXACT_KINDS, Forms, forms_of
from fcil_adapters.contract.registry import (
    load_half,
    load_method,
    make_hparams,
    method_names,
    schema_digest,
    with_forms,
)
from fcil_adapters.numerics.update_list import UpdateList
from fcil_protocol.errors import ConfigError, DoesNotFit, InternalError
from fcil_protocol.payloads.payload import Payload, pack
from fcil_protocol.payloads.schema import Kind, PayloadSchema, TensorSpec
from tiers import OF_EACH_KIND, sampled

LORA = Forms(frozenset({Kind.LORA, Kind.PROTOTYPE}))
SCHEMA = PayloadSchema(
    (
        TensorSpec("lora.0.q.A", Kind.LORA, (3,), max_abs=1e9),
        TensorSpec("mean", Kind.PROTOTYPE, (2,), exact=True),
        TensorSpec("head.bias", Kind.HEAD, (2,)),
        TensorSpec("n", Kind.COUNT, (1,), dtype="I64"),
    )
)
TRAVELS = LORA.schema(SCHEMA)


def payload(*lora: float) -> Payload:
    return Payload(
        {
            "lora.0.q.A": np.array(lora, np.float32),
            "mean": np.array([1 / 3, 2 / 3], np.float32),
            "head.bias": np.array([1 / 3, 2 / 3], np.float32),
            "n": np.array([5]),
        }
    )


SMALL = payload(0.1, -0.2, 1e-5)


class TestTheForm:
    def test_only_the_named_kinds_change_their_dtype_and_statistics_never(self):
        dtypes = {spec.name: spec.dtype for spec in TRAVELS.tensors}
        assert dtypes == {"lora.0.q.A": "F16", "mean": "F32", "head.bias": "F32", "n": "I64"}
        assert TRAVELS.digest() != SCHEMA.digest()

    def test_its_bound_is_the_largest_half(self):
        assert TRAVELS.tensors[0].max_abs == 65504
        assert (
            LORA.schema(PayloadSchema((TensorSpec("x", Kind.LORA, (1,)),))).tensors[0].max_abs
            == 1e4
        )

    def test_a_payload_comes_back_rounded_to_11_bits_and_in_float32(self):
        sent = LORA.narrow(SMALL, TRAVELS)
        assert TRAVELS.check(sent, {}) == []
        assert len(pack(sent)) < len(pack(SMALL))
        back = LORA.widen(sent)
        assert {a.dtype.str for a in back.tensors.values()} == {"<f4", "<i8"}
        for name in ("mean", "head.bias", "n"):
            np.testing.assert_array_equal(back.tensors[name], SMALL.tensors[name])
        np.testing.assert_allclose(
            back.tensors["lora.0.q.A"], SMALL.tensors["lora.0.q.A"], rtol=2**-11, atol=2**-25
        )
        assert pack(LORA.narrow(back, TRAVELS)) == pack(sent)

    def test_without_kinds_nothing_is_touched(self):
        assert EXACT.schema(SCHEMA) is SCHEMA
        assert pack(EXACT.narrow(SMALL, SCHEMA)) == pack(SMALL)
        assert EXACT.widen(SMALL) is SMALL
        method = load_method("pilora")
        assert with_forms(method, EXACT) is method

    @pytest.mark.parametrize("number", [65505.0, -1e6, 3e38])
    def test_a_number_beyond_it_is_refused_before_anything_is_sent(self, number):
        with pytest.raises(DoesNotFit, match=r"tensor 'lora.0.q.A' .* is 65504"):
            LORA.narrow(payload(0, number, 0), TRAVELS)
        with pytest.raises(DoesNotFit, match="kind 'lora'"):
            LORA.commit(Kind.LORA, np.array([number], np.float32))

    @pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
    def test_what_is_no_number_is_left_to_the_schema(self, number):
        sent = LORA.narrow(payload(0, number, 0), TRAVELS)
        assert TRAVELS.check(sent, {}) == ["tensor 'lora.0.q.A' holds NaN or infinity"]
        assert not np.isfinite(LORA.commit(Kind.LORA, np.array([number], np.float32))).all()

    def test_the_largest_half_itself_fits(self):
        sent = LORA.narrow(payload(65504, -65504, 0), TRAVELS)
        assert TRAVELS.check(sent, {}) == []

    def test_a_part_that_rounding_would_change_is_a_defect_of_the_method(self):
        committed = LORA.widen(LORA.narrow(SMALL, TRAVELS))
        assert pack(LORA.narrow_exactly(committed, TRAVELS)) == pack(LORA.narrow(SMALL, TRAVELS))
        with pytest.raises(InternalError, match=r"'lora.0.q.A' .* must commit"):
            LORA.narrow_exactly(SMALL, TRAVELS)

    def test_an_upload_in_the_wrong_form_breaks_the_schema(self):
        assert TRAVELS.check(SMALL, {}) == [
            "tensor 'lora.0.q.A': expected dtype float16, got float32"
        ]
        assert SCHEMA.check(LORA.narrow(SMALL, TRAVELS), {})


class TestWhatAnOperatorAsksFor:
    def test_all_none_or_some_of_what_the_method_offers(self):
        offered = (Kind.LORA, Kind.HEAD)
        assert forms_of("weights", "m", offered).names == ["head", "lora"]
        assert forms_of("none", "m", offered) == forms_of([], "m", offered) == EXACT
        assert forms_of([Kind.LORA], "m", offered).names == forms_of(["lora"], "m", offered).names

    def test_a_kind_that_the_method_does_not_commit_is_refused_with_those_that_it_does(self):
        with pytest.raises(ConfigError, match="names prompt, but the method m .*: lora, head") as e:
            forms_of([Kind.LORA, Kind.PROMPT], "m", (Kind.LORA, Kind.HEAD))
        assert "wire.half" in e.value.action

    def test_statistics_are_offered_by_no_method(self):
        for name in method_names():
            assert not set(load_method(name).half) & set(EXACT_KINDS)
        kinds = set(EXACT_KINDS) | {k for n in method_names() for k in load_method(n).half}
        assert kinds == set(Kind) - {
            Kind.SUM,
            Kind.MASKED,
            Kind.MASK,
        }  # which hold integers and bytes

    def test_both_sides_have_another_digest_with_it(self):
        method, info = load_method("pilora"), toy_backbone().info
        hparams = make_hparams(method, {"blocks": [0, 1]})
        halves = ("none", "weights", [Kind.LORA])
        methods = [with_forms(method, forms_of(h, method.name, method.half)) for h in halves]
        assert len({schema_digest(m, hparams, info) for m in methods}) == 3


class TestWhatRoundingLoses:
    def test_a_step_below_half_a_bit_of_a_number_is_lost_whole(self):
        """The papers' LoRA steps of 1e-5: gone beside an A of 0.04, kept beside a B of 0."""
        start = {"lora.A": np.full(50, 0.04, np.float16), "lora.B": np.zeros(50, np.float16)}
        parts = [LORA.widen(Payload(start))]
        schema = PayloadSchema(tuple(TensorSpec(n, Kind.LORA, (50,)) for n in start))
        for name, at_least, at_most in (("lora.A", 0.999, 1.001), ("lora.B", 0.0, 0.01)):
            moved = {n: a + np.float32(1e-5) * (n == name) for n, a in parts[0].tensors.items()}
            trained = Payload(moved)
            sent = LORA.narrow(trained, LORA.schema(schema))
            assert at_least <= LORA.rounding_loss(trained, sent, parts)["lora"] <= at_most

    def test_steps_about_as_long_as_the_last_bit_arrive_on_the_whole(self):
        """Rounding moves each by a third of its length, this way or that: nothing is lost."""
        rng = np.random.default_rng(0)
        last_bit = 2.0**-15  # of halves between 1/32 and 1/16
        start = np.full(10_000, 0.04, np.float16).astype(np.float32)
        parts = [Payload({"lora.A": start})]
        schema = LORA.schema(PayloadSchema((TensorSpec("lora.A", Kind.LORA, start.shape),)))
        for bits, at_least, at_most in ((1.0, 0.0, 0.02), (0.3, 0.2, 0.5), (0.1, 0.98, 1.0)):
            steps = (rng.standard_normal(10_000) * bits * last_bit).astype(np.float32)
            trained = Payload({"lora.A": start + steps})
            sent = LORA.narrow(trained, schema)
            assert at_least <= LORA.rounding_loss(trained, sent, parts)["lora"] <= at_most

    def test_the_nearest_part_counts_and_what_has_no_start_is_left_out(self):
        near = Payload({"lora.0.q.A": SMALL.tensors["lora.0.q.A"] + np.float32(0.01)})
        far = Payload({"lora.0.q.A": SMALL.tensors["lora.0.q.A"] + np.float32(5)})
        other = Payload({"lora.0.q.A": np.zeros(7, np.float32)})
        sent = LORA.narrow(SMALL, TRAVELS)
        tiny = Payload({"lora.0.q.A": SMALL.tensors["lora.0.q.A"] + np.float32(1e-9)})
        for parts in ([near, other], [far, near]):
            assert LORA.rounding_loss(SMALL, sent, parts)["lora"] < 0.01
        lost = [LORA.rounding_loss(SMALL, sent, parts)["lora"] for parts in ([tiny], [far, tiny])]
        assert lost[0] == lost[1]
        assert LORA.rounding_loss(SMALL, sent, [other]) == {}


def halved(name: str, options: dict, clients=CLIENTS) -> Federation:
    method = load_method(name)
    forms = forms_of("weights", name, method.half)
    return Federation.of(name, clients, toy_backbone(), forms=forms, **options)


# Those that keep their tensors in other places, or broadcast other ones.
OWN_WAYS = [
    (name, options)
    for i, (name, options) in enumerate(CASES)
    if name not in [n for n, _ in CASES[:i]] or {"candidates", "freeze_a"} & set(options)
]


@pytest.mark.parametrize(
    ("name", "options"),
    sampled(OWN_WAYS, (*OF_EACH_KIND, "plora", "ewc")),
    ids=lambda x: str(x)[:40],
)
class TestEveryMethod:
    def test_clients_decode_what_the_state_composes_to_the_bit(self, name, options):
        """`Federation.parts` narrows parts, which refuses any that would change by it."""
        fed = halved(name, options)
        offered = set(fed.method.half)
        for task in TASKS:
            fed.run(task)
            schemas = fed.method.broadcast(fed.hparams, fed.backbone.info)
            ctx = fed.context("evaluate")
            own = {p.name: p.payload for p in fed.aggregator.broadcast(ctx, fed.state)}
            decoded = fed.parts()
            for part, payload in decoded.items():
                for spec in schemas[part.partition("/")[0]].tensors:
                    assert spec.dtype != "F16" or spec.kind in offered
                assert pack(payload) == pack(own[part])
            here, there = (fed.model.compose(ctx, p, fed.backbone) for p in (own, decoded))
            images = toy_images({1: 2, 4: 2}, 7).pictures
            np.testing.assert_array_equal(here.logits(images), there.logits(images))

    def test_kinds_that_it_offers_are_in_half_up_and_down_and_others_are_not(self, name, options):
        fed = halved(name, options)
        uploads = [e.upload for e in fed.exchanges]
        parts = fed.method.broadcast(fed.hparams, fed.backbone.info).values()
        seen = {s.kind for schema in (*uploads, *parts) for s in schema.tensors if s.dtype == "F16"}
        assert seen == set(fed.method.half)
        for schema in (*uploads, *parts):
            for spec in schema.tensors:
                floats = spec.dtype in ("F16", "F32")
                assert not floats or (spec.dtype == "F16") == (
                    spec.kind in fed.method.half and not spec.exact
                )

    def test_what_is_not_committed_is_not_sent(self, name, options, monkeypatch):
        fed = halved(name, options)
        if not fed.method.half:
            return
        monkeypatch.setattr(Forms, "commit", lambda _self, _kind, array: np.float32(array))
        fed.open(TASKS[0])
        with pytest.raises(InternalError, match="must commit"):
            fed.parts()

    def test_numbers_that_do_not_fit_end_the_aggregation(self, name, options):
        fed = halved(name, options)
        if not fed.method.half:
            return
        fed.open(TASKS[0])
        kind, halves = next(
            (e.kind, found)
            for e in reversed(fed.exchanges)
            if (
                found := [
                    s for s in e.upload.tensors if s.dtype == "F16" and s.kind is not Kind.HEAD
                ]
            )
        )
        sent = fed.upload(kind, 0)
        wide = fed.forms.widen(sent).tensors
        wild = {s.name: np.full_like(wide[s.name], 1e6) for s in halves if s.name in wide}
        update = Update(client_id(0), Payload({**sent.tensors, **wild}, sent.meta))
        if name == "fed_talora" and fed.hparams.corrects:
            return  # its LoRA is broadcast as it is
        with pytest.raises(DoesNotFit):
            fed.aggregate(kind, UpdateList.of([update]))

    def test_it_predicts_much_as_without(self, name, options):
        images = toy_images({1: 3, 4: 2, 0: 2}, 7).pictures
        plain = Federation.of(name, CLIENTS, toy_backbone(), **options)
        half = halved(name, options)
        logits = []
        for fed in (plain, half):
            fed.run(TASKS[0])
            logits.append(fed.predictor().logits(images))
        scale = np.abs(logits[0]).max()
        assert np.abs(logits[0] - logits[1]).max() < 0.05 * scale
        same = not load_method(name).half
        assert np.array_equal(*logits) == same


class TestTheResidual:
    """Fed-TaLoRA's uploads are halves; the averages that it makes exact are broadcast as they are."""

    @pytest.mark.parametrize("options", [{}, {"residual": "dense"}, {"catch_up": "factors"}])
    def test_the_effective_weight_is_the_mean_of_what_came(self, options):
        method = load_method("fed_talora")
        fed = talora(forms=forms_of("weights", method.name, method.half), **options)
        for seed in range(3):
            updates = noisy_updates(fed, seed)
            sent = [fed.forms.narrow(u.payload, fed.exchanges[0].upload) for u in updates]
            came = UpdateList.of(
                Update(u.client, fed.forms.widen(p)) for u, p in zip(updates, sent, strict=True)
            )
            assert exact_or_not(fed, came, weights_of(came)) < 1e-6

    def test_it_is_no_wider_than_without(self):
        method = load_method("fed_talora")
        widths = []
        for half in ("none", "weights"):
            fed = talora(forms=forms_of(half, method.name, method.half))
            fed.state = fed.aggregate("train", noisy_updates(fed, 1))
            parts = fed.parts()
            widths.append({n: a.shape for n, a in parts["residual/1"].tensors.items()})
        assert widths[0] == widths[1]


def test_halves_of_a_method_are_loaded_by_the_same_names():
    method = load_method("hgp")
    half = with_forms(method, forms_of("weights", method.name, method.half))
    assert type(load_half(half.learner)) is type(load_half(method.learner))
    assert half.forms.names == ["head", "key", "prompt"]
    assert method.forms == EXACT
