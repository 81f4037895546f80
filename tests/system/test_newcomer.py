"""Every command of README and of the pages for newcomers does what they say, as it is printed.

In an empty directory, in the order of the page, with nothing set. `STEPS` says of each command
how it is run and what one sees then; one that is printed and not named here is a failure.
"""

from __future__ import annotations

import re
import shutil
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from system.kit import write_client
from system.newcomer_kit import Background, Place, bare, commands, fences, place, shape

ROOT = Path(__file__).resolve().parents[2]
README = "README.md"
OWN, STUDY = "docs/tutorials/own-images.md", "docs/tutorials/experiment.md"
# Pages whose commands a newcomer types one after the other, beside README.
PAGES = (OWN, STUDY, "docs/predict.md", "docs/storage.md", "docs/page.md", "docs/metrics.md")

# A lot of processes: on a machine with much else to do, minutes.
pytestmark = [pytest.mark.processes, pytest.mark.timeout(3600)]


@dataclass(frozen=True)
class Step:
    """How a printed command is run.

    Attributes:
        page: where it is printed; empty: nowhere, it belongs to the story.
        story: ``home`` (one machine), ``others`` (with a ticket), ``study`` (experiments); a
            sentence instead says why it is not run here, and what does.
        says: what one sees of it.
        stays: it runs until it is stopped, and goes on in its own terminal.
        full: too long for every run.
        code: its exit code.
    """

    page: str
    command: str
    story: str
    says: str = ""
    stays: bool = False
    full: bool = False
    code: int = 0


def home(command: str, says: str, page: str = README, **more: bool) -> Step:
    return Step(page, command, "home", says, **more)


SCRIPT = "a script of the repository: CONTRIBUTING.md, and the demo's own test"
ASKS = "asks on a terminal: test_storage_commands.py"
TESTED = "needs a tested task: test_promotion.py in this folder"
LATER = "not on an empty machine: test_storage.py in this folder"

INTERRUPT = "^C"

