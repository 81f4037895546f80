"""Exported models: the file scores as the torch model does, says what it is, and is refused else.

What fails is shown with the teaching method, whose graph is written in a moment.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest

from adapters.kit import Federation, make_tasks, toy_backbone, toy_images
from adapters.small import SMALL
from fcil_adapters.backbones.backbone import backbone_digest
from fcil_adapters.backbones.frozen_features import FeatureScorer
from fcil_adapters.contract import registry
from fcil_adapters.export import model_file as export
from fcil_adapters.export.check import TOLERANCES, check_graph, compare
from fcil_adapters.export.exported_model import (
    KEY,
    SEAL_BYTES,
    Checked,
    ExportedModel,
    Origin,
    Tolerance,
    read_info,
    with_seal,
)
from fcil_adapters.export.model_file import ExportOptions, export_model
from fcil_adapters.images.decoding import sample_folder
from fcil_protocol.errors import ConfigError, CorruptFile, DataError, InternalError
from tiers import sampled

# Task 1 has one class; nobody has class 6, so it is no candidate.
TASKS = make_tasks([1, 0], [4], [6, 2])
CLIENTS = [toy_images({1: 5, 0: 3, 4: 4, 2: 2}, 1), toy_images({1: 3, 2: 6}, 3)]
NAMES = {0: "null", 1: "Käse", 2: "two", 6: "never seen"}  # nobody has told the name of 4
ORIGIN = Origin("f" * 32, "r20260102-030405-abcd", 2, 9, NAMES)
IMAGES = toy_images(dict.fromkeys((0, 1, 2, 4), 12), 5).pictures
GRAPHS: dict[tuple[str, int], onnx.ModelProto] = {}


@dataclass(frozen=True)
class Case:
    """A method after three tasks."""

    fed: Federation

    def export(self, target, precision="fp32", images=None, origin=ORIGIN, **options):
        options = ExportOptions(precision, **options)
        ctx = self.fed.context("evaluate")
        return export_model(self.fed.method, ctx, self.fed.parts(), origin, target, options, images)


@cache
def learned(name: str, **options) -> Case:
    fed = Federation.of(name, CLIENTS, toy_backbone(), **{**SMALL[name], **options})
    for task in TASKS:
        fed.run(task)
    return Case(fed)


def error_of(model: ExportedModel, case: Case, images=IMAGES) -> float:
    """The largest difference as a share of the mean spread of an image's scores."""
    expected = case.fed.predictor().logits(images)
    return float(np.abs(model.logits(images) - expected).max() / np.ptp(expected, axis=1).mean())


@pytest.fixture
def target(tmp_path):
    return tmp_path / "model.onnx"


@pytest.fixture(scope="module")
def mean(tmp_path_factory):
    """A whole file, and what export said of it."""
    path = tmp_path_factory.mktemp("mean") / "model.onnx"
    return path, learned("running_mean").export(path)


# A graph takes seconds, so the long tests write those of most methods. That their scores are the
# same while they are traced is asked of all of them below.
CASES = sampled(SMALL, ("running_mean",))


@pytest.fixture
def traced_once(monkeypatch):
    """A method's graph is traced once for all the files that are made of it."""
    write = export._graph

    def once(predictor, name, info, opset):
        if (name, opset) not in GRAPHS:
            GRAPHS[name, opset] = write(predictor, name, info, opset)
        model = onnx.ModelProto()
        model.CopyFrom(GRAPHS[name, opset])
        return model

    monkeypatch.setattr(export, "_graph", once)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "tensor"),
    [("gaussian_head", "turn"), ("ccvr", "calibrated.turn"), ("hgp", "discriminant.turn")],
)
def test_a_quadratic_head_is_exported_for_any_number_of_images(name, tensor, target):
    case = learned(name, head="quadratic")
    case.export(target, images=IMAGES[:8])
    model = ExportedModel.load(target, "cpu", 1)
    assert case.fed.state.f32(tensor).any()
    for count in (1, 3, len(IMAGES)):
        assert error_of(model, case, IMAGES[:count]) < 1e-4


