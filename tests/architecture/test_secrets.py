"""No secret in a log, a repr, an error, a process list, a worker or a file that others can read.

A whole federation of processes runs to its end, through refusals and kill -9
(`secret_story`), and is searched for every private key and every content key that can be got
hold of, in every spelling (`needles`). Where they belong, the search must find them.
"""

import asyncio
import gc
import logging
import pickle
import shutil
import stat
import tempfile
import traceback
from pathlib import Path

import pytest

from architecture.secret_story import KEY_FILES, key_secrets, tell
from fcil_client.cli import main as client_cli
from fcil_client.daemon.client import Client
from fcil_client.membership.enrol import find
from fcil_client.rounds.round_work import ClientOptions
from fcil_protocol.envelopes import envelope
from fcil_protocol.envelopes.envelope import ContentKey, Core, open_body, seal, unwrap_key, wrap_key
from fcil_protocol.errors import FcilError
from fcil_protocol.storage.atomic_files import DirectoryLock
from fcil_protocol.trust.certificate import RootKey
from fcil_protocol.trust.keys import PrivateKeys, PublicKeys
from fcil_protocol.trust.ticket import Ticket
from fcil_server.cli import main as server_cli
from fcil_server.daemon.journal import Journal
from fcil_server.daemon.server import Server
from fcil_server.federation.directory import Federation
from system.kit import settings, write_client
from system.needles import Needles, spellings

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

KEYS = PrivateKeys(
    curve=bytes(range(32)), signing=bytes(range(32, 64)), sealing=bytes(range(64, 96))
)
ROOT = RootKey(bytes(range(96, 128)))
ALONE = {"round__min_clients": 1, "run__evaluate": False}


# --- the search itself ----------------------------------------------------------------------


def test_the_search_finds_a_secret_in_every_spelling_and_place():
    needles = Needles()
    needles.add("key", KEYS._signing)
    for how, text in spellings(KEYS._signing):
        for before in (b"", b"x", b"xy"):
            assert needles.found_in(before + text + b"z"), how
    assert not needles.found_in(bytes(1000) + KEYS.public.signing)


# --- a federation of processes --------------------------------------------------------------


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    temporary = Path(tempfile.mkdtemp(prefix="fcil-"))  # short: sockets may lie there
    try:
        with pytest.MonkeyPatch.context() as monkeypatch:
            yield tell(tmp_path_factory.mktemp("secrets"), temporary, monkeypatch)
    finally:
        shutil.rmtree(temporary)


@pytest.mark.full
def test_secrets_are_in_the_key_files_and_in_the_memory_of_the_server(story):
    """So the search knows them and would find them elsewhere."""
    keys, _ = story.files()
    assert len(keys) == 7  # root, server, a, b, c, d, page
    assert all(story.needles.found_in(path.read_bytes()) for path in keys)
    (held,) = (held for name, held in story.held.items() if "daemon" in name)
    assert any("server.json" in name for name in held)
    assert any("content key" in name for name in story.needles.names)


@pytest.mark.full
def test_no_other_file_holds_one(story):
    """Logs, ledger, spool, outbox, states, results, journals, join files, sockets' places."""
    _, files = story.files()
    names = {path.name for path in files}
    assert {"server.log", "a.log", "ledger.sqlite", "worker.log", "client.json"} <= names
    for path in files:
        assert not story.needles.found_in(str(path)), path
        if path.is_file():
            assert not story.needles.found_in(path.read_bytes()), path


@pytest.mark.full
def test_no_process_shows_one_to_others(story):
    assert sum("worker" in name for name in story.told) == 3
    for name, told in story.told.items():
        assert b"fcil" in told, name
        assert not story.needles.found_in(told), name


@pytest.mark.full
def test_no_worker_has_one(story):
    assert len(story.held) == 5
    for name, held in story.held.items():
        if "worker" in name:
            assert not held, name


@pytest.mark.full
def test_the_process_that_serves_the_page_has_the_pages_alone(story):
    (held,) = (held for name, held in story.held.items() if "'s page " in name)
    assert "page: page.key" in held
    assert all(name.startswith("page: ") for name in held)


@pytest.mark.full
def test_nobody_else_may_look_into_anything(story):
    """Files 0600, directories 0700, although the umask took nothing away."""
    keys, others = story.files()
    logs = story.directory / "logs"  # made by the test
    places = [p for p in (*keys, *others) if logs not in (p, p.parent)]
    assert len(places) > 40
    for path in places:
        if path.name != "keys.json":  # one was opened to others on purpose
            assert not stat.S_IMODE(path.lstat().st_mode) & 0o077, path


@pytest.mark.full
def test_a_key_file_that_is_no_good_ends_its_client_without_a_word_of_it(story):
    assert story.ended == [2, 2]
    for name, words in (("c", "0644"), ("d", "damaged")):
        assert words in (story.directory / "logs" / f"{name}.log").read_text()


# --- objects --------------------------------------------------------------------------------


def shown(thing):
    """Return whatever may be said of an object, and what a pickle of it holds."""
    texts = [repr(thing), str(thing), f"{thing}"]
    try:
        data = pickle.dumps(thing)
    except Exception:
        data = b""
    return "\n".join(texts).encode("utf-8", "surrogateescape") + data


def ours():
    """Yield all objects of our own classes that are alive."""
    gc.unfreeze()  # also those that the collector passes over (conftest.py)
    for thing in gc.get_objects():
        if str(type(thing).__module__).startswith("fcil_"):
            yield thing


