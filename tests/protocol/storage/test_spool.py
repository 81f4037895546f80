"""The spool: what was synced is there after anything; damage costs the damaged record only."""

import errno
import hashlib
import os
import shutil
import struct
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcil_protocol.envelopes.stored_envelope import StoredEnvelope
from fcil_protocol.errors import AlreadyHave, CorruptFile, DiskFull, StorageError
from fcil_protocol.storage import atomic_files, segment, spool
from fcil_protocol.storage.atomic_files import DirectoryLock, FilePart, sync_data
from fcil_protocol.storage.segment import HEAD_BYTES, RecordKind, Segment
from fcil_protocol.storage.spool import Spool


def filled(directory: Path, *records: tuple[str, bytes]) -> Spool:
    made = Spool(directory)
    for key, body in records:
        made.append(key, body)
    made.sync()
    return made


def content(of: Spool) -> dict[str, bytes]:
    keys = of.keys()
    return {key: of.get(key) for key in keys}


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.seg"))


def quarantined(directory: Path) -> list[Path]:
    return sorted(directory.glob("quarantine/*"))


def size_of(key: str, body: bytes) -> int:
    return HEAD_BYTES + len(key.encode()) + len(body)


ABC = (("a", b"alpha" * 20), ("b", b"beta" * 8), ("c", b"gamma" * 4))


# --- the plain way --------------------------------------------------------------------------


def test_what_was_appended_and_synced_is_read_back_now_and_later(tmp_path):
    with_empty = (*ABC, ("empty", b""), ("ü" * 100, b"a key of 200 bytes"))
    first = filled(tmp_path / "new" / "spool", *with_empty)
    assert content(first) == dict(with_empty)
    first.close()
    again = Spool(tmp_path / "new" / "spool")
    assert content(again) == dict(with_empty)
    assert again.keys() == [key for key, _ in with_empty]
    assert again.recovered == []


def test_a_key_counts_as_there_only_once_it_is_durable(tmp_path):
    """`in` decides whether an Ack may be sent."""
    own = Spool(tmp_path)
    own.append("a", b"x")
    assert "a" not in own
    assert own.keys() == []
    assert own.get("a") == b"x"
    own.sync()
    assert "a" in own
    assert own.keys() == ["a"]


def test_the_same_key_twice_is_refused_and_the_first_counts(tmp_path):
    own = Spool(tmp_path)
    own.append("a", b"first")
    with pytest.raises(AlreadyHave, match="first one counts"):
        own.append("a", b"second")
    own.sync()
    with pytest.raises(AlreadyHave):
        own.append("a", b"second")
    assert content(own) == {"a": b"first"}


def test_a_record_that_is_not_there_is_a_named_error(tmp_path):
    """Damage at opening takes records away that a ledger still names."""
    with pytest.raises(CorruptFile, match="no record 'none'"):
        Spool(tmp_path).get("none")


@pytest.mark.parametrize("key", ["", "x" * 201, "ü" * 101])
def test_a_key_without_or_with_too_many_bytes_is_our_defect(tmp_path, key):
    with pytest.raises(AssertionError):
        Spool(tmp_path).append(key, b"")


def test_a_batch_is_one_fdatasync_and_the_directory_only_for_a_new_segment(tmp_path, monkeypatch):
    own = Spool(tmp_path)
    calls = []
    monkeypatch.setattr(spool, "sync_data", lambda fd: calls.append("data"))
    monkeypatch.setattr(spool, "sync_directory", lambda directory: calls.append("names"))
    for key in "abcdef":
        own.append(key, bytes(1000))
    assert calls == []
    own.sync()
    assert calls == ["data", "names"]
    own.append("g", b"")
    own.sync()
    assert calls == ["data", "names", "data"]
    own.sync()
    assert calls == ["data", "names", "data"]


def test_files_and_directories_are_private(tmp_path):
    filled(tmp_path / "s", *ABC)
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o700
    assert {p.stat().st_mode & 0o777 for p in segments(tmp_path / "s")} == {0o600}


def test_other_files_in_the_directory_are_left_alone(tmp_path):
    (tmp_path / "lock").write_bytes(b"1")
    (tmp_path / "00000001-xyz.seg").write_bytes(b"not ours")
    own = filled(tmp_path, *ABC)
    own.remove("abc")
    assert own.recovered == []
    assert (tmp_path / "00000001-xyz.seg").read_bytes() == b"not ours"


def test_an_envelope_survives_the_way_through_a_record(tmp_path):
    stored = StoredEnvelope(b"header", b"s" * 64, b"wrap", bytes(5000))
    own = filled(tmp_path, ("a", stored.to_bytes()))
    assert StoredEnvelope.from_bytes(own.get("a")) == stored


# --- a file for each round ------------------------------------------------------------------


def rounds(directory: Path, *each: tuple[tuple[str, bytes], ...]) -> Spool:
    """A spool of rounds that are over, each with these records."""
    made = Spool(directory)
    for records in each:
        for key, body in records:
            made.append(key, body)
        made.sync()
        made.end_round()
    return made


