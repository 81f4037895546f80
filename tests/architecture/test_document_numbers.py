"""Numbers in the sentences of the documents are those of the code.

Each row is a sentence with gaps and the constants that fill them: a changed constant, and a
sentence that was changed without its row, fail. The methods' pages have their options in tables,
with defaults and presets. PROTOCOL.md's tables have tests of their own (`test_documents.py`).
"""

from __future__ import annotations

import ast
import asyncio
import functools
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import zmq
from pydantic import BaseModel

from architecture.tree_texts import ROOT, syntax
from fcil_adapters.contract.registry import load_method
from fcil_protocol.link import zmq_link as transport
from fcil_protocol.trust.certificate import RootKey
from fcil_protocol.trust.keys import PrivateKeys
from fcil_server.cli.relay import relay
from fcil_server.sessions import conduct

PROTOCOL, SECURITY = "protocol/PROTOCOL.md", "docs/security.md"
KIB, MIB = 1 << 10, 1 << 20
WORDS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


class Of(NamedTuple):
    """How a constant is written: divided by a unit, as it is said."""

    path: str
    unit: float = 1
    said: Callable[[float], str] = lambda n: f"{n:,g}" if n != int(n) else f"{int(n):,}"

    def __str__(self) -> str:
        module, _, name = self.path.rpartition(".")
        return self.said(getattr(importlib.import_module(module), name) / self.unit)


def word(path: str, unit: float = 1) -> Of:
    """Return a number that is written as a word."""
    return Of(path, unit, lambda n: WORDS[int(n)])


class Written(NamedTuple):
    """A constant as its module has it, for modules that would load torch."""

    path: str
    said: Callable[[str], str] = lambda source: f"{float(source):g}"

    def __str__(self) -> str:
        module, _, name = self.path.rpartition(".")
        found = importlib.util.find_spec(module)
        assert found is not None
        assert found.origin is not None
        tree = syntax(Path(found.origin))
        [value] = [
            node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
        ]
        return self.said(ast.unparse(value))


def exponent(path: str) -> Written:
    """Return the exponent of a power of ten, or of one that is written as a power."""

    def said(source: str) -> str:
        base, power, exponent = source.partition("**")
        return exponent.strip(" ()") if power else str(int(f"{float(base):e}".partition("e")[2]))

    return Written(path, said)


class Default(NamedTuple):
    """The default of a method's option."""

    method: str
    option: str

    def __str__(self) -> str:
        return shown(dict(options(load_method(self.method).hparams))[self.option])


