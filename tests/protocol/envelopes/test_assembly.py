"""Assembly: chunks in any order, only true ones, resumed after a crash."""

import errno
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcil_protocol import PROTOCOL_VERSION
from fcil_protocol.envelopes.assembly import Assembly
from fcil_protocol.envelopes.envelope import Core, Header, open_body, seal
from fcil_protocol.errors import CorruptFile, DiskFull, StorageError, WireError
from fcil_protocol.ids import FederationId
from fcil_protocol.trust.keys import PrivateKeys

KEYS = PrivateKeys(curve=b"\x01" * 32, signing=b"\x02" * 32, sealing=b"\x03" * 32)
CHUNK = 16 << 10
PLAIN = random.Random(1).randbytes(9 * CHUNK + 777)  # ten chunks, the last one short
CORE = Core(
    protocol=PROTOCOL_VERSION,
    federation=FederationId("0123456789abcdef" * 2),
    run="r20260102-030405-0a0b",
    direction="update",
    sender="a" * 26,
    sender_key=KEYS.public.fingerprint,
    recipient="server",
    method="pilora",
    schema="",
    task=0,
    round=0,
    kind="train",
    base=0,
)
SEALED, KEY = seal(PLAIN, CORE, KEYS, chunk_bytes=CHUNK)
HEADER: Header = SEALED.parsed
COUNT = len(HEADER.hashes)
ALL = range(COUNT)
assert COUNT == 10


@pytest.fixture(params=["memory", "file"])
def path(request, tmp_path) -> Path | None:
    return tmp_path / "incoming" if request.param == "file" else None


def test_chunks_in_order_give_the_body(path):
    whole = Assembly(HEADER, path=path)
    for index in ALL:
        assert not whole.complete
        assert whole.missing(1) == [index]
        assert whole.put(index, bytes(SEALED.chunk(index))) is True
    assert whole.complete
    assert whole.missing(1) == []
    assert whole.received_bytes == len(SEALED.body)
    assert b"".join(whole.steps()) == SEALED.body
    assert open_body(HEADER, KEY, whole.steps()) == PLAIN


def test_chunks_may_be_views(path):
    """Frames of the link come as views of buffers that are used again."""
    whole = Assembly(HEADER, path=path)
    for index in ALL:
        buffer = bytearray(SEALED.chunk(index))
        whole.put(index, memoryview(buffer))
        buffer[:] = bytes(len(buffer))
    assert b"".join(whole.steps()) == SEALED.body


def test_chunks_in_any_order_and_twice_give_the_same_body(tmp_path):
    @settings(
        max_examples=25,
    )
    @given(st.permutations([*ALL, *ALL]), st.booleans())
    def holds(order, on_disk):
        path = tmp_path / "x" if on_disk else None
        whole = Assembly(HEADER, path=path)
        seen = set()
        for index in order:
            assert whole.put(index, bytes(SEALED.chunk(index))) is (index not in seen)
            seen.add(index)
            assert whole.missing(COUNT) == [i for i in ALL if i not in seen]
            assert whole.received_bytes == sum(HEADER.chunk_size(i) for i in seen)
        assert b"".join(whole.steps()) == SEALED.body
        whole.discard()

    holds()


def test_missing_names_the_first_ones_up_to_the_limit(path):
    part = Assembly(HEADER, path=path)
    for index in (0, 2, 3, 9):
        part.put(index, bytes(SEALED.chunk(index)))
    assert part.missing(3) == [1, 4, 5]
    assert part.missing(100) == [1, 4, 5, 6, 7, 8]
    assert part.missing(0) == []


@pytest.mark.parametrize(
    ("index", "change", "words"),
    [
        (-1, lambda c: c, "expected a chunk of 0 to 9, got -1"),
        (COUNT, lambda c: c, "got 10"),
        (2**40, lambda c: c, "expected a chunk"),
        (3, lambda c: c[:-1], f"expected {CHUNK} bytes, got {CHUNK - 1}"),
        (3, lambda c: b"", "got 0"),
        (3, lambda c: bytes([c[0] ^ 1]) + c[1:], "does not match its hash"),
        (3, lambda c: c[:-1] + bytes([c[-1] ^ 0x80]), "does not match its hash"),
        (3, lambda c: bytes(SEALED.chunk(4)), "does not match its hash"),
        (9, lambda c: c[:-1], f"expected {HEADER.chunk_size(9)} bytes"),
    ],
)
def test_what_does_not_fit_is_refused_and_not_kept(path, index, change, words):
    part = Assembly(HEADER, path=path)
    part.put(0, bytes(SEALED.chunk(0)))
    chunk = bytes(SEALED.chunk(index)) if index in ALL else bytes(CHUNK)
    with pytest.raises(WireError, match=words):
        part.put(index, change(chunk))
    assert part.missing(COUNT) == list(range(1, COUNT))
    assert part.received_bytes == CHUNK


