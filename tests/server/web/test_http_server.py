"""The operators' HTTP door: open to who may, shut to who should not, bounded to all."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import ipaddress
import socket
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from fcil_protocol.errors import ConfigError, LinkError, Unreachable
from fcil_server.federation.addresses import TlsFiles, check_listen_address
from fcil_server.web import child as web_child
from fcil_server.web import http_server
from fcil_server.web.child import Fresh
from fcil_server.web.http_server import (
    LIMITS,
    HttpLimits,
    is_ours,
    make_server,
    mark_as_stream,
    open_listener,
    own_names,
)
from fcil_server.web.metrics.server import Figures, make_app
from server.web_kit import NO_CERTIFICATE, ask, door, get

LARGE = "x" * 64_000_000  # more than the buffers of any kernel on the way


async def hello(_request):
    return PlainTextResponse("hello\n")


async def large(_request):
    return PlainTextResponse(LARGE)


def app() -> Starlette:
    return Starlette(routes=[Route("/", hello), Route("/large", large)])


def answers(*requests: str, **limits) -> list[str]:
    async def work() -> list[str]:
        async with door(app(), **limits) as port:
            return [await ask(port, request) for request in requests]

    return asyncio.run(work())


def codes(*requests: str) -> list[str]:
    return [answer.split(" ", 2)[1] for answer in answers(*requests)]


def test_a_page_is_served_and_nothing_of_the_software_is_told() -> None:
    (answer,) = answers(get())
    assert answer.startswith("HTTP/1.1 200")
    assert answer.endswith("hello\n")
    assert "uvicorn" not in answer.lower()


def test_strangers_that_use_all_descriptors_fill_no_log(caplog) -> None:
    assert http_server.ALL_USED in inspect.getsource(asyncio.selector_events)

    async def work() -> None:
        async with door(app()) as port:
            await ask(port, get("/metrics"))  # it serves now
            for message in (http_server.ALL_USED, "something else"):
                asyncio.get_running_loop().call_exception_handler({"message": message})

    asyncio.run(work())
    assert [record.message for record in caplog.records] == ["something else"]


def test_other_methods_and_places_are_refused() -> None:
    asked = [get(method="POST"), get(method="DELETE"), get("/nothing"), get("/../etc/passwd")]
    assert codes(*asked) == ["405", "405", "404", "404"]


def test_who_calls_it_by_a_foreign_name_is_sent_away() -> None:
    two = "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
    none = "GET / HTTP/1.0\r\n\r\n"
    named = ["evil.example", "evil.example:9464", "", "[::1].evil.com", "[127.0.0.1]evil.com:1"]
    foreign = [*(get(host=name) for name in named), none]
    assert codes(*foreign) == ["421"] * len(foreign)
    assert codes(two) in (["400"], ["421"])
    own = ["localhost", "LOCALHOST:9464", "127.0.0.1:9464", "[::1]", "[::1]:9464", "192.0.2.7"]
    assert codes(*(get(host=name) for name in own)) == ["200"] * len(own)


def test_a_request_that_never_ends_is_cut_where_it_is_too_long() -> None:
    long = "GET / HTTP/1.1\r\n" + "".join(f"X-{i}: {'y' * 90}\r\n" for i in range(2_000))
    (answer,) = answers(long, first_s=1000.0)  # it is not for its time
    assert answer.partition("\r")[0] in ("HTTP/1.1 400 Bad Request", "")  # cut, with or without


@pytest.mark.parametrize("path", ["/", f"/?{'y' * 20_000}"])
def test_a_long_request_is_refused_even_if_it_comes_at_once(path: str) -> None:
    header = f"X: {'y' * (20_000 if path == '/' else 1)}\r\nConnection"
    (answer,) = answers(get(path).replace("Connection", header))
    assert answer.startswith("HTTP/1.1 431")


@pytest.mark.parametrize("junk", ["\x16\x03\x01\x02\x00", "\r\n" * 10_000, "GET\r\n\r\n"])
def test_what_is_no_http_is_refused(junk: str) -> None:
    (answer,) = answers(junk + "\0" * http_server.MAX_HEAD_BYTES)
    assert answer.startswith("HTTP/1.1 400")


def test_who_says_nothing_is_cut() -> None:
    assert answers("", "GET / HT", first_s=0.2) == ["", ""]  # `ask` ends with the connection


def test_an_answer_may_take_longer_than_the_first_request() -> None:
    async def slow(_request):
        await ask(port_of["it"], "")  # until one that says nothing is cut, who came later
        return PlainTextResponse("at last\n")

    port_of: dict[str, int] = {}

    async def work() -> str:
        async with door(Starlette(routes=[Route("/", slow)]), first_s=0.2) as port:
            port_of["it"] = port
            return await ask(port, get())

    assert asyncio.run(work()).endswith("at last\n")


def test_each_request_of_a_connection_has_all_of_the_time(monkeypatch) -> None:
    """Not what idling after the request before has left."""
    begun, later = [], asyncio.BaseEventLoop.call_later

    def noted(self, delay, *given, **more):
        begun.append(delay)
        return later(self, delay, *given, **more)

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_later", noted)

    async def work() -> None:
        async with door(app(), request_s=61.25) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(2):
                writer.write(get().replace("Connection: close\r\n", "").encode())
                assert (await reader.readuntil(b"hello\n")).startswith(b"HTTP/1.1 200")
            writer.close()

    asyncio.run(work())
    assert begun.count(61.25) == 4, "for each request, and for the next after each answer"


def test_who_does_not_read_is_cut() -> None:
    async def work() -> int:
        async with door(app(), first_s=0.5, request_s=0.5) as port:
            link = socket.socket()
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            link.connect(("127.0.0.1", port))
            reader, writer = await asyncio.open_connection(sock=link, limit=1024)
            writer.write(get("/large").encode())
            reader._transport.pause_reading()
            assert (await ask(port, get())).endswith("hello\n")  # others do not notice
            await _until_one_is_left(port)
            reader._transport.resume_reading()
            got = 0
            with contextlib.suppress(ConnectionError):
                while more := await asyncio.wait_for(reader.read(1 << 16), 60):
                    got += len(more)
            writer.close()
            return got

    assert 0 < asyncio.run(work()) < len(LARGE)


async def _until_one_is_left(port: int) -> None:
    """Wait until the time of a request has passed: by a connection that says nothing."""
    await ask(port, "")


def test_many_connections_leave_room_for_those_that_were_there() -> None:
    async def work() -> tuple[str, list[bytes], str]:
        async with door(app(), connections=4) as port:
            kept = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
            for reader, writer in kept:
                writer.write(get().replace("Connection: close\r\n", "").encode())
                await reader.readuntil(b"hello\n")
            beyond = []
            for _ in range(3):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                with contextlib.suppress(ConnectionError):
                    beyond.append(await asyncio.wait_for(reader.read(), 60))
                writer.close()
            reader, writer = kept[0]
            writer.write(get().encode())
            again = (await reader.read()).decode()
            for _, open_one in kept:
                open_one.close()
            await asyncio.gather(*(w.wait_closed() for _, w in kept), return_exceptions=True)
            later = await ask(port, get())
            return again, beyond, later

    again, beyond, later = asyncio.run(work())
    assert again.endswith("hello\n")
    assert set(beyond) <= {b""}
    assert later.endswith("hello\n")


# --- bodies and streams ---------------------------------------------------------------------


def test_the_door_of_figures_takes_few_and_little_and_waits_briefly() -> None:
    assert HttpLimits(connections=32, body_bytes=0, first_s=2.0, request_s=10.0) == LIMITS
    assert inspect.signature(make_server).parameters["limits"].default is LIMITS


def test_a_body_is_bounded_and_says_its_length() -> None:
    async def length(request):
        return PlainTextResponse(str(len(await request.body())))

    application = Starlette(routes=[Route("/", length, methods=["GET", "POST"])])

    async def work() -> list[str]:
        sent = [
            get(method="POST", Content_Length="8") + "12345678",
            get(method="POST", Content_Length="9") + "123456789",
            get(Content_Length="9") + "123456789",
            get(method="POST", Transfer_Encoding="chunked") + "1\r\nx\r\n0\r\n\r\n",
        ]
        async with door(application, body_bytes=8) as port:
            answers = [await ask(port, request) for request in sent]
        async with door(application) as port:
            answers.append(await ask(port, sent[0]))  # as the door of figures
        return [answer.split(" ", 2)[1] for answer in answers]

    assert asyncio.run(work()) == ["200", "413", "413", "411", "413"]


def stream_of(pieces: int, size: int):
    """An endless answer of so many pieces."""

    async def application(scope, _receive, send) -> None:
        mark_as_stream(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(pieces):
            await send({"type": "http.response.body", "body": b"x" * size, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return application


def test_a_stream_may_last_longer_than_a_request() -> None:
    async def application(scope, _receive, send) -> None:
        mark_as_stream(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await ask(port_of["it"], "")  # until one that says nothing is cut: longer than a request
        await send({"type": "http.response.body", "body": b"at last", "more_body": False})

    port_of: dict[str, int] = {}

    async def work() -> str:
        async with door(application, first_s=0.3, request_s=0.1) as port:
            port_of["it"] = port
            return await ask(port, get())

    assert "at last" in asyncio.run(work())


async def slowly(port: int, take, tls=None) -> int:
    """Ask for a stream and take it as `take` says; return how much came until its end."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(
        sock=raw, limit=1024, ssl=tls, server_hostname="127.0.0.1" if tls else None
    )
    writer.write(get().encode())
    got = 0
    with contextlib.suppress(ConnectionError):
        got = await take(reader)
    writer.close()
    return got


