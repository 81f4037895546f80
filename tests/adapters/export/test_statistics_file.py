"""Files of class statistics: figures computed here independently, read back by safetensors."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from adapters.kit import Federation, make_tasks, toy_backbone, toy_images
from adapters.small import SMALL
from fcil_adapters.export import statistics_file
from fcil_adapters.export.exported_model import Origin
from fcil_adapters.export.load import wanted_form
from fcil_adapters.export.statistics_file import export_statistics, pool, read_statistics
from fcil_adapters.toolkit.gaussians.gaussian import describe
from fcil_protocol.errors import CorruptFile, DataError, InternalError, StorageError
from server.storage_kit import flip

TASKS = make_tasks([1, 0], [4], [6, 2])
CLIENTS = [toy_images({1: 5, 0: 3, 4: 4, 2: 2}, 1), toy_images({1: 3, 2: 6}, 3)]
ORIGIN = Origin("f" * 32, "r20260102-030405-abcd", 2, 9, {0: "null", 1: "Käse", 6: "never seen"})
CLASSES = (1, 0, 4, 2)


def learned(name: str, **options) -> Federation:
    fed = Federation.of(name, CLIENTS, toy_backbone(), **{**SMALL[name], **options})
    for task in TASKS:
        fed.run(task)
    return fed


def export(fed, target, *, server=True):
    ctx = replace(fed.context("evaluate"), backbone=None)
    state = fed.state if server else None
    return export_statistics(fed.method, ctx, state, fed.parts(), ORIGIN, target)


def features_of(fed, label) -> np.ndarray:
    """Return the frozen features of all clients' images of a class."""
    pictures = np.concatenate([c.pictures[c.labels == label] for c in CLIENTS])
    return fed.backbone.features(pictures).astype(np.float64)


@pytest.mark.parametrize("form", ["full", "lowrank", "diag"])
def test_gaussians_are_those_of_all_images_of_a_class(form, tmp_path):
    """The full form is the covariance of all clients' images; the diagonal has its diagonal."""
    fed = learned("gaussian_head", cov=form, **({"cov_rank": 2} if form == "lowrank" else {}))
    info = export(fed, tmp_path / "s.safetensors")
    read, tensors = read_statistics(tmp_path / "s.safetensors")
    assert read == info
    assert (info.source, info.covariance, info.features) == ("gaussians", form, "frozen")
    assert info.classes == CLASSES
    assert info.names == ("Käse", "null", "", "")
    assert tensors["count"].tolist() == [8, 3, 4, 8]
    blocks = np.split(tensors["factor"].astype(np.float64), np.cumsum(tensors["rows"])[:-1])
    for i, label in enumerate(CLASSES):
        x = features_of(fed, label)
        np.testing.assert_allclose(tensors["mean"][i], x.mean(0), atol=1e-5)
        covariance = blocks[i].T @ blocks[i] + np.diag(tensors["rest"][i])
        right = np.cov(x.T)
        if form == "full":
            np.testing.assert_allclose(covariance, right, atol=1e-5)
        else:
            np.testing.assert_allclose(np.diag(covariance), np.diag(right), atol=1e-5)


def test_pooling_equals_a_description_of_all_images():
    rng = np.random.default_rng(3)
    pieces = [rng.normal(size=(n, 6)) + n for n in (1, 2, 40)]
    one = pool([describe(x, "full", 0) for x in pieces], diagonal=False)
    whole = np.concatenate(pieces)
    np.testing.assert_allclose(one.mean, whole.mean(0))
    np.testing.assert_allclose(one.covariance(), np.cov(whole.T), atol=1e-12)
    assert one.count == 43
    assert len(one.factor) <= 6, "no more rows than numbers in a row"
    alone = pool([describe(pieces[0], "full", 0)], diagonal=False)
    assert not alone.covariance().any(), "one image has no covariance"


def test_no_row_of_a_pooled_factor_is_a_clients():
    """Also with fewer rows than features, of which some are 0 everywhere."""
    draw = np.random.default_rng(3)
    pieces = [draw.normal(size=(n, 40)) * (np.arange(40) > 2) for n in (5, 9, 7)]
    many = [describe(x, "lowrank", 2) for x in pieces]
    one = pool(many, diagonal=False)
    assert len(one.factor) < 40
    rows = np.concatenate([*(g.factor for g in many), *(g.mean[None] - one.mean for g in many)])
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    own = one.factor / np.linalg.norm(one.factor, axis=1, keepdims=True)
    assert np.abs(own @ rows.T).max() < 0.999
    other = pool(many[::-1], diagonal=False)
    assert np.allclose(np.abs(other.factor), np.abs(one.factor)), "a matter of the covariance alone"