def test_a_message_may_carry_several_chunks(path):
    part = Assembly(HEADER, path=path)
    assert part.put(4, bytes(SEALED.chunk(4)))
    assert part.put(3, SEALED.body[3 * CHUNK : 7 * CHUNK])
    assert not part.put(4, SEALED.body[4 * CHUNK : 6 * CHUNK])
    assert part.missing(COUNT) == [0, 1, 2, 7, 8, 9]
    assert part.put(7, SEALED.body[7 * CHUNK :])
    assert part.put(0, SEALED.body[: 3 * CHUNK])
    assert b"".join(part.steps()) == SEALED.body


@pytest.mark.parametrize(
    ("index", "change", "words", "kept"),
    [
        (3, lambda c: c + b"x", "chunk 6: expected 16384 bytes, got 1", [3, 4, 5]),
        (3, lambda c: c[:-1], "chunk 5", [3, 4]),
        (3, lambda c: flip(c, 2 * CHUNK), "chunk 5 of envelope", [3, 4]),
        (3, lambda c: flip(c, 0), "chunk 3 of envelope", []),
        (7, lambda c: c + b"x", "expected a chunk of 0 to 9, got 10", [7, 8, 9]),
    ],
)
def test_of_a_message_that_does_not_fit_to_its_end_what_fits_is_kept(
    path, index, change, words, kept
):
    part = Assembly(HEADER, path=path)
    with pytest.raises(WireError, match=words):
        part.put(index, change(SEALED.body[index * CHUNK : (index + 3) * CHUNK]))
    assert [i for i in ALL if i not in part.missing(COUNT)] == kept
    for i in part.missing(COUNT):
        part.put(i, bytes(SEALED.chunk(i)))
    assert b"".join(part.steps()) == SEALED.body


