"""Shared frames: bounded in bytes, and the same on both sides of a pipe."""

from hypothesis import given
from hypothesis import strategies as st

from fcil_protocol.link.interface import SharedFrame, SharedFrames


def test_the_one_used_least_recently_makes_room():
    frames = SharedFrames(10)
    for name in "ab":
        frames.keep(name, SharedFrame(bytes(5)))
    assert frames.use("a") is not None
    frames.keep("c", SharedFrame(bytes(5)))
    assert [frames.use(name) is not None for name in "abc"] == [True, False, True]


def test_one_that_is_larger_than_all_may_be_is_kept_alone():
    frames = SharedFrames(10)
    frames.keep("a", SharedFrame(bytes(5)))
    frames.keep("b", SharedFrame(bytes(50)))
    assert frames.use("a") is None
    assert len(frames.use("b")) == 50
    frames.keep("c", SharedFrame(bytes(5)))
    assert frames.use("b") is None


@given(st.lists(st.integers(0, 9), max_size=60))
def test_both_ends_of_a_pipe_remember_the_same(names):
    """As an intake process follows its server: a frame, if it is new there, and then its number."""
    server, process = SharedFrames(20), SharedFrames(20)
    for name in names:
        frame = SharedFrame(bytes(name))
        if server.use(name) is None:
            server.keep(name, frame)
            process.keep(name, frame)
        assert process.use(name) is not None