STEPS = [
    Step(README, "./scripts/quickstart", SCRIPT),
    Step(README, "./scripts/test", "it is what runs this test"),
    home("source .venv/bin/activate", ""),
    home("fcil-server serve", "listening on 127.0.0.1:7710", stays=True),
    home("fcil-client join --data ./camera-1", "connected to 127.0.0.1:7710", stays=True),
    home("fcil-client join --data ./camera-2", "connected to 127.0.0.1:7710", stays=True),
    home("fcil-server status", "camera-2"),
    home("fcil-server rounds", "", OWN, full=True),
    home("fcil-client status", "link     ", OWN, full=True),
    home("fcil-client journal", "camera-1", OWN, full=True),
    home("fcil-client doctor", " 0 failures", OWN, full=True),
    home("fcil-server report", "report.html", OWN, full=True),
    home("fcil-server classes ls", "", OWN, full=True),
    home("fcil-server methods", "FedNCM", OWN, full=True),
    home("fcil-server methods hgp --backbone vit_base_patch16_224.dino", "HGP", OWN, full=True),
    home('fcil-server methods --budget "2 MB"', "budget 2.00 MB", OWN, full=True),
    home("fcil-server methods --new my_idea", "It runs as it is", OWN, full=True),
    Step("", "fcil-server clients", "home", "camera-2", full=True),
    home("fcil-server check", "0 failures", "docs/storage.md", full=True),
    home("fcil-server check --json", '"failure": 0', "docs/storage.md", full=True),
    home("fcil-server backup monday.tar --without-keys", "monday.tar", "docs/storage.md", full=True),
    # From here on there is a model, once the first round is over.
    home("fcil-client predict ./photos --data ./camera-1", "photos/0.png: ", full=True),
    home(
        "fcil-client predict ./camera --watch --data ./camera-1", "camera/1.jpg", OWN, stays=True,
        full=True,
    ),
    Step(OWN, "pip install 'fcil[export,edge]'", "of packages: tests/deploy/test_release.py"),
    home("fcil-client export --onnx model.onnx --data ./camera-1", "model.onnx", OWN, full=True),
    home("fcil-server export --onnx all.onnx", "all.onnx", OWN, full=True),
    Step("", "fcil-client leave --data ./camera-2 --yes", "home", "has left", full=True),
    home("fcil-client predict photo.jpg", "photo.jpg: ", "docs/predict.md", full=True),
    home("fcil-client predict ./photos --top 1 --json", '"top"', "docs/predict.md", full=True),
    home("cat photo.jpg | fcil-client predict -", "cat ", "docs/predict.md", full=True),
    Step("docs/predict.md", "fcil-client predict ./camera --watch", "as in own-images.md, with --data"),
    home("fcil-client export --onnx model.onnx", "model.onnx", "docs/predict.md", full=True),
    home(
        "fcil-client predict photo.jpg --model model.onnx", "photo.jpg: ", "docs/predict.md",
        full=True,
    ),
    Step(
        "docs/predict.md",
        "fcil-client predict ./camera --watch --format jsonl --unknown-above 0.6 | your-program",
        "your-program is the reader's",
    ),
    Step("docs/predict.md", "fcil-server run promote best", TESTED),
    Step("docs/predict.md", "fcil-server run promote 9", TESTED),
    Step("docs/predict.md", "fcil-server run promote last", TESTED),
    Step("", INTERRUPT, "home", "fcil-client join"),  # Ctrl-C in their terminals: they are busy
    home("fcil-server stop", "The server has stopped.", "docs/storage.md"),
    Step("docs/storage.md", "fcil-server run rollback --to-task 3", LATER),
    Step("docs/storage.md", "fcil-server run rollback --to-state 40", LATER),
    home(
        "fcil-server serve", "listening on 127.0.0.1:7710", "docs/storage.md", stays=True, full=True
    ),
    Step("", "fcil-server stop", "home", "The server has stopped.", full=True),
    Step("docs/storage.md", "fcil-server backup monday.tar", ASKS),
    Step("docs/storage.md", "fcil-server backup monday.tar --passphrase-file FILE", ASKS),
    Step("docs/storage.md", "fcil-server restore monday.tar --dir new", ASKS),
    Step("docs/storage.md", "fcil-server restore monday.tar --dir new --keys FOLDER", ASKS),
    home(
        "fcil-server restore monday.tar --dir new --new-keys", "new", "docs/storage.md", full=True
    ),
    home("fcil-server serve --dir new", "listening on", "docs/storage.md", stays=True, full=True),
    Step("", "fcil-server stop --dir new", "home", "The server has stopped.", full=True),
    # Doors: each is opened once, and the server ended.
    home(
        "fcil-server serve --page", "http://127.0.0.1:7780", "docs/page.md", stays=True, full=True
    ),
    home("fcil-server page", "http://127.0.0.1:7780", "docs/page.md", full=True),
    Step("docs/page.md", "fcil-server page --open", "opens a browser: test_cli_page.py"),
    home("fcil-server page --sign-out", "", "docs/page.md", full=True),
    Step("", "fcil-server stop", "home", "The server has stopped.", full=True),
    home(
        "fcil-server serve --page 127.0.0.1:7781", "http://127.0.0.1:7781", "docs/page.md",
        stays=True, full=True,
    ),
    Step("", "fcil-server stop", "home", "The server has stopped.", full=True),
    Step(
        "docs/page.md",
        "fcil-server serve --page 0.0.0.0:7780 --page-cert page.pem --page-key page.key",
        "needs the reader's certificate: test_web_door.py",
    ),
    home(
        "fcil-server serve --page --page-read-only", "http://127.0.0.1:7780", "docs/page.md",
        stays=True, full=True,
    ),
    Step("", "fcil-server stop", "home", "The server has stopped.", full=True),
    home("fcil-server serve --metrics", "127.0.0.1:9464", "docs/metrics.md", stays=True, full=True),
    Step("", "fcil-server stop", "home", "The server has stopped.", full=True),
    home(
        "fcil-server serve --metrics 127.0.0.1:9500", "127.0.0.1:9500", "docs/metrics.md",
        stays=True, full=True,
    ),
    Step("", "fcil-server stop", "home", "The server has stopped.", full=True),
    Step(
        "docs/metrics.md",
        "fcil-server serve --metrics 0.0.0.0:9464 --metrics-cert metrics.pem --metrics-key metrics.key",
        "needs the reader's certificate: test_web_door.py",
    ),
    # From other machines: a place of its own.
    Step(
        README,
        "fcil-server serve -c federation.listen=0.0.0.0:7710"
        " -c 'federation.advertise=[\"lab.example:7710\"]'",
        "others", "listening on 0.0.0.0:7710; advertised as lab.example:7710", stays=True,
    ),
    Step(README, "fcil-server enrol camera-3 --out camera-3.ticket", "others", "camera-3"),
    Step(
        README, "fcil-client join --data ./images --ticket camera-3.ticket", "others",
        "no server at lab.example:7710 answered", stays=True,  # lab.example is the reader's
    ),
    Step("", "fcil-server clients", "others", "open ticket for camera-3"),
    Step(README, "fcil-server revoke camera-3", "others", "camera-3"),
    # Experiments.
    Step(
        STUDY, "fcil-client split --data cifar100.zip --clients 10 --alpha 6", "study",
        "partition.json", full=True,
    ),
    Step(
        STUDY, "fcil-server serve --partition partition.json", "study", "listening on",
        stays=True, full=True,
    ),
    Step(
        STUDY, "fcil-client swarm --data cifar100.zip --partition partition.json", "study",
        "10 of 10 connected", stays=True, full=True,
    ),
    Step(STUDY, "scripts/reproduce experiments/digits.toml", "takes minutes: tests/server/lab/test_reproduce.py"),
]  # fmt: skip
STORIES = ("home", "others", "study")
LONGER = [story for story in STORIES if any(s.full for s in STEPS if s.story == story)]
# Blocks without a language that show what a command prints: as that step does.
SHOWN = {"docs/predict.md": ("fcil-client predict photo.jpg", 0)}


