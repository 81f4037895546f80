"""Actions that were described to an operator and wait for their confirmation."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fcil_protocol.errors import UsageError

GOOD_S = 60.0  # from the description to the confirmation
MAX_OPEN = 8  # of one session; a further one replaces the oldest
MAX_ALL = 256  # of all sessions together


@dataclass(frozen=True)
class PlannedAct:
    """Effect of an action, decided and not carried out yet.

    Attributes:
        act: its name.
        op: the control command that carries it out, with its fields.
        target: its object, such as the round under way; if that has changed when the confirmation
            comes, nothing happens.
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
    plan: PlannedAct
    until: float


@dataclass
class Confirmations:
    """Confirmation tokens, each good once, for one session, one action and its fields.

    Several threads may use it.

    Args:
        clock: seconds that only ever grow.
    """

    clock: Callable[[], float] = time.monotonic
    _waiting: dict[str, _Waiting] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, session: str, request: dict[str, Any], plan: PlannedAct) -> str:
        """Return the token for a request and its plan."""
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

    def redeem(self, session: str, word: str) -> tuple[dict[str, Any], PlannedAct]:
        """Return the request and plan of a token, and void it, even for a wrong session.

        Raises:
            UsageError: it was used, is too old, or is another session's.
        """
        with self._lock:
            self._forget_old()
            waiting = self._waiting.pop(word, None)
        if waiting is None or waiting.session != session:
            raise UsageError(
                f"this confirmation is no longer valid: it is valid once, for {GOOD_S:.0f} s.",
                action="Start again; nothing was done.",
            )
        return waiting.request, waiting.plan

    def _forget_old(self) -> None:
        now = self.clock()
        for word in [w for w, waiting in self._waiting.items() if waiting.until <= now]:
            del self._waiting[word]
