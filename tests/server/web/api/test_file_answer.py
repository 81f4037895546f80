"""Files as answers: whole and of one moment, whatever the server writes meanwhile."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from fcil_server.web.api import file_answer
from fcil_server.web.api.file_answer import OpenFileAnswer, open_plain


def answered(path: Path, between=lambda: None, *, method="GET", leaves=False):
    """Return the messages of an answer; ``between`` is called once its head is sent."""
    sent: list[dict] = []

    async def receive():
        if leaves and len(sent) > 1:
            return {"type": "http.disconnect"}
        await asyncio.sleep(0 if leaves else 60)
        return {"type": "http.request"}

    async def send(message):
        sent.append(message)
        if len(sent) == 1:
            between()
        await asyncio.sleep(0)

    file = open_plain(path)
    assert file is not None
    scope = {"method": method, "state": {"fcil_endless": lambda: None}}
    asyncio.run(OpenFileAnswer(file, "text/plain")(scope, receive, send))
    assert file.closed
    return sent


def body(sent) -> bytes:
    return b"".join(m["body"] for m in sent[1:])


@pytest.fixture
def path(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setattr(file_answer, "PIECE_BYTES", 4)
    found = tmp_path / "rounds.jsonl"
    found.write_bytes(b"0123456789")
    return found


def test_a_file_that_grows_is_sent_as_it_was(path: Path) -> None:
    def grow() -> None:
        with path.open("ab") as file:
            file.write(b"more")

    sent = answered(path, grow)
    assert dict(sent[0]["headers"])[b"content-length"] == b"10"
    assert (body(sent), sent[-1]["more_body"]) == (b"0123456789", False)


def test_a_file_that_is_replaced_is_sent_as_it_was(path: Path) -> None:
    other = path.with_name("new")
    other.write_bytes(b"x" * 99)
    assert body(answered(path, lambda: os.replace(other, path))) == b"0123456789"


def test_a_file_that_shrinks_is_not_taken_for_whole(path: Path) -> None:
    sent = answered(path, lambda: os.truncate(path, 4))
    assert all(m["more_body"] for m in sent[1:])


def test_a_head_has_the_length_alone(path: Path) -> None:
    sent = answered(path, method="HEAD")
    assert (dict(sent[0]["headers"])[b"content-length"], body(sent)) == (b"10", b"")


def test_a_reader_that_leaves_ends_it(path: Path) -> None:
    path.write_bytes(b"x" * 4000)
    assert len(body(answered(path, leaves=True))) < 4000


def test_links_pipes_and_folders_are_no_files(path: Path) -> None:
    link, pipe = path.with_name("link"), path.with_name("pipe")
    link.symlink_to(path)
    os.mkfifo(pipe)
    assert [open_plain(p) for p in (link, pipe, path.parent, path.with_name("none"))] == [None] * 4