@pytest.mark.parametrize("name", sampled(SMALL))
def test_what_a_trace_computes_is_what_the_predictor_says(name, monkeypatch):
    """Steps that ask whether they are being traced answer as they do then."""
    predictor = learned(name).fed.predictor()
    score = export.torch_score(predictor)
    some = (IMAGES, IMAGES[:1])
    expected = [predictor.logits(images) for images in some]
    monkeypatch.setattr(export.torch.compiler, "is_exporting", lambda: True)
    with export.torch.no_grad():
        for images, logits in zip(some, expected, strict=True):
            scores = score(export.torch.from_numpy(images))
            np.testing.assert_allclose(scores.numpy(), logits, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("name", CASES)
def test_the_file_scores_as_the_torch_model_does(name, target):
    case = learned(name)
    info = case.export(target, images=IMAGES[:8])
    model = ExportedModel.load(target, "cpu", 1)
    assert model.info == info
    assert (info.method, info.precision, info.opset, info.task, info.state) == (
        name, "fp32", 18, 2, 9,
    )  # fmt: skip
    assert info.classes == case.fed.predictor().classes
    assert dict(zip(info.classes, info.names, strict=True)) == {
        0: "null", 1: "Käse", 2: "two", 4: "",
    }  # fmt: skip
    assert info.backbone.digest == case.fed.backbone.info.digest
    assert info.checked.images == 12  # four of them probe images
    assert info.checked.error < 1e-4
    for some in (IMAGES, IMAGES[:1], IMAGES[:0]):
        scores = model.logits(some)
        assert (scores.dtype, scores.shape) == (np.float32, (len(some), 4))
    assert error_of(model, case) < 1e-4
    assert error_of(model, case, IMAGES[:1]) < 1e-4
    assert backbone_digest(case.fed.backbone.module.state_dict()) == info.backbone.digest
    onnx.checker.check_model(onnx.load(target), full_check=True)


@pytest.mark.usefixtures("traced_once")
@pytest.mark.full
def test_half_precision_keeps_the_head_and_both_ends_as_they_are(target):
    case = learned("pilora")
    info = case.export(target, "fp16", images=IMAGES)
    model = ExportedModel.load(target, "cpu", 1)
    assert 1e-6 < error_of(model, case) < 2e-2
    assert info.precision == "fp16"
    graph = onnx.load(target).graph
    (pixels,), (logits,) = graph.input, graph.output
    kinds = (pixels.type.tensor_type.elem_type, logits.type.tensor_type.elem_type)
    assert kinds == (onnx.TensorProto.UINT8, onnx.TensorProto.FLOAT)
    types = {t.data_type for t in graph.initializer if np.prod(t.dims) > 4 * 16}
    assert types == {onnx.TensorProto.FLOAT16}
    prototypes = [t for t in graph.initializer if tuple(t.dims) == (16, 4)]
    assert {t.data_type for t in prototypes} == {onnx.TensorProto.FLOAT}


@pytest.mark.usefixtures("traced_once")
@pytest.mark.full
def test_int8_changes_the_linear_layers_of_the_blocks_alone(target, monkeypatch):
    """It is written because of `force`: what is allowed here, nothing reaches."""
    monkeypatch.setitem(TOLERANCES, "int8", Tolerance(error=1e-9, agreement=1))
    case = learned("hgp")
    info = case.export(target, "int8", images=IMAGES, force=True)
    model = ExportedModel.load(target, "cpu", 1)
    assert info.checked.images == 4 + len(IMAGES) // 2  # the other half told the ranges
    assert 1e-6 < error_of(model, case) < 0.5
    expected = case.fed.predictor().logits(IMAGES)
    assert (model.logits(IMAGES).argmax(1) == expected.argmax(1)).mean() > 0.8
    weights = [t for t in onnx.load(target).graph.initializer if t.data_type == t.INT8 and t.dims]
    shapes = sorted(tuple(t.dims) for t in weights if len(t.dims) == 2)
    assert set(shapes) == {(16, 48), (16, 16), (16, 64), (64, 16)}
    assert len(shapes) == 2 * 4  # of two blocks, though two passes go through them


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_what_has_no_transformer_stays_float32(precision, target):
    with pytest.raises(DataError, match=f"no transformer in it, so {precision} would change"):
        learned("running_mean").export(target, precision, images=IMAGES)
    assert not target.exists()


@pytest.mark.parametrize("images", [None, IMAGES[:15]])
def test_int8_without_images_is_refused(images, target):
    count = 0 if images is None else 15
    with pytest.raises(DataError, match=f"expected at least 16, got {count}"):
        learned("pilora").export(target, "int8", images=images)


@pytest.mark.full
def test_a_model_of_one_class_and_none(target):
    case = Case(Federation.of("running_mean", CLIENTS, toy_backbone()))
    (task,) = make_tasks([4])
    case.fed.open(task)
    with pytest.raises(DataError, match="knows no class yet"):
        case.export(target)
    case.fed.run(task)
    assert case.export(target).names == ("",)
    model = ExportedModel.load(target, "cpu", 1)
    np.testing.assert_allclose(
        model.logits(IMAGES), case.fed.predictor().logits(IMAGES), rtol=1e-4, atol=1e-5
    )


# --- what must not be written ---------------------------------------------------------------


def test_a_wrong_graph_is_found_and_nothing_is_written(target, monkeypatch):
    """The exported function is the model's but for a hundredth of one class's score."""
    right = export.torch_score

    def slightly_wrong(predictor):
        score = right(predictor)
        factor = export.torch.tensor([1.0, 1.0, 1.01, 1.0])
        return lambda pixels: score(pixels) * factor

    monkeypatch.setattr(export, "torch_score", slightly_wrong)
    target.write_bytes(b"an older model")
    with pytest.raises(InternalError, match="differs from the model: its scores differ by up to"):
        learned("running_mean").export(target, force=True)
    assert target.read_bytes() == b"an older model"
    assert [p.name for p in target.parent.iterdir()] == [target.name]


@pytest.mark.parametrize(
    ("precision", "error", "agreement", "said"),
    [
        ("fp16", 0.06, 1.0, "does not tolerate fp16: its scores differ by up to 0.06 .* 5e-02 is"),
        ("int8", 0.3, 0.89, "does not tolerate int8: .* and 89.0% of 50 images get .* 90% are"),
        ("fp32", 0.01, 1.0, "differs from the model: its scores differ by up to 0.01"),
    ],
)
def test_what_differs_too_much_is_refused(precision, error, agreement, said):
    found = {"images": 50, "provider": "CPU", "error": error, "agreement": agreement}
    refusal = InternalError if precision == "fp32" else DataError
    with pytest.raises(refusal, match=said):
        check_graph(Checked(**found), precision)
    check_graph(Checked(**{**found, "error": 1e-4, "agreement": 0.9}), precision)


def test_scores_that_are_not_finite_or_of_another_shape_agree_with_nothing():
    right = np.eye(3, dtype=np.float32)
    for wrong in (np.full((3, 3), np.nan, np.float32), right[:, :2]):
        with pytest.raises(InternalError):
            check_graph(compare(wrong, right), "fp32")
    assert compare(right, right).error == 0


def alien(predictor):
    """What a method may return that knows nothing of exports."""

    @dataclass(frozen=True)
    class Own:
        classes: tuple[int, ...]

        def logits(self, images):
            return predictor.logits(images)

    return Own(predictor.classes)


def asks_for_the_batch(predictor):
    def score(pixels, *_):
        return pixels.reshape(len(pixels), -1)[:, :4] * len(pixels)

    return FeatureScorer(predictor.classes, None, score, (), None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (alien, "a model of the class Own cannot be exported. Its method must return a Scorer"),
        (asks_for_the_batch, "must not depend on the number of images"),
    ],
)
def test_a_method_that_cannot_be_exported_is_told_why(change, said, target, monkeypatch):
    load_half = registry.load_half

    class Model:
        def compose(self, *args):
            model = load_half("fcil_adapters.methods.running_mean.model:Model")
            return change(model.compose(*args))

    monkeypatch.setattr(registry, "load_half", lambda _: Model())
    with pytest.raises(DataError) as told:
        learned("running_mean").export(target)
    assert said in str(told.value)
    assert not target.exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [({"precision": "fp8"}, "known are fp32, fp16, int8"), ({"opset": 9}, "expected 18 to")],
)
def test_options_that_do_not_exist_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        ExportOptions(**options)


