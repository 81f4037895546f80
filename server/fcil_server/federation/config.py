"""The TOML configuration of a federation, checked before any work, all faults at once."""

from __future__ import annotations

import copy
import difflib
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from fcil_adapters.contract.half_precision import NOTHING
from fcil_protocol.errors import ConfigError
from fcil_protocol.payloads.schema import class_key, class_name_fault
from fcil_protocol.process.overrides import apply_override
from fcil_server.federation.addresses import check_listen_address, split_address
from fcil_server.federation.sections import (
    LEAST_NOISE,
    MOST_NOISE,
    FederationSection,
    MethodSection,
    PartsSection,
    PrivacySection,
    RoundSection,
    RunSection,
    Section,
    SinksSection,
    StorageSection,
    TasksSection,
    TrustSection,
    WebhooksSection,
    WireSection,
)


class Config(Section):
    """Content of ``federation.toml``."""

    federation: FederationSection = FederationSection()
    run: RunSection = RunSection()
    method: MethodSection = MethodSection()
    tasks: TasksSection = TasksSection()
    round: RoundSection = RoundSection()
    wire: WireSection = WireSection()
    parts: PartsSection = PartsSection()
    privacy: PrivacySection = PrivacySection()
    trust: TrustSection = TrustSection()
    storage: StorageSection = StorageSection()
    sinks: SinksSection = SinksSection()
    webhooks: WebhooksSection = WebhooksSection()

    @property
    def least_updates(self) -> int:
        """Smallest number of updates that make a state (`[round] min_updates`)."""
        masked = self.privacy.secure_min_clients if self.privacy.secure != "off" else 1
        return max(self.round.min_updates, masked, 2 if self.privacy.noise_multiplier else 1)


_PLAIN_URL = re.compile(
    r"(?=.{1,1000}$)https?://[A-Za-z0-9.:\[\]-]+(/[\w.~%!$&'()*+,;=:@/-]*)?", re.ASCII
)

# Names of the same thing in other programs: a hint in the error, not an option.
ELSEWHERE = {
    "credit": "wire.window_mb",
    "num-server-rounds": "round.rounds_per_task",
    "num_server_rounds": "round.rounds_per_task",
    "num_rounds": "round.rounds_per_task",
    "rounds": "round.rounds_per_task",
    "rounds_to_train": "round.rounds_per_task",
    "fraction-train": "round.clients_per_round",
    "fraction_train": "round.clients_per_round",
    "fraction_fit": "round.clients_per_round",
    "min-available-nodes": "round.min_clients",
    "min_available_nodes": "round.min_clients",
    "min_available_clients": "round.min_clients",
    "min_train_nodes": "round.quorum",
    "min_fit_clients": "round.quorum",
    "minimum_reporting": "round.quorum",
    "straggler_cutoff_time": "round.deadline_s",
    "wait_time_after_min_received": "round.deadline_s",
    "train_timeout": "round.deadline_s",
    "address": "federation.listen",
    "superlink": "federation.listen",
    "lr": "method.<option>; `fcil-server methods` lists them",
}


