"""Which methods can have asynchronous rounds: those that declare it, and those that the page names."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from adapters.kit import Federation, client_id, make_tasks, toy_backbone, toy_images
from adapters.small import SMALL
from fcil_adapters.contract import Exchange, Kind, PayloadSchema, Update
from fcil_adapters.contract.backbone_info import NO_BACKBONE
from fcil_adapters.contract.manifest_checks import check_asynchronous
from fcil_adapters.contract.registry import load_method, make_hparams, method_names
from fcil_adapters.numerics.update_list import UpdateList
from fcil_protocol.errors import ConfigError
from tiers import sampled

CLIENTS = [
    toy_images({1: 5, 0: 3, 4: 4}, 1), toy_images({0: 1, 4: 1}, 2), toy_images({1: 3}, 3),
]  # fmt: skip
BACKBONE = replace(NO_BACKBONE, dim=8, depth=12, heads=2, mlp_dim=16)
PAGE = Path(__file__).parents[3] / "docs" / "asynchronous-rounds.md"


def averaged(name, **options):
    """Return the kinds of a method's rounds that may be asynchronous."""
    method = load_method(name)
    found = method.exchanges(make_hparams(method, options), BACKBONE)
    return [e.kind for e in found if e.averaged]


def test_the_page_names_exactly_the_methods_that_declare_it():
    table = PAGE.read_text().partition("## Methods")[2].splitlines()
    rows = [line.split(" | ") for line in table if line.startswith("| `")]
    said = {name: row[1] for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    own = {name for name in method_names() if load_method(name).learner.startswith("fcil_")}
    assert set(said) == own
    assert {n for n in own if averaged(n)} == {n for n in own if said[n].startswith("yes")}


def cases():
    """The methods with averaged rounds; one of each kind runs at each change."""
    quick = ("fedavg_lora", "ewc", "adapt_once", "fedavg_prompt", "l2p", "coda_prompt")
    return sampled([name for name in SMALL if averaged(name, **SMALL[name])], quick)


@pytest.mark.parametrize("name", cases())
def test_updates_without_a_change_leave_all_that_is_averaged(name):
    """`AveragingAggregator.start` names every trained tensor of an upload, as it is averaged."""
    fed = Federation.of(name, CLIENTS, toy_backbone(), **SMALL[name])
    seen = set()
    for task in make_tasks([1, 0], [4]):  # the second has a lone class
        fed.open(task)
        for exchange in fed.exchanges:
            fed.round(exchange.kind)
            if not exchange.averaged:
                continue
            ctx, trained = fed.context(exchange.kind), trained_names(exchange)
            start = fed.aggregator.start(ctx, fed.state)
            sent = [fed.upload(exchange.kind, k) for k in range(len(CLIENTS))]
            for upload in sent:
                assert all(upload.tensors[n].shape == a.shape for n, a in start.items())
            if len(task.classes) > 1:
                assert {n for n in sent[0].tensors if n in trained} == set(start)
                seen |= set(start)
            still = [replace(u, tensors={**u.tensors, **start}) for u in sent]
            updates = UpdateList.of(Update(client_id(k), u) for k, u in enumerate(still))
            after = fed.aggregator.start(ctx, fed.aggregate(exchange.kind, updates))
            for tensor, array in start.items():
                np.testing.assert_allclose(after[tensor], array, rtol=1e-6, atol=1e-7)
    assert seen, "something was averaged"


def trained_names(exchange):
    kinds = (Kind.LORA, Kind.PROMPT, Kind.KEY, Kind.HEAD)
    return {s.name for s in exchange.upload.tensors if s.kind in kinds}


def test_only_training_is_averaged_and_not_where_factors_take_turns():
    assert averaged("ewc") == ["train"]
    assert averaged("adapt_once") == ["train"]
    assert averaged("adapt_once", adapt={"rounds": 0}) == []
    assert averaged("lorm") == []


@pytest.mark.parametrize("name", ["hepco", "analytic", "plora"])
def test_a_method_without_such_rounds_is_refused_with_what_to_do(name):
    method = load_method(name)
    with pytest.raises(ConfigError, match="round.mode is 'async'") as caught:
        check_asynchronous(method, method.hparams(), BACKBONE)
    assert "Set round.mode to 'sync'" in str(caught.value)


def test_an_averaged_exchange_keeps_no_state_of_the_client():
    with pytest.raises(ValueError, match="cannot keep a client's state"):
        Exchange("train", PayloadSchema(()), averaged=True, keeps_state=True)
