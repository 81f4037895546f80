"""The LoRA that a run begins with: read once, kept, and put into the first opening."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters.export.test_adapter_start import INFO, some_lora, write
from adapters.kit import Federation, make_tasks, toy_backbone, toy_images
from fcil_adapters.contract import registry
from fcil_adapters.contract.half_precision import EXACT, forms_of
from fcil_protocol.errors import ConfigError, CorruptFile, DataError
from fcil_server.aggregation.start import FACT, NAME, RunStart, read_new

OPTIONS: dict[str, Any] = {"rank": 3, "blocks": [0, 1], "epochs": 1, "batch_size": 4}
(TASK,) = make_tasks([0, 1])


def opened(name: str, **options: Any) -> Federation:
    fed = Federation.of(name, [toy_images({0: 3, 1: 3})], toy_backbone(), **OPTIONS, **options)
    fed.open(TASK)
    return fed


def begin(folder: Path, fed: Federation, directory: Path) -> RunStart:
    new = read_new(str(folder), fed.method, fed.hparams, INFO)
    new.write(directory)
    found = RunStart.of(directory, {FACT: new.facts})
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["fedavg_lora", "fed_talora", "ffa_lora", "ewc"])
def test_the_first_state_has_the_adapters_product_and_trainable_ranks(
    name: str, tmp_path: Path
) -> None:
    """The adapter has rank 2 at three places, the run rank 3 at eight."""
    lora = some_lora()
    fed = opened(name)
    drawn = fed.state
    state = begin(write(tmp_path / "a", lora), fed, tmp_path / "run").into(drawn, EXACT)
    assert {n: a.shape for n, a in state.tensors.items()} == {
        n: a.shape for n, a in drawn.tensors.items()
    }
    for place in ("0.q", "0.v", "1.fc1"):
        A, B = state.f32(f"lora.{place}.A"), state.f32(f"lora.{place}.B")
        np.testing.assert_array_equal(A[:2], lora[f"lora.{place}.A"])
        np.testing.assert_array_equal(B[:, :2], lora[f"lora.{place}.B"])
        np.testing.assert_array_equal(A[2], drawn.f32(f"lora.{place}.A")[2])
        assert not B[:, 2].any()
    same = [n for n in drawn.tensors if not n.startswith(("lora.0.q", "lora.0.v", "lora.1.fc1"))]
    for n in same:
        np.testing.assert_array_equal(state.tensors[n], drawn.tensors[n])


def test_clients_get_what_the_state_holds_in_half_precision(tmp_path: Path) -> None:
    fed = opened("fedavg_lora")
    forms = forms_of("weights", fed.method.name, fed.method.half)
    state = begin(write(tmp_path / "a", some_lora()), fed, tmp_path / "run").into(fed.state, forms)
    A = state.f32("lora.0.q.A")
    np.testing.assert_array_equal(A[:2], some_lora()["lora.0.q.A"].astype(np.float16))


def test_facts_and_the_sentence_say_what_it_is(tmp_path: Path) -> None:
    fed = opened("fedavg_lora")
    new = read_new(str(write(tmp_path / "a", some_lora())), fed.method, fed.hparams, INFO)
    assert new.facts["places"] == ["0.q", "0.v", "1.fc1"]
    assert new.facts["adapter"] == str(tmp_path / "a")
    assert f"(digest {new.facts['digest'][:12]}, 3 of 8 places)" in new.text()
    assert new.text().endswith("its head is not used, since the run has classes of its own")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("pilora", "each of its tasks trains a LoRA of its own"),
        ("lorm", "each of its tasks trains a LoRA of its own"),
        ("adapt_once", "its clients compare the digest"),
        ("hgp", "it trains no LoRA that all tasks share"),
        ("running_mean", "it trains no LoRA that all tasks share"),
    ],
)
def test_a_method_that_cannot_begin_with_one_says_so(name: str, why: str, tmp_path: Path) -> None:
    method = registry.load_method(name)
    with pytest.raises(ConfigError, match=f"{name} cannot begin with an adapter: {why}"):
        read_new(str(tmp_path), method, registry.make_hparams(method, {}), INFO)


def test_plora_begins_with_one_too(tmp_path: Path) -> None:
    method = registry.load_method("plora")
    hparams = registry.make_hparams(method, {"rank": 2, "blocks": [0]})
    folder = write(tmp_path / "a", some_lora(("0.q", "0.v")))
    assert read_new(str(folder), method, hparams, INFO).facts["of"] == 2
    with pytest.raises(DataError, match="cannot be read as the description"):
        read_new(str(tmp_path / "none"), method, hparams, INFO)


def test_a_file_that_is_damaged_or_gone_is_never_guessed(tmp_path: Path) -> None:
    fed = opened("fedavg_lora")
    start = begin(write(tmp_path / "a", some_lora()), fed, tmp_path / "run")
    path = tmp_path / "run" / NAME
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptFile, match="is not the adapter that the run began with"):
        start.into(fed.state, EXACT)
    path.unlink()
    with pytest.raises(CorruptFile, match="began with, is missing"):
        start.into(fed.state, EXACT)


def test_a_run_without_one_begins_as_drawn(tmp_path: Path) -> None:
    assert RunStart.of(tmp_path, {"budget": {}}) is None