@pytest.mark.parametrize("sealed", [False, True])
def test_a_stream_of_many_pieces_comes_whole(certificate: TlsFiles, sealed: bool) -> None:
    trusts = ssl.create_default_context(cafile=certificate.chain) if sealed else None

    async def work() -> str:
        shown = certificate if sealed else NO_CERTIFICATE
        async with door(stream_of(40, 20_000), shown, first_s=5.0, stalled_s=3.0) as port:
            return await ask(port, get(), tls=trusts)

    assert asyncio.run(work()).count("x") == 800_000


@pytest.mark.parametrize("sealed", [False, True])
def test_who_takes_nothing_of_a_stream_is_cut(certificate: TlsFiles, sealed: bool) -> None:
    size = 4_000_000
    trusts = ssl.create_default_context(cafile=certificate.chain) if sealed else None
    shown = certificate if sealed else NO_CERTIFICATE

    async def work() -> int:
        async with door(stream_of(1, size), shown, first_s=1.0, stalled_s=0.3) as port:

            async def take(reader) -> int:
                reader._transport.pause_reading()
                await ask(port, "", tls=trusts)  # one that says nothing is cut: later than this
                reader._transport.resume_reading()
                got = 0
                while more := await asyncio.wait_for(reader.read(1 << 16), 60):
                    got += len(more)
                return got

            return await slowly(port, take, trusts)

    assert asyncio.run(work()) < size


