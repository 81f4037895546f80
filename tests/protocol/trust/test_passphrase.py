"""What is sealed with a passphrase opens with it, in its context, unaltered, and never else."""

from __future__ import annotations

from pathlib import Path

import pytest

from fcil_protocol.errors import CannotOpen, CorruptFile, UsageError
from fcil_protocol.trust import passphrase
from fcil_protocol.trust.passphrase import (
    open_with_passphrase,
    read_passphrase,
    seal_with_passphrase,
)

PHRASE, CONTEXT = "correct horse battery", b"context"


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passphrase, "_LOG2_N", 4)


def test_it_comes_back_and_costs_what_it_should() -> None:
    sealed = seal_with_passphrase(b"secret", PHRASE, CONTEXT)
    assert b"secret" not in sealed
    assert sealed[8] == 17  # 2^17 x 8 x 128 bytes a guess
    assert open_with_passphrase(sealed, PHRASE, CONTEXT) == b"secret"


@pytest.mark.usefixtures("cheap")
def test_two_seals_of_the_same_are_different() -> None:
    made = {seal_with_passphrase(b"secret", PHRASE, CONTEXT) for _ in range(2)}
    assert len(made) == 2


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize(
    ("phrase", "context"), [(PHRASE + " ", CONTEXT), (PHRASE.upper(), CONTEXT), (PHRASE, b"other")]
)
def test_another_passphrase_or_context_opens_nothing(phrase: str, context: bytes) -> None:
    sealed = seal_with_passphrase(b"secret", PHRASE, CONTEXT)
    with pytest.raises(CannotOpen):
        open_with_passphrase(sealed, phrase, context)


@pytest.mark.usefixtures("cheap")
def test_no_bit_may_change() -> None:
    sealed = seal_with_passphrase(b"secret", PHRASE, CONTEXT)
    for position in range(len(sealed)):
        data = bytearray(sealed)
        data[position] ^= 1
        with pytest.raises((CannotOpen, CorruptFile)):
            open_with_passphrase(bytes(data), PHRASE, CONTEXT)


@pytest.mark.parametrize("log2_n", [0, 21, 63, 255])
def test_a_file_cannot_ask_for_gigabytes(log2_n: int) -> None:
    with pytest.raises(CorruptFile):
        open_with_passphrase(b"fcilpwd1" + bytes((log2_n,)) + bytes(60), PHRASE, CONTEXT)


@pytest.mark.parametrize("data", [b"", b"fcilpwd1", b"x" * 100])
def test_other_bytes_are_told_apart_from_a_wrong_passphrase(data: bytes) -> None:
    with pytest.raises(CorruptFile):
        open_with_passphrase(data, PHRASE, CONTEXT)


def test_a_short_passphrase_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 12 characters, got 11"):
        seal_with_passphrase(b"secret", "x" * 11, CONTEXT)


def test_a_passphrase_of_bytes_that_are_no_text_is_refused() -> None:
    with pytest.raises(UsageError, match="no valid text"):
        seal_with_passphrase(b"secret", "a long passphrase \udcff", CONTEXT)


def test_a_passphrase_is_the_first_line_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "p"
    for data in (b"caf\xc3\xa9 \r\nsecond", b"caf\xc3\xa9 "):
        path.write_bytes(data)
        assert read_passphrase(path) == "caf\u00e9 "


@pytest.mark.parametrize("data", [b"", b"\nsecond", b"\xff\xfe", b"x" * 1025])
def test_a_file_without_a_passphrase_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "p").write_bytes(data)
    with pytest.raises(UsageError, match="on the first line"):
        read_passphrase(tmp_path / "p")
