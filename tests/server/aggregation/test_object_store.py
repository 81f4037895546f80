"""The server's side of an object store, here a folder: what is put, told, renewed and removed."""

import asyncio
import importlib.util

import pytest

from fcil_protocol.errors import ConfigError, UsageError
from fcil_protocol.ids import Digest, FederationId
from fcil_server.aggregation import object_store
from fcil_server.aggregation.object_store import PAUSE_S, ObjectStore
from fcil_server.federation.config import validate
from fcil_server.federation.sections import PartsSection

FEDERATION = FederationId("0123456789abcdef" * 2)
A, B = Digest("a" * 64), Digest("b" * 64)
URL = "https://cdn.example/parts/"


class Notes(list):
    def __call__(self, level, code, text):
        assert code == "object_store"
        self.append((level, text))


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(object_store.time, "monotonic", lambda: now[0])
    return now


def opened(tmp_path, notes=None, **more):
    given = {"store": f"file://{tmp_path}/parts", "url": URL, **more}
    return ObjectStore(PartsSection(**given), FEDERATION, notes if notes is not None else Notes())


def files(tmp_path):
    return {p.name: p.read_bytes() for p in (tmp_path / "parts").rglob("*") if p.is_file()}


def hold(store, **bodies):
    parts = {Digest(name * 64): (lambda body=body: body) for name, body in bodies.items()}
    asyncio.run(store.hold(parts))


def test_a_part_is_put_once_under_the_federations_id(tmp_path):
    store = opened(tmp_path)
    assert store.base == f"{URL}{FEDERATION}/"
    assert store.url(A) == ""
    hold(store, a=b"one")
    path = tmp_path / "parts" / FEDERATION / A
    assert path.read_bytes() == b"one"
    assert store.url(A) == f"{store.base}{A}"
    path.write_bytes(b"two")
    hold(store, a=b"one")
    assert path.read_bytes() == b"two", "it is not put again"


def test_after_a_restart_what_is_there_is_used_and_what_is_torn_is_put_again(tmp_path):
    hold(opened(tmp_path), a=b"one", b=b"two")
    folder = tmp_path / "parts" / FEDERATION
    (folder / B).write_bytes(b"t")
    before = (folder / A).stat().st_mtime_ns
    hold(opened(tmp_path), a=b"one", b=b"two")
    assert (folder / A).stat().st_mtime_ns == before
    assert (folder / B).read_bytes() == b"two"


def test_what_no_state_needs_is_removed_also_that_of_an_earlier_start(tmp_path):
    notes = Notes()
    hold(opened(tmp_path), a=b"one")
    store = opened(tmp_path, notes)
    hold(store, b=b"two", c=b"three")
    asyncio.run(store.keep_only(lambda: {B, "c" * 64}))
    assert files(tmp_path).keys() == {B, "c" * 64}
    asyncio.run(store.keep_only(lambda: {B}))
    assert files(tmp_path).keys() == {B}
    assert store.url("c" * 64) == ""
    assert store.url(B)
    (tmp_path / "parts" / FEDERATION / B).unlink()
    asyncio.run(store.keep_only(set))
    assert not notes, "what is gone already is no fault"


def test_addresses_are_renewed_at_half_of_their_time_and_never_told_when_they_are_over(
    tmp_path, clock
):
    store = opened(tmp_path)
    assert store.url(A) == ""
    store._valid_s = 3600  # as that of signed addresses
    signed = []
    store._address = lambda digest: signed.append(digest) or f"signed {len(signed)}"
    hold(store, a=b"one")
    clock[0] += 1799
    hold(store, a=b"one")
    assert store.url(A) == "signed 1"
    clock[0] += 1
    hold(store, a=b"one")
    assert store.url(A) == "signed 2"
    clock[0] += 3540
    assert store.url(A) == ""


def test_a_store_that_takes_nothing_is_named_once_and_tried_again_later(tmp_path, clock):
    notes = Notes()
    store = opened(tmp_path, notes)
    tried = []

    class Full:
        async def head_async(self, *_):
            raise FileNotFoundError

        async def put_async(self, *_):
            tried.append(1)
            raise OSError("no room.\nDebug source: secrets")

    real, store._obstore = store._obstore, Full()
    hold(store, a=b"one")
    hold(store, a=b"one")
    assert len(tried) == 1
    clock[0] += PAUSE_S
    hold(store, a=b"one")
    assert len(tried) == 2
    assert [text for _, text in notes] == [
        "the object store takes no parts (no room); clients fetch them from the server"
    ]
    assert store.url(A) == ""
    store._obstore = real
    clock[0] += PAUSE_S
    hold(store, a=b"one")
    assert notes[-1] == ("info", "the object store takes parts again")
    assert store.url(A)


def test_what_one_state_puts_the_tidying_of_another_leaves(tmp_path):
    """A tidying looks at what is to be kept when it is its turn, and no earlier."""
    hold(opened(tmp_path), a=b"one", b=b"two")
    store, wanted = opened(tmp_path), {A}

    async def at_once():
        tidying = asyncio.create_task(store.keep_only(lambda: set(wanted)))
        wanted.add(B)
        await store.hold({B: lambda: b"two"})
        await tidying

    asyncio.run(at_once())
    assert files(tmp_path).keys() == {A, B}
    assert store.url(B)


def test_what_cannot_be_removed_is_removed_later(tmp_path):
    notes = Notes()
    store = opened(tmp_path, notes)
    hold(store, a=b"one", b=b"two")
    real = store._obstore

    class Stuck:
        list = staticmethod(real.list)

        async def delete_async(self, *_):
            raise OSError("no right to")

    store._obstore = Stuck()
    asyncio.run(store.keep_only(lambda: {B}))
    assert files(tmp_path).keys() == {A, B}
    assert store.url(A) == ""
    store._obstore = real
    asyncio.run(store.keep_only(lambda: {B}))
    assert files(tmp_path).keys() == {B}
    assert len(notes) == 1


def test_an_address_too_long_for_a_message_is_none(tmp_path):
    notes = Notes()
    store = opened(tmp_path, notes)
    store._address = lambda digest: "https://a/" + "x" * 5000
    hold(store, a=b"one")
    assert store.url(A) == ""
    assert "5010 characters" in notes[0][1]
    asyncio.run(store.keep_only(set))
    assert not files(tmp_path), "what was put for nothing does not stay"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"store": "s4://bucket"}, "is not usable"),
        ({"store": "bucket"}, "is not usable"),
        ({"url": ""}, "is not usable"),
    ],
)
def test_an_address_that_is_none_is_one_sentence_at_the_start(tmp_path, given, said):
    with pytest.raises(ConfigError, match=said) as caught:
        opened(tmp_path, **given)
    assert "\n" not in str(caught.value)
    assert "[parts] url" in caught.value.action


def test_without_obstore_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError) as caught:
        opened(tmp_path)
    assert "fcil[store]" in caught.value.action


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"url": "https://a"}, "does nothing while parts.store is empty"),
        ({"store": "file:///a", "url": "ftp://a"}, "expected https://HOST"),
        ({"store": "file:///a", "url": "https://"}, "expected https://HOST"),
        ({"store": "file:///a", "url": "https://a/b?key=1"}, "expected https://HOST"),
        ({"store": "file:///a", "url": "https://a/b c"}, "expected https://HOST"),
        ({"store": "file:///a", "url": "https://a/" + "b" * 1000}, "expected https://HOST"),
    ],
)
def test_settings_that_cannot_be_meant_are_faults(parts, said):
    with pytest.raises(ConfigError, match=said):
        validate({"parts": parts})