@pytest.mark.parametrize("sealed", [False, True])
def test_a_stream_for_one_who_has_gone_is_no_fault(certificate: TlsFiles, sealed: bool) -> None:
    trusts = ssl.create_default_context(cafile=certificate.chain) if sealed else None

    async def work() -> None:
        asked, told = asyncio.Event(), asyncio.Event()
        faults: list[Exception] = []

        async def application(scope, receive, _send) -> None:
            await receive()
            asked.set()
            await receive()  # until it has gone
            try:
                mark_as_stream(scope)
            except Exception as error:
                faults.append(error)
            told.set()

        async with door(application, certificate if sealed else NO_CERTIFICATE) as port:
            host = "127.0.0.1"
            _, writer = await asyncio.open_connection(host, port, ssl=trusts)
            writer.write(get().encode())
            await asyncio.wait_for(asked.wait(), 60)
            writer.transport.abort()
            await asyncio.wait_for(told.wait(), 60)
        assert faults == []

    asyncio.run(work())


def test_who_takes_a_stream_slowly_gets_it_whole() -> None:
    size = 300_000

    async def work() -> int:
        async with door(stream_of(1, size), first_s=0.05, stalled_s=0.5) as port:

            async def take(reader) -> int:
                got = 0
                while more := await asyncio.wait_for(reader.read(8_000), 60):
                    got += len(more)
                    reader._transport.pause_reading()
                    await ask(port, "")  # a pause that is shorter than the patience
                    reader._transport.resume_reading()
                return got

            return await slowly(port, take)

    assert asyncio.run(work()) > size


# --- addresses and certificates -------------------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.0.1:9464", "[::1]:0", "localhost:1", "127.9.9.9:2"])
def test_the_loopback_address_needs_no_certificate(address: str) -> None:
    check_listen_address(address, NO_CERTIFICATE)


@pytest.mark.parametrize("address", ["0.0.0.0:9464", "[::]:1", "192.0.2.1:1", "lab.example:1"])
def test_another_address_needs_one(address: str) -> None:
    with pytest.raises(ConfigError, match="unencrypted"):
        check_listen_address(address, NO_CERTIFICATE)
    check_listen_address(address, TlsFiles("c.pem", "k.pem"))
    with pytest.raises(ConfigError, match="belong together"):
        check_listen_address(address, TlsFiles("c.pem"))


def test_an_address_in_use_is_told_in_a_sentence() -> None:
    with open_listener("127.0.0.1:0") as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(LinkError, match=f"cannot listen on {address}"):
            open_listener(address)


