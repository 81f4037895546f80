"""Who is let into the page: with a fresh, whole cookie of the key that is there now."""

from __future__ import annotations

import json
import os

import pytest

from fcil_protocol.errors import CorruptFile, DiskFull, KeyFileError
from fcil_server.federation.page_key import KEY_NAME, LEFT_NAME, renew_key
from fcil_server.web.page.access import left_sessions
from fcil_server.web.page.access.left_sessions import MAX_LEFT
from fcil_server.web.page.access.sessions import (
    IDLE_S,
    LIFE_S,
    MAX_COOKIES,
    RENEW_S,
    BrowserSessions,
    KeyedSessions,
    forget_cookies,
    set_cookie,
)
from sample_run import Clock

KEY = b"k" * 32


def sessions(clock: Clock, key: bytes = KEY) -> BrowserSessions:
    return BrowserSessions(key, clock)


def put_key(directory, key: bytes, mode: int = 0o600) -> None:
    new = directory / "new"
    new.write_bytes(key)
    new.chmod(mode)
    new.replace(directory / KEY_NAME)


def keyed(directory) -> KeyedSessions:
    put_key(directory, KEY)
    return KeyedSessions(directory, Clock())


def jar(let_in: BrowserSessions) -> dict[str, str]:
    """Return the cookies of a browser that has just entered."""
    return {let_in.cookie: let_in.begin(), "other": "1"}


def test_who_entered_is_let_in_and_stays_who_it_is() -> None:
    clock = Clock()
    let_in = sessions(clock)
    cookie = let_in.begin()
    first = let_in.check(cookie)
    clock.now += RENEW_S + 1
    again = sessions(clock).check(cookie)  # a process that started anew
    assert first is not None
    assert again is not None
    assert (again.id, again.csrf) == (first.id, first.csrf)
    other = let_in.check(let_in.begin())
    assert other is not None
    assert other.id != first.id
    assert other.csrf != first.csrf


def test_a_cookie_is_renewed_when_it_is_not_fresh_and_then_lasts_as_long() -> None:
    clock = Clock()
    let_in = sessions(clock)
    fresh = let_in.check(cookie := let_in.begin())
    assert fresh is not None
    assert fresh.renewal is None
    clock.now += IDLE_S
    old = let_in.check(cookie)
    assert old is not None
    assert old.renewal is not None
    renewed = let_in.check(old.renewal)
    assert renewed is not None
    assert (renewed.id, renewed.renewal) == (fresh.id, None)
    clock.now += IDLE_S
    assert let_in.check(old.renewal) is not None
    clock.now += 1
    assert let_in.check(old.renewal) is None


def test_a_session_that_nobody_uses_is_over() -> None:
    clock = Clock()
    let_in = sessions(clock)
    cookie = let_in.begin()
    clock.now += IDLE_S + 1
    assert let_in.check(cookie) is None


def test_a_session_in_use_is_over_after_its_longest_life() -> None:
    clock = Clock()
    let_in = sessions(clock)
    cookie, began = let_in.begin(), clock.now
    while clock.now + IDLE_S < began + LIFE_S:
        clock.now += IDLE_S - 1
        session = let_in.check(cookie)
        assert session is not None
        cookie = session.renewal or cookie
    clock.now = began + LIFE_S + 1
    assert let_in.check(cookie) is None


def test_a_clock_that_was_set_back_lengthens_no_session() -> None:
    clock = Clock()
    let_in = sessions(clock)
    cookie = let_in.begin()
    clock.now -= IDLE_S + 1
    assert let_in.check(cookie) is None


def test_what_is_altered_anywhere_is_none() -> None:
    let_in = sessions(Clock())
    cookie = let_in.begin()
    for at, old in enumerate(cookie):
        for new in {"0", "1", "a", "A", ".", "-"} - {old}:
            forged = cookie[:at] + new + cookie[at + 1 :]
            # The last character of the signature has bits that mean nothing; it must be exact too.
            assert let_in.check(forged) is None, at


@pytest.mark.parametrize(
    "forged",
    ["", "1", "....", "x" * 8000, "1." + "0" * 32 + ".0.0." + "A" * 43, "é\0\n", "1.\ud800"],
)
def test_what_nobody_signed_is_none(forged: str) -> None:
    assert sessions(Clock()).check(forged) is None


def test_numbers_in_another_writing_are_none() -> None:
    let_in = sessions(Clock())
    version, name, begun, used, mac = let_in.begin().split(".")
    assert let_in.check(f"{version}.{name}.0{begun}.{used}.{mac}") is None
    arabic = used.translate({ord("0") + i: 0x660 + i for i in range(10)})
    assert let_in.check(f"{version}.{name}.{begun}.{arabic}.{mac}") is None


def test_the_cookie_of_another_key_is_none_and_has_another_name() -> None:
    clock = Clock()
    ours, theirs = sessions(clock), sessions(clock, b"x" * 32)
    assert ours.check(theirs.begin()) is None
    assert ours.cookie != theirs.cookie


def test_who_left_does_not_come_back_with_a_copy_of_the_cookie() -> None:
    let_in = sessions(Clock())
    cookie = let_in.begin()
    session = let_in.check(cookie)
    assert session is not None
    let_in.leave(session)
    assert let_in.check(cookie) is None


def test_of_those_who_left_only_the_newest_are_kept() -> None:
    let_in = sessions(Clock())
    cookies = [let_in.begin() for _ in range(MAX_LEFT + 1)]
    for cookie in cookies:
        session = let_in.check(cookie)
        assert session is not None
        let_in.leave(session)
    assert let_in.check(cookies[0]) is not None
    assert let_in.check(cookies[1]) is None


