"""An adapter as the first LoRA of a run: exactly, or refused with one sentence."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import safetensors.numpy

from adapters.kit import toy_backbone
from fcil_adapters.export.adapter_start import read_start
from fcil_adapters.export.folder import ABOUT
from fcil_adapters.export.peft_adapter import (
    CONFIG,
    WEIGHTS,
    adapter_config,
    adapter_layers,
    adapter_tensors,
)
from fcil_adapters.toolkit.lora.low_rank import Changes
from fcil_adapters.toolkit.lora.tensors import draw_lora, lora_names
from fcil_protocol.errors import DataError

INFO = toy_backbone().info
PLACES = ("0.q", "0.v", "1.fc1")
QKV = "base_model.model.blocks.0.attn.qkv.lora_"


def some_lora(places=PLACES, rank=2, seed=1):
    rng = np.random.default_rng(seed)
    drawn = draw_lora(lora_names(places), rank, INFO, rng)
    return {n: rng.standard_normal(a.shape).astype(np.float32) for n, a in drawn.items()}


def write(folder, lora, scale=1.0, *, about=True, head=True, **config):
    """Write an adapter as an export does, with other entries of its configuration."""
    folder.mkdir(exist_ok=True)
    layers = adapter_layers(Changes.of(scale, [lora]), INFO)
    rows = (np.ones((3, INFO.dim), np.float32), np.ones(3, np.float32)) if head else None
    stated = json.loads(adapter_config(layers, scale, INFO.name, with_head=head)) | config
    (folder / CONFIG).write_text(json.dumps(stated))
    safetensors.numpy.save_file(adapter_tensors(layers, rows), folder / WEIGHTS)
    if about:
        (folder / ABOUT).write_text(json.dumps({"backbone": {"digest": INFO.digest}}))
    return folder


def read(folder, places=PLACES, rank=2, scale=1.0):
    return read_start(folder, places, rank=rank, scale=scale, info=INFO)


def product(tensors, place):
    A, B = (tensors[f"lora.{place}.{m}"].astype(np.float64) for m in "AB")
    return B @ A


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_what_an_export_wrote_comes_back_to_the_last_bit(tmp_path, scale):
    lora = some_lora()
    found = read(write(tmp_path / "a", lora, scale), scale=scale)
    assert found.tensors.keys() == lora.keys()
    for name, values in lora.items():
        np.testing.assert_array_equal(found.tensors[name], values)
    assert (found.checked, found.ignored) == ("digest", ("head",))


def test_alpha_and_the_runs_scale_are_put_into_b(tmp_path):
    lora = some_lora(("1.fc1",))
    plain = write(tmp_path / "a", lora, lora_alpha=6, alpha_pattern={})
    np.testing.assert_allclose(
        0.5 * product(read(plain, scale=0.5).tensors, "1.fc1"),
        6 / 2 * product(lora, "1.fc1"),
        atol=1e-5,
    )
    other = write(tmp_path / "b", lora, alpha_pattern={"fc1": 8}, use_rslora=True)
    np.testing.assert_allclose(
        product(read(other).tensors, "1.fc1"), 8 / 2**0.5 * product(lora, "1.fc1"), atol=1e-5
    )


def test_a_dense_b_on_qkv_gives_each_slice_all_ranks(tmp_path):
    """As PEFT trains it; a run with q, k and v, or with qkv whole, can be that."""
    lora = some_lora(("0.qkv",), rank=3)
    folder = write(tmp_path / "a", lora)
    whole = product(lora, "0.qkv")
    np.testing.assert_allclose(
        product(read(folder, ("0.qkv",), 3).tensors, "0.qkv"), whole, atol=1e-6
    )
    thirds = read(folder, ("0.q", "0.k", "0.v"), 3).tensors
    for i, module in enumerate("qkv"):
        np.testing.assert_allclose(
            product(thirds, f"0.{module}"), whole[16 * i : 16 * (i + 1)], atol=1e-6
        )


def test_what_is_known_of_the_base_is_told(tmp_path):
    lora = some_lora()
    for base, checked in ((f"timm/{INFO.name}", "name"), (None, "nothing")):
        folder = write(tmp_path / "a", lora, about=False, base_model_name_or_path=base)
        assert read(folder).checked == checked


def test_places_that_the_adapter_lacks_are_left_out(tmp_path):
    folder = write(tmp_path / "a", some_lora(("0.q",)))
    assert set(read(folder).tensors) == {"lora.0.q.A", "lora.0.q.B"}


# --- refusals -------------------------------------------------------------------------------


def changed(**tensors):
    """Return a change of an adapter's weights."""

    def change(folder):
        held = safetensors.numpy.load_file(folder / WEIGHTS)
        named = {name.replace("QKV_", QKV) + ".weight": a for name, a in tensors.items()}
        held = {n: a for n, a in (held | named).items() if a is not None}
        safetensors.numpy.save_file(held, folder / WEIGHTS)

    return change


