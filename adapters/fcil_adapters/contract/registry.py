"""Find methods by name, built-in and third-party alike, through entry points.

And what a run makes of one: its options, its schemas and their digest.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fcil_adapters.contract.backbone_info import BackboneInfo
from fcil_adapters.contract.context import Hparams, TaskInfo
from fcil_adapters.contract.half_precision import Forms
from fcil_adapters.contract.halves import Part
from fcil_adapters.contract.manifest import Exchange, Method
from fcil_adapters.contract.source_code import blaming
from fcil_protocol.errors import ConfigError, MethodMismatch
from fcil_protocol.messages.messages import NO_PRIVACY, PrivacyTerms
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.payloads.schema import PayloadSchema

GROUP = "fcil.methods"
_TORCH = ("torch", "timm", "torchvision")


def installed() -> EntryPoints:
    """Return the entry points of all installed methods.

    It reads every installed package; again only when one has come or gone since.
    """
    return _doors(entry_points, tuple(_stamp(place) for place in sys.path))


@lru_cache(maxsize=1)
def _doors(look: Callable[..., EntryPoints], _places: tuple[tuple[str, int], ...]) -> EntryPoints:
    return look(group=GROUP)


def _stamp(place: str) -> tuple[str, int]:
    """Return a folder of packages with the time of its last change."""
    try:
        return place, Path(place).stat().st_mtime_ns
    except OSError:
        return place, 0


def method_names() -> list[str]:
    """Return the names of all installed methods, sorted."""
    return sorted({e.name for e in installed()})


def load_method(name: str, doors: EntryPoints | None = None) -> Method:
    """Load a manifest (no torch).

    Args:
        name: of the method.
        doors: result of `installed`, to load several methods.

    Raises:
        ConfigError: no installed package offers the name, or two do, or its entry point leads to no
            manifest.
    """
    entries = _entries(name, doors)
    if len({e.value for e in entries}) > 1:
        packages = " and ".join(sorted(_package(e) for e in entries))
        raise ConfigError(
            f"{packages} both offer a method {name[:80]!r}.", action="Uninstall one of them."
        )
    if entries:
        return _load(entries[0])
    known = method_names()
    near = difflib.get_close_matches(name, known, 1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known are: {', '.join(known)}."
    raise ConfigError(f"no installed package offers the method {name[:80]!r}.", action=hint)


def package_of(name: str) -> str:
    """Return the installed package that brings a method, and its version; "" if unknown."""
    entries = _entries(name)
    return _package(entries[0]) if entries else ""


def module_of(name: str) -> str:
    """Return the module with a method's manifest; "" if no package offers it."""
    entries = _entries(name)
    return entries[0].value.partition(":")[0] if entries else ""


def _entries(name: str, doors: EntryPoints | None = None) -> list[EntryPoint]:
    return [e for e in (installed() if doors is None else doors) if e.name == name]


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else ""


def _load(entry: EntryPoint) -> Method:
    try:
        manifest = entry.load()
    except Exception as error:  # a third-party module may raise anything on import
        place, action = _place_of(error), "Install its package again."
        if place:
            action = f"Correct {place} if the method is yours; else install its package again."
        elif isinstance(error, AttributeError):  # the module is there, its manifest is not
            action = (
                f"Name the manifest {entry.attr} in {entry.module}, or correct the entry point in "
                "the package's pyproject.toml and install it again."
            )
        raise ConfigError(
            f"the method {entry.name!r} ({entry.value}) cannot be imported: "
            f"{type(error).__name__}: {error}.",
            action=action,
        ) from error
    if not isinstance(manifest, Method) or manifest.name != entry.name:
        found = type(manifest).__name__
        if isinstance(manifest, Method):
            found = f"the manifest of {manifest.name!r}"
        raise ConfigError(
            f"the entry point {entry.name!r} leads to {entry.value}, which is not its manifest: "
            f"found {found}.",
            action="It must be a fcil_adapters.contract.Method of the same name.",
        )
    return manifest


