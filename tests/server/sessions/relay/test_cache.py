"""A relay's cache: what fits the hash, the newest used, within its limit."""

import errno
import hashlib
from pathlib import Path

from fcil_server.sessions.relay.cache import Cache

DIGEST = "ab" * 32


def data(index, size=100):
    return bytes([index]) * size


def expected(index):
    return hashlib.sha256(data(index)).digest()


def filled(directory, limit=1000, count=3):
    cache = Cache(directory, limit)
    for index in range(count):
        cache.put(DIGEST, index, data(index))
    return cache


def test_what_was_put_is_there_also_for_the_next_process(tmp_path):
    filled(tmp_path)
    again = Cache(tmp_path, 1000)
    assert [again.get(DIGEST, i, expected(i)) for i in range(3)] == [data(i) for i in range(3)]
    assert (len(again), again.bytes) == (3, 300)
    assert again.get("cd" * 32, 0, expected(0)) is None


def test_what_does_not_fit_its_hash_is_removed(tmp_path):
    cache = filled(tmp_path)
    (tmp_path / f"{DIGEST}.1").write_bytes(data(9))
    assert cache.get(DIGEST, 1, expected(1)) is None
    assert (len(cache), cache.bytes) == (2, 200)
    assert not (tmp_path / f"{DIGEST}.1").exists()
    cache.put(DIGEST, 1, data(1))
    assert cache.get(DIGEST, 1, expected(1)) == data(1)


def test_the_least_recently_used_goes_first(tmp_path):
    cache = filled(tmp_path, limit=300)
    assert cache.get(DIGEST, 0, expected(0))
    cache.put(DIGEST, 3, data(3))
    assert {p.name for p in tmp_path.iterdir()} == {f"{DIGEST}.{i}" for i in (0, 2, 3)}
    assert cache.bytes == 300


def test_a_smaller_limit_holds_from_the_start(tmp_path):
    filled(tmp_path)
    assert Cache(tmp_path, 150).bytes == 100
    assert len(list(tmp_path.iterdir())) == 1


def test_what_is_larger_than_the_limit_or_meets_a_full_disk_is_not_kept(tmp_path, monkeypatch):
    cache = filled(tmp_path, limit=50)
    assert (len(cache), cache.bytes) == (0, 0)

    def full(*_):
        raise OSError(28, "No space left on device")

    cache = Cache(tmp_path, 1000)
    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    cache.put(DIGEST, 0, data(0))
    assert cache.get(DIGEST, 0, expected(0)) is None


def test_files_of_others_are_left_alone(tmp_path):
    (tmp_path / "README").write_text("x")
    assert len(Cache(tmp_path, 1)) == 0
    assert (tmp_path / "README").exists()


def test_a_file_that_cannot_be_opened_now_is_kept(tmp_path, monkeypatch):
    cache = filled(tmp_path)

    def refuse(_self):
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        assert cache.get(DIGEST, 1, expected(1)) is None
    assert cache.get(DIGEST, 1, expected(1)) == data(1)
    (tmp_path / f"{DIGEST}.2").unlink()
    assert cache.get(DIGEST, 2, expected(2)) is None
    assert (len(cache), cache.bytes) == (2, 200)
