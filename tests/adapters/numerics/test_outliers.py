"""Updates far from the round's others are found, and no honest client ever is."""

from __future__ import annotations

import math

import numpy as np
import pytest

from adapters.kit import Federation, client_id, make_tasks, toy_images
from fcil_adapters.contract import Update
from fcil_adapters.numerics.outliers import OutlierRule, kind_sizes, outliers, screen
from fcil_adapters.numerics.update_list import UpdateList
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.payloads.schema import Kind, PayloadSchema, TensorSpec
from tiers import sampled

RULE = OutlierRule(factor=6, min_clients=5)
SCHEMA = PayloadSchema(
    (
        TensorSpec("proto", Kind.PROTOTYPE, ("c", "d")),
        TensorSpec("bias", Kind.HEAD, ("c",)),
        TensorSpec("half", Kind.LORA, ("c", 2, "d"), dtype="F16", optional=True),
        TensorSpec("gram", Kind.GRAM, ("d", "d"), optional=True),
        TensorSpec("n", Kind.COUNT, (1,), dtype="I64"),
    )
)


def ids(K):
    return tuple(client_id(k) for k in range(K))


def sizes(*values):
    return [{Kind.HEAD: v} for v in values]


def names(found):
    return [list(ids(10)).index(c) for c in found]


class TestSizes:
    def test_are_root_mean_squares_of_the_largest_row_of_each_kind(self):
        tensors = {
            "proto": np.array([[3, 4, 0, 0], [1, 1, 1, 1]], np.float32),
            "bias": np.array([0.5, -2], np.float32),
            "half": np.full((2, 2, 4), 250, np.float16),  # 250^2 is no float16
            "gram": np.full((4, 4), 1e3, np.float32),
            "n": np.array([9]),
        }
        found = kind_sizes(Payload(tensors), SCHEMA)
        assert found == {Kind.PROTOTYPE: 2.5, Kind.HEAD: 2.0, Kind.LORA: 250.0}

    def test_neither_rows_of_zeros_nor_their_number_change_a_size(self):
        few, many = np.ones((1, 4), np.float32), np.zeros((9, 4), np.float32)
        many[3] = 1
        for rows in (few, many):
            assert kind_sizes(Payload({"proto": rows}), SCHEMA) == {Kind.PROTOTYPE: 1.0}

    def test_a_tensor_without_rows_has_no_size(self):
        empty = Payload({"proto": np.zeros((0, 4), np.float32)})
        assert kind_sizes(empty, SCHEMA) == {}


class TestOutliers:
    def test_nearly_equal_clients_may_differ_eleven_times(self):
        limit = math.exp(6 * 0.4)
        assert outliers(RULE, ids(5), sizes(1, 1, 1, 1, 0.999 * limit)) == {}
        found = outliers(RULE, ids(5), sizes(1, 1, 1, 1, 1.001 * limit))
        assert names(found) == [4]

    def test_the_reason_names_kind_value_median_and_limit(self):
        (reason,) = outliers(RULE, ids(5), sizes(2, 2, 2, 2, 300)).values()
        assert reason == (
            "its head values are far from the round's: size 300, where the clients' median is 2 "
            "and the limit 22"
        )

    def test_where_honest_clients_differ_widely_the_limit_is_wide(self):
        limit = math.exp(6 * 1.4826 * math.log(5))  # the median deviation is that of 5 from 1
        for last, expected in ((0.999 * limit, []), (1.001 * limit, [6])):
            spread = sizes(0.2, 0.2, 1, 1, 5, 5, last)
            assert names(outliers(RULE, ids(7), spread)) == expected

    def test_small_and_zero_updates_pass(self):
        assert outliers(RULE, ids(6), sizes(1, 1, 1, 1, 1e-9, 0)) == {}

    def test_without_a_scale_or_enough_clients_nothing_is_judged(self):
        assert outliers(RULE, ids(5), sizes(0, 0, 0, 0, 5)) == {}
        assert outliers(RULE, ids(4), sizes(1, 1, 1, 999)) == {}
        some = [{Kind.HEAD: 1.0}] * 4 + [{Kind.LORA: 999.0}] * 2
        assert outliers(RULE, ids(6), some) == {}

    def test_two_liars_in_five_cannot_hide_each_other(self):
        assert names(outliers(RULE, ids(5), sizes(1, 1, 1, 500, 500))) == [3, 4]

    def test_always_a_minority_the_farthest(self):
        """Each kind has liars of its own: four of seven are beyond a limit, three are named."""
        own = [{Kind.HEAD: 1.0, Kind.LORA: 1.0} for _ in range(7)]
        for k, (kind, size) in enumerate(
            [(Kind.HEAD, 50), (Kind.HEAD, 900), (Kind.LORA, 80), (Kind.LORA, 70)]
        ):
            own[k] = {**own[k], kind: float(size)}
        assert names(outliers(RULE, ids(7), own)) == [1, 2, 3]

    def test_huge_factors_stay_finite(self):
        rule = OutlierRule(factor=1e9)
        assert outliers(rule, ids(5), sizes(1, 1, 1, 1, 1e30)) == {}