def test_each_round_has_a_file_and_each_start_begins_one(tmp_path):
    own = rounds(tmp_path, ABC[:2], ABC[2:])
    assert len(segments(tmp_path)) == 2
    own.append("d", b"of the third round")
    own.append("e", bytes(5_000_000))
    own.close()
    assert len(segments(tmp_path)) == 3
    again = Spool(tmp_path)
    again.append("f", b"of it too")
    again.close()
    assert len(segments(tmp_path)) == 4
    assert Spool(tmp_path).keys() == list("abcdef")


def test_the_file_of_a_round_goes_as_soon_as_nothing_of_it_counts(tmp_path):
    """As rounds do: the updates of the last one still count while the next come in."""
    own = rounds(tmp_path, [("0-a", b"x")])
    for turn in range(1, 20):
        for name in "abc":
            own.append(f"{turn}-{name}", bytes(1000))
        own.sync()
        assert len(segments(tmp_path)) == 2
        own.end_round()
        own.remove([key for key in own.keys() if not key.startswith(f"{turn}-")])  # noqa: SIM118
        (path,) = segments(tmp_path)
        assert path.stat().st_size == 3 * size_of(f"{turn}-a", bytes(1000))
    own.remove(["19-a", "unknown"])
    assert own.keys() == ["19-b", "19-c"]
    assert segments(tmp_path) == [path]
    own.remove(own.keys())
    assert segments(tmp_path) == []
    own.append("19-a", b"again")
    own.close()
    assert content(Spool(tmp_path)) == {"19-a": b"again"}


def test_what_was_removed_is_found_again_until_its_file_is_gone_and_then_never(tmp_path):
    """So a kill before or after the removal is one thing: who knows what is needed says it again."""
    own = rounds(tmp_path, ABC[:2])
    own.append(*ABC[2])
    own.remove(["b"])
    own.close()
    again = Spool(tmp_path)
    assert again.keys() == ["a", "b", "c"]
    again.remove(["a", "b"])
    again.close()
    assert content(Spool(tmp_path)) == {"c": ABC[2][1]}


