"""Dockerfiles and the compose file: linted, of a piece, and without secrets."""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess

import pytest

from deploy.kit import BIN, COMPOSE, DEPLOY, DOCKERFILES, ROOT, docker, documents, image_of, program
from fcil_server.federation.config import Config

USER = "10001:10001"
HOME = "/var/lib/fcil"


def name(path) -> str:
    return path.stem


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("path", DOCKERFILES, ids=name)
def test_hadolint_finds_nothing_in_a_dockerfile(path):
    found = run(BIN / "hadolint", path)
    assert (found.returncode, found.stdout) == (0, "")


def test_hadolint_finds_what_is_wrong_with_one(tmp_path):
    path = tmp_path / "Dockerfile"
    path.write_text("FROM python:latest\nRUN cd /x && sudo apt-get install y\n", encoding="utf-8")
    assert "DL3007" in run(BIN / "hadolint", path).stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=name)
def test_a_dockerfile_installs_the_wheel_of_a_release_and_nothing_else_enters_the_build(path):
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in lines, "only what is listed enters a build"
    allowed = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copied = [rest.split() for word, rest in docker(path) if word == "COPY"]
    sources = {s for words in copied if not words[0].startswith("--from") for s in words[:-1]}
    wheel = "dist/*.whl" if path.stem == "server" else "dist/client/*.whl"
    assert sources == {"constraints.txt", "dist/SHA256SUMS", wheel}, "a device has no server"
    assert {source.partition("/")[0] for source in sources} == allowed
    text = path.read_text(encoding="utf-8")
    assert f'"$(echo {wheel})[' in text
    assert text.index("sha256sum --check") < text.index(f'"$(echo {wheel})[')


def test_keys_tickets_and_images_stay_out_of_a_build():
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = [line.removeprefix("!") for line in lines if line.startswith("!")]
    for secret in (
        "federation",
        "client-1.ticket",
        "tickets",
        "camera-1",
        ".git",
        ".venv",
        "state",
    ):
        assert not [a for a in allowed if fnmatch.fnmatch(secret, a)], secret


@pytest.mark.parametrize("path", DOCKERFILES, ids=name)
def test_an_image_runs_as_nobody_special_and_keeps_its_state_in_a_volume(path):
    found = dict(docker(path))  # the last of each, which is the final stage's
    text = path.read_text(encoding="utf-8")
    assert found["USER"] == USER
    assert json.loads(found["VOLUME"]) == [HOME]
    assert found["WORKDIR"] == HOME
    assert f"XDG_STATE_HOME={HOME}/state" in found["ENV"]
    assert f"install -d -o fcil -g fcil -m 0700 {HOME} /tickets" in text
    assert found["STOPSIGNAL"] == "SIGTERM"
    assert json.loads(found["ENTRYPOINT"])[:2] == ["/usr/bin/tini", "--"]
    health = json.loads(found["HEALTHCHECK"].split(" CMD ")[1])
    assert health == [*program(path), "status", "--alive"]
    assert ("ORT_DISABLE_TELEMETRY=1" in found["ENV"]) is (path.stem in {"edge", "jetson"})


@pytest.mark.parametrize("path", DOCKERFILES, ids=name)
def test_what_an_image_installs_is_pinned_and_is_an_extra(path):
    text = path.read_text(encoding="utf-8")
    installs = re.findall(r"pip install ([^&;\n]*)", text)
    assert installs
    assert [i for i in installs if "--constraint constraints.txt" not in i] == []
    extras = set(re.findall(r'whl\)\[([\w-]+)\]"', text)) | set(re.findall(r"extra=([\w-]+)", text))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert extras
    assert [e for e in extras if f"\n{e} = [" not in project] == []


def test_the_port_is_the_same_everywhere():
    _, port = Config().federation.listen.rsplit(":", 1)
    assert dict(docker(DEPLOY / "docker/server.Dockerfile"))["EXPOSE"] == port
    server = documents(COMPOSE)[0]["services"]["server"]
    assert f"federation.listen=0.0.0.0:{port}" in server["command"]
    assert server["ports"] == ["${FCIL_BIND:-127.0.0.1}:" + f"{port}:{port}"]


def test_the_compose_file_is_one():
    found = run(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE)
    assert found.returncode == 0, found.stdout


def test_a_compose_file_that_is_none_is_found(tmp_path):
    path = tmp_path / "compose.yaml"
    path.write_text("services: {a: {image: x, healthchecks: {}}}\n", encoding="utf-8")
    found = run(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", path)
    assert found.returncode != 0


def test_every_service_of_ours_is_shut_in_and_built_from_its_dockerfile():
    ours = {
        name: service
        for name, service in documents(COMPOSE)[0]["services"].items()
        if service["image"].startswith("fcil-")
    }
    assert set(ours) == {"server", "client-1", "client-2"}
    for service in ours.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["tmpfs"] == ["/tmp:mode=1777,size=64m"]
        assert ROOT / service["build"]["dockerfile"] == image_of(service["image"])
        assert "environment" not in service
        assert [v for v in service["volumes"] if v.endswith(f":{HOME}")]


def test_yaml_is_laid_out_as_everywhere():
    rules = (
        "{extends: default, rules: {line-length: {max: 130}, document-start: disable, "
        "truthy: {check-keys: false}, comments-indentation: disable, "
        "comments: {min-spaces-from-content: 1}, braces: {max-spaces-inside: 1}, "
        "octal-values: disable}}"
    )
    found = run(BIN / "yamllint", "--strict", "-d", rules, DEPLOY)
    assert (found.returncode, found.stdout) == (0, "")