@pytest.mark.parametrize("page", [README, *PAGES])
def test_every_printed_command_is_named_here(page: str) -> None:
    printed = Counter(bare(c) for c in commands((ROOT / page).read_text()))
    named = Counter(s.command for s in STEPS if s.page == page)
    assert printed == named


def test_a_command_that_is_not_run_says_why() -> None:
    assert all(" " in s.story for s in STEPS if s.story not in STORIES)


def images(work: Path) -> None:
    """Lay out what README's newcomer has: two cameras, photographs, and a data set."""
    names = {0: "cat", 1: "dog", 2: "bird"}
    write_client(work / "camera-1", [0, 1], per_class=4, names=names)
    write_client(work / "camera-2", [0, 2], per_class=4, offset=4, names=names)
    write_client(work / "images", [1, 2], per_class=4, offset=8, names=names)
    for folder in ("photos", "camera"):
        write_client(work / folder, [0], per_class=1, offset=12, names={0: "."})
    for path in sorted((work / "photos").iterdir()):
        path.rename(work / "photos" / "0.png")
        shutil.copy(work / "photos" / "0.png", work / "photo.jpg")
        shutil.copy(work / "photos" / "0.png", work / "camera" / "0.png")


def data_set(work: Path) -> None:
    """Write ``cifar100.zip``: 100 classes of three images, laid out as the real one."""
    for side, offset in (("train", 0), ("test", 60)):
        for part in range(10):
            names = {digit: f"class-{part}{digit}" for digit in range(10)}
            folder = work / "set" / side
            write_client(folder, range(10), per_class=3, offset=offset + 3 * part, names=names)
    with zipfile.ZipFile(work / "cifar100.zip", "w") as file:
        for path in sorted((work / "set").rglob("*.png")):
            file.write(path, path.relative_to(work / "set"))


@pytest.fixture
def new(tmp_path: Path) -> Iterator[Place]:
    with place(tmp_path / "new") as made:
        if made is None:
            pytest.skip("no network namespaces here, and the default ports are taken")
        images(made.work)
        yield made


def tell(new: Place, story: str, *, full: bool) -> list[Background]:
    """Type the commands of a story, see what each one says, and return those that stayed."""
    stay: list[Background] = []
    for step in STEPS:
        if step.story != story or (step.full and not full):
            continue
        if step.command == INTERRUPT:
            for one in stay:
                if one.command.startswith(step.says):
                    one.interrupt()
            continue
        if step.command.startswith("fcil-client predict ./photos --data"):
            stay[0].until("task 0 is learned")
        text = printed(step)
        if step.stays:
            stay.append(new.start(text))
            if "--watch" in step.command:  # it names what arrives from then on
                stay[-1].until("watching")
                shutil.copy(new.work / "photo.jpg", new.work / "camera" / "1.jpg")
            stay[-1].until(step.says)
            continue
        said = new.run(text, code=step.code)
        assert step.says in said, f"{step.command}: {said}"
        command, number = SHOWN.get(step.page, ("", 0))
        if step.command == command:
            block = fences((ROOT / step.page).read_text(), "")[number]
            assert shape(block) in [shape(line) for line in said.splitlines()], said
    return stay


def printed(step: Step) -> str:
    """Return a step's command with its comment, as the page has it."""
    if not step.page:
        return step.command
    found = commands((ROOT / step.page).read_text())
    return next(c for c in found if bare(c) == step.command)


def test_what_readme_says_of_one_machine_is_so(new: Place) -> None:
    (layout,) = [b for b in fences((ROOT / README).read_text(), "") if "camera-1" in b]
    for word in layout.split():  # each folder that README draws is there
        assert (new.work / word.replace("0001.jpg", "").replace("...", "")).is_dir()
    server = tell(new, "home", full=False)[0]
    assert_shown(server, before_the_round=True)


def assert_shown(server: Background, *, before_the_round: bool) -> None:
    """Compare what README shows of the server with what it said."""
    said = [own_shape(line) for line in server.log.read_text().splitlines()]
    _, shown = fences((ROOT / README).read_text(), "text")  # the first one is the demo's
    for line in shown.splitlines()[: 2 if before_the_round else None]:
        assert own_shape(line) in said, f"{line}: {said}"


def own_shape(line: str) -> set[str]:
    """Return a line's shape, whatever this machine is called, and however few images it draws."""
    several = re.sub(r"\b1 (test image|client)\b", r"1 \1s", line)
    return shape(re.sub(r"\(.*\)", "()", re.sub(r"\S+:camera", "camera", several)))


@pytest.mark.full
@pytest.mark.parametrize("story", LONGER)
def test_what_readme_says_is_so_to_the_end(new: Place, story: str) -> None:
    if story == "study":
        data_set(new.work)
    stayed = tell(new, story, full=True)
    if story == "home":
        assert_shown(stayed[0], before_the_round=False)


def test_what_readme_says_of_other_machines_is_so(new: Place) -> None:
    tell(new, "others", full=False)
