"""Acts with a key: carried out once, over restarts, kills, other keys and full files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fcil_protocol.errors import CorruptFile, DiskFull, UsageError
from fcil_server.federation.api_tokens import REQUESTS_NAME
from fcil_server.web.api import past_acts
from fcil_server.web.api.past_acts import LIFE_S, PastActs, key_of, request_digest
from fcil_server.web.requests import RefusedRequest
from sample_run import Clock


def test_an_answer_outlives_the_process(tmp_path: Path) -> None:
    acts = PastActs(tmp_path)
    assert acts.begin("k", "r") is None
    acts.done("k", 200, {"mode": "paused"}, private=False)
    assert PastActs(tmp_path).begin("k", "r") == (200, {"mode": "paused"})


def test_what_a_kill_interrupted_is_not_carried_out_again(tmp_path: Path) -> None:
    assert PastActs(tmp_path).begin("k", "r") is None
    with pytest.raises(RefusedRequest, match="may have been carried out") as told:
        PastActs(tmp_path).begin("k", "r")
    assert told.value.status == 409


@pytest.mark.parametrize("private", [False, True])
def test_a_full_disk_hides_no_success(tmp_path: Path, monkeypatch, private: bool) -> None:
    acts = PastActs(tmp_path)
    acts.begin("k", "r")
    acts.begin("other", "r")
    with monkeypatch.context() as full:
        full.setattr(past_acts, "write_atomic", _full)
        acts.done("k", 201, {"ticket": "SECRET"}, private=private)
        acts.undone("other")
        with pytest.raises(DiskFull):
            acts.begin("third", "r")
    assert acts.begin("k", "r") == (201, {"ticket": "SECRET"})
    assert acts.begin("other", "r") is None
    assert acts.begin("third", "r") is None


def _full(path: Path, _: bytes) -> None:
    raise DiskFull(f"no room is left for {path}.")


def test_a_second_request_waits_for_the_first(tmp_path: Path) -> None:
    acts = PastActs(tmp_path)
    acts.begin("k", "r")
    with pytest.raises(RefusedRequest, match="is under way"):
        acts.begin("k", "r")
    acts.undone("k")
    assert acts.begin("k", "r") is None


def test_a_secret_is_answered_by_this_process_only(tmp_path: Path) -> None:
    acts = PastActs(tmp_path)
    acts.begin("k", "r")
    acts.done("k", 201, {"ticket": "SECRET"}, private=True)
    assert acts.begin("k", "r") == (201, {"ticket": "SECRET"})
    assert "SECRET" not in (tmp_path / REQUESTS_NAME).read_text()
    with pytest.raises(RefusedRequest, match="was private or long, and is not kept"):
        PastActs(tmp_path).begin("k", "r")


def test_after_a_day_and_a_number_of_acts_the_oldest_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    acts = PastActs(tmp_path, clock)
    acts.begin("k", "r")
    acts.done("k", 200, {}, private=False)
    clock.now += LIFE_S
    assert acts.begin("k", "r") is None
    monkeypatch.setattr(past_acts, "MAX_ACTS", 3)
    for n in range(4):
        acts.begin(str(n), "r")
        acts.done(str(n), 200, {"n": n}, private=True)
    assert list(json.loads((tmp_path / REQUESTS_NAME).read_text())["acts"]) == ["1", "2", "3"]
    assert list(acts._unwritten) == ["1", "2", "3"]


def test_what_is_older_than_a_day_leaves_the_file_at_the_next_start(tmp_path: Path) -> None:
    clock = Clock()
    for key in ("old", "young"):
        PastActs(tmp_path, clock).begin(key, "r")
        clock.now += LIFE_S / 2
    PastActs(tmp_path, clock).tidy()
    assert list(json.loads((tmp_path / REQUESTS_NAME).read_text())["acts"]) == ["young"]
    (tmp_path / REQUESTS_NAME).write_text("{")
    PastActs(tmp_path, clock).tidy()
    assert (tmp_path / REQUESTS_NAME).read_text() == "{"


def test_keys_of_two_tokens_never_meet() -> None:
    assert key_of("a", "b") != key_of("b", "b")
    assert request_digest("POST", "/a", {"x": 1, "y": 2}) == request_digest(
        "POST", "/a", {"y": 2, "x": 1}
    )
    assert request_digest("POST", "/a", {}) != request_digest("POST", "/b", {})


@pytest.mark.parametrize("key", ["", "x" * 201, "ä", "a\tb"])
def test_a_key_is_a_short_printable_text(key: str) -> None:
    with pytest.raises(UsageError, match="printable ASCII"):
        key_of("a", key)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"version": 2, "acts": {}}', '{"version": 1, "acts": {"a": 1}}']
)
def test_a_damaged_file_refuses_acts_with_a_key(tmp_path: Path, content: str) -> None:
    (tmp_path / REQUESTS_NAME).write_text(content)
    with pytest.raises(CorruptFile, match="it has the acts of the last day"):
        PastActs(tmp_path).begin("k", "r")
