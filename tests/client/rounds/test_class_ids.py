"""Images that come after their class was learned: who is told of them, and when."""

from fcil_client.rounds.class_ids import Learned
from fcil_protocol.messages.messages import RoundOpen


def order(task, classes, past=(), *, kind="train", run="r1"):
    return RoundOpen(
        run=run, task=task, kind=kind, round=0, rounds=1, base=0, classes=list(classes),
        past=list(past), seed=[1], remaining_s=1.0, parts=[],
    )  # fmt: skip


IDS = {"cat": 0, "dog": 1, "elk": 2}


def test_a_client_that_learned_a_class_itself_is_told_nothing():
    learned = Learned()
    assert learned.unreported_names(order(0, [0]), {"cat": 0}, {"cat": 5}) == []
    assert learned.unreported_names(order(1, [1], [0]), IDS, {"cat": 5, "dog": 3}) == []
    assert learned.names == set()


def test_a_latecomer_is_told_once_of_what_was_learned_before_it_came():
    learned = Learned()
    told = order(2, [2], [0, 1])
    assert learned.unreported_names(told, IDS, {"cat": 5, "dog": 1, "elk": 2}) == ["cat", "dog"]
    assert learned.unreported_names(told, IDS, {"cat": 5, "dog": 1, "elk": 2}) == []
    assert learned.names == {"cat", "dog"}


def test_more_images_of_a_learned_class_are_told_and_fewer_are_not():
    learned = Learned()
    learned.unreported_names(order(0, [0]), {"cat": 0}, {"cat": 5})
    assert learned.unreported_names(order(1, [1], [0]), IDS, {"cat": 4}) == []
    assert learned.unreported_names(order(1, [1], [0]), IDS, {"cat": 6}) == ["cat"]


def test_who_only_tested_a_class_did_not_learn_it():
    learned = Learned()
    assert learned.unreported_names(order(0, [0], kind="evaluate"), {"cat": 0}, {"cat": 5}) == []
    assert learned.unreported_names(order(1, [1], [0]), IDS, {"cat": 5}) == ["cat"]


def test_classes_that_are_only_tested_here_are_not_new_images():
    assert Learned().unreported_names(order(1, [1], [0]), IDS, {"dog": 2}) == []


def test_another_run_has_learned_nothing_yet():
    learned = Learned()
    learned.unreported_names(order(1, [1], [0]), IDS, {"cat": 5})
    assert learned.unreported_names(order(0, [0, 1], run="r2"), IDS, {"cat": 5}) == []
    assert learned.names == set()