def test_who_left_stays_out_when_the_process_or_the_key_file_is_read_anew(tmp_path) -> None:
    let_in = keyed(tmp_path)
    cookies, others = jar(let_in.current()), jar(let_in.current())
    session = let_in.of(cookies)
    assert session is not None
    let_in.current().leave(session)
    assert (tmp_path / LEFT_NAME).stat().st_mode & 0o777 == 0o600
    for again in (keyed(tmp_path), let_in):  # `keyed` writes the same key, as another file
        assert again.of(cookies) is None
        assert again.of(others) is not None


def test_who_left_is_forgotten_when_its_cookie_is_over_by_itself(tmp_path) -> None:
    let_in = keyed(tmp_path)
    names = []
    for later in (0.0, LIFE_S - 1, 2.0):
        let_in._clock.now += later
        session = let_in.of(jar(let_in.current()))
        let_in.current().leave(session)
        names.append(session.id)
    assert list(json.loads((tmp_path / LEFT_NAME).read_bytes())) == names[1:]


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b'{"a": 1}', b'{"%s": "x"}' % (b"0" * 32), b"[" * 100_000, b" " * (1 << 21)],
    ids=["empty", "list", "name", "time", "deep", "long"],
)
def test_nobody_is_let_in_while_it_is_not_known_who_left(data, tmp_path) -> None:
    let_in = keyed(tmp_path)
    cookies = jar(let_in.current())
    (tmp_path / LEFT_NAME).write_bytes(data)
    again = keyed(tmp_path)
    assert again.of(cookies) is None
    with pytest.raises(CorruptFile, match=r"sessions that signed out\. *.*--sign-out"):
        again.current()
    renew_key(tmp_path)
    assert again.of(jar(again.current())) is not None


def test_who_left_is_out_although_the_disk_is_full(tmp_path, monkeypatch) -> None:
    let_in = keyed(tmp_path)
    cookies = jar(let_in.current())

    def full(*_args):
        raise DiskFull("no room.")

    monkeypatch.setattr(left_sessions, "write_atomic", full)
    with pytest.raises(DiskFull):
        let_in.current().leave(let_in.of(cookies))
    assert let_in.of(cookies) is None


def test_a_new_key_ends_all_sessions_with_the_next_look(tmp_path) -> None:
    let_in = keyed(tmp_path)
    cookies = jar(let_in.current())
    assert let_in.of(cookies) is not None
    put_key(tmp_path, b"n" * 32)
    assert let_in.of(cookies) is None
    assert let_in.of(jar(let_in.current())) is not None


def test_a_key_that_is_the_same_is_not_read_again(tmp_path, monkeypatch) -> None:
    let_in = keyed(tmp_path)
    cookies = jar(let_in.current())
    monkeypatch.setattr("fcil_server.web.page.access.sessions.read_private", None)
    assert let_in.of(cookies) is not None


def test_without_a_key_nobody_is_let_in(tmp_path) -> None:
    let_in = keyed(tmp_path)
    cookies = jar(let_in.current())
    (tmp_path / KEY_NAME).unlink()
    assert let_in.of(cookies) is None
    with pytest.raises(KeyFileError, match="does not exist"):
        let_in.current()
    put_key(tmp_path, KEY)
    assert let_in.of(cookies) is not None


@pytest.mark.parametrize(("key", "mode"), [(b"short", 0o600), (b"", 0o600), (KEY, 0o644)])
def test_a_key_that_is_none_lets_nobody_in(tmp_path, key: bytes, mode: int) -> None:
    let_in = keyed(tmp_path)
    cookies = jar(let_in.current())
    put_key(tmp_path, key, mode)
    assert let_in.of(cookies) is None
    with pytest.raises(KeyFileError):
        let_in.current()


def test_a_key_whose_permissions_are_loosened_is_noticed(tmp_path) -> None:
    let_in = keyed(tmp_path)
    cookies = jar(let_in.current())
    assert let_in.of(cookies) is not None
    os.chmod(tmp_path / KEY_NAME, 0o640)  # noqa: PTH101
    assert let_in.of(cookies) is None


def test_the_cookie_is_for_this_door_alone() -> None:
    let_in = sessions(Clock())
    header = set_cookie(let_in, let_in.begin(), secure=True)
    attributes = header.split("; ")[1:]
    assert {"Path=/", "HttpOnly", "SameSite=Strict", "Secure"} <= set(attributes)
    assert "Secure" not in set_cookie(let_in, "x", secure=False)
    assert "Max-Age=0" in set_cookie(let_in, "", secure=False)


def test_of_other_pages_a_browser_keeps_only_the_cookies_used_last() -> None:
    clock = Clock()
    ours = sessions(clock)
    cookies = {**jar(ours), "fcil_page_garbage": "x", "fcil_page_": "x"}
    named = []
    for i in range(MAX_COOKIES + 1):
        clock.now += 1
        other = sessions(clock, bytes([i]) * 32)
        cookies |= {other.cookie: other.begin()}
        named.append(other.cookie)
    forgotten = forget_cookies(cookies, ours.cookie, secure=False)
    assert [header.partition("=")[0] for header in forgotten] == named[:1]
    assert all("Max-Age=0" in header for header in forgotten)
    del cookies[named[0]]
    assert forget_cookies(cookies, ours.cookie, secure=False) == []


def test_nothing_secret_is_in_a_representation() -> None:
    clock = Clock()
    let_in = sessions(clock)
    cookie = let_in.begin()
    clock.now += RENEW_S + 1
    session = let_in.check(cookie)
    assert session is not None
    assert session.renewal is not None
    text = f"{let_in!r} {session!r} {session}"
    for secret in (cookie, session.csrf, session.renewal, KEY.decode()):
        assert secret not in text