def flip(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_a_wrong_second_copy_does_not_replace_a_true_chunk(path):
    part = Assembly(HEADER, path=path)
    part.put(4, bytes(SEALED.chunk(4)))
    with pytest.raises(WireError):
        part.put(4, bytes(CHUNK))
    for index in ALL:
        part.put(index, bytes(SEALED.chunk(index)))
    assert b"".join(part.steps()) == SEALED.body


def test_discard_forgets_all_and_removes_the_file(path):
    part = Assembly(HEADER, path=path)
    part.put(0, bytes(SEALED.chunk(0)))
    part.discard()
    assert part.received_bytes == 0
    assert part.missing(1) == [0]
    assert path is None or not path.exists()
    part.discard()


def test_an_incomplete_body_is_not_handed_out(path):
    with pytest.raises(AssertionError):
        b"".join(Assembly(HEADER, path=path).steps())


# --- in a file ------------------------------------------------------------------------------


def test_space_is_reserved_at_once_and_private(tmp_path):
    Assembly(HEADER, path=tmp_path / "x")
    status = (tmp_path / "x").stat()
    assert status.st_size == HEADER.sealed_bytes
    assert status.st_blocks * 512 >= HEADER.sealed_bytes
    assert status.st_mode & 0o777 == 0o600


def test_a_killed_receiver_continues_with_the_chunks_that_it_had(tmp_path):
    """A child stores some chunks and kills itself; nothing but its file is left."""
    files = {"header": SEALED.header, "body": SEALED.body}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    script = """
import os, signal, sys
from pathlib import Path
from fcil_protocol.envelopes.assembly import Assembly
from fcil_protocol.envelopes.envelope import parse_header
d = Path(sys.argv[1])
header = parse_header((d / "header").read_bytes(), max_plain_bytes=1 << 30)
chunks = list(header.split((d / "body").read_bytes()))
part = Assembly(header, path=d / "incoming")
for index in (0, 1, 5, 9):
    part.put(index, bytes(chunks[index]))
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == -9
    part = Assembly(HEADER, path=tmp_path / "incoming")
    assert part.missing(COUNT) == [2, 3, 4, 6, 7, 8]
    assert part.received_bytes == 3 * CHUNK + HEADER.chunk_size(9)
    for index in part.missing(COUNT):
        part.put(index, bytes(SEALED.chunk(index)))
    assert b"".join(part.steps()) == SEALED.body


def test_chunks_that_a_power_cut_damaged_are_missing_again(tmp_path):
    path = tmp_path / "x"
    whole = Assembly(HEADER, path=path)
    for index in ALL:
        whole.put(index, bytes(SEALED.chunk(index)))
    data = bytearray(path.read_bytes())
    data[2 * CHUNK] ^= 1
    data[7 * CHUNK : 8 * CHUNK] = bytes(CHUNK)
    path.write_bytes(data)
    again = Assembly(HEADER, path=path)
    assert again.missing(COUNT) == [2, 7]
    assert not again.complete


def test_a_finished_file_is_what_stands_before_the_body_and_the_body(path, tmp_path):
    whole = Assembly(HEADER, path=path, head=b"before")
    for index in reversed(ALL):
        whole.put(index, bytes(SEALED.chunk(index)))
    assert b"".join(whole.steps()) == SEALED.body
    whole.finish(tmp_path / "done")
    assert (tmp_path / "done").read_bytes() == b"before" + SEALED.body
    assert [p.name for p in tmp_path.iterdir()] == ["done"]


def test_what_stands_before_the_body_is_the_newest_when_an_assembly_goes_on(tmp_path):
    """A key is wrapped anew in each session."""
    path = tmp_path / "x"
    Assembly(HEADER, path=path, head=b"before").put(3, bytes(SEALED.chunk(3)))
    again = Assembly(HEADER, path=path, head=b"newest")
    assert 3 not in again.missing(COUNT)
    for index in again.missing(COUNT):
        again.put(index, bytes(SEALED.chunk(index)))
    again.finish(tmp_path / "done")
    assert (tmp_path / "done").read_bytes() == b"newest" + SEALED.body


@pytest.mark.parametrize("left", [b"", b"x" * 5, bytes(len(SEALED.body) + 1)])
def test_a_file_of_another_size_is_begun_anew(tmp_path, left):
    path = tmp_path / "x"
    path.write_bytes(left)
    part = Assembly(HEADER, path=path)
    assert part.missing(COUNT) == list(ALL)
    assert path.stat().st_size == HEADER.sealed_bytes


def test_the_file_of_another_envelope_of_the_same_size_counts_for_nothing(tmp_path):
    other, _ = seal(PLAIN, CORE, KEYS, chunk_bytes=CHUNK)
    (tmp_path / "x").write_bytes(other.body)
    assert Assembly(HEADER, path=tmp_path / "x").received_bytes == 0


def test_a_full_disk_is_known_before_the_first_chunk(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFull, match="reserve space"):
        Assembly(HEADER, path=tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_without_fallocate_the_file_is_made_all_the_same(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate")
    whole = Assembly(HEADER, path=tmp_path / "x")
    for index in reversed(ALL):
        whole.put(index, bytes(SEALED.chunk(index)))
    assert b"".join(whole.steps()) == SEALED.body


def test_a_chunk_that_could_not_be_written_is_still_missing(tmp_path, monkeypatch):
    part = Assembly(HEADER, path=tmp_path / "x")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", _raise_eio)
        with pytest.raises(StorageError, match="fault"):
            part.put(0, bytes(SEALED.chunk(0)))
    assert part.missing(1) == [0]
    assert part.put(0, bytes(SEALED.chunk(0))) is True


def _raise_eio(*args):
    raise OSError(errno.EIO, "input/output error")


def test_short_writes_are_continued(tmp_path, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, bytes(data)[:5000], at))
    whole = Assembly(HEADER, path=tmp_path / "x")
    for index in ALL:
        whole.put(index, bytes(SEALED.chunk(index)))
    assert b"".join(whole.steps()) == SEALED.body


def test_a_file_that_was_cut_meanwhile_is_noticed(tmp_path):
    whole = Assembly(HEADER, path=tmp_path / "x")
    for index in ALL:
        whole.put(index, bytes(SEALED.chunk(index)))
    os.truncate(tmp_path / "x", 3 * CHUNK)
    with pytest.raises(CorruptFile, match="shorter"):
        b"".join(whole.steps())


def test_an_announced_size_takes_no_memory_before_chunks_come():
    """The header is small; only what arrived and was verified is kept."""
    part = Assembly(HEADER, path=None)
    part.put(9, bytes(SEALED.chunk(9)))
    kept = sum(len(c) for c in part._memory.values())
    assert kept == HEADER.chunk_size(9)
