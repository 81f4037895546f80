"""The operators' HTTP door: open to who may, shut to who should not, bounded to all."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from fcil_protocol.errors import ConfigError, LinkError, Unreachable
from fcil_server import metrics_process, metrics_server, web_door
from fcil_server.addresses import Certificate, check_door
from fcil_server.config_sections import FederationSection
from fcil_server.metrics_process import MetricsProcess
from fcil_server.metrics_server import Figures, Fresh, make_app
from fcil_server.web_door import is_ours, make_server, open_door, own_names

LARGE = "x" * 4_000_000
NO_CERTIFICATE = Certificate()


async def hello(_request):
    return PlainTextResponse("hello\n")


async def large(_request):
    return PlainTextResponse(LARGE)


def app() -> Starlette:
    return Starlette(routes=[Route("/", hello), Route("/large", large)])


@contextlib.asynccontextmanager
async def door(application=None, certificate=NO_CERTIFICATE):
    """Serve an app; yields the port."""
    sock = open_door("127.0.0.1:0")
    server = make_server(application or app(), certificate)
    server.capture_signals = contextlib.nullcontext  # they are pytest's
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, 60)
        sock.close()


async def ask(port: int, request: str, *, tls=None) -> str:
    """Send bytes as they are; return everything until the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    got = b""
    try:
        writer.write(request.encode("latin-1"))
        with contextlib.suppress(ConnectionError):  # cut: what came until then
            while more := await asyncio.wait_for(reader.read(1 << 16), 60):
                got += more
    finally:
        writer.close()
    return got.decode("latin-1")


def get(path: str = "/", host: str = "127.0.0.1", *, method: str = "GET") -> str:
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"


def answers(*requests: str) -> list[str]:
    async def work() -> list[str]:
        async with door() as port:
            return [await ask(port, request) for request in requests]

    return asyncio.run(work())


def codes(*requests: str) -> list[str]:
    return [answer.split(" ", 2)[1] for answer in answers(*requests)]


def test_a_page_is_served_and_nothing_of_the_software_is_told() -> None:
    (answer,) = answers(get())
    assert answer.startswith("HTTP/1.1 200")
    assert answer.endswith("hello\n")
    assert "uvicorn" not in answer.lower()


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


def test_a_request_that_never_ends_is_cut_where_it_is_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(web_door, "FIRST_S", 1000.0)  # it is not for its time
    long = "GET / HTTP/1.1\r\n" + "".join(f"X-{i}: {'y' * 90}\r\n" for i in range(2_000))
    (answer,) = answers(long)
    assert answer.partition("\r")[0] in ("HTTP/1.1 400 Bad Request", "")  # cut, with or without


@pytest.mark.parametrize("path", ["/", f"/?{'y' * 20_000}"])
def test_a_long_request_is_refused_even_if_it_comes_at_once(path: str) -> None:
    header = f"X: {'y' * (20_000 if path == '/' else 1)}\r\nConnection"
    (answer,) = answers(get(path).replace("Connection", header))
    assert answer.startswith("HTTP/1.1 431")


@pytest.mark.parametrize("junk", ["\x16\x03\x01\x02\x00", "\r\n" * 10_000, "GET\r\n\r\n"])
def test_what_is_no_http_is_refused(junk: str) -> None:
    (answer,) = answers(junk + "\0" * web_door.MAX_HEAD_BYTES)
    assert answer.startswith("HTTP/1.1 400")


def test_who_says_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_door, "FIRST_S", 0.2)
    assert answers("", "GET / HT") == ["", ""]  # `ask` ends with the connection


def test_an_answer_may_take_longer_than_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_door, "FIRST_S", 0.2)

    async def slow(_request):
        await ask(port_of["it"], "")  # until one that says nothing is cut, who came later
        return PlainTextResponse("at last\n")

    port_of: dict[str, int] = {}

    async def work() -> str:
        async with door(Starlette(routes=[Route("/", slow)])) as port:
            port_of["it"] = port
            return await ask(port, get())

    assert asyncio.run(work()).endswith("at last\n")


def test_who_does_not_read_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_door, "FIRST_S", 0.5)
    monkeypatch.setattr(web_door, "REQUEST_S", 0.5)

    async def work() -> int:
        async with door() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
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


def test_many_connections_leave_room_for_those_that_were_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(web_door, "MAX_CONNECTIONS", 4)

    async def work() -> tuple[str, list[bytes], str]:
        async with door() as port:
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


# --- addresses and certificates -------------------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.0.1:9464", "[::1]:0", "localhost:1", "127.9.9.9:2"])
def test_the_loopback_address_needs_no_certificate(address: str) -> None:
    check_door(address, NO_CERTIFICATE)


@pytest.mark.parametrize("address", ["0.0.0.0:9464", "[::]:1", "192.0.2.1:1", "lab.example:1"])
def test_another_address_needs_one(address: str) -> None:
    with pytest.raises(ConfigError, match="in the clear"):
        check_door(address, NO_CERTIFICATE)
    check_door(address, Certificate("c.pem", "k.pem"))
    with pytest.raises(ConfigError, match="belong together"):
        check_door(address, Certificate("c.pem"))