def options(hparams: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each option of a method with its default, groups as ``group.option``."""
    for name, field in hparams.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            yield from options(type(default), f"{prefix}{name}.")
        else:
            yield prefix + name, default


def settings(preset: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield what a preset sets, as it is written."""
    for name, value in preset.items():
        if isinstance(value, Mapping):
            yield from settings(value, f"{prefix}{name}.")
        else:
            yield prefix + name, shown(value)


def shown(value: Any) -> str:
    """Return a value of an option as the pages write it."""
    if isinstance(value, tuple):
        return ", ".join(shown(one) for one in value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}".replace("e-0", "e-")
    return "none" if value is None else str(value)


p, s, c = "fcil_protocol.", "fcil_server.", "fcil_client."
a, m = "fcil_adapters.", "fcil_adapters.methods."
RETRY, PAUSE, PATIENCE = (
    Of(c + "session.machine.SERVER_RETRY_S"), Of(c + "session.machine.LOCAL_RETRY_S"), Of(p + "envelopes.window.LOSS_TIMEOUT_S"),
)  # fmt: skip
WRAP, FINGERPRINT = Of(p + "envelopes.envelope.WRAP_BYTES"), Of(p + "trust.keys.FINGERPRINT_DIGITS")
REFUSED = [Of(s + "sessions.conduct.MOST"), Of(s + "sessions.conduct.MOST", conduct.WINDOW_S)]
SENTENCES = [
    # 2 Link
    (PROTOCOL, "more than {} at once and {} a second, is **cut off**", REFUSED),
    (PROTOCOL, "{} a second are always tolerated.", [Of(s + "sessions.conduct.MOST", conduct.WINDOW_S, {10: "Ten"}.__getitem__)]),
    (PROTOCOL, "an inventory, which counts {} times,", [word(s + "sessions.conduct.ANNOUNCED")]),
    (PROTOCOL, "a `rotate`, which counts {} times,", [Of(s + "daemon.cut_offs.A_ROTATION")]),
    (PROTOCOL, "the server keeps the {} newest", [word(s + "daemon.dispatch.MOST_STRAYS")]),
    (PROTOCOL, "| `HANDSHAKE_IVL` | {} s |", [Of(p + "link.zmq_link.HANDSHAKE_MS", 1000)]),
    (PROTOCOL, "| `MAXMSGSIZE` | {} MiB |", [Of(p + "link.zmq_link.MAX_MESSAGE_BYTES", MIB)]),
    (PROTOCOL, "| `SNDHWM` | {} messages |", [Of(p + "link.zmq_link.HIGH_WATER")]),
    (PROTOCOL, "| server: `BACKLOG` | {} |", [Of(p + "link.listeners.BACKLOG")]),
    (PROTOCOL, "chunks of {} KiB together at most.", [Of(p + "envelopes.window.MAX_SPAN_BYTES", KIB)]),
    (PROTOCOL, "yields** after every {} messages, and reads at most {} ahead, or {} MiB.",
     [Of(p + "link.socket_reader.YIELD_EVERY"), Of(p + "link.socket_reader.QUEUE"),
      Of(p + "link.socket_reader.QUEUE_BYTES", MIB)]),
    (PROTOCOL, "A message of more than {} frames, or of more than {} MiB together",
     [Of(p + "link.socket_reader.MAX_FRAMES", 1, lambda n: str(int(n) - 1)), Of(p + "link.socket_reader.MAX_SUM_BYTES", MIB)]),
    # 3 Identities and keys
    (PROTOCOL, "Each private key is {} random bytes.", [Of(p + "trust.key_file.SECRET_BYTES")]),
    (PROTOCOL, "stretches it to {} bytes for ML-KEM-768", [Of(p + "trust.keys._MLKEM_SEED_BYTES")]),
    (PROTOCOL, "is the first {} hex digits of the SHA-256 of its public", [FINGERPRINT]),
    (PROTOCOL, "is the first {} hex digits of the SHA-256 of the public root key", [FINGERPRINT]),
    (PROTOCOL, "together at most {} bytes; it has about", [Of(p + "trust.certificate.MAX_CERTIFICATE_BYTES")]),
    (PROTOCOL, "becomes valid {} day before it is made", [word(p + "trust.certificate._CLOCK_MARGIN_S", 86_400)]),
    (PROTOCOL, "| {} | a random secret |", [Of(p + "trust.ticket.SECRET_TICKET_BYTES")]),
    (PROTOCOL, "up to {} addresses HOST:PORT", [Of(p + "trust.ticket.MAX_ADDRESSES")]),
    (PROTOCOL, "| {} | beginning of the SHA-256 of `fcil/1/ticket`", [Of(p + "trust.ticket._CHECK_BYTES")]),
    (PROTOCOL, "makes {} bytes: the private keys", [Of(p + "trust.key_file.SECRET_BYTES", 1 / 3)]),
    # 4 and 5 Messages, sessions
    (PROTOCOL, "The **signature** is {} bytes", [Of(p + "messages.messages.SIGNATURE_BYTES")]),
    (PROTOCOL, "or a MAC of {} bytes", [Of(p + "trust.session_keys.MAC_BYTES")]),
    (PROTOCOL, "| nonce | {} bytes |", [Of(p + "messages.messages.NONCE_BYTES")]),
    (PROTOCOL, "C and S are {} random bytes", [Of(p + "messages.messages.NONCE_BYTES")]),
    (PROTOCOL, "may differ by at most {} relative.", [Of("fcil_adapters.backbones.probes.TOLERANCE", 1, lambda n: f"{n:.0e}".replace("-0", "-"))]),
    (PROTOCOL, "Client to server, at most {} a second: the progress", [Of(c + "daemon.conversation.PROGRESS_S", 1, {1.0: "once"}.__getitem__)]),
    (PROTOCOL, "the client sends its `hello` again after {} seconds, and also", [RETRY]),
    (PROTOCOL, "Without any answer it sends the `hello` again after {} seconds.", [Of(c + "daemon.conversation.ANSWER_S")]),
    # 6 Payloads and envelopes
    (PROTOCOL, "refuses numbers beyond {} (`does_not_fit`)", [Of("fcil_adapters.contract.half_precision.LARGEST")]),
    (PROTOCOL, "printable and at most {} bytes of UTF-8", [Of(p + "payloads.schema.MAX_CLASS_NAME_BYTES")]),
    (PROTOCOL, "sealed(p) = p + {} + {} * (floor(p / 16384) + 1)",
     [Of(p + "envelopes.header._AEAD_FIXED_BYTES"), Of(p + "envelopes.header._AEAD_TAG_BYTES")]),
    (PROTOCOL, "is cut into blocks of {} bytes.", [Of(p + "envelopes.header.AEAD_BLOCK_BYTES")]),
    (PROTOCOL, "is a multiple of {}: its shortness", [Of(p + "envelopes.header.AEAD_BLOCK_BYTES")]),
    (PROTOCOL, "The plaintext is the {}-byte content key", [Of(p + "envelopes.envelope.KEY_BYTES")]),
    (PROTOCOL, "and its tag of 16: {} bytes.", [WRAP]),
    (PROTOCOL, "Public keys are {} bytes of ML-KEM-768", [Of(p + "trust.keys._MLKEM_PUBLIC_BYTES")]),
    (PROTOCOL, "A msgpack map of at most {} bytes.", [Of(p + "envelopes.header.MAX_CORE_BYTES")]),
    (PROTOCOL, "| `run` | text of 1 to {} characters |", [Of(p + "envelopes.header._MAX_NAME")]),
    (PROTOCOL, "A msgpack map of at most {} MiB,", [Of(p + "envelopes.header.MAX_HEADER_BYTES", MIB)]),
    (PROTOCOL, "| `chunk` | integer from {} to {} |",
     [Of(p + "envelopes.header.MIN_CHUNK_BYTES"), Of(p + "envelopes.header.MAX_CHUNK_BYTES")]),
    (PROTOCOL, "| `hashes` | {} bytes for each chunk |", [Of(p + "envelopes.header.HASH_BYTES")]),
    (PROTOCOL, "seal in chunks of {} KiB", [Of(p + "envelopes.header.USUAL_CHUNK_BYTES", KIB)]),
    (PROTOCOL, "which a link of 20 kB/s moves in {} seconds",
     [Of(p + "envelopes.header.USUAL_CHUNK_BYTES", 20_000, lambda n: f"{n:.1f}")]),
    (PROTOCOL, "until there are at most {} chunks, up to {} MiB.",
     [Of(p + "envelopes.header._USUAL_CHUNKS"), Of(p + "envelopes.header.MAX_CHUNK_BYTES", MIB)]),
    # 7 Transfers
    (PROTOCOL, "The window is the amount that arrives in {} s, from {} KiB up to",
     [Of(p + "envelopes.window.WINDOW_S"), Of(p + "envelopes.window.MIN_WINDOW_BYTES", KIB)]),
    (PROTOCOL, "carry the amount that arrives in {} s, at most a {} of the window and {} KiB",
     [Of(p + "envelopes.window.SPAN_S"), Of(p + "envelopes.window.SPANS", 1, {4: "quarter"}.__getitem__), Of(p + "envelopes.window.MAX_SPAN_BYTES", KIB)]),
    (PROTOCOL, "sends up to {} KiB unasked", [Of(p + "envelopes.transfer.UNASKED_BYTES", KIB)]),
    (PROTOCOL, "updates of at most {} clients", [Of("fcil_server.sessions.offers.MOST_ARRIVING")]),
    (PROTOCOL, "nothing has arrived for {} s", [Of("fcil_server.sessions.offers.IDLE_S")]),
    (PROTOCOL, "of the last requested size, or {} KiB;", [Of(p + "envelopes.transfer.UNASKED_SPAN_BYTES", KIB)]),
    (PROTOCOL, "All clients together share {} MiB: the more there are, the less each may ask for, but not less than {} KiB.",
     [Of(p + "envelopes.window.TOTAL_BYTES", MIB), Of(p + "envelopes.window.MIN_WINDOW_BYTES", KIB)]),
    (PROTOCOL, "is requested again, {} times for each envelope.", [word(p + "envelopes.transfer.MAX_SPOILED")]),
    (PROTOCOL, "count as lost if nothing arrives for {} s although", [PATIENCE]),
    (PROTOCOL, "(on the server {} MiB, on the client {} KiB)",
     [Of(p + "envelopes.partial_envelopes.IN_MEMORY_BYTES", MIB), Of(c + "link.downloads.IN_MEMORY_BYTES", KIB)]),
    (PROTOCOL, "kept in memory, {} MiB together;", [Of(p + "envelopes.partial_envelopes.MEMORY_BYTES", MIB)]),
    (PROTOCOL, "keeps at most {} envelopes of one client", [word(s + "sessions.intake.MAX_UPLOADS")]),
    # 8 to 12 States, parts, trust, errors
    (PROTOCOL, "after a pause (`TryAgain`), {} seconds for a fault of the server and {} for one of the client.",
     [RETRY, PAUSE]),
    (PROTOCOL, "is fetched again, at most {} times for one order", [word(c + "session.machine.REFETCHES")]),
    (PROTOCOL, "the folder is scanned again after {} seconds.", [PAUSE]),
    (PROTOCOL, "with a temporary code (section 12) it is announced again after {} seconds.", [RETRY]),
    (PROTOCOL, "on disk, at most {} at a time,", [word(c + "link.downloads.PARALLEL")]),
    (PROTOCOL, "it makes a wrap of {} bytes.", [WRAP]),
    (PROTOCOL, "the sealed bodies of parts of {} MiB and more", [Of(p + "envelopes.transfer.OBJECT_BYTES", MIB)]),
    (PROTOCOL, "more slowly than {} KiB in {} s,",
     [Of(c + "link.url_fetch.LEAST_BYTES", KIB), Of(c + "link.url_fetch.SILENCE_S")]),
    (PROTOCOL, "for {} minutes it looks for no part there", [Of(c + "link.object_downloads.PAUSE_S", 60)]),
    (PROTOCOL, "counts at most {} times the part's size", [word(s + "daemon.dispatch.MOST_ATTEMPTS")]),
    (PROTOCOL, "counts of at most 10^{};", [Of(p + "payloads.schema.MAX_COUNT", 1, lambda n: str(len(str(int(n))) - 1))]),
    (PROTOCOL, "offers the same bytes again, {}, {} seconds apart",
     [Of(c + "session.machine.RESENDS", 1, {2: "twice"}.__getitem__), RETRY]),
    (PROTOCOL, "offers the update again after {} seconds (`RetryDue`)", [RETRY]),
    (PROTOCOL, "if they answered a `hello`, it is sent again after {} seconds.", [RETRY]),
    # 15 to 17 Bytes, relays
    (PROTOCOL, "the bytes of the last {} seconds at most are missing", [Of(s + "daemon.server.FLUSH_S")]),
    (PROTOCOL, "wait, in order, up to {} MiB and {} messages; then",
     [Of(p + "link.send_queue.MAX_QUEUED_BYTES", MIB), Of(p + "link.send_queue.MAX_QUEUED_MESSAGES")]),
    # Other documents
    ("docs/relay.md", "admits {} newcomers at once and then {} a second",
     [Of(s + "federation.allow_list.NEWCOMERS_BURST"), Of(s + "federation.allow_list.NEWCOMERS_PER_S")]),
    (SECURITY, "after more than {} at once, and {} a second, the sender is cut off", REFUSED),
    ("docs/relay.md", "(more than {} at once, and {} a second)", REFUSED),
    (SECURITY, "a limit for every frame, {} s for a handshake", [Of(p + "link.zmq_link.HANDSHAKE_MS", 1000)]),
    (SECURITY, "| {}-bit secret, check digits", [Of(p + "trust.ticket.SECRET_TICKET_BYTES", 1 / 8)]),
    (SECURITY, "| {} for each client; those that no session continues", [word(s + "sessions.intake.MAX_UPLOADS")]),
    (SECURITY, "| {} bits, one use, {} day; at most {} are checked at once, and the answer to a wrong one takes a second |",
     [Of(s + "web.page.access.links.TOKEN_BYTES", 1 / 8), word(s + "web.page.access.links.LIFE_S", 86_400), word(s + "web.page.actions.routes.TRIES")]),
    (SECURITY, "and the answer to a wrong one takes {} |", [Of(s + "web.page.actions.routes.PAUSE_S", 1, {1.0: "a second"}.__getitem__)]),
    (SECURITY, "{} question a second for all of them", [word(s + "web.child.FRESH_S")]),
    ("docs/bytes.md", "Numbers beyond {} are refused", [Of("fcil_adapters.contract.half_precision.LARGEST")]),
    ("docs/bytes.md", "warns if a {} of its step is lost", [Of("fcil_adapters.contract.half_precision.MUCH", 1, {0.25: "quarter"}.__getitem__)]),
    ("docs/bytes.md", "Without them {} tasks of {} classes",
     [word(s + "reports.traffic.budget.ASSUMED_TASKS"), word(s + "reports.traffic.budget.ASSUMED_CLASSES")]),
    ("docs/bytes.md", "loses at most the counts of its last {} seconds", [Of(s + "daemon.server.FLUSH_S")]),
    ("docs/upgrades.md", "| the server's ledger | {} |", [Of(s + "ledger.databases.schema.SCHEMA_VERSION")]),
    ("docs/upgrades.md", "between server, clients and relays | {} |", [Of(p + "PROTOCOL_VERSION")]),
    ("docs/upgrades.md", "`rounds.jsonl` | {}; {}, as",
     [Of(p + "process.terminal.SCHEMA_VERSION"), Of(s + "reports.run_directory.SCHEMA_VERSION")]),
    ("docs/sizing.md", "bounded: {} MiB to them, and {} MiB from them, or {} KiB of each",
     [Of(p + "envelopes.window.TOTAL_BYTES", MIB), Of(p + "envelopes.window.ASKED_BYTES", MIB),
      Of(p + "envelopes.window.MIN_WINDOW_BYTES", KIB)]),
    ("docs/sizing.md", "updates of at most {} clients", [Of(s + "sessions.offers.MOST_ARRIVING")]),
    ("docs/sizing.md", "Older clients send {} KiB", [Of(p + "envelopes.transfer.UNASKED_BYTES", KIB)]),
    ("docs/sizing.md", "Tickets admit {} at once and then {} a second",
     [Of(s + "federation.allow_list.NEWCOMERS_BURST"), Of(s + "federation.allow_list.NEWCOMERS_PER_S")]),
    ("docs/network.md", "names up to {} addresses", [word(p + "trust.ticket.MAX_ADDRESSES")]),
    # What the methods compute
    ("docs/methods/README.md", "| prototypes | ${} N(0, I)$", [Of(a + "toolkit.prototypes.rows._SPREAD")]),
    ("docs/methods/README.md", "| head rows, LoRA methods | $N(0, {}^2)$", [Of(a + "toolkit.heads.server._SPREAD")]),
    ("docs/methods/README.md", "| distance 0 | counts as {} |", [Written(a + "toolkit.prototypes.reweighting.SMALLEST_DISTANCE")]),
    ("docs/methods/README.md", "step of PILoRA's and PLoRA's LoRA, {} with Adam,", [Default("pilora", "lr_lora")]),
    ("docs/methods/pilora.md", "$p_k = 1 / \\max(d_k, 10^{{{}}})$", [exponent(a + "toolkit.prototypes.reweighting.SMALLEST_DISTANCE")]),
    ("docs/methods/pilora.md", "\\le 10^{{{}}} \\max p$", [exponent(a + "toolkit.prototypes.reweighting.EQUAL")]),
    ("docs/methods/pilora.md", "\\rVert^2 / d,\\ 10^{{{}}})", [exponent(a + "toolkit.heads.distances._SMALLEST")]),
    ("docs/methods/pilora.md", "random start ${} N(0, I)$", [Of(a + "toolkit.prototypes.rows._SPREAD")]),
    ("docs/methods/fed_talora.md", "at or below $10^{{{}}}$ of the largest, or below $2^{{{}}} ",
     [exponent(m + "fed_talora.residuals._RELATIVE"), exponent(m + "fed_talora.residuals._FLOAT32")]),
    ("docs/methods/hgp.md", "the task, else $10^{{{}}} I$", [exponent(a + "toolkit.gaussians.mixture._LAST_RESORT")]),
    ("docs/methods/hgp.md", "of $l / ({} \\lVert l \\rVert)$", [Written(a + "toolkit.gaussians.rebalance._TEMPERATURE")]),
    ("docs/methods/hepco.md", "Differences below $10^{{{}}}$", [exponent(m + "hepco.distillation.EQUAL")]),
    ("docs/methods/baselines.md", "$s$ = `cov_scale` = {}.", [Default("ccvr", "cov_scale")]),
    ("docs/methods/baselines.md", "`alpha` = {} and $T$ = `temperature` = {}.",
     [Default("lwf", "alpha"), Default("lwf", "temperature")]),
    ("docs/methods/baselines.md", "`ewc_lambda` = {}, $\\gamma$ = `gamma` = {},",
     [Default("ewc", "ewc_lambda"), Default("ewc", "gamma")]),
    ("docs/methods/baselines.md", "with `pull` = {}. The head", [Default("fedproto", "pull")]),
    ("docs/methods/baselines.md", "with `pull` = {}. [Notes]", [Default("l2p", "pull")]),
    ("docs/methods/baselines.md", "`near` = {}, `far` = {}, `margin` = {} and `contrast` = {}.",
     [Default("fed_cprompt", name) for name in ("near", "far", "margin", "contrast")]),
]  # fmt: skip


@functools.cache
def flat(document: str) -> str:
    """Return a document in one line, so that a sentence may be broken anywhere."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize(
    ("document", "sentence", "constants"), SENTENCES, ids=[row[1][:50] for row in SENTENCES]
)
def test_a_number_is_that_of_the_code(
    document: str, sentence: str, constants: list[Of | Written | Default]
) -> None:
    assert sentence.format(*map(str, constants)) in flat(document)


PAGES = sorted(path.stem for path in (ROOT / "docs" / "methods").glob("*.md"))


@pytest.mark.parametrize("method", [page for page in PAGES if page not in ("README", "baselines")])
def test_the_options_of_a_method_are_those_of_its_page(method: str) -> None:
    """Every option with its default, and what each preset makes of it."""
    manifest = load_method(method)
    text = (ROOT / "docs" / "methods" / f"{method}.md").read_text(encoding="utf-8")
    lines = text.partition("\n## Options\n")[2].splitlines()
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    first, _, *listed = rows
    assert first == ["option", "default", *manifest.presets, "where the default comes from"]
    assert all(row[-1] for row in listed)
    presets = [dict(settings(preset)) for preset in manifest.presets.values()]
    expected = [
        [f"`{name}`", shown(default), *(preset.get(name, "") for preset in presets)]
        for name, default in options(manifest.hparams)
    ]
    assert sorted(row[:-1] for row in listed) == sorted(expected)


def test_a_certificate_is_valid_for_as_many_days_as_the_document_says() -> None:
    days = inspect.signature(RootKey.certify).parameters["valid_days"].default
    assert f"is valid for {days:,} days." in flat(PROTOCOL)


def test_a_client_that_was_refused_comes_again_as_often_as_the_document_says() -> None:
    wait = inspect.signature(transport.Dealer).parameters["retry_s"].default
    assert f"the client does, every {wait:g} seconds," in flat(PROTOCOL)


def test_a_relays_cache_is_as_large_as_the_document_says() -> None:
    size = inspect.signature(relay).parameters["cache_mb"].default
    assert f"`--cache-mb` limits the disk space ({size:,})." in flat("docs/relay.md")


def test_the_sockets_options_are_those_of_the_table() -> None:
    def row(name: str) -> str:
        [text] = re.findall(rf"\| (?:client: |server: )?`{name}[^|]*\| ([^|]*?) \|", flat(PROTOCOL))
        return text

    async def look() -> dict[str, str]:
        keys = PrivateKeys.generate()
        secret, public = keys.curve_secret, keys.public.curve
        dealer = transport.Dealer(curve_secret=secret, curve_public=public, server_key=public)
        router = transport.Router(curve_secret=secret, curve_public=public, admit=lambda _: False)
        try:
            of, its = dealer._socket.getsockopt, router._socket.getsockopt
            beats = of(zmq.HEARTBEAT_IVL)
            assert of(zmq.HEARTBEAT_TIMEOUT) == of(zmq.HEARTBEAT_TTL) == its(zmq.HEARTBEAT_TTL)
            return {
                "HEARTBEAT_IVL": f"client: {beats / 1000:g} s",
                "HEARTBEAT_TIMEOUT": f"{of(zmq.HEARTBEAT_TIMEOUT) // beats} x `HEARTBEAT_IVL`",
                "LINGER": str(of(zmq.LINGER)),
                "IPV6": str(int(of(zmq.IPV6))),
                "ZAP_DOMAIN": f"`{its(zmq.ZAP_DOMAIN).decode()}`",
                "IMMEDIATE": str(of(zmq.IMMEDIATE)),
                "RECONNECT_IVL": f"{of(zmq.RECONNECT_IVL) // 1000:,} s",
            }
        finally:
            dealer.close()
            router.close()

    for name, value in asyncio.run(look()).items():
        assert row(name).endswith(value), name
