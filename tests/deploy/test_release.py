"""A release: what it says of itself, what is in it, and that a stranger can install it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import releasing

from system.newcomer_kit import fences, shape

ROOT = Path(__file__).resolve().parents[2]
PROJECT_TEXT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PROJECT = tomllib.loads(PROJECT_TEXT)["project"]
VERSION = PROJECT["version"]


def git(folder, *arguments):
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", folder, *who, *arguments], check=True, capture_output=True)


# --- what it says of itself -------------------------------------------------------------------


def test_the_version_is_the_same_wherever_it_stands():
    stated = releasing.stated_versions(ROOT)
    assert {"CITATION.cff", "deploy/docker/server.Dockerfile"} <= stated.keys()
    assert set(stated.values()) == {VERSION}
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/*.md")]:
        named = set(re.findall(r"fcil-(\d+\.\d+\.\d+)", page.read_text(encoding="utf-8")))
        assert named <= {VERSION}, page


def test_the_citation_is_one():
    check = Path(sys.executable).parent / "check-jsonschema"
    schema = ("--builtin-schema", "vendor.citation-file-format")
    done = subprocess.run([check, *schema, ROOT / "CITATION.cff"], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_metadata_say_what_it_is():
    assert PROJECT["license"] == "Apache-2.0"
    assert PROJECT["license-files"] == ["LICENSE"]
    assert PROJECT["readme"] == "README.md"
    assert "federated learning" in PROJECT["keywords"]
    assert PROJECT["keywords"] == sorted(PROJECT["keywords"])
    assert PROJECT["classifiers"] == sorted(PROJECT["classifiers"])
    assert "Typing :: Typed" in PROJECT["classifiers"]
    assert {"server", "client", "edge", "demo", "lab"} <= PROJECT["optional-dependencies"].keys()


def test_every_extra_that_a_sentence_tells_to_install_exists():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/**/*.md")]
    modules = [p for part in releasing.PARTS for p in (ROOT / part).rglob("*.py")]
    named = set()
    for path in (*pages, *modules):
        for extras in re.findall(r"fcil\[([\w,-]+)\]", path.read_text(encoding="utf-8")):
            named |= set(extras.split(","))
    assert named - PROJECT["optional-dependencies"].keys() == set()
    assert len(named) > 8


def test_the_page_on_installing_has_every_extra():
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    extras = text.partition("## Extras\n")[2].partition("\n## ")[0]
    assert PROJECT["optional-dependencies"].keys() <= set(re.findall(r"`([\w-]+)`", extras))


def test_the_embedded_backbone_and_the_libraries_of_the_dashboard_have_licences():
    card = ROOT / "adapters/fcil_adapters/data/vit_nano_patch4_32.md"
    assert "| licence | Apache-2.0" in card.read_text(encoding="utf-8")
    vendor = ROOT / "server/fcil_server/reports/charts/static/vendor"
    assert {p.name for p in vendor.glob("*.LICENSE")} == {"uPlot.LICENSE", "idiomorph.LICENSE"}


def test_the_changelog_has_an_entry_of_the_version_and_counts_what_follows_it(tmp_path):
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert releasing.dated(ROOT) or f"\n## [{VERSION}] - not tagged yet\n" in text
    changes = (
        "## [Unreleased]\n\n### Added\n\n- one\n  of two lines\n- two\n\n## [0.1.0] - x\n\n- old\n"
    )
    (tmp_path / "CHANGELOG.md").write_text(changes)
    assert releasing.unreleased(tmp_path) == 2


# --- the device's wheel -----------------------------------------------------------------------


def test_what_the_wheel_for_devices_is_built_from_has_no_word_of_the_server():
    text = releasing.without_server(PROJECT_TEXT)
    assert "server" not in text
    for kept in ('fcil-client = "', "[project.entry-points.", "\nclient = [", "\nedge = ["):
        assert kept in text


def test_a_pyproject_of_another_form_is_refused_by_name():
    with pytest.raises(ValueError, match="fcil-server"):
        releasing.without_server("[project]\nname = 'other'\n")


# --- what is refused --------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    (root / "CITATION.cff").write_text("title: x\nversion: 1.2.3\n")
    (root / "CHANGELOG.md").write_text("## [Unreleased]\n\n## [1.2.3] - 2026-01-02\n")
    assert releasing.dated(root)
    git(root, "init", "--quiet")
    commit(root)
    releasing.check_tree(root)
    return root


def commit(root):
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--allow-empty", "--message", "x")


def refusal(root):
    with pytest.raises(releasing.Refused) as caught:
        releasing.check_tree(root)
    return str(caught.value)


def test_a_tree_with_changes_is_refused_and_the_first_is_named(checkout):
    (checkout / "forgotten.py").write_text("")
    assert "forgotten.py differs" in refusal(checkout)


def test_another_version_elsewhere_is_refused(checkout):
    (checkout / "CITATION.cff").write_text("version: 1.2.4\n")
    commit(checkout)
    assert "CITATION.cff has version 1.2.4, pyproject.toml has 1.2.3" in refusal(checkout)


def test_a_version_may_wait_for_its_date(checkout):
    (checkout / "CHANGELOG.md").write_text("## [1.2.3] - not tagged yet\n## [1.2.2] - 2026-01-02\n")
    commit(checkout)
    releasing.check_tree(checkout)
    assert not releasing.dated(checkout)


def test_a_version_without_an_entry_is_refused(checkout):
    (checkout / "CHANGELOG.md").write_text("## [Unreleased]\n## [1.2.30]\n")
    commit(checkout)
    assert "## [1.2.3]" in refusal(checkout)


def test_a_version_that_another_commit_has_is_refused(checkout):
    git(checkout, "tag", "v1.2.3")
    releasing.check_tree(checkout)
    commit(checkout)
    assert "v1.2.3 is the tag of another commit" in refusal(checkout)


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "client").mkdir()
    (tmp_path / "client" / "fcil.whl").write_bytes(b"1")
    releasing.write_sums(tmp_path)
    (tmp_path / "thesis.txt").write_bytes(b"2")
    with pytest.raises(releasing.Refused, match="thesis"):
        releasing.clear(tmp_path)
    assert (tmp_path / "client" / "fcil.whl").exists()
    (tmp_path / "thesis.txt").unlink()
    releasing.clear(tmp_path)
    assert not tmp_path.exists()


def test_an_archive_tells_nothing_of_who_made_it_and_when(tmp_path):
    made = []
    for mtime, mode, owner in ((1.0, 0o600, "a"), (2.0, 0o644, "b")):
        path = tmp_path / f"{owner}.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            info = tarfile.TarInfo("fcil/x")
            info.mtime, info.mode, info.uname = mtime, mode, owner
            archive.addfile(info)
        releasing.normalise(path, 1_700_000_000)
        made.append(path.read_bytes())
    assert made[0] == made[1]
    with tarfile.open(path) as archive:
        (info,) = archive.getmembers()
    assert (info.mtime, info.mode, info.uid, info.uname) == (1_700_000_000, 0o644, 0, "")


# --- the real thing ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout")
    folder = tmp_path_factory.mktemp("release") / "dist"
    releasing.build(ROOT, folder)
    return folder


@pytest.fixture(scope="module")
def installed(dist, tmp_path_factory):
    """Install the wheel alone; what it needs comes from this environment."""
    place = tmp_path_factory.mktemp("installed")
    venv.create(place, with_pip=False)
    (wheel,) = dist.glob("*.whl")
    python = place / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    subprocess.run([*pip, "--no-index", "--no-deps", wheel], check=True)
    (site,) = place.glob("lib/python*/site-packages")
    (site / "rest.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return place


def run(program, *arguments, cwd):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "FCIL_"))}
    command = [str(program), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


@pytest.mark.full
def test_the_release_has_what_git_tracks_and_the_same_bytes_twice(dist, tmp_path):
    releasing.check_files(ROOT, dist)
    again = tmp_path / "again"
    before = os.umask(0o077)
    try:
        releasing.build(ROOT, again)
    finally:
        os.umask(before)
    for folder in (dist, again):
        releasing.write_sums(folder)
    assert (dist / "SHA256SUMS").read_text() == (again / "SHA256SUMS").read_text()
    assert len((dist / "SHA256SUMS").read_text().splitlines()) == 4


@pytest.mark.full
def test_the_command_does_all_of_it_and_publishes_nothing(tmp_path):
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    done = run(sys.executable, "scripts/release", cwd=clone)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"twine upload dist/fcil-{VERSION}-py3-none-any.whl dist/fcil-{VERSION}.tar.gz" in (
        done.stdout
    )
    checked = run("sha256sum", "--check", "SHA256SUMS", cwd=clone / "dist")
    names = {line.partition(":")[0] for line in checked.stdout.splitlines()}
    assert checked.returncode == 0
    assert {"sbom.json", "constraints.txt", f"fcil-{VERSION}.tar.gz"} < names
    assert releasing.git(clone, "status", "--porcelain") == ""
    (clone / "forgotten.txt").write_text("")
    refused = run(sys.executable, "scripts/release", "elsewhere", cwd=clone)
    assert refused.returncode == 4
    assert "forgotten.txt differs from the last commit" in refused.stderr
    assert not (clone / "elsewhere").exists()


@pytest.mark.full
def test_the_wheel_from_the_sdist_is_that_of_the_sources(dist, tmp_path):
    source = releasing.copy_tracked(ROOT, tmp_path / "s", releasing.FILES + releasing.PARTS)
    releasing.run_build(source, tmp_path, releasing.epoch(ROOT), "--wheel")
    (one,), (other,) = dist.glob("*.whl"), tmp_path.glob("*.whl")
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.full
def test_a_wheel_that_lacks_a_file_is_refused(dist, tmp_path):
    broken = shutil.copytree(dist, tmp_path / "dist")
    (whole,) = broken.glob("*.whl")
    with zipfile.ZipFile(whole) as old:
        kept = {n: old.read(n) for n in old.namelist() if not n.endswith("uPlot.min.css")}
    with zipfile.ZipFile(whole, "w") as new:
        for name, data in kept.items():
            new.writestr(name, data)
    with pytest.raises(releasing.Refused, match=r"uPlot\.min\.css is missing"):
        releasing.check_files(ROOT, broken)


@pytest.mark.full
def test_the_installed_package_is_complete_outside_of_the_repository(installed, tmp_path):
    for name in ("fcil-server", "fcil-client"):
        assert (
            run(installed / "bin" / name, "--version", cwd=tmp_path).stdout == f"fcil {VERSION}\n"
        )
    code = (
        "import fcil_protocol, fcil_adapters, fcil_client, fcil_server, fcil_server.api\n"
        "import fcil_adapters.backbones.known as known\n"
        "from fcil_adapters.contract import registry\n"
        "assert known.embedded_file('.safetensors').is_file()\n"
        "print(fcil_server.__file__, registry.load_method('pilora').name)"
    )
    shown = run(installed / "bin" / "python", "-c", code, cwd=tmp_path)
    assert shown.stdout.startswith(str(installed)), shown.stderr
    assert shown.stdout.endswith("pilora\n")


@pytest.mark.full
@pytest.mark.processes
def test_the_demo_learns_the_digits_with_the_installed_package(installed, tmp_path):
    done = run(
        installed / "bin" / "fcil-server", "demo", "-n", 2, "-c", "method.name=fedncm",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "report.html" in done.stdout
    shown = fences((ROOT / "README.md").read_text(encoding="utf-8"), "text")[0]
    said = [shape(" ".join(line.split())) for line in done.stdout.splitlines()]
    for line in shown.splitlines():  # README's numbers are another method's
        assert shape(" ".join(line.split())) in said
    (page,) = tmp_path.glob("fcil-demo/federation/runs/*/report.html")
    assert "uPlot" in page.read_text(encoding="utf-8")


@pytest.mark.full
def test_the_wheel_for_devices_runs_a_client_and_holds_no_server(dist, tmp_path):
    (wheel,) = (dist / "client").glob("*-1client-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        (commands,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
        assert "fcil_server" not in archive.read(commands).decode()
        archive.extractall(tmp_path)
    assert {p.partition("/")[0] for p in releasing.packaged(wheel)} == {
        "fcil_adapters", "fcil_client", "fcil_protocol",
    }  # fmt: skip
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import fcil_client.cli.main as cli; print(cli.__file__); cli.main()"
    )
    shown = run(sys.executable, "-P", "-c", code, "join", "--help", cwd=tmp_path)
    assert shown.stdout.startswith(str(tmp_path))
    assert "--ticket" in shown.stdout
