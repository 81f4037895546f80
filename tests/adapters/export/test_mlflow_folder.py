"""Folders for MLflow: MLflow computes what the ONNX file in it does, without fcil."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from adapters.kit import Federation, make_tasks, toy_backbone, toy_images
from fcil_adapters.export import load, model_file
from fcil_adapters.export.exported_model import ExportedModel, Origin
from fcil_adapters.export.folder import ABOUT, MLFLOW_DATA, MLFLOW_FILES
from fcil_adapters.export.load import ExportOrder, wanted_form
from fcil_protocol.errors import ConfigError, DataError, InternalError

ORIGIN = Origin("f" * 32, "r20260102-030405-abcd", 0, 9, {0: "null", 1: "Käse"})
IMAGES = toy_images({0: 3, 1: 3}, 5).pictures
USE = """\
import sys
import numpy as np
from mlflow import pyfunc
model = pyfunc.load_model(sys.argv[1])
np.save(sys.argv[3], model.predict(np.load(sys.argv[2]))["logits"])
print(model.metadata.metadata["fcil"]["names"])
assert not any(name.startswith("fcil") for name in sys.modules)
"""


@pytest.fixture
def fed() -> Federation:
    made = Federation.of("fedncm", [toy_images({1: 5, 0: 3})], toy_backbone())
    made.run(make_tasks([1, 0])[0])
    return made


def export(fed, target):
    order = ExportOrder("mlflow", target)
    ctx = fed.context("evaluate")
    model = (fed.method, ctx, fed.parts(), ORIGIN)
    return load.write(model_file, order, model, None, None, lambda _: None)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # of MLflow's own, about what is not in its small package
def test_mlflow_computes_what_the_model_does_without_fcil(fed, tmp_path):
    pytest.importorskip("mlflow")
    info = export(fed, tmp_path / "model")
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == sorted(MLFLOW_FILES)
    assert json.loads((tmp_path / "model" / ABOUT).read_text()) == info.model_dump(mode="json")
    np.save(tmp_path / "in.npy", IMAGES)
    places = [str(tmp_path / n) for n in ("model", "in.npy", "out.npy")]
    env = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
    command = [sys.executable, "-c", USE, *places]
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "['Käse', 'null']" in done.stdout
    wanted = fed.predictor().logits(IMAGES)
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), wanted, atol=1e-4)
    again = export(fed, tmp_path / "model")
    assert ExportedModel.load(tmp_path / "model" / MLFLOW_DATA).info == again
    with pytest.MonkeyPatch.context() as patch:
        right = ExportedModel.logits
        patch.setattr(ExportedModel, "logits", lambda self, x: right(self, x) + 1)
        before = (tmp_path / "model" / MLFLOW_DATA).read_bytes()
        with pytest.raises(InternalError, match="as MLflow loads it differs"):
            export(fed, tmp_path / "model")
        assert (tmp_path / "model" / MLFLOW_DATA).read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.npy", "model", "out.npy"]


@pytest.mark.skipif(find_spec("onnxscript") is None, reason="needs onnxscript")
def test_without_mlflow_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError) as caught:
        load.exporter("server", "mlflow")
    assert "a model of MLflow needs packages that are not installed (mlflow)" in str(caught.value)
    assert "fcil[mlflow]" in caught.value.action


def test_it_is_a_folder_with_the_options_of_onnx(tmp_path):
    order = wanted_form({"mlflow": tmp_path / "m"}, precision="int8", force=True)
    assert order.is_folder
    assert order.is_graph
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "MLmodel").write_text("of another program")
    with pytest.raises(DataError, match=r"lacks 'fcil.json', so it is no earlier export"):
        wanted_form({"mlflow": tmp_path / "m"})