def without(name):
    return lambda folder: (folder / name).unlink()


def in_place_of(name):
    """Put a pipe there, which a reader would wait for."""

    def change(folder):
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def text(name, content):
    return lambda folder: (folder / name).write_text(content)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without(CONFIG), "adapter_config.json cannot be read .*No such file"),
        (without(WEIGHTS), "adapter_model.safetensors cannot be read as safetensors"),
        (text(CONFIG, "{"), "adapter_config.json cannot be read"),
        (text(CONFIG, "[1]"), "it is no object"),
        (text(CONFIG, '{"peft_type": "IA3"}'), "peft_type 'IA3'; expected plain LoRA"),
        (
            text(CONFIG, '{"peft_type": "LORA", "use_dora": true}'),
            "use_dora = True; expected plain",
        ),
        (text(CONFIG, '{"peft_type": "LORA", "bias": "all"}'), "bias = 'all'; expected plain"),
        (
            text(CONFIG, '{"peft_type": "LORA", "lora_alpha": []}'),
            "no usable lora_alpha for blocks",
        ),
        (
            text(CONFIG, '{"peft_type": "LORA", "lora_alpha": NaN}'),
            "no usable lora_alpha for blocks.*it is not finite",
        ),
        (
            text(CONFIG, '{"peft_type": "LORA", "alpha_pattern": {".*qkv$": 3}}'),
            "alpha_pattern has more than names",
        ),
        (
            text(CONFIG, '{"peft_type": "LORA", "init_lora_weights": "pissa_niter_4"}'),
            "init_lora_weights = 'pissa_niter_4'; expected plain",
        ),
        (text(WEIGHTS, "no weights"), "cannot be read as safetensors"),
        (text(ABOUT, '{"backbone": {"digest": "ffff"}}'), "backbone with digest ffff; the run's"),
        (text(ABOUT, '{"backbone": 3}'), "backbone with digest None; the run's"),
        (changed(QKV_A=np.ones((4, 8), np.float32)), r"factors \(4, 8\) .*needs \(r, 16\)"),
        (changed(QKV_A=np.ones((5, 16), np.float32)), r"\(5, 16\) and \(48, 4\) at blocks.0.attn"),
        (changed(QKV_A=np.ones(4, np.float32)), r"shape \(4,\) in .*expected a matrix"),
        (changed(QKV_A=np.array(1, np.float32)), r"shape \(\) in .*expected a matrix"),
        (text(CONFIG, f'{{"peft_type": "LORA", "lora_alpha": 1{"0" * 400}}}'), "no usable lora_al"),
        (text(CONFIG, '{"peft_type": "LORA", "lora_alpha": 30000}'), "a lora_B at .*that exceeds"),
        (text(CONFIG, " " * (1 << 20) + "{}"), "it is too large"),
        (in_place_of(CONFIG), "adapter_config.json .*it is not a file"),
        (in_place_of(WEIGHTS), "adapter_model.safetensors .*it is not a file"),
        (changed(QKV_A=None), "lacks a lora_A or a lora_B"),
        (changed(QKV_A=np.full((4, 16), np.nan, np.float32)), "holds NaN, infinity or huge"),
        (changed(QKV_A=np.full((4, 16), 1e9, np.float32)), "holds NaN, infinity or huge"),
        (
            changed(QKV_B=np.ones((48, 4), np.float32)),
            r"changes blocks.0.attn.qkv \(k of block 0\)",
        ),
        (changed(other=np.ones(3, np.float32)), "has a tensor 'other.weight'; expected LoRA on"),
    ],
)
def test_what_the_run_cannot_be_is_one_sentence(tmp_path, change, said):
    folder = write(tmp_path / "a", some_lora())
    change(folder)
    with pytest.raises(DataError, match=said):
        read(folder)


@pytest.mark.parametrize(
    ("places", "rank", "said"),
    [
        (PLACES, 1, "has rank 2 at blocks.0.attn.qkv for q, and method.rank is 1.*to 2 or more"),
        (
            ("0.q", "0.v"),
            2,
            r"changes blocks.1.mlp.fc1 \(fc1 of block 1\), which this run does not",
        ),
    ],
)
def test_ranks_and_places_beyond_the_runs_are_refused(tmp_path, places, rank, said):
    with pytest.raises(DataError, match=said):
        read(write(tmp_path / "a", some_lora()), places, rank)


def test_another_base_by_name_is_refused(tmp_path):
    folder = write(tmp_path / "a", some_lora(), about=False, base_model_name_or_path="x/vit_b")
    with pytest.raises(DataError, match="base model 'x/vit_b'; the run's is 'toy'"):
        read(folder)
