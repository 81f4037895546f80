"""Completions for a shell: whole words in bash, and none where they cannot be computed.

bash ends words at ``:`` and ``=`` as well: it passes ``host:folder`` and ``key=value`` as three
words each, and replaces only the last of them. typer would take each for an argument.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence

_BREAKS = re.compile(r"[:=]+")  # such a word joins its neighbours
_SPECIAL = re.compile(r"([^\w@%+=:,./-])")  # characters that have a meaning of their own in bash


@contextlib.contextmanager
def completing(program: str) -> Iterator[None]:
    """Let typer answer a shell that asks for completions of ``program``; or do nothing.

    A failure ends as no completion: a shell has no place for a reason.
    """
    asked = os.environ.get(f"_{program}_COMPLETE".replace("-", "_").upper(), "")
    if not asked.startswith("complete_"):
        yield
        return
    found = io.StringIO()
    try:
        kept, quoted = "", True
        if asked == "complete_bash":
            words, current = os.environ["COMP_WORDS"].split("\n"), int(os.environ["COMP_CWORD"])
            quoted = words[current].startswith(("'", '"'))
            words, kept = join_words(words, current)
            os.environ["COMP_WORDS"] = "\n".join(words)
            os.environ["COMP_CWORD"] = str(len(words) - 1)
        with contextlib.redirect_stdout(found):
            yield
    except SystemExit:
        for line in found.getvalue().splitlines():
            rest = line.removeprefix(kept)
            sys.stdout.write((rest if quoted else _SPECIAL.sub(r"\\\1", rest)) + "\n")
        raise
    except Exception:
        raise SystemExit(0) from None


def join_words(words: Sequence[str], current: int) -> tuple[list[str], str]:
    """Return bash's words as they were typed, up to the current one.

    Args:
        words: ``COMP_WORDS``, still quoted.
        current: ``COMP_CWORD``.

    Returns:
        The words; and the beginning of the last one, without quotes, that bash does not replace.
    """
    typed: list[str] = []
    joins = False
    for word in words[: current + 1]:
        breaks = _BREAKS.fullmatch(word) is not None
        if word == "=" and typed[-1].startswith("--"):  # between an option and its value
            typed.append("")
        elif word and (breaks or joins):
            typed[-1] += word
        else:
            typed.append(word)
        joins = breaks
    own = "" if joins else words[current]
    return typed, "".join(shlex.split(typed[-1].removesuffix(own)))
