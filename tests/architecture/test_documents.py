"""What the documents say is what the code does."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import types
import typing
from datetime import date
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from architecture.tree_texts import ROOT, prose, texts
from fcil_client.session import machine as session
from fcil_protocol import PROTOCOL_VERSION
from fcil_protocol.envelopes.header import sealed_size
from fcil_protocol.envelopes.stored_envelope import StoredEnvelope
from fcil_protocol.errors import all_errors
from fcil_protocol.link.zmq_link import HANDSHAKE_DOWN_BYTES, HANDSHAKE_UP_BYTES, frame_wire_bytes
from fcil_protocol.messages import frames, messages
from fcil_protocol.messages.messages import MESSAGES, Message
from fcil_protocol.payloads.builtin import EVALUATE_SCHEMA, INVENTORY_SCHEMA, REGISTRY_SCHEMA
from fcil_protocol.payloads.payload import WIRE_DTYPES
from fcil_protocol.payloads.schema import Kind
from fcil_server.federation.config import ELSEWHERE, Config, known_keys
from fcil_server.ledger.enums import Answer, Outcome
from fcil_server.rounds import machine

PROTOCOL = (ROOT / "protocol" / "PROTOCOL.md").read_text(encoding="utf-8")
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
ERRORS = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")

NESTED = (messages.BackboneClaim, messages.Verdict, messages.PartRef)


def section(text: str, heading: str) -> str:
    """Return a Markdown section from its heading to the next one of the same or a higher level."""
    level = len(heading) - len(heading.lstrip("#"))
    lines = text.splitlines()
    start = lines.index(heading)
    end = next(
        (i for i in range(start + 1, len(lines)) if re.match(rf"#{{1,{level}}} ", lines[i])),
        len(lines),
    )
    return "\n".join(lines[start:end])


def numbered(text: str, number: int) -> str:
    (heading,) = [line for line in text.splitlines() if line.startswith(f"## {number}. ")]
    return section(text, heading)


def rows(text: str) -> list[list[str]]:
    """Return the cells of all table rows whose first cell is code."""
    found = []
    for line in text.splitlines():
        cells = [c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells and cells[0].startswith("`"):
            found.append(cells)
    return found


def table(text: str) -> dict[str, list[str]]:
    return {cells[0].strip("`"): cells[1:] for cells in rows(text)}


# --- generated pages ------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["errorlist", "configlist", "commandlist", "architecture"])
def test_generated_page_is_current(script: str) -> None:
    command = [sys.executable, str(ROOT / "scripts" / script), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_every_error_code_has_a_section_with_its_exit_code() -> None:
    for cls in all_errors():
        assert f"exit code {cls.exit_code}." in section(ERRORS, f"## {cls.code}")


def test_every_error_says_what_happened_and_what_to_do() -> None:
    for cls in all_errors():
        assert cls.__doc__
        assert cls.default_action(), cls.__name__


def test_every_configuration_key_stands_in_the_table_of_its_section() -> None:
    for key in known_keys():
        name, _, option = key.partition(".")
        text = section(CONFIGURATION, f"## [{name}]")
        assert not option or option in table(text), key


def test_every_configuration_key_has_a_meaning() -> None:
    for name in Config.model_fields:
        for key, cells in table(section(CONFIGURATION, f"## [{name}]")).items():
            assert cells[-1], f"{name}.{key}"


def test_names_from_elsewhere_lead_to_keys_that_exist() -> None:
    listed = table(section(CONFIGURATION, "## Names from elsewhere"))
    assert listed.keys() == ELSEWHERE.keys()
    known = {*known_keys(), "method.<option>"}
    assert {cells[0].split(";")[0].strip("`") for cells in listed.values()} <= known


def test_what_a_run_keeps_is_as_decision_0008_says() -> None:
    kept_config = importlib.import_module("fcil_server.runs.frozen_config")
    page = ROOT / "docs" / "decisions" / "0008-what-a-run-keeps.md"
    decision = section(page.read_text(encoding="utf-8"), "## Decision")
    for name in kept_config.FIXED_SECTIONS:
        assert f"`[{name}]`" in decision
    for keys in kept_config.FREE_KEYS.values():
        for key in keys:
            assert f"`{key}`" in decision


# --- messages -------------------------------------------------------------------------------

WORDS = {
    messages.Nonce: "nonce",
    messages.Name: "name",
    messages.Text: "text",
    messages.Hex: "hex",
    messages.SessionKey: "key",
    messages.EnvelopeDigest: "digest",
    messages.Count: "count",
    messages.Index: "index",
}
PLAIN = {bool: "truth", float: "number", bytes: "bytes"}


def type_words(hint: Any) -> str:
    """Return how PROTOCOL.md must begin to describe a field's type; "" where it is free to."""
    for alias, word in WORDS.items():
        if hint is alias:
            return word
    if hint in PLAIN:
        return PLAIN[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return f"`{arguments[0]}`"
    if origin is list:
        return f"list of {type_words(arguments[0])}"
    if origin in (types.UnionType, typing.Union):
        return type_words(arguments[0])
    if origin is typing.Annotated:
        return PLAIN.get(arguments[0], "")
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return f"map `{hint.__name__}`"
    return ""


def message_section(cls: type[Message]) -> str:
    pattern = rf"^### 4\.\d+ {cls.type}$"
    (heading,) = re.findall(pattern, PROTOCOL, re.MULTILINE)
    return section(PROTOCOL, heading)


def field_table(model: type[BaseModel]) -> dict[str, list[str]]:
    """Return field -> [type, default, meaning] of a message or of a map inside one."""
    if issubclass(model, Message) and model is not Message:
        return table(message_section(model).split("\n\n`")[0])
    intro = "Every message has these two fields; section 5 explains them."
    before = intro if model is Message else f"\n`{model.__name__}`:"
    _, _, rest = numbered(PROTOCOL, 4).partition(f"{before}\n\n")
    assert rest, f"PROTOCOL.md has no table of {model.__name__}"
    return table(rest.split("\n\n")[0])


MODELS = [Message, *MESSAGES.values(), *NESTED]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_protocol_lists_exactly_the_fields_of(model: type[BaseModel]) -> None:
    own = set(model.model_fields)
    if issubclass(model, Message) and model is not Message:
        own -= set(Message.model_fields)
    assert set(field_table(model)) == own


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_protocol_gives_type_limit_and_default_of_every_field_of(model: type[BaseModel]) -> None:
    hints = typing.get_type_hints(model, include_extras=True)
    for name, (kind, default, meaning) in field_table(model).items():
        field = model.model_fields[name]
        assert kind.startswith(type_words(hints[name])), f"{name}: {kind}"
        assert meaning, name
        required = field.default is PydanticUndefined and field.default_factory is None
        assert (default == "required") == required, name
        for rule in () if hints[name] in WORDS else field.metadata:
            longest = getattr(rule, "max_length", None)
            assert longest is None or f"{longest:,}" in kind, f"{name}: {longest}"


def test_protocol_gives_every_choice_of_a_literal() -> None:
    for cls in MESSAGES.values():
        for name, field in cls.model_fields.items():
            if typing.get_origin(field.annotation) is Literal:
                for choice in typing.get_args(field.annotation):
                    assert f"`{choice}`" in field_table(cls)[name][0]


def test_protocol_lists_no_message_that_does_not_exist() -> None:
    named = re.findall(r"^### 4\.\d+ (\w+)$", PROTOCOL, re.MULTILINE)
    assert sorted(named) == sorted(MESSAGES)


def test_protocol_says_which_messages_are_not_signed() -> None:
    unsigned = [cls for cls in MESSAGES.values() if not cls.signed]
    assert unsigned
    for cls in MESSAGES.values():
        assert ("Not signed" in message_section(cls)) == (cls in unsigned), cls.type


def test_every_message_is_named_with_its_blobs() -> None:
    form = numbered(PROTOCOL, 4).split("### 4.1")[0]
    three = [name for name, counts in frames._BLOBS.items() if counts[0] == 3]
    one = [name for name, counts in frames._BLOBS.items() if counts[0] == 1]
    (more,) = [name for name, counts in frames._BLOBS.items() if len(counts) > 1]
    assert f"`{more}` may have a fourth" in form
    assert " and ".join(f"`{n}`" for n in three) + " have three" in form
    assert " and ".join(f"`{n}`" for n in one) + " has one" in form
    assert len(three) + len(one) == len(frames._BLOBS)


# --- the rest of the protocol ---------------------------------------------------------------


def test_protocol_is_of_the_version_that_the_code_speaks() -> None:
    assert PROTOCOL.startswith(f"# The fcil protocol, version {PROTOCOL_VERSION}\n")


def constant(path: str) -> int:
    module, _, name = path.rpartition(".")
    value: int = getattr(importlib.import_module(module), name)
    return value


def test_limits_are_those_of_the_code() -> None:
    limits = [c for c in numbered(PROTOCOL, 13).splitlines() if c.endswith("` |")]
    assert len(limits) > 15
    for line in limits:
        _, shown, path = (cell.strip() for cell in line.strip("|").split("|"))
        assert int(shown.split()[0].replace(",", "")) == constant(path.strip("`")), line


def test_codes_in_the_table_of_nacks_are_codes_of_errors() -> None:
    codes = {cls.code for cls in all_errors()}
    first = [cells[0] for cells in rows(numbered(PROTOCOL, 12))]
    named = {code for cell in first for code in re.findall(r"`(\w+)`", cell)}
    assert len(named) > 10
    assert named <= codes


@pytest.mark.parametrize("states", [session.Link, session.Work, machine.Phase])
def test_states_of_the_machines_are_those_of_the_document(states: Any) -> None:
    listed = table(numbered(PROTOCOL, 8))
    drawing = numbered(PROTOCOL, 8)
    for state in states:
        assert state.value in listed
        assert re.search(rf"^    .*\b{state.value}\b", drawing, re.MULTILINE), state


def test_document_knows_no_other_states() -> None:
    known = {s.value for s in (*session.Link, *session.Work, *machine.Phase)}
    assert table(numbered(PROTOCOL, 8)).keys() == known


@pytest.mark.parametrize(
    "words", [[a.word for a in Answer], [o.value for o in Outcome if o is not Outcome.REOPENED]]
)
def test_answers_and_outcomes_of_a_round_are_listed(words: list[str]) -> None:
    text = section(PROTOCOL, "### 8.2 A round on the server")
    assert all(f"`{word}`" in text for word in words)


@pytest.mark.parametrize(
    ("table_of", "heading"),
    [
        (session.ClientSession.TABLE, "### 8.1 A client's session"),
        (machine.Round.TABLE, "### 8.2 A round on the server"),
    ],
)
def test_every_event_of_a_machine_is_named(table_of: dict[Any, Any], heading: str) -> None:
    text = section(PROTOCOL, heading)
    for _, event in table_of:
        # Welcomed is drawn twice, ready and not.
        assert re.search(rf"\b{event.__name__}\b", text), event


def drawn(text: str) -> dict[tuple[str, str], set[str]]:
    """Return (state, next state) -> events of the drawing in section 8.2."""
    edge = re.compile(r"(?=(\w+) ---([^>]*)---> (\w+))")
    found = {(a, b): events for a, events, b in edge.findall(text)}
    (skipped,) = re.findall(r"^        \+---([^>]*)---> closed, skipped$", text, re.MULTILINE)
    found["gathering", "closed"] = skipped
    return {edge: set(re.findall(r"\b[A-Z]\w+", events)) for edge, events in found.items()}


OPENING = {"_settle_or_open", "_open_if_settled", "_open_if_enough"}


@pytest.mark.parametrize(
    ("edge", "steps"),
    [
        (("gathering", "open"), OPENING),
        (("gathering", "closed"), OPENING | {"_close"}),
        (("open", "closed"), {"_close_if_complete", "_close"}),
    ],
)
def test_events_of_a_round_are_drawn_where_they_can_change_its_state(
    edge: tuple[str, str], steps: set[str]
) -> None:
    """What can is read from the handlers themselves: which of the deciding steps each calls."""
    table = {e.__name__: t for (p, e), t in machine.Round.TABLE.items() if p.value == edge[0]}
    able = {e for e, (h, _) in table.items() if steps & set(h.__code__.co_names)}
    events = drawn(section(PROTOCOL, "### 8.2 A round on the server"))[edge]
    assert events == able
    assert events == {e for e, (_, phases) in table.items() if edge[1] in phases}


def test_payload_words_are_those_of_the_code() -> None:
    payloads = numbered(PROTOCOL, 6)
    for word in (*Kind, *WIRE_DTYPES):
        assert f"`{word}`" in payloads
    schemas = (INVENTORY_SCHEMA, EVALUATE_SCHEMA, REGISTRY_SCHEMA)
    for name, schema in zip(("inventory", "evaluate", "registry"), schemas, strict=True):
        row = " ".join(table(payloads)[name])
        for spec in (*schema.tensors, *schema.meta):
            assert f"`{spec.name}`" in row


def test_worked_sizes_are_right() -> None:
    assert f"1,000,000 bytes become {sealed_size(1_000_000):,}" in PROTOCOL
    text = numbered(PROTOCOL, 15)
    assert f"{HANDSHAKE_UP_BYTES} bytes from client to server" in text
    assert f"{HANDSHAKE_DOWN_BYTES} back" in text
    for size in (0, 222, 223, 65_536):  # the formula as the document states it
        assert frame_wire_bytes(size) == size + 33 + (2 if size + 33 <= 255 else 9)


def test_stored_form_has_the_preamble_that_the_document_gives() -> None:
    lines = section(PROTOCOL, "### 6.7 Stored form").splitlines()
    sizes = [line.split("|")[1] for line in lines if line.startswith("| ")]
    preamble = sum(int(n) for size in sizes for n in re.findall(r"\d+", size))
    assert len(StoredEnvelope(b"", b"", b"", b"").to_bytes()) == preamble


# --- all documents --------------------------------------------------------------------------


def test_no_text_file_names_a_path_of_somebodys_machine() -> None:
    place = re.compile(r"(?<![\w.])/(?:home|work|Users|root|mnt)/\w")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path, text in texts()
        for number, line in enumerate(text.splitlines(), start=1)
        if place.search(line)
    ]
    assert found == []