class Unopened(UpdateList):
    def __iter__(self):
        raise AssertionError("opened")


@pytest.mark.parametrize("rule", [OutlierRule(0), OutlierRule(6, 6)])
def test_no_update_is_opened_when_nothing_can_be_judged(rule):
    tensors = {"bias": np.ones(2, np.float32), "n": np.array([1])}
    updates = Unopened(tuple(Update(c, Payload(tensors)) for c in ids(5)))
    assert screen(rule, updates, SCHEMA) == {}
    with pytest.raises(AssertionError, match="opened"):
        screen(RULE, updates, SCHEMA)


# Small steps, so that what a client sends tells how many images it has; Fed-TaLoRA with B
# alone is the hardest: B begins at zero and is as long as the client's training was.
LORA = {"rank": 2, "epochs": 2, "batch_size": 4}
PROMPTS = {"blocks": [0, 1], "epochs": 1, "batch_size": 4}
HONEST = {
    "running_mean": ({}, range(12)),
    "pilora": ({**LORA, "epochs": 1, "lr_prototype": 1e-2, "lr_lora": 1e-2}, range(1)),
    "plora": ({**LORA, "epochs": 1, "blocks": [0], "lr_lora": 1e-2}, range(1)),
    "fed_talora": ({**LORA, "blocks": [0, 1], "freeze_a": True}, range(3)),
    "hgp": ({**PROMPTS, "prompts": 3, "length": 2, "rebalance": "off"}, range(1)),
    "hepco": ({**PROMPTS, "pool_size": 3, "prompt_length": 2, "distill": "none"}, range(1)),
}


@pytest.mark.parametrize("beta", [0.05, 0.3, 5])
@pytest.mark.parametrize("name", sampled(HONEST, ("running_mean", "pilora", "hgp")))
def test_no_honest_update_is_ever_excluded(name, beta):
    """Dirichlet partitions from a client per class to all alike, two tasks, several seeds."""
    options, seeds = HONEST[name]
    judged = 0
    for seed in seeds:
        rng = np.random.default_rng([seed, int(100 * beta)])
        shares = rng.dirichlet([beta] * 7, size=4)  # (classes, clients)
        counts = [rng.multinomial(30, share) for share in shares]
        clients = [
            toy_images({c: int(counts[c][k]) for c in range(4) if counts[c][k]}, 10 * seed + k)
            for k in range(7)
        ]
        fed = Federation.of(name, clients, seed=seed, **options)
        for task in make_tasks([0, 1, 2], [3]):
            fed.open(task)
            for exchange in fed.exchanges:
                holders = [k for k in range(7) if len(clients[k].of(task.classes))]
                updates = UpdateList.of(
                    Update(client_id(k), fed.upload(exchange.kind, k)) for k in holders
                )
                assert screen(RULE, updates, exchange.upload) == {}
                judged += len(updates) >= RULE.min_clients
                fed.state = fed.aggregate(exchange.kind, updates)
    assert judged > 0
