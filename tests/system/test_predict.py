"""People use the model: after a real federation, with its daemons gone, and beside one that runs."""

import json
import shutil
import signal
import subprocess
import sys

import pytest

from fcil_client.data.manifest import NAME, load
from fcil_client.state import current_model
from fcil_client.state.home import Home, data_digest
from fcil_server.aggregation.store import StateStore, states_folder
from fcil_server.lab.local.federation import LocalFederation
from system.kit import open_ledger, settings, write_client

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

NAMES = ["zero", "one", "two", "three"]
NEW = 60  # from here on, images of a digit were in no client's folder


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """A run of two tasks with fedncm, done; client b still runs, a was killed."""
    folder = tmp_path_factory.mktemp("predict")
    tasks = [NAMES[:2], NAMES[2:]]
    with LocalFederation(folder) as federation:
        federation.serve(*settings(method__name="fedncm", tasks__classes=tasks))
        for i, name in enumerate("ab"):
            data = write_client(folder / name, range(4), per_class=30, offset=30 * i, names=NAMES)
            federation.join(name, data, "--threads", "1", "--engine", "onnx")
        federation.until("run_done", timeout_s=280)
        federation.kill_client("a")
        yield federation


@pytest.fixture(scope="module")
def shots(tmp_path_factory):
    return write_client(tmp_path_factory.mktemp("new") / "shots", range(4), offset=NEW, names=NAMES)


# As on a machine where torch is not installed.
NO_TORCH = (
    "import sys\n"
    "sys.modules.update(dict.fromkeys(('torch', 'timm', 'torchvision')))\n"
    "from fcil_client.cli.main import main\n"
    "main()\n"
)


def predict(federation, *arguments, code=0, stdin=None, program=("-m", "fcil_client")):
    done = subprocess.run(
        [sys.executable, *program, "predict", *map(str, arguments)],
        env=federation.environment(), capture_output=True, timeout=120, input=stdin, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr.decode()
    assert b"Traceback" not in done.stderr
    return done


def rows(federation, *arguments, engine="onnx", **options):
    """Return what predict says, with the engine that is loaded soonest; both agree (below)."""
    done = predict(federation, *arguments, "--engine", engine, "--json", **options)
    return json.loads(done.stdout)["data"]


def home_of(federation, name):
    folder = federation.directory / name
    (found,) = (federation.directory / "state").rglob(data_digest(folder))
    return Home(found), folder


def last_state(federation):
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest()
    return StateStore(states_folder(federation.federation, run.run_id)).numbers()[-1]


def share_right(images):
    right = [row["image"].split("/")[-2] == row["top"][0]["name"] for row in images]
    return sum(right) / len(right)


@pytest.mark.full
@pytest.mark.parametrize("client", ["a", "b"])  # a's daemon is gone, b's runs
def test_a_folder_of_new_images_is_named(federation, shots, client):
    told = rows(federation, shots, "--data", federation.directory / client, "--unknown")
    assert told["model"]["when"] == "after task 1"
    assert told["model"]["state"] == last_state(federation)
    assert told["model"]["calibrated"]
    assert told["failed"] == 0
    assert len(told["images"]) == 48
    assert share_right(told["images"]) > 0.6
    for row in told["images"]:
        p = [one["probability"] for one in row["top"]]
        assert p == sorted(p, reverse=True)
        assert sum(p) <= 1 + 1e-5
        assert 0 <= row["unknown"] <= 1


@pytest.mark.full
def test_it_names_as_the_evaluation_did_image_by_image(federation):
    """The last evaluation counted, over both clients' test images, what predict gets right."""
    counted = {}
    with open_ledger(federation) as ledger:
        for row in ledger.evaluations.all(ledger.runs.newest().run_id):
            if row.task == 1:
                right, total = counted.get(row.class_id, (0, 0))
                counted[row.class_id] = right + row.correct, total + row.total
    mine = dict.fromkeys(counted, (0, 0))
    for name in "ab":
        home, folder = home_of(federation, name)
        manifest = load(home.directory / NAME, home.salt())
        tested = [folder / i.entry.name for i in manifest.images if i.side == "test"]
        ids = {v: k for k, v in current_model.load(home).names.items()}
        for row in rows(federation, *tested, "--data", folder)["images"]:
            label = ids[row["image"].split("/")[-2]]
            right, total = mine[label]
            mine[label] = right + (row["top"][0]["class"] == label), total + 1
    assert mine == counted
    assert sum(total for _, total in counted.values()) > 30


@pytest.mark.full
def test_without_torch_it_names_as_with_torch(federation, shots):
    data = federation.directory / "a"
    first = rows(federation, shots, "--data", data, engine="torch")
    second = rows(federation, shots, "--data", data, engine="auto", program=("-c", NO_TORCH))
    assert (first["model"]["engine"], second["model"]["engine"]) == ("torch", "onnx")
    said = predict(federation, shots, "--data", data, "--engine", "torch", code=1, program=("-c", NO_TORCH)).stderr  # fmt: skip
    assert b"--model FILE.onnx" in said
    for one, other in zip(first["images"], second["images"], strict=True):
        assert one["top"][0]["class"] == other["top"][0]["class"]
        assert one["top"][0]["probability"] == pytest.approx(
            other["top"][0]["probability"], abs=1e-3
        )


@pytest.mark.full
def test_an_image_on_standard_input_and_a_broken_one_among_good_ones(federation, shots, tmp_path):
    image = min((shots / "one").iterdir())
    data = federation.directory / "a"
    (row,) = rows(federation, "-", "--data", data, stdin=image.read_bytes())["images"]
    assert row["top"][0]["name"] == "one"
    shutil.copy(image, tmp_path / "good.png")
    (tmp_path / "bad.png").write_bytes(image.read_bytes()[:40])
    done = predict(federation, tmp_path, "--data", data, "--engine", "onnx", code=1)
    assert b"bad.png: the image cannot be decoded" in done.stderr
    assert done.stdout.startswith(str(tmp_path / "good.png").encode())


@pytest.mark.full
def test_status_says_how_old_the_model_is(federation):
    done = subprocess.run(
        [sys.executable, "-m", "fcil_client", "status"],
        env=federation.environment(), capture_output=True, timeout=60, check=True, text=True,
    )  # fmt: skip
    assert done.stdout.count("model    after task 1 of run ") == 2


@pytest.mark.full
def test_a_watched_folder_names_what_arrives_until_ctrl_c(federation, shots, tmp_path):
    camera = tmp_path / "camera"
    camera.mkdir()
    data = federation.directory / "a"
    images = {name: min((shots / name).iterdir()) for name in ("zero", "three")}
    said = {
        name: rows(federation, image, "--data", data)["images"][0]["top"][0]["name"]
        for name, image in images.items()
    }
    command = ["fcil_client", "predict", str(camera), "--watch", "--format", "jsonl"]
    command += ["--engine", "onnx"]
    with subprocess.Popen(
        [sys.executable, "-m", *command, "--data", str(data)],
        env=federation.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as watch:  # fmt: skip
        try:
            while "watching" not in watch.stderr.readline():
                assert watch.poll() is None
            for name, image in images.items():
                shutil.copy(image, camera / f"{name}.png")
                row = json.loads(watch.stdout.readline())
                top = row["top"][0]["name"]
                assert (row["image"], top) == (str(camera / f"{name}.png"), said[name])
            watch.send_signal(signal.SIGINT)
            rest = watch.communicate(timeout=60)
        finally:
            watch.kill()
    assert watch.returncode == 0
    assert rest == ("", "stopped\n")
