"""What the server makes of a client's report of its work."""

from types import SimpleNamespace

import pytest

from fcil_protocol.ids import RoundKey
from fcil_protocol.messages.messages import Progress
from fcil_server.daemon.dispatch import Dispatch
from sample_run import RUN


@pytest.mark.parametrize(
    ("number", "kind", "phase"),
    [(4, "train", "working"), (1, "train", "round 1: working"), (0, "finish", "working")],
)
def test_work_on_an_earlier_round_names_it(number, kind, phase):
    current = RoundKey(RUN, 0, "train", 4)
    coordinator = SimpleNamespace(
        context=SimpleNamespace(run=RUN), progress=SimpleNamespace(key=lambda _: current)
    )
    desk = SimpleNamespace(_context=SimpleNamespace(run=SimpleNamespace(coordinator=coordinator)))
    said = Progress(run=RUN, task=0, kind=kind, round=number, phase="working", done=1, total=2)
    assert Dispatch._phase(desk, said) == phase
