"""State and part files: what was saved comes back or is refused; nothing is lost silently."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from fcil_protocol.errors import CorruptFile, InternalError, StorageError
from fcil_protocol.payloads.payload import Payload, pack
from fcil_server.aggregation import store as store_module
from fcil_server.aggregation.store import PartStore, StateStore
from sample_run import digest


def state(value: float) -> Payload:
    return Payload({"w": np.full((2, 3), value, np.float32)}, {"step": int(value)})


def flip(path: Path, position: int) -> None:
    """Flip one bit: overwriting with a constant might change nothing."""
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    return StateStore(tmp_path / "states")


def fill(store: StateStore, tasks: list[int]) -> None:
    parent = None
    for number, task in enumerate(tasks):
        parent = store.save(number, state(number), parent, task)


class TestStates:
    def test_a_state_comes_back_with_its_parent(self, store: StateStore) -> None:
        first = store.save(0, state(0), None, -1)
        second = store.save(1, state(1), first, 0)
        loaded = store.load(1)
        np.testing.assert_array_equal(loaded.tensors["w"], state(1).tensors["w"])
        assert loaded.meta == {"step": 1}
        record = store.record(1)
        assert (record.digest, record.parent, record.task) == (second, first, 0)
        assert store.numbers() == [0, 1]

    def test_the_file_is_the_packed_state_and_private(self, store: StateStore) -> None:
        made = store.save(12, state(3), None, 0)
        path = store.directory / "000012.safetensors"
        assert path.read_bytes() == pack(state(3))
        assert hashlib.sha256(path.read_bytes()).hexdigest() == made
        assert {p.stat().st_mode & 0o777 for p in store.directory.iterdir()} == {0o600}

    @pytest.mark.parametrize("position", [0, 20, -1])
    def test_a_flipped_bit_is_found_and_the_state_keeps_its_number(
        self, store: StateStore, position: int
    ) -> None:
        fill(store, [0, 0, 0])
        flip(store.path(2), position)
        with pytest.raises(CorruptFile, match=r"000002\.safetensors is damaged: expected SHA-256"):
            store.load(2)
        assert store.load(1).meta["step"] == 1
        assert store.numbers() == [0, 1, 2]

    @pytest.mark.parametrize("size", [0, 1, 50])
    def test_a_truncated_state_is_refused(self, store: StateStore, size: int) -> None:
        fill(store, [0, 0])
        store.path(1).write_bytes(store.path(1).read_bytes()[:size])
        with pytest.raises(CorruptFile, match="is damaged"):
            store.load(1)

    @pytest.mark.parametrize(
        "text", [b"", b"[]", b"{}", b"\xff\xff", b'{"number": 1}', b"[" * 100_000]
    )
    def test_a_damaged_record_is_refused(self, store: StateStore, text: bytes) -> None:
        fill(store, [0, 0])
        (store.directory / "000001.json").write_bytes(text)
        with pytest.raises(CorruptFile, match="record"):
            store.load(1)

    def test_every_flipped_bit_of_a_record_is_found_or_harmless(self, store: StateStore) -> None:
        fill(store, [0, 0])
        path = store.directory / "000001.json"
        whole = path.read_bytes()
        for position in range(whole.index(b'"digest": "') + 11, whole.index(b'"digest": "') + 75):
            path.write_bytes(whole)
            flip(path, position)
            with pytest.raises(CorruptFile):
                store.load(1)

    def test_a_renamed_state_is_refused(self, store: StateStore) -> None:
        fill(store, [0, 0])
        for suffix in ("safetensors", "json"):
            (store.directory / f"000001.{suffix}").rename(store.directory / f"000007.{suffix}")
        with pytest.raises(CorruptFile, match="expected state 7"):
            store.load(7)

    def test_a_state_without_its_record_was_never_committed(
        self, store: StateStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A kill between the two files leaves the state before, and the number can be reused."""
        fill(store, [0])
        real = store_module.write_atomic

        def killed(path: Path, *data: bytes, **kwargs: object) -> None:
            if path.suffix == ".json":
                raise KeyboardInterrupt
            real(path, *data, **kwargs)

        monkeypatch.setattr(store_module, "write_atomic", killed)
        with pytest.raises(KeyboardInterrupt):
            store.save(1, state(1), None, 0)
        monkeypatch.setattr(store_module, "write_atomic", real)
        with pytest.raises(CorruptFile, match="not written to its end"):
            store.load(1)
        store.save(1, state(5), None, 0)
        assert store.load(1).meta["step"] == 5

    def test_saving_again_is_harmless_and_changing_is_refused(self, store: StateStore) -> None:
        made = store.save(0, state(0), None, 0)
        assert store.save(0, state(0), None, 0) == made
        with pytest.raises(InternalError, match="a state never changes"):
            store.save(0, state(1), None, 0)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("dtype", [np.float32, np.float16])
    def test_a_state_that_is_not_finite_is_never_stored(
        self, store: StateStore, value: float, dtype: type
    ) -> None:
        bad = Payload({"ok": np.zeros(2, np.float32), "w": np.array([1, value], dtype)})
        with pytest.raises(InternalError, match="NaN or infinity in 'w'"):
            store.save(0, bad, None, 0)
        assert list(store.directory.iterdir()) == []

    def test_pruning_keeps_the_newest_three_and_the_last_of_each_task(
        self, store: StateStore
    ) -> None:
        fill(store, [-1, 0, 0, 0, 1, 1, 2, 2, 2, 2])
        assert store.prune() == [1, 2, 4, 6]
        assert store.numbers() == [0, 3, 5, 7, 8, 9]
        assert [store.load(n).meta["step"] for n in store.numbers()] == [0, 3, 5, 7, 8, 9]
        assert store.prune() == []

    def test_pruning_keeps_what_it_is_given(self, store: StateStore) -> None:
        fill(store, [0] * 8)
        assert store.prune((2, 99)) == [0, 1, 3, 4]
        assert store.prune((3,)) == [2], "a state that was the best one until now"

    def test_pruning_does_not_count_unfinished_states(self, store: StateStore) -> None:
        fill(store, [0, 0, 0, 0])
        (store.directory / "000003.json").unlink()
        assert store.prune() == []
        store.save(4, state(4), None, 0)
        assert store.prune() == [0]
        store.save(5, state(5), None, 0)
        store.save(6, state(6), None, 0)
        assert store.prune() == [1, 2, 3]

    def test_other_files_are_left_alone(self, store: StateStore) -> None:
        fill(store, [0])
        (store.directory / "notes.txt").write_text("mine")
        (store.directory / ".000001.safetensors.1-00000000.tmp").write_bytes(b"half")
        assert store.numbers() == [0]
        store.prune()
        assert (store.directory / "notes.txt").exists()

    def test_a_directory_that_cannot_be_made_is_a_storage_error(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(StorageError, match="cannot create"):
            StateStore(tmp_path / "file" / "states")


class TestParts:
    def test_bytes_come_back(self, tmp_path: Path) -> None:
        parts = PartStore(tmp_path / "parts")
        for data in (b"", b"sealed bytes"):
            name = digest(data.decode())
            path = parts.put(name, data)
            assert parts.get(name) == data
            assert name in parts
            assert path.stat().st_mode & 0o777 == 0o600
        assert parts.digests() == sorted([digest(""), digest("sealed bytes")])

    def test_every_flipped_byte_and_every_cut_is_found(self, tmp_path: Path) -> None:
        parts = PartStore(tmp_path)
        name = digest("x")
        path = parts.put(name, b"sealed")
        whole = path.read_bytes()
        for position in range(len(whole)):
            flip(path, position)
            with pytest.raises(CorruptFile, match="damaged"):
                parts.get(name)
            path.write_bytes(whole[:position])
            with pytest.raises(CorruptFile, match="damaged"):
                parts.get(name)
            path.write_bytes(whole)
        assert parts.get(name) == b"sealed"

    def test_a_part_under_anothers_name_is_found(self, tmp_path: Path) -> None:
        parts = PartStore(tmp_path)
        parts.put(digest("a"), b"same length")
        parts.put(digest("b"), b"other bytes")
        parts.path(digest("a")).replace(parts.path(digest("b")))
        with pytest.raises(CorruptFile, match="damaged"):
            parts.get(digest("b"))
        with pytest.raises(CorruptFile, match="missing"):
            parts.get(digest("a"))

    def test_only_wanted_parts_are_kept(self, tmp_path: Path) -> None:
        parts = PartStore(tmp_path)
        for name in "abc":
            parts.put(digest(name), name.encode())
        removed = parts.keep_only([digest("b"), digest("never stored")])
        assert removed == sorted([digest("a"), digest("c")])
        assert parts.digests() == [digest("b")]