def _place_of(error: Exception) -> str:
    """Return the file and line at which a module's import failed; empty if there is no module."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    importing = ("<", __file__, str(Path(importlib.__file__).parent))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(importing)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def load_half(path: str) -> Any:
    """Instantiate a learner, aggregator or model given as ``package.module:Class``.

    Raises:
        ConfigError: it needs torch, and torch is not installed.
    """
    return load_object(path)()


def load_object(path: str) -> Any:
    """Return a class or function that a manifest names as ``package.module:name``.

    Raises:
        ConfigError: it needs torch, and torch is not installed, or the module has no such name.
    """
    module, _, name = path.partition(":")
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _TORCH:
            raise
        raise ConfigError(
            f"{module} needs {missing}, which is not installed here.",
            action="Install it: pip install 'fcil[client]'",
        ) from error
    try:
        return getattr(loaded, name)
    except AttributeError as error:
        raise ConfigError(
            f"a manifest names {path}, but the module has no {name!r}.",
            action=f"Correct the manifest, or define it in {loaded.__file__}.",
        ) from error


def make_hparams(method: Method, options: dict[str, Any]) -> Hparams:
    """Build hyper-parameters from defaults, a preset and single options, in this order.

    Raises:
        ConfigError: names every unknown or wrong option at once, or the line of the method's own
            package that fails with them.
    """
    options = dict(options)
    preset = options.pop("preset", None)
    known_one = isinstance(preset, str) and preset in method.presets
    if preset is not None and not known_one:
        known = ", ".join(sorted(method.presets)) or "none"
        raise ConfigError(f"method {method.name} has no preset {preset!r}; it has: {known}.")
    merged = _merge(method.presets[preset] if preset else {}, options)
    try:
        with blaming(method):
            return method.hparams.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(
            "; ".join(option_fault(method, e) for e in error.errors()) + "."
        ) from error


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Lay options over a preset; nested sections are merged key by key."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        nested = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = _merge(old, value) if nested else value  # type: ignore[arg-type]
    return merged


def option_fault(method: Method, error: Any) -> str:
    """Return pydantic's finding about an option as a sentence."""
    key = ".".join(str(x) for x in error["loc"])
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, method.hparams.model_fields, 1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        return f"method {method.name} has no option {key!r}{hint}"
    text = error["msg"].removeprefix("Value error, ")
    if not key:  # several options together
        return f"method {method.name}: {text}"
    return f"option {key!r} of method {method.name}: {text}, got {error['input']!r}"


def schema_digest(
    method: Method,
    hparams: Hparams,
    backbone: BackboneInfo,
    privacy: PrivacyTerms = NO_PRIVACY,
) -> str:
    """Return the SHA-256 that both sides of a federation must agree on (hex).

    It covers the method's name and version, its hyper-parameters and all its schemas, and privacy
    terms if there are any: a client that does not know them cannot take part then.
    """
    terms = privacy.model_dump(mode="json")
    if not privacy.masks:  # so that runs from before there were masks keep their digest
        terms = {key: value for key, value in terms.items() if not key.startswith("secure")}
    if not privacy.relay_sums:  # the same for relays that add up updates
        del terms["relay_sums"]
    extra = {} if privacy == NO_PRIVACY else {"privacy": terms}
    text = json.dumps(
        {
            **extra,
            "name": method.name,
            "version": method.version,
            "hparams": hparams.model_dump(mode="json"),
            "exchanges": [
                [e.kind, e.rounds, e.keeps_state, e.upload.digest(), *_special(e)]
                for e in method.exchanges(hparams, backbone)
            ],
            "broadcast": {
                kind: schema.digest()
                for kind, schema in method.broadcast(hparams, backbone).items()
            },
        },
        sort_keys=True,
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _special(exchange: Exchange) -> list[str]:
    """Return the names of an exchange's flags that are set, of those that few methods use."""
    flags = ("first_task", "trains", "unlabelled", "counts_once")
    return [name for name in flags if getattr(exchange, name)]


def with_forms(method: Method, forms: Forms) -> Method:
    """Return a method whose schemas give the forms of its tensors in a run.

    Code that checks, predicts or shows traffic works with this one; the halves do not notice,
    because workers narrow and widen.
    """
    if not forms.half:
        return method

    def exchanges(hparams: Any, backbone: BackboneInfo) -> tuple[Exchange, ...]:
        return tuple(_in_forms(e, forms) for e in method.exchanges(hparams, backbone))

    def broadcast(hparams: Any, backbone: BackboneInfo) -> dict[str, PayloadSchema]:
        parts = method.broadcast(hparams, backbone)
        return {kind: forms.schema(schema) for kind, schema in parts.items()}

    return replace(method, exchanges=exchanges, broadcast=broadcast, forms=forms)


def _in_forms(exchange: Exchange, forms: Forms) -> Exchange:
    def check(payload: Payload, task: TaskInfo) -> list[str]:
        return exchange.check(forms.widen(payload), task)

    return replace(exchange, upload=forms.schema(exchange.upload), check=check)


def part_faults(
    method: Method, hparams: Hparams, backbone: BackboneInfo, task: TaskInfo, part: Part
) -> list[str]:
    """Return every way in which a part breaks the broadcast schema of its kind."""
    schema = method.broadcast(hparams, backbone).get(part.kind)
    if schema is None:
        return [f"method {method.name} has no broadcast part {part.name!r}"]
    faults = schema.check(part.payload, method.dims(hparams, backbone, task))
    return [f"part {part.name!r}: {fault}" for fault in faults]


def find_exchange(method: Method, hparams: Hparams, backbone: BackboneInfo, kind: str) -> Exchange:
    """Return the method's exchange of one kind.

    Raises:
        MethodMismatch: the method has no such exchange with these hyper-parameters.
    """
    for exchange in method.exchanges(hparams, backbone):
        if exchange.kind == kind:
            return exchange
    raise MethodMismatch(f"method {method.name} has no exchange {kind!r}.")