# --- reading --------------------------------------------------------------------------------


def test_a_flipped_bit_anywhere_is_found(mean, tmp_path):
    path, _ = mean
    data = path.read_bytes()
    for where in range(0, len(data), len(data) // 23):
        changed = bytearray(data)
        changed[where] ^= 1
        damaged = tmp_path / "damaged.onnx"
        damaged.write_bytes(changed)
        with pytest.raises((CorruptFile, DataError)):
            ExportedModel.load(damaged)
    assert ExportedModel.load(path).info.method == "running_mean"


def metadata(path, **changes: Any) -> bytes:
    """The file with other words about itself, sealed again."""
    model = onnx.load(path)
    fields = {p.key: p.value for p in model.metadata_props}
    del model.metadata_props[:]
    model.metadata_props.add(key=KEY, value=json.dumps({**json.loads(fields[KEY]), **changes}))
    return b"".join(with_seal(model.SerializeToString()))


def prepared(path, **changes: Any) -> dict[str, Any]:
    """How the file says that images are prepared, with changes."""
    fields = {p.key: p.value for p in onnx.load(path).metadata_props}
    return {**json.loads(fields[KEY])["preprocessing"], **changes}


def with_name(path, end: str) -> bytes:
    """The file with another name for its input or output, sealed again."""
    model = onnx.load(path)
    (value,) = getattr(model.graph, end)
    for node in model.graph.node:
        names = getattr(node, end)
        names[:] = ["other" if name == value.name else name for name in names]
    value.name = "other"
    model.metadata_props.pop()
    return b"".join(with_seal(model.SerializeToString()))


def without_metadata(path) -> bytes:
    model = onnx.load(path)
    del model.metadata_props[:]
    return model.SerializeToString()


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda p: b"", DataError, "cannot load .*No graph was found"),
        (lambda p: b"\x89PNG and so on", DataError, "not an ONNX file, or is cut short"),
        (lambda p: p.read_bytes()[:-500], DataError, "not an ONNX file, or is cut short"),
        (lambda p: p.read_bytes()[:-SEAL_BYTES], CorruptFile, "has changed since it was written"),
        (without_metadata, DataError, "not one that fcil exported"),
        (lambda p: metadata(p, format=2), DataError, "has format 2, this fcil reads format 1"),
        (lambda p: metadata(p, format=None), DataError, "has format None"),
        (lambda p: metadata(p, names=["a"]), CorruptFile, "not as many names as classes"),
        (lambda p: metadata(p, classes="x"), CorruptFile, "classes: Input should be a valid"),
        (lambda p: metadata(p, classes=[], names=[]), CorruptFile, "there is no class"),
        (
            lambda p: metadata(p, classes=[1], names=["a"]),
            CorruptFile,
            "does not match the metadata",
        ),
        (lambda p: metadata(p, temperature=1e-300), CorruptFile, "temperature"),
        (lambda p: metadata(p, preprocessing=prepared(p, crop_pct=0.0)), CorruptFile, "this size"),
        (
            lambda p: metadata(p, preprocessing=prepared(p, size=8)),
            CorruptFile,
            "does not match the metadata",
        ),
        (lambda p: with_name(p, "input"), CorruptFile, "does not match the metadata"),
        (lambda p: with_name(p, "output"), CorruptFile, "does not match the metadata"),
    ],
)
def test_what_is_no_whole_model_of_this_format_is_refused(change, error, said, mean, tmp_path):
    path = tmp_path / "other.onnx"
    path.write_bytes(change(mean[0]))
    with pytest.raises(error, match=said):
        ExportedModel.load(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match="none.onnx cannot be read: No such file"):
        ExportedModel.load(tmp_path / "none.onnx")


# --- images to calibrate with ---------------------------------------------------------------


def test_a_sample_takes_from_every_class_and_passes_over_what_is_broken(tmp_path):
    from PIL import Image

    p = toy_backbone().info.preprocessing
    for shade, name in ((40, "dark"), (200, "light")):
        (tmp_path / name).mkdir()
        for i in range(8):
            Image.new("RGB", (20, 20), (shade,) * 3).save(tmp_path / name / f"{i}.png")
    (tmp_path / "dark" / "0.png").write_bytes(b"broken")
    (tmp_path / "notes.txt").write_text("no image")
    images = sample_folder(tmp_path, p, 8)
    assert [int(i.mean()) for i in images] == [40] * 3 + [200] * 4
    for empty in (tmp_path / "none", tmp_path / "light" / "0.png"):
        with pytest.raises(DataError, match="no folder"):
            sample_folder(empty, p)


def test_metadata_of_a_hundred_thousand_levels_is_damaged(tmp_path):
    with pytest.raises(CorruptFile, match="cannot be read"):
        read_info("[" * 100_000, tmp_path)