@pytest.mark.parametrize(
    ("name", "source", "space"),
    [
        ("fedncm", "means", "frozen"),
        ("running_mean", "means", "pixels"),
        ("pilora", "prototypes", "learned"),
        ("fedproto", "prototypes", "learned"),
        ("fedclm", "means", "learned"),
        ("icarl", "means", "learned"),
    ],
)
def test_means_and_prototypes_are_the_same_on_both_sides(name, source, space, tmp_path):
    fed = learned(name)
    info = export(fed, tmp_path / "server")
    own = export(fed, tmp_path / "client", server=False)
    assert (info.source, info.covariance, info.features) == (source, "none", space)
    assert info.classes == own.classes == CLASSES
    _, one = read_statistics(tmp_path / "server")
    _, other = read_statistics(tmp_path / "client")
    assert all(np.array_equal(one[n], other[n]) for n in one)
    assert one["mean"].shape == (4, info.dim)


def test_means_are_those_of_the_images(tmp_path):
    fed = learned("fedncm")
    export(fed, tmp_path / "s")
    _, tensors = read_statistics(tmp_path / "s")
    for i, label in enumerate(CLASSES):
        np.testing.assert_allclose(tensors["mean"][i], features_of(fed, label).mean(0), atol=1e-5)
    assert tensors["count"].tolist() == [8, 3, 4, 8]


def test_sums_become_means_of_features_of_length_one(tmp_path):
    fed = learned("analytic")
    info = export(fed, tmp_path / "s")
    _, tensors = read_statistics(tmp_path / "s")
    assert (info.source, info.unit, info.dim) == ("sums", True, 16)
    for i, label in enumerate(info.classes):
        x = features_of(fed, label)
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        np.testing.assert_allclose(tensors["mean"][i], x.mean(0), atol=1e-5)


def test_the_metadata_is_readable_without_fcil(tmp_path):
    export(learned("fedncm"), tmp_path / "s")
    with safetensors.safe_open(tmp_path / "s", "np") as file:
        about = json.loads(file.metadata()["fcil"])
    assert (about["format"], about["classes"][0], about["names"][0]) == (1, 1, "Käse")


def test_no_client_is_in_it(tmp_path):
    """Neither a name or id, nor a Gaussian of one client's images among several's."""
    fed = learned("gaussian_head")
    export(fed, tmp_path / "s")
    text = (tmp_path / "s").read_bytes()
    assert b"client" not in text
    _, tensors = read_statistics(tmp_path / "s")
    assert len(tensors["mean"]) == len(CLASSES)


# --- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["l2p", "fedavg_lora", "ewc"])
def test_methods_without_statistics_say_so(name, tmp_path):
    with pytest.raises(DataError, match=f"{name} has no means, prototypes or Gaussians"):
        export(learned(name), tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["gaussian_head", "analytic"])
def test_a_client_that_has_none_is_sent_to_the_server(name, tmp_path):
    with pytest.raises(DataError, match="sends its clients no means.*fcil-server export"):
        export(learned(name), tmp_path / "s", server=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["fedncm", "pilora", "gaussian_head", "analytic"])
def test_before_the_first_round_there_is_nothing_to_export(name, tmp_path):
    fed = Federation.of(name, CLIENTS, toy_backbone(), **SMALL[name])
    fed.open(TASKS[0])
    with pytest.raises(DataError, match="knows no class yet"):
        export(fed, tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_is_no_file_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "x")
    for place in (tmp_path, tmp_path / "link", tmp_path / "no" / "s"):
        with pytest.raises(DataError, match="expected a file in a folder that exists"):
            wanted_form({"statistics": place})


def test_a_damaged_or_foreign_file_is_named(tmp_path):
    place = tmp_path / "s"
    export(learned("fedncm"), place)
    whole = place.read_bytes()
    safetensors.numpy.save_file({"mean": np.zeros((1, 2))}, tmp_path / "other")
    flip(place, 0.95)
    for path in (place, tmp_path / "other"):
        with pytest.raises(CorruptFile, match="is no file of statistics"):
            read_statistics(path)
    deep = (9000).to_bytes(8, "little") + b"[" * 9000
    for content in (b"", whole[:100], whole[:-3], b"x" * 50, deep):
        place.write_bytes(content)
        with pytest.raises(CorruptFile, match="is no file of statistics"):
            read_statistics(place)
    place.write_bytes(whole.replace(rb"\"format\": 1", rb"\"format\": 7"))
    with pytest.raises(DataError, match="has format 7"):
        read_statistics(place)


def test_a_file_that_reads_otherwise_is_not_written(tmp_path, monkeypatch):
    fed = learned("fedncm")
    save = safetensors.numpy.save

    def wrong(tensors, metadata=None):
        return save({**tensors, "mean": tensors["mean"] + 1}, metadata)

    monkeypatch.setattr(statistics_file.safetensors.numpy, "save", wrong)
    with pytest.raises(InternalError, match="differs in mean"):
        export(fed, tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_earlier_file(tmp_path, monkeypatch):
    fed = learned("fedncm")
    export(fed, tmp_path / "s")
    before = (tmp_path / "s").read_bytes()

    def full(*_args, **_more):
        raise StorageError("cannot write it")

    monkeypatch.setattr(statistics_file, "write_atomic", full)
    with pytest.raises(StorageError):
        export(fed, tmp_path / "s")
    assert (tmp_path / "s").read_bytes() == before