@pytest.mark.full
def test_no_object_of_a_running_server_and_client_shows_one(tmp_path, monkeypatch, caplog):
    """Both daemons in this process; their logs are read down to the debugging lines."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    needles, kept = Needles(), []
    encrypt = envelope._encrypt

    def remember(plain, key, *rest):
        needles.add("content key", key.value)
        kept.append(key)
        return encrypt(plain, key, *rest)

    monkeypatch.setattr(envelope, "_encrypt", remember)
    said = []
    asyncio.run(two_daemons(tmp_path, needles, said))
    kinds = {type(thing).__name__ for thing in said}
    assert {"Server", "Client", "PrivateKeys", "RootKey", "ContentKey", "Channel"} <= kinds
    assert kept
    lines = [r.getMessage() + str(r.exc_text) + str(vars(r)) for r in caplog.records]
    assert not needles.found_in("\n".join(lines))


async def two_daemons(tmp_path, needles, said):
    """Learn two tasks, then search all that is alive."""
    given = ("federation.listen='127.0.0.1:0'", *settings(**ALONE)[1::2])
    federation = Federation.open(tmp_path / "federation", None, given)
    notes = []
    server = Server(federation, Journal(federation.ledger, notes.append))
    serving = asyncio.create_task(server.serve())
    try:
        await heard(server, "serving", 1)
        folder = write_client(tmp_path / "images", range(4))
        home, enrolment = await asyncio.to_thread(find, folder, None)
        with DirectoryLock.acquire(home.directory, "client"):
            client = Client(home, enrolment, ClientOptions(folder), notify=notes.append)
            running = asyncio.create_task(client.run())
            try:
                await heard(server, "update", 2)
                search(tmp_path, needles, said)
            finally:
                client._stopping.set()
                await running
    finally:
        server.stop()
        await serving
        federation.close()


async def heard(server, code, count):
    """Wait until the server has noted something so many times."""
    last = 0
    while sum(note.code == code for note in server.journal._notes) < count:
        last = (await server.journal.after(last))["last"]


def search(tmp_path, needles, said):
    for path in tmp_path.rglob("*.json"):
        if path.name in KEY_FILES:
            for name, secret in key_secrets(path):
                needles.add(name, secret)
    for thing in ours():
        said.append(thing)
        assert not needles.found_in(shown(thing)), type(thing)


TICKET = Ticket.new(KEYS.public.curve, ROOT.federation, ("localhost:1",), 60)


@pytest.mark.parametrize(
    "thing", [KEYS, ROOT, ContentKey(KEYS._curve), TICKET], ids=lambda t: type(t).__name__
)
def test_what_is_secret_cannot_be_pickled(thing):
    with pytest.raises(TypeError, match="secret"):
        pickle.dumps(thing)


# --- errors ---------------------------------------------------------------------------------


def core(**changes):
    fields = {
        "protocol": 1, "federation": ROOT.federation, "run": "r", "direction": "update",
        "sender": "a", "sender_key": KEYS.public.fingerprint, "recipient": "server",
        "method": "m", "schema": "", "task": 0, "round": 0, "kind": "train", "base": 0,
    }  # fmt: skip
    return Core(**fields | changes)


def failures(tmp_path):
    """Yield calls that fail with secrets at hand."""
    path = tmp_path / "keys.json"
    KEYS.save(path)
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        yield PrivateKeys.load, write(tmp_path / f"cut-{size}", whole[:size])
    for at in range(0, len(whole), 7):
        yield (
            PrivateKeys.load,
            write(tmp_path / f"bit-{at}", whole[:at] + b"\xff" + whole[at + 1 :]),
        )
    yield RootKey.load, path
    sealed, key = seal(b"plain", core(), KEYS, chunk_bytes=16384)
    wrap = wrap_key(key, sealed.header, KEYS.public)
    other = PrivateKeys.generate()
    yield lambda _: unwrap_key(wrap, sealed.header, other), None
    yield lambda _: unwrap_key(wrap[:-1], sealed.header, KEYS), None
    yield lambda _: open_body(sealed.parsed, ContentKey(KEYS._curve), [sealed.body]), None
    yield lambda _: wrap_key(key, sealed.header, PublicKeys(b"", b"", bytes(1216))), None
    yield lambda _: seal(b"", core(run=""), KEYS, chunk_bytes=16384), None
    text = TICKET.to_text()
    for size in range(0, len(text), 9):
        yield Ticket.from_text, text[:size]


def write(path, data):
    path.write_bytes(data)
    path.chmod(0o600)
    return path


def test_no_error_says_one(tmp_path):
    """Neither its words nor its causes, nor a traceback with all of them."""
    needles = Needles()
    for name in ("_curve", "_signing", "_sealing"):
        needles.add(name, getattr(KEYS, name))
    needles.add("ticket", TICKET.secret)
    count = 0
    for call, argument in failures(tmp_path):
        try:
            call(argument)
        except FcilError as error:
            count += 1
            words = "".join(traceback.format_exception(error))
            while error is not None:
                words += repr(error) + repr(vars(error)) + repr(getattr(error, "doc", ""))
                error = error.__cause__ or error.__context__  # suppressed or not
            assert not needles.found_in(words), words
    assert count > 100


@pytest.mark.parametrize("app", [server_cli.app, client_cli.app], ids=["server", "client"])
def test_no_traceback_of_a_command_shows_local_variables(app):
    """Typer's own would, and with them whatever a variable holds."""
    assert app.pretty_exceptions_enable is False
