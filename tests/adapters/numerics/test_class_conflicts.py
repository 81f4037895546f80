"""One class name for two things is noticed; honest differences are not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from digits import load_digits
from fcil_adapters.contract import TaskInfo, Update
from fcil_adapters.numerics.class_conflicts import ClassConflicts
from fcil_adapters.numerics.class_reports import report_specs, report_tensors
from fcil_protocol.ids import ClientId
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.payloads.schema import Kind, PayloadSchema, TensorSpec

DIGITS = load_digits()
SCHEMA = PayloadSchema(report_specs(), (), (("owned", "c"),))
TASK = TaskInfo(1, (4, 5, 6), (0, 1, 2, 3))


class Round:
    """Updates of some clients; ``meant`` says which digit each of them calls by a class id."""

    def __init__(self, meant: Mapping[str, Mapping[int, int]], images: int = 40, seed: int = 0):
        self._rng = np.random.default_rng(seed)
        self._meant = {ClientId(k): v for k, v in sorted(meant.items())}
        self._images = images

    @property
    def clients(self) -> tuple[ClientId, ...]:
        return tuple(self._meant)

    def __iter__(self) -> Iterator[Update]:
        for client, meant in self._meant.items():
            counts = [self._images if c in meant else 0 for c in TASK.classes]
            means = np.stack([self._mean(meant.get(c)) for c in TASK.classes])
            tensors = report_tensors(TASK.classes, means, np.array(counts, np.int64), 1)
            yield Update(client, Payload(tensors))

    def _mean(self, digit: int | None) -> np.ndarray:
        if digit is None:
            return np.zeros(64)
        of_it = np.flatnonzero(DIGITS.target == digit)
        chosen = self._rng.choice(of_it, self._images, replace=False)
        return DIGITS.images[chosen].reshape(-1, 64).mean(axis=0)


RIGHT = {4: 4, 5: 5, 6: 6}


def far_apart(updates, schema, task):
    meanings = ClassConflicts(schema, task)
    for update in updates:
        meanings.take(update)
    return meanings.pairs()


@pytest.mark.parametrize("seed", range(20))
def test_clients_that_mean_the_same_are_left_in_peace(seed: int) -> None:
    meant = dict.fromkeys("abcdef", RIGHT)
    assert far_apart(Round(meant, seed=seed), SCHEMA, TASK) == []


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("others", ["a", "abde"])
def test_who_calls_another_thing_by_the_name_is_found(seed: int, others: str) -> None:
    meant = dict.fromkeys(others, RIGHT) | {"c": {**RIGHT, 5: 1}}
    [found] = far_apart(Round(meant, seed=seed), SCHEMA, TASK)
    assert (found.class_id, "c" in (found.one, found.other)) == (5, True)
    assert found.ratio > 0.8


def test_few_images_are_no_ground_for_a_suspicion() -> None:
    meant = {"a": RIGHT, "c": {**RIGHT, 5: 1}}
    assert far_apart(Round(meant, images=29), SCHEMA, TASK) == []


def test_a_class_that_one_client_holds_is_compared_with_nobodys() -> None:
    meant = {"a": {4: 4, 5: 5}, "b": {4: 4, 6: 6}}
    assert far_apart(Round(meant), SCHEMA, TASK) == []


def test_without_a_second_class_there_is_no_measure() -> None:
    assert far_apart(Round({"a": {4: 4}, "b": {4: 9}}), SCHEMA, TASK) == []


def test_uploads_without_a_mean_for_each_class_say_nothing() -> None:
    plain = PayloadSchema((TensorSpec("n", Kind.COUNT, (1,), dtype="I64"),))
    assert far_apart(Round({"a": RIGHT, "c": {**RIGHT, 5: 1}}), plain, TASK) == []


def test_equal_means_are_not_apart() -> None:
    [update] = Round({"a": RIGHT})
    twin = Update(ClientId("b"), update.payload)
    assert far_apart([update, twin, update], SCHEMA, TASK) == []
