"""A client's inventories, as the operator reads of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fcil_protocol.payloads.payload import Payload
from fcil_server.runs.uploads import RunUploads


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def uploads(notes: list[str]) -> RunUploads:
    """Uploads of a run in which one client, ``PEER``, is connected."""
    ports: Any = SimpleNamespace(
        peers=SimpleNamespace(by_conn=lambda _conn: PEER),
        announced=lambda _peer: None,
        notify=lambda _level, _code, text, _client: notes.append(text),
    )
    classes = SimpleNamespace(announce=lambda _client, _names: SimpleNamespace(refused={}))
    coordinator: Any = SimpleNamespace(
        context=SimpleNamespace(ledger=None, classes=classes),
        progress=SimpleNamespace(phase="training"),
        on_client_ready=lambda _peer: None,
    )
    PEER.train, PEER.test, PEER.resting = None, None, False
    return RunUploads(coordinator, ports)


PEER: Any = SimpleNamespace(conn=1, client="c1", name="camera-1")


def inventory(**images: int) -> Payload:
    counts = np.array(list(images.values()), np.int64)
    return Payload({"train": counts, "test": counts // 4}, {"names": tuple(images)})


def test_what_a_client_holds_is_a_note_when_it_changes(
    uploads: RunUploads, notes: list[str]
) -> None:
    for held in (inventory(cat=8), inventory(cat=8), inventory(cat=8, dog=4), inventory()):
        uploads.announced(PEER, held)
    assert notes == [
        "camera-1 holds 8 training images of 1 class",
        "camera-1 holds 12 training images of 2 classes",
        "camera-1 holds 0 training images of 0 classes",
    ]


def test_a_client_that_has_rested_is_noted_again(uploads: RunUploads, notes: list[str]) -> None:
    uploads.announced(PEER, inventory(cat=8))
    PEER.resting = True
    uploads.announced(PEER, inventory(cat=8))
    assert len(notes) == 2
    assert not PEER.resting


def test_an_empty_folder_is_noted_too(uploads: RunUploads, notes: list[str]) -> None:
    uploads.announced(PEER, inventory())
    assert notes == ["camera-1 holds 0 training images of 0 classes"]
