"""Tokens of the API: shown once, kept as digests, and void when they should be."""

from __future__ import annotations

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fcil_protocol.errors import CorruptFile, KeyFileError, UsageError
from fcil_server.federation.api_tokens import (
    MAX_TOKENS,
    TOKENS_NAME,
    TokenRole,
    find_token,
    make_token,
    read_tokens,
    revoke_token,
)


def made(directory: Path, name="grafana", role="read", lasts_s=None, now=1000.0) -> str:
    return make_token(directory, name, role, lasts_s=lasts_s, now=now)[0]


def test_a_token_is_found_by_its_text_alone_and_the_file_does_not_have_it(tmp_path: Path) -> None:
    text = made(tmp_path)
    other = made(tmp_path, "ci", "operate")
    assert len(text) == len("fcil_") + 43
    content = (tmp_path / TOKENS_NAME).read_text()
    assert text not in content
    assert text.removeprefix("fcil_") not in content
    assert stat.S_IMODE((tmp_path / TOKENS_NAME).stat().st_mode) == 0o600
    tokens = read_tokens(tmp_path)
    assert find_token(tokens, text, 1000.0).name == "grafana"
    assert find_token(tokens, other, 1000.0).role is TokenRole.OPERATE
    for wrong in ("", text[:-1], text + "x", text.upper(), "fcil_", "x" * 100_000, "\ud800"):
        assert find_token(tokens, wrong, 1000.0) is None
    assert text not in repr(tokens)
    assert tokens[0].digest not in repr(tokens)


def test_roles_include_those_before_them() -> None:
    allowed = [[a.allows(b) for b in TokenRole] for a in TokenRole]
    assert allowed == [[True, False, False], [True, True, False], [True, True, True]]


def test_an_expired_token_is_void_and_its_name_is_free(tmp_path: Path) -> None:
    text = made(tmp_path, lasts_s=60.0)
    assert find_token(read_tokens(tmp_path), text, 1059.0) is not None
    assert find_token(read_tokens(tmp_path), text, 1060.0) is None
    with pytest.raises(UsageError, match="there is a token 'grafana' already"):
        made(tmp_path, now=1059.0)
    made(tmp_path, now=1060.0)
    assert len(read_tokens(tmp_path)) == 1


def test_a_revoked_token_is_gone(tmp_path: Path) -> None:
    text = made(tmp_path)
    assert revoke_token(tmp_path, "grafana").role is TokenRole.READ
    assert find_token(read_tokens(tmp_path), text, 1000.0) is None
    with pytest.raises(UsageError, match="there is no token 'grafana'; known are none"):
        revoke_token(tmp_path, "grafana")


@pytest.mark.parametrize("name", ["", "a b", "-x", "a/b", "a\n", "x" * 65, None, 3, "ü"])
def test_a_name_that_could_confuse_a_log_is_refused(tmp_path: Path, name: object) -> None:
    with pytest.raises(UsageError, match="expected a name of 1 to 64"):
        made(tmp_path, name)
    assert not (tmp_path / TOKENS_NAME).exists()


def test_an_unknown_role_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one of read, operate, administer, got 'root'"):
        made(tmp_path, role="root")


def test_tokens_are_few_and_made_one_at_a_time(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda n: made(tmp_path, f"n{n}"), range(MAX_TOKENS)))
    assert len(read_tokens(tmp_path)) == MAX_TOKENS
    with pytest.raises(UsageError, match=f"at most {MAX_TOKENS} are allowed"):
        made(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"[" * 9000,
        b"\xff",
        b'{"version": 1}',
        b'{"version": 1, "tokens": [1]}',
        b'{"version": 1, "tokens": [{"name": "a"}]}',
        b'{"version": 2, "tokens": []}',
    ],
)
def test_a_file_that_cannot_be_read_stops_everything(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / TOKENS_NAME
    path.write_bytes(content)
    path.chmod(0o600)
    for work in (read_tokens, made, lambda folder: revoke_token(folder, "a")):
        with pytest.raises(CorruptFile):
            work(tmp_path)
    assert path.read_bytes() == content


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    made(tmp_path)
    (tmp_path / TOKENS_NAME).chmod(0o640)
    with pytest.raises(KeyFileError, match="expected 0600"):
        read_tokens(tmp_path)


def test_a_role_of_a_newer_version_is_no_right(tmp_path: Path) -> None:
    made(tmp_path)
    content = json.loads((tmp_path / TOKENS_NAME).read_text())
    content["tokens"][0]["role"] = "everything"
    (tmp_path / TOKENS_NAME).write_text(json.dumps(content))
    with pytest.raises(CorruptFile):
        read_tokens(tmp_path)