def test_an_address_in_use_is_told_in_a_sentence() -> None:
    with open_door("127.0.0.1:0") as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(LinkError, match=f"cannot listen on {address}"):
            open_door(address)


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
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
    return Certificate(str(chain), str(secret))


def test_with_a_certificate_it_speaks_tls_alone(certificate: Certificate) -> None:
    async def work() -> tuple[str, str]:
        trusts = ssl.create_default_context(cafile=certificate.chain)
        async with door(certificate=certificate) as port:
            sealed = await ask(port, get(), tls=trusts)
            return sealed, await ask(port, get())

    sealed, clear = asyncio.run(work())
    assert sealed.endswith("hello\n")
    assert clear == ""


def test_who_never_finishes_the_handshake_of_tls_is_cut(
    certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_door, "HANDSHAKE_S", 0.2)

    async def work() -> list[str]:
        async with door(certificate=certificate) as port:
            assert "create_server" not in vars(asyncio.get_running_loop())
            return [await ask(port, silence) for silence in ("", "\x16\x03\x01\x02\x00")]

    assert asyncio.run(work()) == ["", ""]  # `ask` ends with the connection


def test_the_names_in_the_certificate_are_its_own(certificate: Certificate) -> None:
    names = own_names(certificate)
    for name in ("lab.example", "a.gpu.example:1", "localhost", "192.0.2.1", "[2001:db8::1]:7"):
        assert is_ours(name, names), name
    for name in ("gpu.example", "a.b.gpu.example", "example", "lab.example.evil", "", "[evil]"):
        assert not is_ours(name, names), name


@pytest.mark.parametrize("damage", ["missing", "no key", "other key"])
def test_a_certificate_that_cannot_be_used_is_refused(
    certificate: Certificate, tmp_path: Path, damage: str
) -> None:
    if damage == "missing":
        certificate = Certificate(str(tmp_path / "none.pem"), certificate.key)
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


def test_a_server_that_is_gone_is_unhealthy_with_the_reason() -> None:
    source = Deaf(Unreachable("no daemon runs at federation."))
    for answer in pages(source, "/healthz", "/metrics"):
        assert answer.startswith("HTTP/1.1 503")
        assert "unreachable: no daemon runs at federation." in answer


def test_a_defect_is_answered_without_a_traceback() -> None:
    for answer in pages(Deaf(ZeroDivisionError("secret words")), "/healthz", "/metrics"):
        assert answer.startswith("HTTP/1.1 500")
        assert "secret words" not in answer


def test_figures_are_gathered_once_for_all_who_ask_together() -> None:
    source = Deaf(Unreachable("gone."))
    pages(source, *["/healthz"] * 5)
    assert source.asked == 1


def test_figures_are_gathered_anew_when_they_are_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "FRESH_S", -1.0)
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
    with open_door("127.0.0.1:0") as sock:
        place = sock.getsockname()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(place, timeout=5)


# --- the process behind it ------------------------------------------------------------------


def process(address: str, **given) -> MetricsProcess:
    section = FederationSection(metrics=address, **given)
    return MetricsProcess(Path("federation"), section, lambda *_: None)


def test_without_an_address_there_is_no_door() -> None:
    made = process("")
    assert (made.describe(), made.address) == (None, "")
    asyncio.run(made.run())  # nothing to keep running
    made.close()


@pytest.mark.parametrize("given", ["metrics_cert", "metrics_key"])
def test_a_certificate_without_an_address_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="no address of figures"):
        process("", **{given: "c.pem"})


def test_missing_packages_are_named_before_anything_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the packages prometheus_client, starlette"):
        process("127.0.0.1:0")


def test_a_bad_certificate_is_told_before_anything_listens(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the certificate"):
        process("0.0.0.0:0", metrics_cert=str(tmp_path / "c.pem"), metrics_key="k.pem")


def test_a_process_that_ends_again_and_again_is_started_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    made = process("127.0.0.1:0")
    enough = asyncio.Event()

    def say(_level: str, _code: str, text: str) -> None:
        said.append(text)
        if len(said) == 6:
            enough.set()

    made._say = say
    monkeypatch.setattr(metrics_process, "BACK_OFF_S", (0.001, 0.002, 0.003))
    monkeypatch.setattr(made, "_command", lambda *_: [sys.executable, "-c", "raise SystemExit(3)"])

    async def until_five_ends() -> None:
        task = asyncio.create_task(made.run())
        await asyncio.wait_for(enough.wait(), 60)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(until_five_ends())
    made.close()
    assert said[0].startswith("figures are at http://127.0.0.1:")
    assert said[1] == (
        "the process that serves figures ended with exit code 3; it is started again in 0.001 s"
    )
    assert [text.rsplit(" ", 2)[1] for text in said[1:6]] == [
        "0.001",
        "0.002",
        "0.003",
        "0.003",
        "0.003",
    ]
