"""What a client takes of its machine: cores and memory of the machine or of its cgroup."""

import os

import pytest
from typer.testing import CliRunner

from fcil_adapters.resources import machine
from fcil_client.cli.main import app
from fcil_client.rounds import resources as module
from fcil_client.rounds.resources import LEAST_BYTES, read_bound, resources
from fcil_client.rounds.round_work import ClientOptions, RoundWork
from fcil_client.state.home import Enrolment, Home
from fcil_protocol.errors import UsageError
from fcil_protocol.formats import show_size
from fcil_protocol.ids import ClientId
from fcil_protocol.trust.keys import PrivateKeys


def system(root, **files):
    """Write files of a system under ``root``; ``__`` in a name stands for ``/``."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


NEWER = {"proc__self__cgroup": "0::/box/inner"}
OLDER = {"proc__self__cgroup": "5:cpu,cpuacct:/box\n4:memory:/box\n1:name=systemd:/x"}


class TestMachine:
    def test_the_tightest_of_the_cgroups_above_counts(self, tmp_path):
        root = system(
            tmp_path, **NEWER, sys__fs__cgroup__box__cpu_dot_max="150000 100000",
            sys__fs__cgroup__box__inner__cpu_dot_max="max 100000",
            sys__fs__cgroup__box__memory_dot_max=str(900_000_000),
            sys__fs__cgroup__box__memory_dot_current=str(500_000_000),
            sys__fs__cgroup__box__memory_dot_stat="anon 1\ninactive_file 100000000",
            sys__fs__cgroup__box__inner__memory_dot_max="max",
        )  # fmt: skip
        assert machine.share(root) == machine.CgroupShare(1.5, 900_000_000, 400_000_000)
        assert machine.cores(root) == min(2, len(os.sched_getaffinity(0)))
        assert machine.memory(root) == (900_000_000, True)

    def test_the_processors_model_is_named(self, tmp_path):
        text = "processor\t: 0\nmodel\t\t: 17\nmodel name\t: A 9: Two \nmodel name\t: Other"
        assert machine.processor(system(tmp_path, proc__cpuinfo=text)) == "A 9: Two"

    def test_older_cgroups_are_read_too(self, tmp_path):
        root = system(
            tmp_path, **OLDER, **{
                "sys__fs__cgroup__cpu,cpuacct__box__cpu_dot_cfs_quota_us": "50000",
                "sys__fs__cgroup__cpu,cpuacct__box__cpu_dot_cfs_period_us": "100000",
                "sys__fs__cgroup__memory__box__memory_dot_limit_in_bytes": "300000000",
                "sys__fs__cgroup__memory__memory_dot_limit_in_bytes": "9223372036854771712",
            },
        )  # fmt: skip
        assert machine.share(root) == machine.CgroupShare(0.5, 300_000_000, 0)
        assert machine.cores(root) == 1, "never none"

    @pytest.mark.parametrize("text", ["-1", "0", "much", ""])
    def test_what_is_no_limit_limits_nothing(self, tmp_path, text):
        root = system(
            tmp_path, **NEWER, sys__fs__cgroup__box__cpu_dot_max=f"{text} 0",
            sys__fs__cgroup__box__memory_dot_max=text if text != "0" else "max",
        )  # fmt: skip
        assert machine.share(root) == machine.CgroupShare()
        assert machine.cores(root) == len(os.sched_getaffinity(0))
        assert machine.memory(root)[1] is False

    def test_a_limit_above_what_there_is_is_none(self, tmp_path):
        root = system(tmp_path, **NEWER, sys__fs__cgroup__memory_dot_max=str(1 << 50))
        assert machine.memory(root)[1] is False


class TestResources:
    @pytest.fixture(autouse=True)
    def machine(self, monkeypatch):
        monkeypatch.setattr(module.machine, "memory", lambda: (4_000_000_000, True))
        monkeypatch.setattr(module.machine, "cores", lambda: 3)

    def test_what_is_not_chosen_follows_the_machine(self):
        made = resources()
        assert (made.threads, made.nice, made.bound) == (3, 10, 0)
        assert made.image_bytes == 1_000_000_000, "a quarter"
        assert "all the memory that its cgroup allows (4.0 GB)" in made.description

    def test_decoded_images_take_their_part_of_the_bound_or_what_is_said(self):
        made = resources(threads=1, nice=0, bound=800_000_000)
        assert (made.threads, made.nice, made.image_bytes) == (1, 0, 200_000_000)
        assert made.description.startswith("1 thread, nice 0; at most 800 MB of memory")
        assert resources(bound=800_000_000, image_bytes=5).image_bytes == 5

    def test_a_bound_above_the_machine_leaves_the_images_their_part_of_the_machine(self):
        assert resources(bound=40_000_000_000).image_bytes == 1_000_000_000

    def test_a_large_machine_keeps_images_up_to_the_usual_bound(self, monkeypatch):
        monkeypatch.setattr(module.machine, "memory", lambda: (64_000_000_000, False))
        assert resources().image_bytes == 2_000_000_000

    @pytest.mark.parametrize(
        ("text", "size"),
        [("1.5 GB", 1_500_000_000), ("800MB", 800_000_000), ("1 GiB", 1 << 30), (None, 0)],
    )
    def test_a_bound_is_read(self, text, size):
        assert read_bound(text) == size

    @pytest.mark.parametrize("text", ["", "800", "much", "-1 GB", "0 MB", "1e999 GB"])
    def test_what_is_no_size_is_refused_in_a_sentence(self, text):
        with pytest.raises(UsageError, match="--max-memory is a size such as"):
            read_bound(text)

    def test_a_bound_in_which_nothing_fits_is_refused_before_anything_starts(self):
        with pytest.raises(UsageError, match="needs at least 250 MB"):
            read_bound(f"{LEAST_BYTES - 1} B")

    def test_sizes_are_shown_as_they_are_written(self):
        shown = [show_size(n) for n in (250_000_000, 1_500_000_000, 24_152_000_000)]
        assert shown == ["250 MB", "1.5 GB", "24 GB"]


def test_the_worker_is_told_what_it_may_take(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    fed = "0" * 32
    home = Home.of(fed, tmp_path)
    enrolment = Enrolment(ClientId("a" * 26), "c", fed, "", ("a:1",), str(tmp_path))
    options = ClientOptions(tmp_path, threads=3, nice=4, max_memory=800_000_000, image_bytes=7)
    work = RoundWork(home, enrolment, PrivateKeys.generate(), options)
    fields = work._data_fields()
    assert (fields["threads"], fields["memory_bytes"]) == (3, 7)
    host = work._host
    assert (host._nice, host._memory, host._env["OMP_NUM_THREADS"]) == (4, 800_000_000, "3")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--hours", "6"), "expected hours such as 22-6"),
        (("--max-memory", "lots"), "--max-memory is a size"),
        (("--max-memory", "10 MB"), "needs at least 250 MB"),
        (("--min-battery", "101"), "--min-battery"),
        (("--nice", "-1"), "--nice"),
    ],
)
def test_a_wrong_choice_is_refused_before_anything_starts(tmp_path, arguments, words):
    result = CliRunner().invoke(app, ["join", "--data", str(tmp_path), *arguments])
    assert result.exit_code in (2, 4)
    assert words in result.output


def test_the_older_name_of_a_choice_is_understood_and_not_shown():
    shown = CliRunner().invoke(app, ["join", "--help"], env={"COLUMNS": "200"}).output
    assert "--max-threads" in shown
    assert " --threads" not in shown