def test_every_decision_has_its_four_headings_and_fits_on_a_page() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert [p.name[:4] for p in pages] == [f"{i:04d}" for i in range(1, len(pages) + 1)]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
        assert headings == ["Context", "Decision", "Why", "Consequences"], page.name
        assert text.startswith(f"# {page.name[:4]}: ")
        assert len(text.splitlines()) <= 60, page.name


STATUS = re.compile(r"(\d{4}-\d\d-\d\d), (?:accepted|(?:superseded|amended) by (.+))\.")


def test_every_decision_has_its_date_and_status_under_the_title() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    dates = []
    for page in pages:
        line = page.read_text(encoding="utf-8").splitlines()[2]
        found = STATUS.fullmatch(line)
        assert found, f"{page.name}: {line}"
        dates.append(date.fromisoformat(found[1]))
        later = found[2].split(" and ") if found[2] else []
        known = {f"[{p.name[:4]}]({p.name})" for p in pages if p.name > page.name}
        assert set(later) <= known, f"{page.name} names a decision that is no later one"
    assert dates == sorted(dates)


# What the laboratory writes has tables without end; decisions have a limit of their own.
PAGES = [p for p in (ROOT / "docs").rglob("*.md") if "results" not in p.parts]
MOST_WORDS = 2500


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_a_page_has_no_more_words_than_one_reads_at_a_time(page: Path) -> None:
    """Words of the text and of tables, without code and the targets of links."""
    text = re.sub(r"\]\([^)\s]*\)", "]", prose(page.read_text(encoding="utf-8")))
    assert len(re.findall(r"\S*\w\S*", text)) <= MOST_WORDS


def test_readme_fits_on_the_first_screens() -> None:
    words = len((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert 600 <= words <= 800


BENCHMARKS = sorted((ROOT / "docs" / "benchmarks").glob("*.md"))


@pytest.mark.parametrize("page", BENCHMARKS, ids=lambda p: p.name)
def test_a_page_of_benchmarks_is_short_and_names_its_command_before_its_numbers(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    assert re.search(r"scripts/\w+|fcil-server \w+", text.partition("\n|---")[0])
