"""Acts that were described to an operator and wait for the word that lets them happen."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fcil_protocol.errors import UsageError

GOOD_S = 60.0  # from the description to the word
MAX_OPEN = 8  # of one session; a further one takes the place of the oldest
MAX_ALL = 256  # of all sessions together


@dataclass(frozen=True)
class Plan:
    """What an act will do, decided and not done yet.

    Attributes:
        act: its name.
        op: the control command that does it, with its fields.
        target: what it will happen to, such as the round under way; if that is another one
            when the word comes, nothing happens.
        says: the sentence that was shown.
    """

    act: str
    op: str
    fields: dict[str, Any]
    target: tuple[object, ...]
    says: str


@dataclass(frozen=True)
class _Waiting:
    session: str
    request: dict[str, Any]
    plan: Plan
    until: float


@dataclass
class Confirmations:
    """Words that were handed out, each good once, for one session, one act and its fields.

    Several threads may use it.

    Args:
        clock: seconds that only ever grow.
    """

    clock: Callable[[], float] = time.monotonic
    _waiting: dict[str, _Waiting] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, session: str, request: dict[str, Any], plan: Plan) -> str:
        """Return the word for what was asked for and the plan that was made of it."""
        word = secrets.token_urlsafe(24)
        with self._lock:
            self._forget_old()
            own = [w for w, waiting in self._waiting.items() if waiting.session == session]
            for old in own[: max(0, len(own) + 1 - MAX_OPEN)]:
                del self._waiting[old]
            while len(self._waiting) >= MAX_ALL:
                del self._waiting[next(iter(self._waiting))]
            until = self.clock() + GOOD_S
            self._waiting[word] = _Waiting(session, dict(request), plan, until)
        return word

    def burn(self, session: str, word: str) -> tuple[dict[str, Any], Plan]:
        """Return what a word stands for; it is good no more, whoever gave it.

        Raises:
            UsageError: it was used, is too old, or is another session's.
        """
        with self._lock:
            self._forget_old()
            waiting = self._waiting.pop(word, None)
        if waiting is None or waiting.session != session:
            raise UsageError(
                f"this confirmation is good no more: it is good once, for {GOOD_S:.0f} s.",
                action="Begin again; nothing was done.",
            )
        return waiting.request, waiting.plan

    def _forget_old(self) -> None:
        now = self.clock()
        for word in [w for w, waiting in self._waiting.items() if waiting.until <= now]:
            del self._waiting[word]
