"""Asynchronous rounds: the rules of each kind, and the oldest state that an order names."""

from types import SimpleNamespace

import pytest

from fcil_protocol.ids import RoundKey
from fcil_server.federation.config import Config
from fcil_server.rounds import restore
from fcil_server.rounds.asking import oldest_base
from fcil_server.rounds.position import Mode, RunContext, RunProgress
from fcil_server.rounds.schedule import Step
from sample_run import RUN


def context(mode="async"):
    """A run whose kind ``train`` is averaged and whose kind ``finish`` is not."""
    made = SimpleNamespace(
        run=RUN,
        masked_kinds=frozenset(),
        config=Config.model_validate({"round": {"mode": mode, "take": 2, "max_staleness": 3}}),
        exchange=lambda kind: SimpleNamespace(
            averaged=kind == "train", gives_up=0, unlabelled=0, late=False
        ),
        ledger=SimpleNamespace(rounds=SimpleNamespace(count_closed=lambda *_: 1)),
        states=SimpleNamespace(numbers=lambda: [0, 1, 2, 3, *range(5, 10)]),
    )
    made.is_asynchronous = lambda kind: RunContext.is_asynchronous(made, kind)
    return made


@pytest.mark.parametrize(
    ("mode", "kind", "expected"),
    [
        ("async", "train", (True, 2)),
        ("async", "finish", (False, 0)),
        ("async", "evaluate", (False, 0)),
        ("sync", "train", (False, 2)),
        ("sync", "finish", (False, 2)),
    ],
)
def test_a_buffer_is_for_averaged_rounds_and_all_clients_are_for_the_others(mode, kind, expected):
    progress = SimpleNamespace(mode=Mode.RUNNING, unheld_since=None)
    made = restore.machine_of(context(mode), progress, RoundKey(RUN, 0, kind, 0), None, 0.0)
    assert (made.rules.asynchronous, made.rules.take) == expected


@pytest.mark.parametrize(
    ("mode", "kind", "number", "oldest"),
    [
        ("async", "train", 9, 6),
        ("async", "train", 7, 5),
        ("async", "train", 2, 0),
        ("async", "finish", 9, -1),
        ("sync", "train", 9, -1),
    ],
)
def test_an_order_names_the_oldest_state_within_the_bound_that_is_kept(mode, kind, number, oldest):
    progress = RunProgress(step=Step(kind, 0, 1))
    progress.number = number
    assert oldest_base(context(mode), progress) == oldest
