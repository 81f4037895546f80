"""A backbone's weights as a file: the digest without torch, converted checkpoints, damaged files."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from adapters.kit import toy_backbone
from fcil_adapters.backbones.backbone import backbone_digest
from fcil_adapters.backbones.weights import WeightsFile
from fcil_client.cli.main import app
from fcil_protocol.errors import DataError


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_the_digest_of_a_file_is_torchs_digest_of_its_tensors(tmp_path, dtype):
    state = {k: v.to(dtype) for k, v in toy_backbone().module.state_dict().items()}
    state["scalar"] = torch.tensor(0.5, dtype=dtype)
    state["none"] = torch.zeros(0, 3, dtype=dtype)
    path = tmp_path / "toy.safetensors"
    safetensors.torch.save_file(state | {"head.weight": torch.zeros(2, 2)}, path)
    assert WeightsFile.open(path).digest() == backbone_digest(state)


def test_tensors_at_odd_places_are_read_all_the_same(tmp_path):
    """safetensors pads its header, but need not."""
    values = np.arange(6, dtype="<f4").reshape(2, 3)
    header = json.dumps({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
    header += b" " * (5 - (8 + len(header)) % 4)
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + values.tobytes())
    file = WeightsFile.open(path)
    assert file.tensors["a"].offset % 4 == 1
    (read,) = file.tensors_f32().values()
    np.testing.assert_array_equal(read, values)
    assert read.flags.aligned
    assert file.digest() == backbone_digest({"a": torch.tensor(values)})


def header(**entry):
    text = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **entry}})
    return len(text).to_bytes(8, "little") + text.encode() + bytes(8)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is not a safetensors file"),
        (b"words and more words", "is not a safetensors file"),
        ((1 << 40).to_bytes(8, "little"), "is not a safetensors file"),
        (header(shape=[3]), "is not a safetensors file"),
        (header(data_offsets=[8, 0]), "is not a safetensors file"),
        (header(data_offsets="ab"), "is not a safetensors file"),
        (header(shape=[-1, -2]), "is not a safetensors file"),
        (header(shape=[float("inf")]), "is not a safetensors file"),
        (header()[:-1], "is cut short"),
        (b"\x02" + bytes(7) + b"[]", "is not a safetensors file"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, data, words):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(DataError, match=words):
        WeightsFile.open(path)


def test_no_damage_does_anything_but_a_sentence(tmp_path):
    rng, path = np.random.default_rng(7), tmp_path / "x.safetensors"
    safetensors.torch.save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)}, path)
    whole, outcomes = path.read_bytes(), set()
    for _ in range(500):
        data = bytearray(whole)
        for at in rng.integers(0, len(data), rng.integers(1, 4)):
            data[at] = rng.integers(256)
        path.write_bytes(data[: rng.integers(len(data) // 2, 2 * len(data))])
        try:
            outcomes.add(bool(WeightsFile.open(path).digest()))
        except DataError:
            outcomes.add("refused")
    assert outcomes == {True, "refused"}


def test_numbers_of_another_kind_are_named(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"a": torch.zeros(2, dtype=torch.bfloat16)}, path)
    with pytest.raises(DataError, match="a has the type BF16"):
        WeightsFile.open(path).digest()


class TestConvert:
    def convert(self, source, target):
        return CliRunner().invoke(app, ["backbone", "convert", str(source), str(target), "--json"])

    @pytest.mark.parametrize(
        "wrap",
        [
            lambda state: state,
            lambda state: {"model": state, "epoch": 3},
            lambda state: {"teacher": {f"module.backbone.{k}": v for k, v in state.items()}},
        ],
    )
    def test_finds_the_weights_wherever_training_scripts_keep_them(self, tmp_path, wrap):
        state = toy_backbone().module.state_dict()
        torch.save(wrap(state), tmp_path / "x.pth")
        done = self.convert(tmp_path / "x.pth", tmp_path / "x.safetensors")
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["data"]["digest"] == backbone_digest(state)

    def test_never_runs_what_a_checkpoint_holds(self, tmp_path):
        marker = tmp_path / "ran"

        class Evil:
            def __reduce__(self):
                return (open, (str(marker), "w"))

        for name, save in (
            ("a.pth", torch.save),
            ("b.pth", lambda x, p: p.write_bytes(pickle.dumps(x))),
        ):
            save({"model": Evil()}, tmp_path / name)
            done = self.convert(tmp_path / name, tmp_path / "x.safetensors")
            assert done.exit_code == 4
            assert "could contain a program; it was not opened" in done.output
        assert not marker.exists()

    @pytest.mark.parametrize("content", [b"", b"junk", pickle.dumps({"epoch": 3})])
    def test_refuses_what_holds_no_weights(self, tmp_path, content):
        (tmp_path / "x.pth").write_bytes(content)
        done = self.convert(tmp_path / "x.pth", tmp_path / "x.safetensors")
        assert done.exit_code == 4
        assert "Traceback" not in done.output

    def test_overwrites_nothing(self, tmp_path):
        torch.save({"a": torch.zeros(2)}, tmp_path / "x.pth")
        (tmp_path / "x.safetensors").write_text("mine")
        done = self.convert(tmp_path / "x.pth", tmp_path / "x.safetensors")
        assert done.exit_code == 4
        assert (tmp_path / "x.safetensors").read_text() == "mine"