@pytest.mark.parametrize("kept", [(), ("kept",)])
def test_a_file_that_a_kill_kept_is_deleted_after_the_next_start(tmp_path, monkeypatch, kept):
    """Nothing of the old round counts any more, and the process dies before it deletes the file."""
    own = rounds(tmp_path, [("old", b"x"), ("older", b"y")], [(key, b"z") for key in kept])

    def killed(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            own.remove(["old", "older"])
    again = Spool(tmp_path)
    again.remove([key for key in again.keys() if key not in kept])  # noqa: SIM118
    assert len(segments(tmp_path)) == len(kept)
    assert content(again) == dict.fromkeys(kept, b"z")


def test_a_file_without_a_record_is_deleted_at_the_start(tmp_path):
    (tmp_path / f"00000007-{bytes(16).hex()}.seg").write_bytes(b"")
    Spool(tmp_path)
    assert segments(tmp_path) == []


def test_a_file_that_cannot_be_deleted_is_told_and_deleted_with_the_next_removal(
    tmp_path, monkeypatch
):
    own = rounds(tmp_path, ABC[:1], ABC[1:])

    def refused(*arguments, **options):
        raise PermissionError(errno.EACCES, "permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refused)
        with pytest.raises(StorageError, match="cannot delete"):
            own.remove(["a"])
    assert own.keys() == ["b", "c"]
    assert len(segments(tmp_path)) == 2
    own.remove([])
    assert len(segments(tmp_path)) == 1


def test_a_removal_needs_no_space(tmp_path, monkeypatch):
    own = rounds(tmp_path, ABC[:1], ABC[1:])
    monkeypatch.setattr(os, "write", no_space)
    own.remove(["b"])
    assert own.keys() == ["a", "c"]
    own.remove(own.keys())
    assert segments(tmp_path) == []


def test_an_update_that_is_refused_again_and_again_fills_no_file(tmp_path):
    """Its row cannot be written into the ledger, and its sender offers it every ten seconds."""
    own = filled(tmp_path, *ABC)
    for _ in range(50):
        own.append("d", bytes(1000))
        own.sync()
        own.remove(["d"])
    assert own.keys() == ["a", "b", "c"]
    assert sum(p.stat().st_size for p in segments(tmp_path)) < 3000


def test_a_key_that_is_taken_anew_counts_once(tmp_path):
    own = filled(tmp_path, *ABC)
    own.remove(["b"])
    own.append("b", b"anew")
    own.close()
    again = Spool(tmp_path)
    assert content(again) == {"a": ABC[0][1], "c": ABC[2][1], "b": b"anew"}
    again.remove(["a", "c"])
    assert len(segments(tmp_path)) == 1, "the first b does not keep its file"
    assert content(again) == {"b": b"anew"}


def earlier(directory: Path, number: int, *records: tuple[RecordKind, str, bytes]) -> None:
    """Write a file of the earlier layout, with records of removal."""
    directory.mkdir(exist_ok=True)
    made = Segment.create(directory, number)
    for kind, key, body in records:
        made.append(kind, key, body)
    made.close()


def test_a_directory_of_the_earlier_layout_is_read_and_removed_when_done_with(tmp_path):
    """There a file held several rounds, notes of removals and copies of records elsewhere."""
    data, removed = RecordKind.DATA, RecordKind.REMOVED
    earlier(tmp_path, 1, (data, "a", b"1"), (data, "b", b"2"), (removed, "a", b""))
    earlier(tmp_path, 2, (data, "c", b"3"), (data, "d", b"4"))
    earlier(tmp_path, 3, (removed, "c", b""), (data, "b", b"2"))
    earlier(tmp_path, 4, (removed, "c", b""))
    own = Spool(tmp_path)
    assert own.recovered == []
    assert content(own) == {"d": b"4", "b": b"2"}
    assert [p.name[:8] for p in segments(tmp_path)] == ["00000002", "00000003"]
    own.append("e", b"5")
    own.remove(["d"])
    own.end_round()
    own.remove(["b"])
    own.close()
    assert content(Spool(tmp_path)) == {"e": b"5"}
    assert [p.name[:8] for p in segments(tmp_path)] == ["00000004"]


# --- torn ends ------------------------------------------------------------------------------


def test_a_tail_torn_at_any_byte_is_cut_off_and_reported(tmp_path):
    """The last record is cut after each of its bytes in turn."""
    filled(tmp_path / "whole", *ABC).close()
    (whole,) = segments(tmp_path / "whole")
    data = whole.read_bytes()
    start = len(data) - size_of(*ABC[2])
    for end in range(start, len(data)):
        directory = tmp_path / str(end)
        directory.mkdir()
        (directory / whole.name).write_bytes(data[:end])
        own = Spool(directory)
        assert content(own) == dict(ABC[:2])
        assert len(own.recovered) == (1 if end > start else 0)
        assert all("never durable" in message for message in own.recovered)
        assert quarantined(directory) == []
        own.append("c", b"once more")
        own.close()
        again = Spool(directory)
        assert content(again) == {**dict(ABC[:2]), "c": b"once more"}
        assert again.recovered == []
        shutil.rmtree(directory)


@pytest.mark.parametrize("tail", [bytes(10), bytes(5000), b"\xff" * 100, b"fsp", b"fspl" * 9])
def test_a_tail_that_is_no_record_is_cut_off(tmp_path, tail):
    """After a power cut the file system may have extended the file with zeros."""
    filled(tmp_path, *ABC).close()
    (path,) = segments(tmp_path)
    with path.open("ab") as file:
        file.write(tail)
    own = Spool(tmp_path)
    assert content(own) == dict(ABC)
    assert len(own.recovered) == 1
    assert f"{len(tail)} bytes" in own.recovered[0]
    own.close()
    assert Spool(tmp_path).recovered == []


def test_what_a_killed_process_appended_without_a_sync_is_made_durable_at_opening(
    tmp_path, monkeypatch
):
    killed = Spool(tmp_path)
    killed.append("a", b"x")
    synced = []
    monkeypatch.setattr(spool, "sync_data", lambda fd: synced.append(os.fstat(fd).st_size))
    again = Spool(tmp_path)
    assert synced == [size_of("a", b"x")]
    assert "a" in again


def test_everything_synced_before_kill_9_is_there_after_it(tmp_path):
    script = """
import os, signal, sys
from pathlib import Path
from fcil_protocol.storage.spool import Spool
spool = Spool(Path(sys.argv[1]))
for i in range(20):
    spool.append(f"k{i}", bytes([i]) * 500)
    if i % 5 == 4:
        spool.sync()
        spool.end_round()
spool.remove([f"k{i}" for i in range(5)])
spool.append("torn", bytes(100))
write = os.write
def die(fd, data):
    write(fd, bytes(data)[:40])
    os.kill(os.getpid(), signal.SIGKILL)
os.write = die
spool.append("never", bytes(100))
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == -9
    own = Spool(tmp_path)
    kept = range(5, 20)
    assert own.keys() == [*(f"k{i}" for i in kept), "torn"]
    assert all(own.get(f"k{i}") == bytes([i]) * 500 for i in kept)
    assert len(own.recovered) == 1


# --- damage ---------------------------------------------------------------------------------


def test_a_flipped_bit_anywhere_in_a_middle_record_costs_only_that_record(tmp_path):
    filled(tmp_path / "whole", *ABC).close()
    (whole,) = segments(tmp_path / "whole")
    data = whole.read_bytes()
    start = size_of(*ABC[0])
    size = size_of(*ABC[1])
    for position in range(start, start + size):
        directory = tmp_path / str(position)
        directory.mkdir()
        changed = bytearray(data)
        changed[position] ^= 1 << (position % 8)
        (directory / whole.name).write_bytes(changed)
        own = Spool(directory)
        assert content(own) == {"a": ABC[0][1], "c": ABC[2][1]}
        (moved,) = quarantined(directory)
        assert moved.read_bytes() == changed[start : start + size]
        (message,) = own.recovered
        assert f"{size} bytes at {start}" in message
        assert str(moved) in message
        own.append("b", b"sent again")
        own.close()
        again = Spool(directory)
        assert again.recovered == []  # moved aside once, not met again
        assert content(again) == {"a": ABC[0][1], "c": ABC[2][1], "b": b"sent again"}
        shutil.rmtree(directory)


def test_a_damaged_last_record_is_kept_aside(tmp_path):
    """It was whole once, so it is not merely torn."""
    filled(tmp_path, *ABC).close()
    (path,) = segments(tmp_path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    own = Spool(tmp_path)
    assert own.keys() == ["a", "b"]
    assert quarantined(tmp_path)[0].read_bytes() == data[-size_of(*ABC[2]) :]


def test_several_damaged_stretches_are_each_moved_aside(tmp_path):
    records = [(f"k{i}", bytes([i]) * 300) for i in range(8)]
    filled(tmp_path, *records).close()
    (path,) = segments(tmp_path)
    data = bytearray(path.read_bytes())
    size = size_of(*records[0])
    for index, offset in ((1, 0), (2, HEAD_BYTES + 50), (4, 9), (5, 9), (7, 60)):
        data[index * size + offset] ^= 4
    path.write_bytes(data)
    own = Spool(tmp_path)
    assert own.keys() == ["k0", "k3", "k6"]
    assert sum(p.stat().st_size for p in quarantined(tmp_path)) == 5 * size
    own.close()
    assert Spool(tmp_path).recovered == []


def test_damage_across_a_step_of_the_search_is_survived(tmp_path):
    """The next record's mark lies across the 1 MiB steps in which the file is searched."""
    step = segment._STEP_BYTES
    for shift in range(5):
        directory = tmp_path / str(shift)
        filler = bytes(2 * step - HEAD_BYTES - 1 - shift)
        own = filled(directory, ("x", filler), ("y", b"reached"))
        own.close()
        (path,) = segments(directory)
        with path.open("r+b") as file:
            file.write(b"?")
        again = Spool(directory)
        assert content(again) == {"y": b"reached"}


def test_a_record_that_is_damaged_while_in_use_is_refused_and_the_others_serve(tmp_path):
    own = filled(tmp_path, *ABC)
    (path,) = segments(tmp_path)
    with path.open("r+b") as file:
        file.seek(size_of(*ABC[0]) + HEAD_BYTES + 10)
        file.write(b"?")
    with pytest.raises(CorruptFile, match="'b'"):
        own.get("b")
    assert own.get("a") == ABC[0][1]
    assert own.get("c") == ABC[2][1]


def test_a_body_cannot_contain_a_record_of_somebody_else(tmp_path):
    """A sender knows the format, not the file's salt: damage to its record frees nothing."""

    def forged(salt: bytes) -> bytes:
        fields = struct.pack("<4sBBHQ", b"fspl", 1, 1, 6, 4)
        digest = hashlib.sha256(salt + fields + b"victimEVIL").digest()
        crc = struct.pack("<I", zlib.crc32(salt + fields + digest))
        return fields + digest + crc + b"victimEVIL"

    own = filled(tmp_path / "a", ("x", forged(b"") * 3), ("y", b"ok"))
    own.close()
    (path,) = segments(tmp_path / "a")
    with path.open("r+b") as file:
        file.write(b"?")
    assert content(Spool(tmp_path / "a")) == {"y": b"ok"}
    # The same forgery with the salt would be found: the salt is what protects.
    salt = bytes.fromhex(path.stem.split("-")[1])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / path.name).write_bytes(b"?" * 60 + forged(salt))
    assert content(Spool(tmp_path / "b")) == {"victim": b"EVIL"}


def test_damage_that_cannot_be_moved_for_lack_of_space_is_skipped_and_reported(
    tmp_path, monkeypatch
):
    filled(tmp_path, *ABC).close()
    (path,) = segments(tmp_path)
    data = bytearray(path.read_bytes())
    data[size_of(*ABC[0]) + 3] ^= 1
    path.write_bytes(data)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", no_space)
        own = Spool(tmp_path)
    assert "were skipped: cannot write" in own.recovered[0]
    assert own.keys() == ["a", "c"]
    assert path.read_bytes() == data
    own.append("b", b"again")
    own.close()
    assert Spool(tmp_path).keys() == ["a", "c", "b"]


def test_records_of_a_newer_format_are_not_touched(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(segment, "_VERSION", 2)
        filled(tmp_path, *ABC).close()
    before = {p.name: p.read_bytes() for p in segments(tmp_path)}
    with pytest.raises(StorageError, match="format 2"):
        Spool(tmp_path)
    assert {p.name: p.read_bytes() for p in segments(tmp_path)} == before


# --- full disks and other faults ------------------------------------------------------------


def no_space(*args):
    raise OSError(errno.ENOSPC, "no space left on device")


def failing_after(good_bytes: int, number: int):
    """An os.write that takes so many bytes and then fails, as a disk that fills up."""
    write = os.write
    left = good_bytes

    def limited(fd, data):
        nonlocal left
        if left <= 0:
            raise OSError(number, os.strerror(number))
        done = write(fd, bytes(data)[:left])
        left -= done
        return done

    return limited


@pytest.mark.parametrize("good_bytes", [0, 1, HEAD_BYTES, HEAD_BYTES + 1, HEAD_BYTES + 50])
def test_a_disk_that_fills_up_at_any_point_leaves_the_spool_usable(
    tmp_path, monkeypatch, good_bytes
):
    own = filled(tmp_path, *ABC)
    (path,) = segments(tmp_path)
    size = path.stat().st_size
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing_after(good_bytes, errno.ENOSPC))
        with pytest.raises(DiskFull, match="MB free"):
            own.append("d", bytes(100))
    assert path.stat().st_size == size
    own.append("d", b"after space was made")
    own.close()
    again = Spool(tmp_path)
    assert again.recovered == []
    assert content(again) == {**dict(ABC), "d": b"after space was made"}


def test_a_real_size_limit_leaves_the_spool_usable(tmp_path):
    """RLIMIT_FSIZE: the kernel writes up to the limit, then answers EFBIG.

    A round that is larger than a file may be goes on in another one.
    """
    script = """
import resource, sys
from pathlib import Path
from fcil_protocol.errors import StorageError
from fcil_protocol.storage.spool import Spool
spool = Spool(Path(sys.argv[1]))
spool.append("a", bytes(1000))
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
for key, size in (("big", 5000), ("b", 1500), ("c", 1500), ("c", 1500)):
    try:
        spool.append(key, bytes(size))
    except StorageError as error:
        print(error)
spool.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.count("file size limit") == 2
    own = Spool(tmp_path)
    assert own.keys() == ["a", "b", "c"]
    assert own.recovered == []


def test_a_rollback_that_fails_too_moves_on_to_a_new_segment(tmp_path, monkeypatch):
    own = filled(tmp_path, *ABC)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing_after(20, errno.EIO))
        patch.setattr(os, "ftruncate", no_space)
        with pytest.raises(StorageError):
            own.append("d", bytes(100))
    own.append("d", b"elsewhere")
    own.sync()
    assert content(own) == {**dict(ABC), "d": b"elsewhere"}
    assert len(segments(tmp_path)) == 2
    own.close()
    again = Spool(tmp_path)
    assert content(again) == {**dict(ABC), "d": b"elsewhere"}
    assert "20 bytes" in again.recovered[0]


def broken_sync(fd):
    raise OSError(errno.EIO, "input/output error")


def test_after_a_failed_sync_nothing_of_the_batch_counts(tmp_path, monkeypatch):
    own = filled(tmp_path, *ABC)
    own.append("d", b"x")
    own.append("e", b"y")
    with monkeypatch.context() as patch:
        patch.setattr(spool, "sync_data", broken_sync)
        with pytest.raises(StorageError, match="fault"):
            own.sync()
    assert own.keys() == ["a", "b", "c"]
    with pytest.raises(CorruptFile, match="no record 'd'"):
        own.get("d")
    own.append("d", b"sent again")
    own.sync()
    own.close()
    again = Spool(tmp_path)
    assert content(again) == {**dict(ABC), "d": b"sent again"}
    assert again.recovered == []


def test_a_failed_sync_of_the_directory_is_made_up_for(tmp_path, monkeypatch):
    own = Spool(tmp_path)
    own.append("a", b"x")
    with monkeypatch.context() as patch:
        patch.setattr(spool, "sync_directory", broken_sync)
        with pytest.raises(StorageError):
            own.sync()
    assert own.keys() == []
    names = []
    monkeypatch.setattr(spool, "sync_directory", names.append)
    own.append("a", b"x")
    own.sync()
    assert names == [tmp_path]
    assert "a" in own


def test_an_unusable_directory_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot create"):
        Spool(tmp_path / "file")
    with pytest.raises(StorageError, match="not a directory"):
        Spool(tmp_path / "file" / "below")


# --- erasure --------------------------------------------------------------------------------


def test_what_is_purged_leaves_the_disk_and_nothing_else_does(tmp_path):
    own = filled(tmp_path, ("a", b"secret" * 9), ("b", b"stays" * 9))
    own.append("c", b"secret" * 7)  # not synced yet
    assert own.purge(["a", "c", "unknown"]) == 2
    assert content(own) == {"b": b"stays" * 9}
    assert b"secret" not in b"".join(p.read_bytes() for p in segments(tmp_path))
    own.append("a", b"another")
    own.sync()
    own.close()
    assert content(Spool(tmp_path)) == {"b": b"stays" * 9, "a": b"another"}


def test_what_was_damaged_is_purged_too(tmp_path):
    """Nothing tells whose it was, and parts of it can be opened."""
    filled(tmp_path, ("a", b"secret" * 9), ("b", b"stays" * 9)).close()
    (path,) = segments(tmp_path)
    data = bytearray(path.read_bytes())
    data[data.index(b"secret")] ^= 1
    path.write_bytes(data)
    own = Spool(tmp_path)
    assert len(quarantined(tmp_path)) == 1
    own.purge([])
    assert len(quarantined(tmp_path)) == 1
    assert own.purge(["a"]) == 0
    assert quarantined(tmp_path) == []
    assert content(own) == {"b": b"stays" * 9}


def test_a_purge_rewrites_no_other_file_and_deletes_one_that_it_empties(tmp_path):
    own = rounds(tmp_path, [("a", b"1"), ("b", b"2")], [("c", b"3"), ("d", b"4")], [("e", b"5")])
    first, second, third = segments(tmp_path)
    before = first.stat().st_ino, second.stat().st_ino, third.stat().st_ino
    assert own.purge(["c", "e"]) == 2
    assert segments(tmp_path) == [first, second]
    assert first.stat().st_ino == before[0]
    assert second.stat().st_ino != before[1]
    assert second.stat().st_size == size_of("d", b"4")
    assert content(own) == {"a": b"1", "b": b"2", "d": b"4"}


def test_a_purge_finds_the_bytes_of_what_was_removed_or_replaced_before(tmp_path):
    own = filled(tmp_path, ("a", b"secret"), ("b", b"stays"), ("c", b"secret"))
    own.remove(["a", "c"])
    own.append("c", b"secret again")
    own.append("d", b"stays too")
    own.sync()
    assert own.purge(["a", "c"]) == 2
    assert content(own) == {"b": b"stays", "d": b"stays too"}
    assert b"secret" not in b"".join(p.read_bytes() for p in segments(tmp_path))


def test_a_kill_before_any_call_to_the_disk_of_a_purge_leaves_the_old_file_or_the_new(
    tmp_path, monkeypatch
):
    """The directory is taken as a kill would leave it, half a write included, and opened."""
    own = rounds(tmp_path / "own", [*ABC, ("d", b"delta")], [("e", b"of the open round")])
    everything = content(own)
    erased = {key: body for key, body in everything.items() if key not in "ac"}
    copies, names = [], []

    def taken(name, original):
        def call(*arguments, **options):
            names.append(name)
            for torn in (0, 30) if name == "write" else (0,):
                copy = tmp_path / f"{len(copies)}"
                shutil.copytree(tmp_path / "own", copy)
                if torn:
                    (half,) = copy.glob(".*.tmp")
                    with half.open("ab") as file:
                        file.write(bytes(arguments[1])[:torn])
                copies.append(copy)
            return original(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for name in ("open", "write", "replace", "unlink"):
            patch.setattr(os, name, taken(name, getattr(os, name)))
        patch.setattr(atomic_files, "sync_data", taken("sync", atomic_files.sync_data))
        patch.setattr(segment, "sync_directory", taken("names", segment.sync_directory))
        assert own.purge(["a", "c"]) == 2
    assert content(own) == erased
    order = [names.index(name) for name in ("write", "sync", "replace", "names")]
    assert order == sorted(order), "durable before it takes the name, against a power cut"
    seen = []
    for copy in copies:
        DirectoryLock.acquire(copy, "federation").release()  # as every command does first
        again = Spool(copy)
        assert again.recovered == []
        assert not list(copy.glob(".*"))
        seen.append(content(again))
        assert seen[-1] in (everything, erased)
        again.purge(["a", "c"])
        again.close()
        assert content(Spool(copy)) == erased
    assert seen[0] == everything
    assert seen[-1] == erased


@pytest.mark.parametrize("broken", ["write", "sync"])
def test_a_purge_for_which_there_is_no_room_is_refused_and_can_be_made_later(
    tmp_path, monkeypatch, broken
):
    own = filled(tmp_path, *ABC)
    (path,) = segments(tmp_path)
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        if broken == "write":
            patch.setattr(os, "write", failing_after(50, errno.ENOSPC))
        else:
            patch.setattr(atomic_files, "sync_data", broken_sync)
        with pytest.raises(StorageError, match="cannot write"):
            own.purge(["b"])
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before
    assert content(own) == {"a": ABC[0][1], "c": ABC[2][1]}
    assert own.purge(["b"]) == 1
    assert path.read_bytes() != before
    assert content(own) == {"a": ABC[0][1], "c": ABC[2][1]}


def test_a_purge_whose_names_were_not_synced_syncs_them_when_it_is_called_again(
    tmp_path, monkeypatch
):
    own = filled(tmp_path, *ABC)
    with monkeypatch.context() as patch:
        patch.setattr(segment, "sync_directory", broken_sync)
        with pytest.raises(StorageError, match="fault"):
            own.purge(["a"])
    assert content(own) == dict(ABC[1:])
    names = []
    monkeypatch.setattr(spool, "sync_directory", names.append)
    own.purge(["a"])
    assert names == [tmp_path]


def test_an_opened_record_stays_as_it_was_while_a_purge_moves_it(tmp_path, monkeypatch):
    own = filled(tmp_path, *ABC)
    monkeypatch.setattr(atomic_files, "_STEP_BYTES", 3)

    def reader(part):
        assert own._guard.locked()
        steps = part.steps()
        return next(steps), steps

    first, steps = own.open("c", reader)
    assert len(first) == 3
    own.purge(["a"])
    assert b"".join((first, *steps)) == ABC[2][1]
    assert b"".join(own.open("c", FilePart.steps)) == ABC[2][1]
    with pytest.raises(CorruptFile, match="no record 'a'"):
        own.open("a", FilePart.steps)


def test_a_body_may_come_from_a_file_step_by_step(tmp_path, monkeypatch):
    body = os.urandom(5000)
    (tmp_path / "arrived").write_bytes(b"head" + body + b"more")
    part = FilePart(tmp_path / "arrived", 4, len(body))
    monkeypatch.setattr(atomic_files, "_STEP_BYTES", 999)
    own = Spool(tmp_path / "spool")
    own.append("a", b"before ", part)
    own.append("b", b"another")
    own.close()
    again = Spool(tmp_path / "spool")
    assert content(again) == {"a": b"before " + body, "b": b"another"}


def test_a_body_whose_file_was_cut_meanwhile_leaves_no_record(tmp_path):
    (tmp_path / "arrived").write_bytes(bytes(5000))
    own = Spool(tmp_path / "spool")
    own.append("a", b"whole")
    with pytest.raises(CorruptFile, match="shorter"):
        own.append("b", b"head", FilePart(tmp_path / "arrived", 0, 5001))
    own.append("c", b"after it")
    own.close()
    assert content(Spool(tmp_path / "spool")) == {"a": b"whole", "c": b"after it"}


def test_a_body_whose_file_is_cut_between_hash_and_copy_is_taken_out_again(tmp_path, monkeypatch):
    (tmp_path / "arrived").write_bytes(bytes(5000))
    part = FilePart(tmp_path / "arrived", 0, 5000)
    own = Spool(tmp_path / "spool")
    own.append("a", b"whole")
    real = segment.write_all

    def cut_then_write(fd, data):
        os.truncate(part.path, 10)
        real(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(segment, "write_all", cut_then_write)
        with pytest.raises(CorruptFile, match="shorter"):
            own.append("b", b"head", part)
    own.append("c", b"after it")
    own.close()
    again = Spool(tmp_path / "spool")
    assert content(again) == {"a": b"whole", "c": b"after it"}
    assert not again.recovered


def test_a_body_for_which_there_is_no_memory_is_taken_out_again(tmp_path, monkeypatch):
    own = Spool(tmp_path)
    own.append("a", b"whole")
    real, written = segment.write_all, []

    def write(fd, data):
        written.append(data)
        if len(written) == 2:
            raise MemoryError
        real(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(segment, "write_all", write)
        with pytest.raises(MemoryError):
            own.append("b", b"body")
    own.append("c", b"after it")
    own.close()
    again = Spool(tmp_path)
    assert content(again) == {"a": b"whole", "c": b"after it"}
    assert not again.recovered


def test_a_purge_waits_for_who_reads_a_record_that_it_moves(tmp_path, monkeypatch):
    own = filled(tmp_path, *ABC)
    read = Segment.read
    purge = threading.Thread(target=own.purge, args=[["a"]])

    def late(of, record):
        if not purge.ident:
            alone = own._guard.locked()
            purge.start()
            if not alone:  # nothing keeps the purge from ending first
                purge.join(30)
        return read(of, record)

    monkeypatch.setattr(Segment, "read", late)
    assert own.get("c") == ABC[2][1]
    purge.join(30)
    assert content(own) == dict(ABC[1:])


def test_a_sync_under_way_makes_durable_what_a_purge_has_moved_and_nothing_later(
    tmp_path, monkeypatch
):
    own = filled(tmp_path, *ABC)
    own.append("d", b"in the batch")
    held = HeldSync(monkeypatch)
    thread = held.run(own)
    assert own.purge(["a"]) == 1
    own.append("e", b"after it")
    held.finish(thread)
    assert own.keys() == ["b", "c", "d"]
    synced = []
    monkeypatch.setattr(spool, "sync_data", lambda fd: synced.append(os.fstat(fd).st_size))
    own.sync()
    assert synced == [size_of("e", b"after it")]
    own.close()
    assert Spool(tmp_path).keys() == ["b", "c", "d", "e"]


# --- sync in another thread -----------------------------------------------------------------


class HeldSync:
    """Holds the first sync_data of another thread until it is let go; then it may fail."""

    def __init__(self, monkeypatch, *, fails: bool = False) -> None:
        self.started = threading.Event()
        self.go = threading.Event()
        self.fails = fails
        self.error: Exception | None = None
        monkeypatch.setattr(spool, "sync_data", self._sync)

    def _sync(self, fd: int) -> None:
        if not self.started.is_set():
            self.started.set()
            assert self.go.wait(30)
            if self.fails:
                raise OSError(errno.EIO, "input/output error")
        sync_data(fd)

    def run(self, own: Spool) -> threading.Thread:
        def call():
            try:
                own.sync()
            except StorageError as error:
                self.error = error

        thread = threading.Thread(target=call)
        thread.start()
        assert self.started.wait(30)
        return thread

    def finish(self, thread: threading.Thread) -> None:
        self.go.set()
        thread.join(30)
        assert not thread.is_alive()


def test_what_is_appended_during_a_sync_waits_for_the_next(tmp_path, monkeypatch):
    own = filled(tmp_path, *ABC)
    own.append("d", b"in the batch")
    held = HeldSync(monkeypatch)
    thread = held.run(own)
    own.append("e", b"during it")
    held.finish(thread)
    assert held.error is None
    assert "d" in own
    assert "e" not in own
    synced = []
    monkeypatch.setattr(spool, "sync_data", lambda fd: synced.append(os.fstat(fd).st_size))
    own.sync()
    (path,) = segments(tmp_path)
    assert synced == [path.stat().st_size]
    assert "e" in own


def test_what_is_appended_during_a_failing_sync_fails_with_the_next(tmp_path, monkeypatch):
    """The kernel does not say which bytes it dropped, so none of them may be acknowledged."""
    own = filled(tmp_path, *ABC)
    own.append("d", b"in the batch")
    held = HeldSync(monkeypatch, fails=True)
    thread = held.run(own)
    own.append("e", b"during it")
    held.finish(thread)
    assert held.error is not None
    own.append("f", b"after it, in the same batch as e")
    with pytest.raises(StorageError):
        own.sync()
    assert own.keys() == ["a", "b", "c"]
    for key in "def":
        own.append(key, b"once more")
    own.sync()
    own.close()
    assert Spool(tmp_path).keys() == list("abcdef")


def test_a_segment_may_be_deleted_during_its_sync_and_the_next_one_is_still_synced(
    tmp_path, monkeypatch
):
    own = Spool(tmp_path)
    own.append("a", b"x")
    held = HeldSync(monkeypatch)
    thread = held.run(own)
    own.remove(["a"])
    assert segments(tmp_path) == []
    own.append("b", b"y")
    held.finish(thread)
    assert held.error is None
    assert "b" not in own
    synced = []
    monkeypatch.setattr(spool, "sync_data", lambda fd: synced.append(os.fstat(fd).st_size))
    own.sync()
    assert synced == [size_of("b", b"y")]
    assert own.keys() == ["b"]


# --- against a model ------------------------------------------------------------------------

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 15), st.integers(0, 700)),
        st.tuples(st.just("remove"), st.sets(st.integers(0, 15), max_size=6)),
        st.tuples(st.just("purge"), st.sets(st.integers(0, 15), max_size=6)),
        st.tuples(st.just("sync")),
        st.tuples(st.just("round")),
        st.tuples(st.just("restart")),
        st.tuples(st.just("fill"), st.integers(0, 15), st.integers(0, 200)),
    ),
    max_size=30,
)


@settings(max_examples=60)
@given(OPERATIONS)
def test_any_sequence_of_operations_matches_a_dictionary(tmp_path_factory, operations):
    """ "restart" is a close and an open, after which the owner says again what it does not need;
    "fill" an append on a disk that is full midway.
    """
    directory = tmp_path_factory.mktemp("spool")
    own = Spool(directory)
    model: dict[str, bytes] = {}
    for step, (name, *arguments) in enumerate(operations):
        if name == "append":
            key, body = f"k{arguments[0]}", bytes([step]) * arguments[1]
            if key in model:
                with pytest.raises(AlreadyHave):
                    own.append(key, body)
            else:
                own.append(key, body)
                model[key] = body
        elif name in ("remove", "purge"):
            keys = [f"k{i}" for i in arguments[0]]
            getattr(own, name)(keys)
            for key in keys:
                model.pop(key, None)
        elif name == "sync":
            own.sync()
            assert content(own) == model
        elif name == "round":
            own.end_round()
        elif name == "restart":
            own.close()
            own = Spool(directory)
            assert own.recovered == []
            own.remove([key for key in own.keys() if key not in model])  # noqa: SIM118
            assert content(own) == model
        elif f"k{arguments[0]}" not in model:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, "write", failing_after(arguments[1], errno.ENOSPC))
                with pytest.raises(DiskFull):
                    own.append(f"k{arguments[0]}", bytes(300))
    own.sync()
    assert content(own) == model
    own.remove(list(model))
    own.close()
    assert segments(directory) == []
    shutil.rmtree(directory)
