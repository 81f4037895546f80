"""Frozen features on disk: right or absent, whatever was killed, damaged, full or shared."""

import hashlib
import json
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from fcil_adapters.worker import feature_files
from fcil_adapters.worker.feature_files import FeatureFiles
from fcil_adapters.worker.feature_folder import (
    VARIABLE,
    FeatureCounts,
    FeatureFolder,
    bytes_used,
    counted,
    environment,
    file_of,
    newest,
    remove_replaced,
)
from fcil_protocol.errors import ConfigError

D = 200
MB = 1_000_000
TAP, NUMERICS = "cls " + "0" * 64, "torch, cpu, 1 thread"
START = """
import os, resource, signal, sys
from pathlib import Path
import numpy as np
from fcil_adapters.worker import feature_files
from fcil_adapters.worker.feature_files import FeatureFiles
from fcil_adapters.worker.feature_folder import FeatureFolder
sys.path.insert(0, sys.argv[1])
from test_feature_files import features, place, NUMERICS
here = place(Path(sys.argv[2]))
files = FeatureFiles(here, NUMERICS)
"""


def place(folder, most=100 * MB):
    return FeatureFolder(folder / "features", most, folder / "counts.jsonl")


def key(number, tap=TAP):
    return tap, hashlib.sha256(str(number).encode()).digest()


def feature(number):
    return np.random.default_rng(number).normal(size=D).astype(np.float32)


def features(*numbers):
    return {key(n): feature(n) for n in numbers}


def opened(folder, most=100 * MB, numerics=NUMERICS, **more):
    return closing(FeatureFiles(place(folder, most), numerics, **more))


def store(folder, *numbers, **more):
    with opened(folder, **more) as files:
        files.put(features(*numbers))


def right_ones(folder, *numbers):
    """Return those that are there, each of them equal to the bit."""
    with opened(folder) as files:
        found = files.get([key(n) for n in numbers])
    for k, one in features(*numbers).items():
        if k in found:
            assert found[k].tobytes() == one.tobytes()
    return {n for n in numbers if key(n) in found}


def child(folder, script):
    """Start a process with `files` of this folder open."""
    here = str(place(folder).folder.parent)
    code = START + textwrap.dedent(script)
    command = [sys.executable, "-c", code, str(__file__.rpartition("/")[0]), here]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def done(process, code=0):
    said, faults = process.communicate(timeout=120)
    assert process.returncode == code, faults
    return said


# --- what is found --------------------------------------------------------------------------


def test_features_come_back_to_the_bit_in_another_process_of_the_same_numerics(tmp_path):
    odd = np.array([-0.0, np.nan, np.inf, 1e-45, 3.4e38], np.float32)
    with opened(tmp_path) as files:
        files.put({**features(1, 2), key("odd"): odd})
    with opened(tmp_path) as files:
        found = files.get([key(2), key("odd"), key(3)])
    assert set(found) == {key(2), key("odd")}
    assert found[key("odd")].tobytes() == odd.tobytes()
    assert counted(place(tmp_path).counts) == FeatureCounts(read=2, computed=3)


@pytest.mark.parametrize(
    ("asked", "numerics"),
    [
        (key(1, "cls " + "1" * 64), NUMERICS),  # another backbone, or another image size
        (key(1, "unit " + "0" * 64), NUMERICS),
        (key(2), NUMERICS),
        (key(1), "torch, cpu, 2 threads"),
        (key(1), "onnx, cpu, 1 thread"),
    ],
)
def test_another_backbone_kind_image_or_engine_is_never_answered(tmp_path, asked, numerics):
    store(tmp_path, 1)
    with opened(tmp_path, numerics=numerics) as files:
        assert files.get([asked]) == {}
    assert right_ones(tmp_path, 1) == {1}


def test_a_name_has_no_two_meanings():
    """Numerics, tap and pixels do not run into each other."""
    files = [FeatureFiles(place(Path("/nowhere")), n) for n in ("a", "ab")]
    assert files[0]._name(("bc", b"p")) != files[1]._name(("c", b"p"))