@pytest.fixture
def certificate(tmp_path: Path) -> TlsFiles:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "lab")])
    names = [x509.DNSName("lab.example"), x509.DNSName("*.gpu.example")]
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName(
                [*names, x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
            ),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    chain, secret = tmp_path / "c.pem", tmp_path / "k.pem"
    chain.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return TlsFiles(str(chain), str(secret))


def test_with_a_certificate_it_speaks_tls_alone(certificate: TlsFiles) -> None:
    async def work() -> tuple[str, str]:
        trusts = ssl.create_default_context(cafile=certificate.chain)
        async with door(app(), certificate) as port:
            sealed = await ask(port, get(), tls=trusts)
            return sealed, await ask(port, get())

    sealed, clear = asyncio.run(work())
    assert sealed.endswith("hello\n")
    assert clear == ""


def test_who_never_finishes_the_handshake_of_tls_is_cut(
    certificate: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HANDSHAKE_S", 0.2)

    async def work() -> list[str]:
        async with door(app(), certificate) as port:
            assert "create_server" not in vars(asyncio.get_running_loop())
            return [await ask(port, silence) for silence in ("", "\x16\x03\x01\x02\x00")]

    assert asyncio.run(work()) == ["", ""]  # `ask` ends with the connection


def test_the_names_in_the_certificate_are_its_own(certificate: TlsFiles) -> None:
    names = own_names(certificate)
    for name in ("lab.example", "a.gpu.example:1", "localhost", "192.0.2.1", "[2001:db8::1]:7"):
        assert is_ours(name, names), name
    for name in ("gpu.example", "a.b.gpu.example", "example", "lab.example.evil", "", "[evil]"):
        assert not is_ours(name, names), name


@pytest.mark.parametrize("damage", ["missing", "no key", "other key"])
def test_a_certificate_that_cannot_be_used_is_refused(
    certificate: TlsFiles, tmp_path: Path, damage: str
) -> None:
    if damage == "missing":
        certificate = TlsFiles(str(tmp_path / "none.pem"), certificate.key)
    elif damage == "no key":
        Path(certificate.key).write_text("not a key")
    else:
        other = ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        Path(certificate.key).write_bytes(other)
    with pytest.raises(ConfigError, match="certificate"):
        make_server(app(), certificate)


# --- the pages ------------------------------------------------------------------------------


class Deaf:
    """A federation whose server is gone and whose ledger cannot be read."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.asked = 0

    def ask(self):
        self.asked += 1
        raise self.error

    totals = ask


def pages(source, *paths: str) -> list[str]:
    async def work() -> list[str]:
        async with door(make_app(Figures(source))) as port:
            return [await ask(port, get(path)) for path in paths]

    return asyncio.run(work())


def test_a_server_that_is_gone_is_unhealthy_and_strangers_hear_no_directory() -> None:
    source = Deaf(Unreachable("no daemon runs at /srv/federation."))
    for answer in pages(source, "/healthz", "/metrics"):
        assert answer.startswith("HTTP/1.1 503")
        assert "unreachable: " in answer
        assert "/srv" not in answer


def test_strangers_hear_no_name_of_a_class_that_the_run_waits_for() -> None:
    waits = {"phase": "gathering", "ready": 2, "waiting_for": "a client that holds images of okapi"}
    (answer,) = pages(SimpleNamespace(ask=lambda: waits, totals=None), "/healthz")
    assert answer.endswith("ok: gathering, 2 clients ready\n")


def test_a_defect_is_answered_without_a_traceback() -> None:
    for answer in pages(Deaf(ZeroDivisionError("secret words")), "/healthz", "/metrics"):
        assert answer.startswith("HTTP/1.1 500")
        assert "secret words" not in answer


def test_figures_are_gathered_once_for_all_who_ask_together() -> None:
    source = Deaf(Unreachable("gone."))
    pages(source, *["/healthz"] * 5)
    assert source.asked == 1


def test_figures_are_gathered_anew_when_they_are_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_child, "FRESH_S", -1.0)
    numbers = iter(range(10))

    async def work() -> list[int]:
        fresh = Fresh(lambda: next(numbers))
        return [
            await fresh.get(),
            await fresh.get(),
            *await asyncio.gather(fresh.get(), fresh.get()),
        ]

    first, second, *together = asyncio.run(work())
    assert first < second < together[0]
    assert together[0] == together[1]


def test_the_backlog_of_a_closed_door_is_refused() -> None:
    with open_listener("127.0.0.1:0") as sock:
        place = sock.getsockname()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(place, timeout=5)
