"""Mixed precision is a client's choice: what it means where, and what it leaves in float32."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from adapters.kit import Federation, make_tasks, toy_backbone, toy_images
from fcil_adapters.backbones.backbone import mixed, precision_of
from fcil_adapters.contract import State
from fcil_protocol.errors import ConfigError

METHODS = ("pilora", "plora", "fed_talora", "hgp", "hepco")


def test_auto_is_fp32_everywhere_and_never_asks_torch_for_a_gpu():
    assert precision_of("auto", "cpu") == precision_of("auto", "cuda:1") == "fp32"
    assert precision_of("fp32", "cuda:3") == "fp32"
    assert precision_of("amp", "cpu") == "bf16"


@pytest.mark.parametrize(("native", "expected"), [(True, "bf16"), (False, "fp16")])
def test_on_a_gpu_it_is_bf16_where_the_device_computes_with_it(monkeypatch, native, expected):
    def supported(*, including_emulation):
        assert not including_emulation
        return native

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    monkeypatch.setattr(torch.cuda, "device", lambda _: mixed("fp32", "cpu"))
    assert precision_of("amp", "cuda") == precision_of("amp", "cuda:1") == expected


def test_an_unknown_word_names_the_known_ones():
    with pytest.raises(ConfigError, match="unknown precision 'half'; known are auto, fp32, amp"):
        precision_of("half", "cpu")


@pytest.mark.parametrize("method", METHODS)
def test_training_uses_it_stays_close_and_sends_float32(method):
    def upload(precision):
        backbone = toy_backbone()
        backbone.precision = precision
        fed = Federation.of(
            method, [toy_images({0: 6, 1: 6}, seed=2)], backbone,
            epochs=1, batch_size=4, blocks=[0], augment="none",
        )  # fmt: skip
        fed.open(make_tasks([0, 1])[0])
        dtypes = set()
        original = torch.nn.functional.linear

        def linear(x, weight, bias=None):
            y = original(x, weight, bias)
            dtypes.add((torch.is_grad_enabled(), y.dtype))
            return y

        torch.nn.functional.linear = linear
        try:
            _, sent = fed.learner.run(fed.context("train"), State(), fed.parts(), fed.clients[0])
        finally:
            torch.nn.functional.linear = original
        return sent, dtypes

    plain, exact = upload("fp32")
    sent, dtypes = upload("bf16")
    assert exact <= {(True, torch.float32), (False, torch.float32)}
    assert (True, torch.bfloat16) in dtypes
    if method != "plora":  # its teacher runs without a gradient, in the training step
        assert (False, torch.bfloat16) not in dtypes
    assert sent.tensors.keys() == plain.tensors.keys()
    for name, tensor in sent.tensors.items():
        assert tensor.dtype == plain.tensors[name].dtype
        if tensor.dtype == np.float32:
            assert np.isfinite(tensor).all()
            spread = max(np.abs(plain.tensors[name]).max(), 1e-3)
            assert np.abs(tensor - plain.tensors[name]).max() <= 0.1 * spread, name


def test_means_from_training_batches_are_of_float32_features():
    def means(precision):
        backbone = toy_backbone()
        backbone.precision = precision
        fed = Federation.of(
            "pilora", [toy_images({0: 6, 1: 6}, seed=2)], backbone,
            epochs=1, batch_size=4, blocks=[0], mean_from="training",
        )  # fmt: skip
        fed.open(make_tasks([0, 1])[0])
        context = replace(fed.context("train"), seed=(4,))
        _, sent = fed.learner.run(context, State(), fed.parts(), fed.clients[0])
        return sent.f32("mean")

    assert np.array_equal(means("fp32"), means("bf16"))
