"""``fcil-client export``: the client's model as a file that needs no client, checked at export."""

import json
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

import fcil_adapters.export
from client.model_kit import give_model, picture, write_shades
from fcil_adapters.export import load
from fcil_adapters.export.statistics_file import read_statistics
from fcil_adapters.images.decoding import open_source
from fcil_client.cli import main as cli
from fcil_client.data import manifest
from fcil_client.predict.export import own_images
from fcil_client.state import current_model

SHADES = {"black": 0, "dark": 1, "white": 4, "strange": 7}


@pytest.fixture
def client(home, enrolment, tmp_path):
    """A client with a model; of one class that it holds the model knows nothing."""
    folder = write_shades(tmp_path / "images", SHADES, 20)
    home.save_enrolment(replace(enrolment, data=str(folder)))
    manifest.scan(open_source(folder), home.directory / manifest.NAME, home.salt())
    give_model(home)
    return home


def run(*arguments, code=0):
    done = CliRunner().invoke(cli.app, [*map(str, arguments)])
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    return done


@pytest.mark.full
def test_the_file_names_images_as_the_current_model_does_wherever_it_is(client, tmp_path):
    file, shot = tmp_path / "model.onnx", tmp_path / "shot.png"
    shot.write_bytes(picture(3.2))
    told = json.loads(run("export", "--onnx", file, "--json").stdout)["data"]
    assert (told["method"], told["task"], told["precision"]) == ("running_mean", 1, "fp32")
    assert told["names"] == ["black", "dark", "", "", "white"]
    assert told["temperature"] == pytest.approx(temperature(shot))
    assert told["checked"]["images"] > 4, "its own images beside the probe images"
    expected = rows(shot)
    shutil.rmtree(client.directory)
    found = rows(shot, "--model", file)
    assert [one["class"] for one in found] == [3, 4, 2]
    assert [one["name"] for one in found] == [None, "white", None]
    for one, other in zip(found, expected, strict=True):
        assert one["probability"] == pytest.approx(other["probability"], abs=1e-4)


def rows(*arguments):
    return json.loads(run("predict", *arguments, "--json").stdout)["data"]["images"][0]["top"]


def temperature(shot):
    return json.loads(run("predict", shot, "--json").stdout)["data"]["model"]["temperature"]


def test_int8_is_measured_on_its_own_images(client, tmp_path):
    """On those that it trains with, of classes that the model knows."""
    model = current_model.load(client)
    images = own_images(client, model, 1000, threads=1)
    scanned = manifest.load(client.directory / manifest.NAME, client.salt())
    train = [i for i in scanned.images if i.side == "train"]
    assert len(images) == sum(i.entry.class_name != "strange" for i in train)
    assert images.shape[1:] == (32, 32, 3)
    shades = {round(float(np.mean(image)) / 25.5) for image in images}
    assert shades == {0, 1, 4}
    few = own_images(client, model, 6, threads=1)
    assert {round(float(np.mean(image)) / 25.5) for image in few} == {0, 1, 4}, "from all classes"


def test_images_that_are_away_stop_no_export(client, tmp_path):
    shutil.rmtree(tmp_path / "images")
    assert own_images(client, current_model.load(client), 10, threads=1) is None


def test_where_torch_or_onnx_is_missing_it_says_what_to_install(client, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcil_adapters.export.model_file", None)
    monkeypatch.delattr(fcil_adapters.export, "model_file", raising=False)
    said = run("export", "--onnx", tmp_path / "m.onnx", code=4).stderr
    assert "fcil[client,export,edge]" in said


def test_all_that_is_missing_is_named_at_once_with_one_command(client, tmp_path, monkeypatch):
    for name in ("onnxscript", "onnxruntime"):
        monkeypatch.setitem(sys.modules, name, None)
    said = " ".join(run("export", "--onnx", tmp_path / "m.onnx", code=4).stderr.split())
    assert "not installed (onnxscript, onnxruntime)" in said
    assert f"{sys.prefix}/bin/pip install 'fcil[export,edge]'" in said
    assert "loading" not in said, "it is found before any work"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--precision", "int4"], "unknown precision 'int4'"),
        (["--opset", "3"], "opset 3 is not possible"),
        (["--onnx", "."], "expected a file in a folder that exists"),
        (["--onnx", "no/such/folder/m.onnx"], "expected a file in a folder that exists"),
        (["--data", "nowhere"], "nowhere is not enrolled"),
    ],
)
def test_bad_arguments_get_one_sentence(client, tmp_path, arguments, words):
    given = ["export", "--onnx", tmp_path / "m.onnx", *arguments]
    assert words in run(*given, code=4).stderr
    assert not (tmp_path / "m.onnx").exists()


def test_a_client_writes_the_statistics_that_it_has_received(client, tmp_path, monkeypatch):
    """Without torch, too."""
    monkeypatch.setattr(load, "choose", None)
    done = run("export", "--statistics", tmp_path / "s", "--json")
    data = json.loads(done.stdout)["data"]
    info, tensors = read_statistics(tmp_path / "s")
    assert (info.method, info.source, list(info.classes)) == (
        "running_mean", "means", data["classes"],
    )  # fmt: skip
    assert len(tensors["mean"]) == len(info.classes)
    assert "running_mean" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--peft", "adapter"], "running_mean trains no LoRA"),
        (["--timm", "adapter"], "running_mean works on pixels"),
        (["--peft", "adapter", "--opset", "18"], "--opset goes with --onnx"),
        (
            ["--peft", "adapter", "--onnx", "m.onnx"],
            "expected one of --onnx, --timm, --peft, --statistics, --mlflow; got --onnx and",
        ),
        ([], "expected one of --onnx, --timm, --peft, --statistics, --mlflow; got none"),
    ],
)
def test_an_adapter_that_cannot_be_written_gets_one_sentence(
    client, tmp_path, monkeypatch, arguments, words
):
    monkeypatch.chdir(tmp_path)
    assert words in " ".join(run("export", *arguments, code=4).stderr.split())
    assert not (tmp_path / "adapter").exists()


def test_a_damaged_file_is_one_sentence(client, tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"no model")
    (tmp_path / "x.png").write_bytes(picture(1))
    said = run("predict", tmp_path / "x.png", "--model", tmp_path / "m.onnx", code=4).stderr
    assert said.startswith("error [data_invalid]")
