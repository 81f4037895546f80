"""SIGTERM that lets the round under way end, and what follows if somebody is impatient."""

import signal

import pytest

from fcil_protocol.process.supervisor import Service


class Exited(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def heard(monkeypatch):
    """What the daemon is asked to do, in order; nothing is really ended."""
    calls = []

    def leave(code):
        calls.append(code)
        raise Exited

    monkeypatch.setattr("os._exit", leave)
    return calls


def service_of(heard, *, drains=True):
    service = Service(environ={})
    service._stop = lambda: heard.append("stop")
    service._drain = (lambda: heard.append("drain")) if drains else None
    return service


def test_the_first_sigterm_drains_the_second_stops_the_third_stops_at_once(heard):
    service = service_of(heard)
    service._end(signal.SIGTERM)
    assert heard == ["drain"]
    service._end(signal.SIGTERM)
    assert heard == ["drain", "stop"]
    with pytest.raises(Exited):
        service._end(signal.SIGTERM)
    assert heard == ["drain", "stop", 128 + signal.SIGTERM]


def test_ctrl_c_never_drains(heard):
    service = service_of(heard)
    service._end(signal.SIGINT)
    assert heard == ["stop"]


def test_without_the_option_sigterm_stops(heard):
    service = service_of(heard, drains=False)
    service._end(signal.SIGTERM)
    assert heard == ["stop"]
