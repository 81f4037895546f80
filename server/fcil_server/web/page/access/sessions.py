"""Which browsers are let in: signed sessions, kept by the browsers alone.

A session is a few numbers and their HMAC in a cookie; nothing of it is kept here but the
names of those that left (`left_sessions`). So this process may die and start anew, and nobody
has to enter again; a new key ends all sessions at once.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fcil_protocol.errors import FcilError
from fcil_protocol.storage.atomic_files import read_private
from fcil_server.federation.page_key import KEY_NAME, LEFT_NAME, refuse_short
from fcil_server.web.page.access.left_sessions import LeftSessions

IDLE_S = 12 * 3600.0  # a session that nobody used for so long is over
LIFE_S = 7 * 86_400.0  # and every one after so long, used or not
RENEW_S = 600.0  # a cookie that is older than this is replaced by a fresh one
MAX_COOKIES = 8  # of other federations' pages that a browser keeps beside ours
VERSION = "1"  # of the cookie's form
GET_A_LINK = "Get a link with: fcil-server page"  # what to do without a session

_COOKIE = re.compile(r"1\.([0-9a-f]{32})\.([0-9]{1,12})\.([0-9]{1,12})\.([A-Za-z0-9_-]{43})")

_NAME = re.compile(r"fcil_page_[A-Za-z0-9_-]{8}")

Clock = Callable[[], float]


@dataclass(frozen=True)
class Session:
    """A browser that is let in.

    Attributes:
        id: names it in this process; no secret, and no use without the cookie.
        begun: when it entered, unix seconds.
        ends_at: when it is over unless it is used, unix seconds.
        csrf: what its page sends along with every POST; a stranger's page cannot know it.
        renewal: the cookie that should replace the one it came with; None: that is fresh.
    """

    id: str
    begun: float
    ends_at: float
    csrf: str = field(repr=False)
    renewal: str | None = field(default=None, repr=False)


class Sessions:
    """Sessions that are signed with one key.

    Args:
        key: secret, at least `page_key.MIN_KEY_BYTES`.
        clock: unix seconds.
        left: those that signed out; None: those of this process alone are known.

    Raises:
        KeyFileError: the key is too short to be one.
    """

    def __init__(
        self, key: bytes, clock: Clock = time.time, left: LeftSessions | None = None
    ) -> None:
        refuse_short(key)
        self._key = key
        self._clock = clock
        self._left = left if left is not None else LeftSessions(None, clock, LIFE_S)
        # Browsers keep cookies by host, not by port: two federations of a machine must not
        # use one name, or entering one page would leave the other.
        self.cookie = f"fcil_page_{self._mac('name', '')[:8]}"

    def begin(self) -> str:
        """Return the cookie of a new session."""
        now = int(self._clock())
        return self._value(secrets.token_hex(16), now, now)

    def check(self, cookie: str) -> Session | None:
        """Return the session that a cookie proves; None if it is none, forged, or over."""
        match = _COOKIE.fullmatch(cookie)
        if match is None:
            return None
        name, begun, used = match[1], int(match[2]), int(match[3])
        if not hmac.compare_digest(self._value(name, begun, used), cookie):
            return None
        now = self._clock()
        # A clock that was set back makes a session no longer than one that was not.
        if abs(now - used) > IDLE_S or abs(now - begun) > LIFE_S or name in self._left:
            return None
        return Session(
            id=name,
            begun=float(begun),
            ends_at=min(used + IDLE_S, begun + LIFE_S),
            csrf=self._mac("csrf", name),
            renewal=self._value(name, begun, int(now)) if abs(now - used) > RENEW_S else None,
        )

    def leave(self, session: Session) -> None:
        """End a session now, whoever may hold a copy of its cookie.

        Raises:
            DiskFull, StorageError: a copy would live again when this process is started anew.
        """
        self._left.add(session.id)

    def _value(self, name: str, begun: int, used: int) -> str:
        said = f"{VERSION}.{name}.{begun}.{used}"
        return f"{said}.{self._mac('cookie', said)}"

    def _mac(self, what: str, said: str) -> str:
        mac = hmac.digest(self._key, f"fcil page {what}\n{said}".encode(), hashlib.sha256)
        return base64.urlsafe_b64encode(mac).rstrip(b"=").decode("ascii")


class KeyedSessions:
    """The sessions of a federation: those of the key that lies in its directory now.

    The server writes the key. When it is replaced, every session is over with the next look;
    while it is missing or unusable nobody is let in.

    Args:
        directory: of the federation.
        clock: unix seconds.
    """

    def __init__(self, directory: Path, clock: Clock = time.time) -> None:
        self._path = directory / KEY_NAME
        self._left_path = directory / LEFT_NAME
        self._clock = clock
        self._stamp: tuple[int, ...] | None = None
        self._sessions: Sessions | None = None

    def current(self) -> Sessions:
        """Return the sessions of the key as it is now; costs one `stat` where it is the same.

        Raises:
            KeyFileError: there is no key, or it cannot be used.
            CorruptFile: it is not known who signed out.
            StorageError: one of the two cannot be read.
        """
        stamp = self._look()
        if self._sessions is None or stamp is None or stamp != self._stamp:
            self._sessions = None
            key = read_private(self._path)
            left = LeftSessions(self._left_path, self._clock, LIFE_S)
            self._sessions = Sessions(key, self._clock, left)
            self._stamp = stamp
        return self._sessions

    def of(self, cookies: Mapping[str, str]) -> Session | None:
        """Return the session of a request with these cookies; None: it is let in nowhere."""
        try:
            sessions = self.current()
        except FcilError:  # whoever enters is told; a cookie proves nothing without the key
            return None
        return sessions.check(cookies.get(sessions.cookie, ""))

    def _look(self) -> tuple[int, ...] | None:
        try:
            found = os.stat(self._path)  # noqa: PTH116 - asked for with every request
        except OSError:
            return None  # reading it says why
        return found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode


def set_cookie(sessions: Sessions, value: str, *, secure: bool) -> str:
    """Return the ``Set-Cookie`` header that hands a session to its browser.

    Args:
        sessions: whose cookie it is.
        value: of the cookie; empty: the browser is to forget it.
        secure: the door speaks TLS.
    """
    return _header(sessions.cookie, value, secure=secure)


def forget_cookies(cookies: Mapping[str, str], own: str, *, secure: bool) -> list[str]:
    """Return the headers by which a browser forgets the oldest cookies of other pages.

    Each key has a cookie of its own name; whoever looks at many federations of one machine
    would come to send more of them than a request may be long.

    Args:
        cookies: those that a browser sent.
        own: the name of the one that stays whatever its age.
        secure: the door speaks TLS.
    """
    others = []
    for name, value in cookies.items():
        match = _COOKIE.fullmatch(value)
        if name != own and _NAME.fullmatch(name):
            others.append((int(match[3]) if match else 0, name))
    surplus = sorted(others)[: max(0, len(others) - MAX_COOKIES)]
    return [_header(name, "", secure=secure) for _, name in surplus]


def _header(name: str, value: str, *, secure: bool) -> str:
    age = int(LIFE_S) if value else 0
    tls = "; Secure" if secure else ""
    return f"{name}={value}; Path=/; Max-Age={age}; HttpOnly; SameSite=Strict{tls}"