def test_counts_are_summed_and_a_torn_line_is_left_out(tmp_path):
    path = tmp_path / "counts"
    assert counted(path) == FeatureCounts()
    lines = ['{"read": 3}', '{"computed": 5, "removed": 2}', '{"faults": ["a."]}', '{"read": 4}']
    path.write_text("\n".join([*lines, '{"faults": ["a."]}', '{"read": ']))
    assert counted(path) == FeatureCounts(7, 5, 2, ("a.",))


def test_a_workers_environment_has_the_folder_or_nothing():
    here = FeatureFolder(Path("/a b"), 5, Path("/c"))
    assert FeatureFolder.of(environment(here)) == here
    assert FeatureFolder.of(environment(None)) is FeatureFolder.of({}) is None
    for text in ("/some/folder", "[]", '["a", "b", "c"]', "7", '["a", 1, null]'):
        with pytest.raises(ConfigError, match="Remove it from the environment"):
            FeatureFolder.of({VARIABLE: text})


# --- several processes ----------------------------------------------------------------------


def test_two_processes_read_and_write_at_the_same_time(tmp_path):
    script = """
        first = int(sys.stdin.readline())
        for start in range(first, first + 400, 20):
            some = features(*range(start, start + 20))
            found = files.get(list(some))
            assert all(found[k].tobytes() == some[k].tobytes() for k in found)
            files.put({k: v for k, v in some.items() if k not in found})
    """
    both = [child(tmp_path, script) for _ in range(2)]
    for process, first in zip(both, (0, 200), strict=True):
        process.stdin.write(f"{first}\n")
        process.stdin.flush()
    for process in both:
        done(process)
    assert right_ones(tmp_path, *range(600)) == set(range(600))
    counts = counted(place(tmp_path).counts)
    assert counts.faults == ()
    assert 600 <= counts.computed <= 800
    assert counts.read == 800 - counts.computed + 600