def load(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file (None: all defaults) and apply ``section.key=value`` overrides.

    Raises:
        ConfigError: one message that names every fault, and the file if it has faults by itself.
    """
    fields = merged(path, overrides)
    try:
        return validate(fields)
    except ConfigError as error:
        own = "" if path is None else _faults_of(path)
        if own and own == error.message:
            error.message = f"in {path}: {own}"
        elif own:
            error.message += f" Of these, {path} has: {own}"
        raise


def _faults_of(path: Path) -> str:
    """Return the faults of a file alone; "" if it has none."""
    try:
        validate(_read(path))
    except ConfigError as error:
        return error.message
    return ""


def merged(path: Path | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a TOML file (None: nothing) and apply overrides; the values are not checked.

    Raises:
        ConfigError: the file cannot be read, or an override is no ``section.key=value``.
    """
    fields = _read(path) if path is not None else {}
    for override in overrides:
        apply_override(fields, override)
    return fields


# Also for a number with more digits than Python reads, and for lists nested without end.
_NO_TOML = (ValueError, RecursionError)


def parse(text: str) -> Config:
    """Check TOML text, such as the snapshot kept with a run."""
    try:
        fields = tomllib.loads(text)
        if isinstance(fields.get("wire"), dict):
            fields["wire"].pop("credit", None)  # in runs that began before it was window_mb
            # In runs that began before there were any.
            fields["wire"].setdefault("half", NOTHING)
            fields["wire"].setdefault("compact", False)
    except _NO_TOML as error:
        raise ConfigError(f"the configuration is not TOML: {error}.") from error
    return validate(fields, begun=True)


def validate(fields: dict[str, Any], *, begun: bool = False) -> Config:
    """Check parsed fields.

    Args:
        fields: sections with their keys.
        begun: they are of a run that has begun, perhaps before some limits were there: it goes on.

    Raises:
        ConfigError: one message that names the first faults.
    """
    try:
        config = Config.model_validate(fields)
    except ValidationError as error:
        found: list[dict[str, Any]] = [dict(e) for e in error.errors(include_url=False)]
        faults = [_fault(e) for e in found[:MOST_FAULTS]]
        if len(found) > MOST_FAULTS:
            faults.append(f"and {len(found) - MOST_FAULTS} more")
        elif all(e["type"] == "extra_forbidden" for e in found):
            faults += _faults_without(fields, [e["loc"] for e in found])
        raise ConfigError(f"{'; '.join(faults)}.") from error
    faults_found = list(_cross_checks(config))
    if not begun:
        faults_found += _noise_faults(config.privacy)
    if faults_found:
        raise ConfigError(f"{'; '.join(faults_found)}.")
    return config


MOST_FAULTS = 20  # that are named in one message

# Marks around a file that people edit: half a file may still be TOML, and would mean defaults.
BEGINNING = "# fcil: the last line says that this file is whole; keep both.\n"
END = "# fcil: end of the file.\n"


def as_file(config: Config) -> str:
    """Return a federation's own file: every key with its meaning, between two marks."""
    return f"{BEGINNING}\n{to_toml(config, comments=True)}{END}"


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        fields = tomllib.loads(text)
    except FileNotFoundError as error:
        raise ConfigError(f"there is no configuration file {path}.") from error
    except IsADirectoryError as error:
        raise ConfigError(
            f"{path} is a folder, expected a TOML file of settings.",
            action="Name the file itself, such as federation.toml in it.",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}.") from error
    except _NO_TOML as error:
        raise ConfigError(f"{path} is not TOML: {error}.") from error
    begins = BEGINNING.strip() in text or (text and BEGINNING.startswith(text))
    if begins and END.strip() not in text:
        missing = ", ".join(f"[{name}]" for name in Config.model_fields if name not in fields)
        raise ConfigError(
            f"{path} has no end: expected the line {END.strip()!r}, so it was cut short"
            f"{f'; {missing} would be as if never set' if missing else ''}.",
            action="Restore it from a backup. If it is as you want it, put that line at its end.",
        )
    return fields


def _fault(error: dict[str, Any]) -> str:
    where = ".".join(str(x) for x in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown key {where!r}{_hint(error['loc'])}"
    text = f"{where}: {error['msg'].removeprefix('Value error, ')}"
    # An address may hold a password, and errors go to logs.
    return text if error["loc"][0] in ("sinks", "webhooks") else f"{text}, got {error['input']!r}"


def _faults_without(fields: dict[str, Any], unknown: Sequence[tuple[Any, ...]]) -> list[str]:
    """Return the faults that remain without the unknown keys."""
    rest = copy.deepcopy(fields)
    for *path, key in unknown:
        place: Any = rest
        for step in path:
            place = place[step]
        del place[key]
    return list(_cross_checks(Config.model_validate(rest)))


def _hint(loc: tuple[Any, ...]) -> str:
    key = str(loc[-1])
    if key in ELSEWHERE:
        return f" (here it is called {ELSEWHERE[key]!r})"
    near = difflib.get_close_matches(".".join(str(x) for x in loc), list(known_keys()), 1, 0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""


def known_keys() -> Iterator[str]:
    """Yield every key of the configuration as ``section.key``."""
    for section, field in Config.model_fields.items():
        yield section
        model = field.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        for key in model.model_fields:
            yield f"{section}.{key}"


def _noise_faults(privacy: PrivacySection) -> list[str]:
    """Return which of noise and clip are beyond what the numbers of a run can carry."""
    values = {key: getattr(privacy, key) for key in ("noise_multiplier", "clip")}
    return [
        f"privacy.{key} is {value:g}: expected 0, or {LEAST_NOISE:g} to {MOST_NOISE:g}"
        for key, value in values.items()
        if value and not LEAST_NOISE <= value <= MOST_NOISE
    ]


def _cross_checks(config: Config) -> Iterator[str]:
    tasks = config.tasks
    if tasks.schedule == "listed" and not tasks.classes:
        yield "tasks.schedule is 'listed' but tasks.classes is empty: list the class names"
    if tasks.schedule == "discovered" and tasks.classes:
        yield "tasks.classes is given but tasks.schedule is 'discovered': set it to 'listed'"
    seen: dict[str, int] = {}
    for index, names in enumerate(tasks.classes):
        if not names:
            yield f"tasks.classes[{index}] is empty: a task needs at least one class"
        for name in names:
            fault = class_name_fault(name)
            if fault:
                yield f"tasks.classes[{index}]: {name!r}: {fault}"
            elif class_key(name) in seen:
                yield f"tasks.classes[{index}]: {name!r} is already in task {seen[class_key(name)]}"
            seen.setdefault(class_key(name), index)
    privacy = config.privacy
    why = "privacy.noise_multiplier" if privacy.secure == "off" else "privacy.secure = 'masks'"
    yield from _round_checks(config.round, config.least_updates, why)
    if privacy.noise_multiplier and not privacy.clip:
        yield (
            "privacy.noise_multiplier needs privacy.clip, the largest length of an image's feature "
            "(docs/privacy.md says how to choose it)"
        )
    if not privacy.noise_multiplier:
        for key in ("clip", "max_epsilon", "partial"):
            if getattr(privacy, key):
                yield f"privacy.{key} does nothing while privacy.noise_multiplier is 0"
    if privacy.secure == "masks":
        yield from masks_faults(config)
    else:
        usual = PrivacySection()
        for key in ("secure_threshold", "secure_min_clients"):
            if getattr(privacy, key) != getattr(usual, key):
                yield f"privacy.{key} does nothing while privacy.secure is 'off'"
    if privacy.relay_sums:
        yield from relay_sum_faults(config)
    told = [("advertise", address) for address in config.federation.advertise]
    for key, address in [("listen", config.federation.listen), *told]:
        try:
            split_address(address)
        except ConfigError as error:
            yield f"federation.{key}: {str(error).rstrip('.')}"
    if config.parts.url and not config.parts.store:
        yield "parts.url does nothing while parts.store is empty"
    elif config.parts.url and not _PLAIN_URL.fullmatch(config.parts.url):
        yield (
            f"parts.url is {config.parts.url[:200]!r}, expected https://HOST or "
            "https://HOST/FOLDER without a query, at most 1,000 characters"
        )
    section = config.federation
    for key, address, certificate in (
        ("metrics", section.metrics, section.metrics_certificate),
        ("page", section.page, section.page_certificate),
        ("api", section.api, section.api_certificate),
    ):
        try:
            if address:
                check_listen_address(address, certificate)
        except ConfigError as error:
            yield f"federation.{key}: {str(error).rstrip('.')}"
    if not section.page:
        for key in ("page_read_only", "page_metrics", "page_beside"):
            if getattr(section, key):
                yield f"federation.{key} does nothing while federation.page is empty (--page)"


def _round_checks(section: RoundSection, least: int, why: str) -> Iterator[str]:
    asked, take, quorum = section.clients_per_round, section.take, section.quorum
    if 0 < section.min_updates < least:
        yield (
            f"round.min_updates is {section.min_updates}, and with {why} a round needs {least} "
            f"updates or more; set it to {least} or more, or to 0"
        )
    for key, value in (("clients_per_round", asked), ("take", take)):
        if 0 < value < least:
            yield (
                f"round.{key} is {value}, and a round needs {least} updates to change anything "
                "(round.min_updates): no round could"
            )
    if asked and quorum > asked:
        yield "round.quorum exceeds round.clients_per_round: a round could never complete"
    if asked and take > asked:
        yield (
            f"round.take is {take} and round.clients_per_round {asked}: there cannot be more "
            "updates than asked clients"
        )
    if take and quorum > take:
        yield (
            f"round.quorum is {quorum} and round.take {take}: a round that closes after {take} "
            "updates would never have its quorum"
        )
    if section.mode == "async":
        yield from _async_checks(section)


def masks_faults(config: Config) -> Iterator[str]:
    """Yield the settings that masked rounds exclude."""
    section, least = config.round, config.privacy.secure_min_clients
    yield from _faults_of_sums(config, "privacy.secure = 'masks'")
    if section.take:
        yield (
            f"round.take is {section.take}, and with privacy.secure = 'masks' a round waits for "
            "all whose shares it has: set it to 0"
        )
    if section.min_clients < least:
        yield (
            f"round.min_clients is {section.min_clients}, and with privacy.secure = 'masks' no sum "
            f"of fewer than {least} clients is opened (privacy.secure_min_clients)"
        )


def relay_sum_faults(config: Config) -> Iterator[str]:
    """Yield the settings that sums of relays exclude."""
    privacy = config.privacy
    if privacy.secure != "off":
        yield (
            "privacy.relay_sums lets a relay open updates, and privacy.secure = 'masks' hides them "
            "from all: set one of them to its default"
        )
    if privacy.noise_multiplier:
        yield (
            "privacy.relay_sums adds up updates without noise only: set it to false, or "
            "privacy.noise_multiplier to 0"
        )
    yield from _faults_of_sums(config, "privacy.relay_sums")


def _faults_of_sums(config: Config, cause: str) -> Iterator[str]:
    """Yield the settings that need single updates, which sums hide."""
    trust, default = config.trust, TrustSection()
    alone = f"needs each client's own update, which {cause} hides"
    if config.round.mode == "async":
        yield f"round.mode is 'async', which {alone}: set it to 'sync'"
    if trust.averaging != default.averaging:
        yield f"trust.averaging is {trust.averaging!r}, which {alone}: set it to 'mean'"
    if trust.max_weight_share not in (default.max_weight_share, 1):
        yield f"trust.max_weight_share is {trust.max_weight_share:g}, which {alone}: set it to 1"
    if trust.outlier_factor not in (default.outlier_factor, 0):
        yield f"trust.outlier_factor is {trust.outlier_factor:g}, which {alone}: set it to 0"
    if config.run.keep_updates:
        yield f"run.keep_updates {alone}: set it to false"


def _async_checks(section: RoundSection) -> Iterator[str]:
    if not section.take:
        yield (
            "round.mode is 'async' and round.take is 0: give the number of updates that make a "
            "new state, for example the number of clients that are about equally fast"
        )
    if section.clients_per_round:
        yield (
            "round.clients_per_round does nothing while round.mode is 'async', which keeps all "
            "clients at work: set it to 0"
        )


_BARE = re.compile(r"[A-Za-z0-9_-]+")  # keys that TOML takes without quotes


def to_toml(config: Config, *, comments: bool = False) -> str:
    """Write a configuration as TOML; with ``comments`` each key carries its meaning."""
    lines: list[str] = []
    for section, field in Config.model_fields.items():
        model = getattr(config, section)
        keyless = comments and not type(model).model_fields  # no key describes such a section
        lines.append(f"[{section}]{f'  # {type(model).__doc__}' if keyless else ''}")
        for key, value in _items(model, field.annotation):
            note = _description(field.annotation, key) if comments else ""
            name = key if _BARE.fullmatch(key) else _toml(key)
            lines.append(f"{name} = {_toml(value)}{f'  # {note}' if note else ''}")
        lines.append("")
    return "\n".join(lines)


def _items(model: BaseModel, _type: Any) -> Iterator[tuple[str, Any]]:
    for key in type(model).model_fields:
        yield key, getattr(model, key)
    yield from (model.model_extra or {}).items()


def _description(model: Any, key: str) -> str:
    field = model.model_fields.get(key)
    return (field.description or "") if field else ""


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        printable = "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped)
        return f'"{printable}"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, dict):
        inner = ", ".join(f"{_toml(str(k))} = {_toml(v)}" for k, v in value.items())
        return "{ " + inner + " }"
    raise ConfigError(f"cannot write {type(value).__name__} as TOML.")
