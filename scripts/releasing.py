"""The files of a release, from the tracked files of a checkout; the same bytes each time.

A part of `scripts/release`.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from io import BytesIO
from pathlib import Path

from packaging.metadata import InvalidMetadata, Metadata

FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff",
         "constraints.txt")  # fmt: skip
PARTS = ("protocol", "adapters", "client", "server")
SUMS = "SHA256SUMS"
BILL = "sbom.json"
# Where else the version is stated, besides pyproject.toml.
STATED = (("CITATION.cff", r"^version: (\S+)$"), ("deploy/docker/*", r"^ARG VERSION=(\S+)$"))
# What pyproject.toml says of the server: its command, extra, sinks, data and folder.
SERVER = (
    r'^fcil-server = "[^"]*"\n',
    r"^server = \[\n(?:.*\n)*?\]\n",
    r'^\[project\.entry-points\."fcil\.sinks"\]\n(?:.+\n)*',
    r"^fcil_server = \[.*\]\n",
    r', "server"(?=\]$)',
)


class Refused(Exception):
    """What stands in the way of a release, as one sentence and what to do."""


def git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise Refused("git is not installed, and says what belongs to a release.") from None
    if done.returncode != 0:
        raise Refused(f"git {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout


def version(root: Path) -> str:
    """Return the version, of which pyproject.toml is the source."""
    return tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["version"]


def epoch(root: Path) -> int:
    """Return the time of the commit, which all files of a release bear, in seconds."""
    return int(git(root, "log", "-1", "--format=%ct"))


def check_tree(root: Path) -> None:
    """Refuse a tree that is not exactly a commit, or that does not agree about its version.

    Raises:
        Refused: with the first fault.
    """
    changed = git(root, "status", "--porcelain").splitlines()
    if changed:
        raise Refused(
            f"{changed[0][3:]} differs from the last commit ({len(changed)} such files): "
            "commit it, or remove it."
        )
    for name, found in stated_versions(root).items():
        if found != version(root):
            raise Refused(
                f"{name} has version {found}, pyproject.toml has {version(root)}: correct one."
            )
    changes = (root / "CHANGELOG.md").read_text("utf-8")
    if not re.search(rf"^## \[{re.escape(version(root))}\]", changes, re.MULTILINE):
        raise Refused(f"CHANGELOG.md has no entry ## [{version(root)}]: write it.")
    tag = f"v{version(root)}"
    here = git(root, "tag", "--points-at", "HEAD").split()
    if git(root, "tag", "--list", tag) and tag not in here:
        raise Refused(f"{tag} is the tag of another commit: raise the version in pyproject.toml.")


def stated_versions(root: Path) -> dict[str, str]:
    """Return the version that each other file states."""
    return {
        str(path.relative_to(root)): found[1]
        for pattern, expression in STATED
        for path in sorted(root.glob(pattern))
        if (found := re.search(expression, path.read_text("utf-8"), re.MULTILINE))
    }


def unreleased(root: Path) -> int:
    """Return the number of entries in the changelog that belong to no version yet."""
    text = (root / "CHANGELOG.md").read_text("utf-8")
    block = text.partition("## [Unreleased]")[2].partition("\n## [")[0]
    return len(re.findall(r"^- ", block, re.MULTILINE))


def dated(root: Path) -> bool:
    """Return whether the changelog has a date for the version."""
    heading = rf"^## \[{re.escape(version(root))}\] - \d{{4}}-\d\d-\d\d$"
    text = (root / "CHANGELOG.md").read_text("utf-8")
    return re.search(heading, text, re.MULTILINE) is not None


# --- building ---------------------------------------------------------------------------------


def tracked(root: Path, names: tuple[str, ...]) -> list[Path]:
    """Return what git tracks of these files and folders, relative to the root."""
    return [Path(p) for p in git(root, "ls-files", "-z", "--", *names).split("\0") if p]


def copy_tracked(root: Path, target: Path, names: tuple[str, ...]) -> Path:
    """Copy what git tracks, with modes that do not depend on the checkout; return the target."""
    for path in tracked(root, names):
        copy = target / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / path, copy)
        copy.chmod(0o755 if os.access(root / path, os.X_OK) else 0o644)
    return target


def run_build(source: Path, folder: Path, seconds: int, *arguments: str) -> None:
    """Run pyproject.toml's backend, as installed here: an isolated one would need the network."""
    command = [sys.executable, "-m", "build", "--no-isolation", *arguments]
    done = subprocess.run(
        [*command, "--outdir", str(folder), str(source)],
        env=os.environ | {"SOURCE_DATE_EPOCH": str(seconds)},
        umask=0o022, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise Refused(f"the build failed:\n{done.stdout[-4000:]}")


def normalise(sdist: Path, seconds: int) -> None:
    """Write an sdist again with one time, plain modes and no owner; setuptools keeps those here."""
    with tarfile.open(sdist) as old:
        members = [(m, old.extractfile(m).read() if m.isfile() else b"") for m in old]
    with (
        sdist.open("wb") as file,
        gzip.GzipFile("", "wb", mtime=seconds, fileobj=file) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member, data in sorted(members, key=lambda each: each[0].name):
            plain = tarfile.TarInfo(member.name)
            plain.type, plain.size, plain.mtime = member.type, len(data), seconds
            plain.mode = 0o755 if member.mode & 0o100 else 0o644
            new.addfile(plain, BytesIO(data))


def without_server(text: str) -> str:
    """Return the build's part of pyproject.toml without the server.

    Raises:
        ValueError: the file does not have the form that SERVER expects.
    """
    text = text.partition("\n[tool.ruff]")[0] + "\n"
    for pattern in SERVER:
        text, found = re.subn(pattern, "", text, count=1, flags=re.MULTILINE)
        if not found:
            raise ValueError(f"pyproject.toml: nothing matches {pattern!r}; mend {__file__}")
    return text


def build(root: Path, folder: Path) -> None:
    """Write wheel, sdist and, in ``client/``, the wheel for devices into a folder.

    The complete wheel is built from the sdist. The wheel for devices has a build tag, 1client,
    and a folder of its own: of two wheels of one version pip prefers the one with a build tag.

    Raises:
        Refused: a build failed.
    """
    seconds = epoch(root)
    with tempfile.TemporaryDirectory(prefix="fcil-release-") as place:
        run_build(copy_tracked(root, Path(place, "whole"), FILES + PARTS), folder, seconds)
        (sdist,) = folder.glob("*.tar.gz")
        normalise(sdist, seconds)
        device = copy_tracked(root, Path(place, "device"), ("README.md", "LICENSE", *PARTS[:-1]))
        project = (root / "pyproject.toml").read_text("utf-8")
        (device / "pyproject.toml").write_text(without_server(project), "utf-8")
        (device / "setup.cfg").write_text("[bdist_wheel]\nbuild_number = 1client\n", "utf-8")
        run_build(device, folder / "client", seconds, "--wheel")
    shutil.copyfile(root / "constraints.txt", folder / "constraints.txt")


def write_sums(folder: Path) -> None:
    """Write SHA256SUMS over all files of the folder, as `sha256sum --check` reads it."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != SUMS)
    lines = (
        f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.relative_to(folder)}\n" for p in paths
    )
    (folder / SUMS).write_text("".join(lines), "utf-8")


def clear(folder: Path) -> None:
    """Remove the files of an earlier release from a folder.

    Raises:
        Refused: it has other files as well; nothing is removed.
    """
    if not folder.exists():
        return
    sums = folder / SUMS
    lines = sums.read_text("utf-8").splitlines() if sums.exists() else []
    ours = {folder / line.partition("  ")[2] for line in lines} | {sums}
    others = sorted(p for p in folder.rglob("*") if p.is_file() and p not in ours)
    if others:
        raise Refused(f"{others[0]} is of no release: remove it, or name another folder.")
    shutil.rmtree(folder)


# --- checking ---------------------------------------------------------------------------------


def metadata(path: Path) -> bytes:
    """Return the metadata of a wheel or sdist."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
            return wheel.read(name)
    with tarfile.open(path) as sdist:
        name = f"{path.name.removesuffix('.tar.gz')}/PKG-INFO"
        return sdist.extractfile(name).read()


def packaged(path: Path) -> set[str]:
    """Return the files of a wheel, without those of its metadata."""
    with zipfile.ZipFile(path) as wheel:
        return {n for n in wheel.namelist() if ".dist-info/" not in n}


def check_files(root: Path, folder: Path) -> None:
    """Compare what was built with what git tracks, and its metadata with the standard.

    Raises:
        Refused: with the first fault.
    """
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    (device,) = (folder / "client").glob("*.whl")
    for path, parts in ((wheel, PARTS), (device, PARTS[:-1])):
        names = tuple(f"{part}/fcil_{part}" for part in parts)
        wanted = {p.relative_to(p.parts[0]).as_posix() for p in tracked(root, names)}
        if wanted != packaged(path):
            odd = min(wanted ^ packaged(path))
            raise Refused(
                f"{odd} is {'missing from' if odd in wanted else 'not tracked and in'} "
                f"{path.name}: correct [tool.setuptools.package-data]."
            )
    if metadata(sdist) != metadata(wheel):
        raise Refused(f"{sdist.name} and {wheel.name} have different metadata.")
    for path in (wheel, device):
        try:
            found = Metadata.from_email(metadata(path))
        except (InvalidMetadata, ExceptionGroup) as error:
            raise Refused(f"the metadata of {path.name} are not valid: {error!r}") from None
        if str(found.version) != version(root):
            raise Refused(f"{path.name} has version {found.version}, not {version(root)}.")
