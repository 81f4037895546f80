"""Browser sessions: signed, and kept only by the browsers.

A session is a few numbers and their HMAC in a cookie; this process keeps only the names of those
that signed out (`left_sessions`). So it may die and restart without another sign-in; a new key ends
all sessions at once.
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

IDLE_S = 12 * 3600.0  # a session that is unused for this long is over
LIFE_S = 7 * 86_400.0  # and every one after this long, used or not
RENEW_S = 600.0  # a cookie that is older than this is replaced by a fresh one
MAX_COOKIES = 8  # of other federations' dashboards that a browser keeps next to ours
VERSION = "1"  # of the cookie's format
GET_A_LINK = "Get a link with: fcil-server page"  # advice without a session

_COOKIE = re.compile(r"1\.([0-9a-f]{32})\.([0-9]{1,12})\.([0-9]{1,12})\.([A-Za-z0-9_-]{43})")

_NAME = re.compile(r"fcil_page_[A-Za-z0-9_-]{8}")

Clock = Callable[[], float]


@dataclass(frozen=True)
class BrowserSession:
    """A browser's valid session.

    Attributes:
        id: names it in this process; no secret, and useless without the cookie.
        csrf: token that our page sends with every POST; a foreign page cannot know it.
        renewal: the cookie that should replace the current one; None: that is fresh.
    """

    id: str
    csrf: str = field(repr=False)
    renewal: str | None = field(default=None, repr=False)


class BrowserSessions:
    """Sessions that are signed with one key.

    Args:
        key: secret, at least `page_key.MIN_KEY_BYTES`.
        clock: unix seconds.
        left: those that signed out; None: only those of this process are known.

    Raises:
        KeyFileError: the key is too short.
    """

    def __init__(
        self, key: bytes, clock: Clock = time.time, left: LeftSessions | None = None
    ) -> None:
        refuse_short(key)
        self._key = key
        self._clock = clock
        self._left = left if left is not None else LeftSessions(None, clock, LIFE_S)
        # Browsers keep cookies by host, not by port: two federations on one machine must not share
        # a name, or a sign-in on one dashboard would end the other session.
        self.cookie = f"fcil_page_{self._mac('name', '')[:8]}"

    def begin(self) -> str:
        """Return the cookie of a new session."""
        now = int(self._clock())
        return self._value(secrets.token_hex(16), now, now)

    def check(self, cookie: str) -> BrowserSession | None:
        """Return the session that a cookie proves; None if it is invalid, forged, or over."""
        match = _COOKIE.fullmatch(cookie)
        if match is None:
            return None
        name, begun, used = match[1], int(match[2]), int(match[3])
        if not hmac.compare_digest(self._value(name, begun, used), cookie):
            return None
        now = self._clock()
        # A clock that was set back makes no session longer.
        if abs(now - used) > IDLE_S or abs(now - begun) > LIFE_S or name in self._left:
            return None
        return BrowserSession(
            id=name,
            csrf=self._mac("csrf", name),
            renewal=self._value(name, begun, int(now)) if abs(now - used) > RENEW_S else None,
        )

    def leave(self, session: BrowserSession) -> None:
        """End a session now, including all copies of its cookie.

        Raises:
            DiskFull, StorageError: a copy would be valid again after a restart of this process.
        """
        self._left.add(session.id)

    def _value(self, name: str, begun: int, used: int) -> str:
        said = f"{VERSION}.{name}.{begun}.{used}"
        return f"{said}.{self._mac('cookie', said)}"

    def _mac(self, what: str, said: str) -> str:
        mac = hmac.digest(self._key, f"fcil page {what}\n{said}".encode(), hashlib.sha256)
        return base64.urlsafe_b64encode(mac).rstrip(b"=").decode("ascii")


class KeyedSessions:
    """The sessions of a federation, by the key that is in its directory now.

    The server writes the key. When it is replaced, every session is over at the next check; while
    it is missing or unusable no browser is admitted.

    Args:
        directory: of the federation.
        clock: unix seconds.
    """

    def __init__(self, directory: Path, clock: Clock = time.time) -> None:
        self._path = directory / KEY_NAME
        self._left_path = directory / LEFT_NAME
        self._clock = clock
        self._stamp: tuple[int, ...] | None = None
        self._sessions: BrowserSessions | None = None

    def current(self) -> BrowserSessions:
        """Return the sessions of the current key; costs one `stat` if it is unchanged.

        Raises:
            KeyFileError: there is no key, or it cannot be used.
            CorruptFile: the list of sessions that signed out is damaged.
            StorageError: one of the two cannot be read.
        """
        stamp = self._look()
        if self._sessions is None or stamp is None or stamp != self._stamp:
            self._sessions = None
            key = read_private(self._path)
            left = LeftSessions(self._left_path, self._clock, LIFE_S)
            self._sessions = BrowserSessions(key, self._clock, left)
            self._stamp = stamp
        return self._sessions

    def of(self, cookies: Mapping[str, str]) -> BrowserSession | None:
        """Return the session of a request with these cookies; None: it has none."""
        try:
            sessions = self.current()
        except FcilError:  # a sign-in gets the error; a cookie proves nothing without the key
            return None
        return sessions.check(cookies.get(sessions.cookie, ""))

    def _look(self) -> tuple[int, ...] | None:
        try:
            found = os.stat(self._path)  # noqa: PTH116 - asked for with every request
        except OSError:
            return None  # the read that follows raises the reason
        return found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode


def set_cookie(sessions: BrowserSessions, value: str, *, secure: bool) -> str:
    """Return the ``Set-Cookie`` header that gives a session to its browser.

    Args:
        sessions: the sessions that it belongs to.
        value: of the cookie; empty: the browser is to forget it.
        secure: the listener speaks TLS.
    """
    return _header(sessions.cookie, value, secure=secure)


def forget_cookies(cookies: Mapping[str, str], own: str, *, secure: bool) -> list[str]:
    """Return the headers that delete the oldest cookies of other dashboards in a browser.

    Each key has its own cookie name; a browser that visits many federations of one machine would
    send more cookies than a request may hold.

    Args:
        cookies: those that a browser sent.
        own: the name of the one that always stays.
        secure: the listener speaks TLS.
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