def test_a_writer_that_holds_the_file_for_long_costs_features_and_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(feature_files, "BUSY_S", 0.01)
    store(tmp_path, 1)
    with closing(sqlite3.connect(file_of(place(tmp_path).folder, 1), isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        store(tmp_path, 2)
        assert right_ones(tmp_path, 1, 2) == {1}
        db.execute("ROLLBACK")
    store(tmp_path, 2)
    assert right_ones(tmp_path, 1, 2) == {1, 2}
    assert counted(place(tmp_path).counts).faults == ()


# --- kill -9 --------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["BEGIN", "INSERT", "COMMIT"])
def test_kill_9_in_the_middle_of_a_write_leaves_whole_features(tmp_path, moment):
    """The process kills itself at a statement of SQLite, at the 30th row of an insertion."""
    script = f"""
        files.put(features(*range(64)))
        seen = 0
        def kill(statement):
            global seen
            seen += statement.startswith({moment!r})
            if seen == {30 if moment == "INSERT" else 1}:
                os.kill(os.getpid(), signal.SIGKILL)
        files._opened().set_trace_callback(kill)
        files.put(features(*range(100, 164)))
    """
    done(child(tmp_path, script), -signal.SIGKILL)
    assert right_ones(tmp_path, *range(64), *range(100, 164)) == set(range(64))
    store(tmp_path, *range(100, 164))
    assert right_ones(tmp_path, *range(64), *range(100, 164)) == {*range(64), *range(100, 164)}
    assert counted(place(tmp_path).counts).faults == ()


@pytest.mark.full
def test_kill_9_at_any_moment_leaves_whole_features(tmp_path):
    """Small logs, so that some of the kills meet a log on its way into the file."""
    script = """
        feature_files._LOG_PAGES = 2
        start = int(sys.stdin.readline())
        while True:
            files.put(features(*range(start, start + 10)))
            start += 10
    """
    for turn in range(3):
        process = child(tmp_path, script)
        process.stdin.write(f"{turn * 10_000}\n")
        process.stdin.flush()
        written = counted(place(tmp_path).counts).computed + 100 * (turn + 1)
        while counted(place(tmp_path).counts).computed < written:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0)
        process.kill()
        done(process, -signal.SIGKILL)
        there = right_ones(tmp_path, *range(turn * 10_000, turn * 10_000 + 100))
        assert len(there) == 100
    assert counted(place(tmp_path).counts).faults == ()
    assert newest(place(tmp_path).folder) == 1


def test_kill_9_while_the_file_is_made_leaves_none_and_the_next_makes_it(tmp_path):
    script = """
        feature_files.place_new = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        files.put(features(1))
    """
    done(child(tmp_path, script), -signal.SIGKILL)
    folder = place(tmp_path).folder
    assert newest(folder) == 0
    store(tmp_path, 1)
    assert right_ones(tmp_path, 1) == {1}
    assert [p.name for p in folder.iterdir()] == ["features-1.sqlite"]


# --- damage ---------------------------------------------------------------------------------


def overwrite(path, start, data):
    with path.open("r+b") as file:
        file.seek(start)
        file.write(data)


def flip(path):
    """Change one bit of a feature's numbers."""
    at = path.read_bytes().index(feature(7).tobytes()) + 50
    overwrite(path, at, bytes([path.read_bytes()[at] ^ 4]))


def other_database(path):
    path.unlink()
    with closing(sqlite3.connect(path)) as db:
        db.executescript(f"PRAGMA user_version = {feature_files.FORMAT}; CREATE TABLE t (x)")


def other_format(path):
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 99")


def moved(path):
    """Give a feature the key of another."""
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE features SET feature = (SELECT max(feature) FROM features)")


DAMAGE = {
    "header": lambda path: overwrite(path, 0, b"x" * 100),
    "middle": lambda path: overwrite(path, 16384, bytes(path.stat().st_size - 16384)),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "emptied": lambda path: path.write_bytes(b""),
    "no database": lambda path: path.write_bytes(b"features" * 5000),
    "other database": other_database,
    "other format": other_format,
    "one bit": flip,
    "moved": moved,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_set_aside_with_a_sentence_and_built_again(tmp_path, kind):
    store(tmp_path, *range(100))
    folder = place(tmp_path).folder
    DAMAGE[kind](file_of(folder, 1))
    assert right_ones(tmp_path, *range(100)) < set(range(100))
    store(tmp_path, *range(100))
    assert right_ones(tmp_path, *range(100)) == set(range(100))
    (fault,) = counted(place(tmp_path).counts).faults
    assert "features-1.sqlite is damaged (" in fault
    assert newest(folder) == 2
    assert file_of(folder, 1).exists()
    remove_replaced(folder)
    assert [p.name for p in folder.iterdir()] == ["features-2.sqlite"]


def test_a_process_that_has_the_damaged_file_open_takes_the_new_one(tmp_path):
    with opened(tmp_path) as early, opened(tmp_path) as late:
        early.put(features(7))
        late.get([key(7)])
        early._opened().execute("PRAGMA wal_checkpoint(TRUNCATE)")
        early._opened().execute("UPDATE features SET feature = zeroblob(32)")
        assert early.get([key(7)]) == {}
        early.put(features(7))
        assert late.get([key(7)])[key(7)].tobytes() == feature(7).tobytes()
    assert newest(place(tmp_path).folder) == 2
    assert len(counted(place(tmp_path).counts).faults) == 1


def test_a_disk_that_damages_every_file_ends_the_cache_of_this_process(tmp_path):
    folder = place(tmp_path).folder
    with opened(tmp_path) as files:
        for _ in range(10):
            files.put(features(7))
            with closing(sqlite3.connect(file_of(folder, newest(folder)))) as db, db:
                db.execute("UPDATE features SET feature = zeroblob(32)")
            assert files.get([key(7)]) == {}
    assert newest(folder) == 4
    assert "is off: a feature differs" in counted(place(tmp_path).counts).faults[-1]


# --- no room, no rights ---------------------------------------------------------------------


def test_a_real_full_disk_stops_writing_with_a_sentence_and_nothing_else(tmp_path):
    """RLIMIT_FSIZE makes the kernel itself refuse to let a file grow."""
    script = """
        files.put(features(*range(64)))
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        for start in range(1000, 3000, 64):
            files.put(features(*range(start, start + 64)))
        found = files.get(list(features(*range(64))))
        assert all(found[k].tobytes() == v.tobytes() for k, v in features(*range(64)).items())
    """
    done(child(tmp_path, script))
    assert right_ones(tmp_path, *range(64)) == set(range(64))
    counts = counted(place(tmp_path).counts)
    assert counts.computed == 64 + 32 * 64
    (fault,) = counts.faults
    assert fault.startswith("no further features are written to ")
    store(tmp_path, 9)
    assert right_ones(tmp_path, 9) == {9}


def test_sqlites_own_error_of_a_full_disk_is_a_sentence(tmp_path):
    with opened(tmp_path) as files:
        files.put(features(1))
        files._opened().execute("PRAGMA max_page_count = 5")
        files.put(features(*range(100, 400)))
        assert set(files.get([key(1)])) == {key(1)}
    (fault,) = counted(place(tmp_path).counts).faults
    assert fault.endswith("features: no space is left on its disk.")


def test_a_file_that_may_only_be_read_is_read(tmp_path, monkeypatch):
    store(tmp_path, 1)
    connect = feature_files._connect

    def read_only(path, mode="ro"):
        db = connect(path, mode)
        db.execute("PRAGMA query_only = ON")
        return db

    monkeypatch.setattr(feature_files, "_connect", read_only)
    store(tmp_path, 2)
    assert right_ones(tmp_path, 1, 2) == {1}
    assert "no further features are written" in counted(place(tmp_path).counts).faults[0]


def test_a_folder_that_cannot_be_made_turns_the_cache_off(tmp_path):
    (tmp_path / "features").write_text("a file")
    with opened(tmp_path) as files:
        assert files.get([key(1)]) == {}
        files.put(features(1))
        assert files.get([key(1)]) == {}
    counts = counted(place(tmp_path).counts)
    assert counts.computed == 1
    (fault,) = counts.faults
    assert f"{tmp_path}/features is off: " in fault


def test_counts_that_cannot_be_written_are_no_error(tmp_path):
    folder = FeatureFolder(tmp_path / "x" / "y", MB, tmp_path / "z" / "counts")
    with closing(FeatureFiles(folder, NUMERICS)) as files:
        files.put(features(1))
        assert set(files.get([key(1)])) == {key(1)}


# --- the bound ------------------------------------------------------------------------------


def sizes(folder):
    return bytes_used(place(folder).folder)


def test_the_file_stays_within_its_bound_and_the_newest_are_there(tmp_path):
    for start in range(0, 3000, 100):
        store(tmp_path, *range(start, start + 100), most=MB)
        assert sizes(tmp_path) <= MB
    there = right_ones(tmp_path, *range(3000))
    assert set(range(2900, 3000)) <= there
    assert sizes(tmp_path) > 0.6 * MB
    counts = counted(place(tmp_path).counts)
    assert counts.removed == 3000 - len(there)
    assert counts.faults == ()


def test_the_least_used_go_first(tmp_path):
    def at(hour):
        return {"most": MB, "clock": lambda: hour * 3600.0}

    store(tmp_path, *range(100), **at(0))
    store(tmp_path, *range(100, 400), **at(1))
    with opened(tmp_path, **at(2)) as files:
        assert len(files.get([key(n) for n in range(100)])) == 100
    removed = counted(place(tmp_path).counts).removed
    for start in range(1000, 9000, 100):
        store(tmp_path, *range(start, start + 100), **at(3))
        if counted(place(tmp_path).counts).removed > removed:
            break
    assert right_ones(tmp_path, *range(100)) == set(range(100))
    assert len(right_ones(tmp_path, *range(100, 400))) < 300


def test_a_smaller_bound_than_before_makes_the_file_smaller(tmp_path):
    store(tmp_path, *range(2000))
    assert sizes(tmp_path) > 1.5 * MB
    store(tmp_path, 5000, most=MB)
    assert sizes(tmp_path) <= MB
    assert right_ones(tmp_path, 1999, 5000) == {1999, 5000}


def test_a_bound_below_a_batch_stores_nothing(tmp_path):
    store(tmp_path, *range(64), most=20_000)
    assert right_ones(tmp_path, *range(64)) == set()
    assert counted(place(tmp_path).counts).faults == ()


def test_a_line_of_counts_is_plain_json(tmp_path):
    store(tmp_path, 1)
    assert json.loads(place(tmp_path).counts.read_text()) == {"computed": 1, "removed": 0}
