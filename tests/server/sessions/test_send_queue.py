"""A queue for one socket that knows its size without a look at what is in it."""

from hypothesis import given
from hypothesis import strategies as st

from fcil_server.sessions import relayed
from fcil_server.sessions.relayed import SendQueue


@given(st.lists(st.none() | st.lists(st.binary(max_size=40), min_size=1, max_size=4), max_size=60))
def test_its_size_is_that_of_what_waits(acts):
    made, waiting = SendQueue(), []
    for message in acts:  # None: the first one is sent
        if message is not None:
            made.add(message)
            waiting.append(message)
        elif waiting:
            assert made.first == waiting.pop(0)
            made.drop()
        assert made.bytes == sum(len(frame) for frames in waiting for frame in frames)
        assert len(made) == len(waiting)
    made.clear()
    assert (made.bytes, len(made)) == (0, 0)


def test_it_is_full_of_bytes_or_of_messages(monkeypatch):
    monkeypatch.setattr(relayed, "MAX_QUEUED_BYTES", 100)
    monkeypatch.setattr(relayed, "MAX_QUEUED_MESSAGES", 3)
    made = SendQueue()
    made.add([bytes(60), bytes(40)])
    assert not made.full
    made.add([b"x"])
    assert made.full, "of bytes"
    made.drop()
    assert not made.full
    for _ in range(2):
        made.add([b""])
    assert made.full, "of messages"


class Counted(bytes):
    """Bytes that count how often somebody asks how long they are."""

    asked = 0

    def __len__(self):
        Counted.asked += 1
        return super().__len__()


def test_what_waits_is_measured_once_when_it_comes_and_once_when_it_goes():
    Counted.asked = 0
    made = SendQueue()
    for _ in range(1000):
        made.add([Counted(b"frame")])
        assert not made.full
    while made:
        made.drop()
    assert Counted.asked == 2000
