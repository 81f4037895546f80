"""Reads what deploy/ holds, and what the two command lines know."""

from __future__ import annotations

import copy
import functools
import json
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import yaml

import fcil_client.cli.main
import fcil_server.cli.main

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent  # where pip puts linters that are programs
UNITS = sorted(DEPLOY.glob("systemd/**/*.service"))
DOCKERFILES = sorted(DEPLOY.glob("docker/*.Dockerfile"))
COMPOSE = DEPLOY / "compose.yaml"
MANIFESTS = sorted(
    path for path in DEPLOY.glob("kubernetes/*/*.yaml") if path.name != "kustomization.yaml"
)
APPS = {
    "fcil-server": typer.main.get_command(fcil_server.cli.main.app),
    "fcil-client": typer.main.get_command(fcil_client.cli.main.app),
}


@dataclass(frozen=True)
class Found:
    """A command line, and where it stands."""

    where: str
    words: tuple[str, ...]


@functools.cache
def _parsed(path: Path) -> list[dict[str, Any]]:
    return [d for d in yaml.safe_load_all(path.read_text(encoding="utf-8")) if d]


def documents(path: Path) -> list[dict[str, Any]]:
    """Return what a YAML file holds, to change at will."""
    return copy.deepcopy(_parsed(path))


def unit(path: Path) -> dict[str, list[str]]:
    """Return the directives of a unit, each with all its values."""
    found: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def docker(path: Path) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, each with what follows, in one line."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines if line)]


def program(path: Path) -> list[str]:
    """Return what a container of a Dockerfile starts, behind tini."""
    entry = json.loads(dict(docker(path))["ENTRYPOINT"])
    return entry[entry.index("--") + 1 :]


def image_of(name: str) -> Path:
    """Return the Dockerfile of an image, by its name and tag in manifests."""
    kind, _, tag = name.partition(":")
    stem = tag if tag in ("edge", "jetson") else kind.removeprefix("fcil-")
    return DEPLOY / "docker" / f"{stem}.Dockerfile"


def pods() -> Iterator[tuple[Path, dict[str, Any], dict[str, Any]]]:
    """Yield (file, workload, pod) of every manifest that starts one."""
    for path in MANIFESTS:
        for document in documents(path):
            template = document.get("spec", {}).get("template")
            if template:
                yield path, document, template


def command_lines() -> Iterator[Found]:
    """Yield every command of ours that something in deploy/ starts or tells people to type."""
    for path in UNITS:
        for line in unit(path)["ExecStart"]:
            yield Found(path.name, tuple(shlex.split(line)))
    for path in DOCKERFILES:
        found = dict(docker(path))
        yield Found(path.name, (*program(path), *json.loads(found["CMD"])))
        yield Found(path.name, tuple(json.loads(found["HEALTHCHECK"].split(" CMD ")[1])))
    for name, service in documents(COMPOSE)[0]["services"].items():
        if service["image"].startswith("fcil-"):
            start = program(image_of(service["image"]))
            yield Found(f"compose {name}", (*start, *service["command"]))
    for path, _, pod in pods():
        (container,) = pod["spec"]["containers"]
        yield Found(path.name, (*program(image_of(container["image"])), *container["args"]))
        for probe in ("startupProbe", "livenessProbe"):
            yield Found(path.name, tuple(container[probe]["exec"]["command"]))
    for path in (*DEPLOY.rglob("*.md"), *UNITS, COMPOSE, *DEPLOY.glob("kubernetes/**/*.yaml")):
        for line in re.sub(r"\\\n\s*", "", path.read_text(encoding="utf-8")).splitlines():
            yield from _typed(path, line)


def _typed(path: Path, line: str) -> Iterator[Found]:
    """Yield what a person is told to type: a line, or something between back quotes."""
    whole = [line.strip().removeprefix("# ")] if line.startswith(("    ", "#   ")) else []
    for piece in (*whole, *re.findall(r"`([^`]+)`", line)):
        match = re.search(r"(?:^|/|\s)(fcil-(?:server|client) [a-z-]+.*)", piece)
        if match:
            text = re.split(r"\s[(>|;&<]|\s{3,}", match[1])[0]
            yield Found(f"{path.name}: {piece}", tuple(shlex.split(text, comments=True)))


def unknown_options(words: tuple[str, ...]) -> list[str]:
    """Return the words of a command line that its command does not know."""
    command: Any = APPS[Path(words[0]).name]
    rest = list(words[1:])
    while rest and hasattr(command, "commands"):
        word = rest.pop(0)
        if word not in command.commands:
            return [word]
        command = command.commands[word]
    known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
    return [w for w in rest if re.match(r"--?[a-z]", w) and w.split("=")[0] not in known]
