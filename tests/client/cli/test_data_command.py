"""``fcil-client data`` shows what ``--data`` means, and every command means the same by a name."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adapters.picture_kit import png
from fcil_adapters.images import named_sets
from fcil_client.cli.main import app
from fcil_client.doctor.probes import images
from fcil_client.state.home import data_digest, find_data
from fcil_protocol.errors import DataError


@pytest.fixture
def called(tmp_path, monkeypatch):
    monkeypatch.setenv(named_sets.VARIABLE, str(tmp_path / "sets"))
    monkeypatch.chdir(tmp_path)

    def call(*words):
        return CliRunner().invoke(app, [str(word) for word in words])

    return call


def write_set(folder):
    """Write a CIFAR-100 of three images."""
    folder.mkdir(parents=True)
    for name, labels in (("train.bin", b"\0\1"), ("test.bin", b"\0")):
        (folder / name).write_bytes(b"".join(bytes([9, n]) + bytes([n]) * 3072 for n in labels))
    (folder / "fine_label_names.txt").write_text("apple\nbear\n")


def test_it_shows_classes_sides_and_what_is_left_out(called, tmp_path):
    for name in ("1.png", "3.png"):
        (tmp_path / name).write_bytes(png())
    Path("list.csv").write_text(
        "path,label,split\n1.png,Lynx,train\n2.png,Lynx,test\n3.png,[b]ear,test\n"
    )
    done = called("data", "list.csv")
    assert done.exit_code == 0
    first, second, *table = done.stdout.splitlines()
    assert (first, second) == ("list.csv, a CSV list", "2 images of 2 classes: 1 train, 1 test")
    assert [line.split() for line in table] == [
        ["class", "train", "test"],
        ["Lynx", "1", "0"],
        ["[b]ear", "0", "1"],
    ]
    assert "warning: line 3 of list.csv is left out" in done.stderr
    assert "warning: class '[b]ear' has no image to train on: " in done.stderr
    row = json.loads(called("data", "list.csv", "--json").stdout)["data"]
    assert row["classes"] == {"Lynx": {"train": 1}, "[b]ear": {"test": 1}}
    assert len(row["faults"]) == 2


def test_a_name_is_the_same_data_to_every_command(called, tmp_path):
    folder = tmp_path / "sets" / "cifar100"
    write_set(folder)
    row = json.loads(called("data", "cifar100", "--json").stdout)["data"]
    assert (row["path"], row["form"], row["images"]) == (str(folder), "CIFAR folder", 3)
    assert row["classes"] == {"apple": {"train": 1, "test": 1}, "bear": {"train": 1}}
    assert find_data("cifar100") == folder
    assert data_digest(Path("cifar100")) == data_digest(folder)
    assert images.look(Path("cifar100"), None).counts["bear"]["train"] == 1
    split = ["--clients", 1, "--partition", "iid", "--tasks", 1, "--json"]
    by_name = json.loads(called("split", "--data", "cifar100", *split).stdout)["data"]
    by_path = json.loads(called("split", "--data", folder, *split).stdout)["data"]
    assert by_name["digest"] == by_path["digest"]


def test_what_is_not_here_and_what_cannot_be_downloaded_is_told(called):
    done = called("data", "cifar100")
    assert done.exit_code == DataError.exit_code
    assert "fcil-client data cifar100 --download" in done.stderr
    for command in ("join", "split"):
        words = ["--clients", 2] if command == "split" else []
        done = called(command, "--data", "cifar100", *words)
        assert "cifar100 is not on this machine" in done.stdout + done.stderr
    done = called("data", "pictures", "--download")
    assert "--download is for data sets by name, and pictures is none" in done.stderr
    assert "cifar10, cifar100, hf:OWNER/NAME@REVISION" in done.stderr
