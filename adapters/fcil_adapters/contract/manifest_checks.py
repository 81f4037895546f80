"""Checks of a manifest: of its mistakes, and of what a run asks of its method (torch-free).

The run asks for a rule of averaging, rounds that are asynchronous, uploads that may leave a client,
and privacy terms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from numbers import Integral
from typing import Any

from pydantic import ValidationError

from fcil_adapters.contract.backbone_info import BackboneInfo
from fcil_adapters.contract.context import Hparams, TaskInfo
from fcil_adapters.contract.manifest import EXCHANGE_KINDS, Exchange, Method
from fcil_adapters.contract.registry import option_fault
from fcil_adapters.contract.source_code import blaming, own_function, path_fault
from fcil_protocol.errors import ConfigError, EgressRefused, FcilError
from fcil_protocol.messages.messages import PrivacyTerms
from fcil_protocol.payloads.schema import Kind, PayloadSchema, TensorSpec
from fcil_protocol.payloads.upload_rules import declaration_faults, schema_faults

_USUAL, _SINGLE = TaskInfo(0, (0, 1)), TaskInfo(0, (0,))


def check_manifest(method: Method, backbone: BackboneInfo, hparams: Hparams | None = None) -> None:
    """Check that a manifest gives what its types say, in the first two tasks.

    An author's mistake is found here, with its place, before the code that it would make fail.

    Args:
        method: as it was loaded (`with_forms` calls its functions).
        backbone: of the run.
        hparams: its options; None: the defaults.

    Raises:
        ConfigError: names every fault.
    """
    faults: list[str] = []
    with blaming(method):
        if hparams is None and (wrong := _default_faults(method)):
            raise _wrong(method, wrong)
        options = method.hparams() if hparams is None else hparams
        # Options that do not fit the backbone are no mistake of a manifest: the next call says so.
        with suppress(FcilError):
            faults += _declared_faults(method, options, backbone)
    for half in ("learner", "aggregator", "model"):
        fault = path_fault(getattr(method, half))
        faults += [f"{half}: {fault}"] if fault else []
    if faults:
        raise _wrong(method, faults)


def _declared_faults(method: Method, options: Any, backbone: BackboneInfo) -> list[str]:
    faults = [
        *_placed(method, "exchanges", _exchange_faults(method.exchanges(options, backbone))),
        *_placed(method, "broadcast", _broadcast_faults(method.broadcast(options, backbone))),
    ]
    for task in (TaskInfo(0, (0,)), TaskInfo(1, (1,), (0,))):
        dims = method.dims(options, backbone, task)
        faults += _placed(method, "dims", _dims_faults(dims))
    return faults


def _wrong(method: Method, faults: list[str]) -> ConfigError:
    return ConfigError(
        f"the manifest of the method {method.name!r} is wrong: {'; '.join(dict.fromkeys(faults))}.",
        action="Correct it if the method is yours; else install its package again.",
    )


def _placed(method: Method, part: str, faults: list[str]) -> list[str]:
    place = own_function(method, getattr(method, part))
    return [f"{part}{f' ({place})' if place else ''}: {fault}" for fault in faults]


def _default_faults(method: Method) -> list[str]:
    """Return the defaults that break the options' own bounds; pydantic checks given values only."""
    try:
        method.hparams.model_validate(method.hparams().model_dump())
    except ValidationError as error:
        return [f"its default: {option_fault(method, e)}" for e in error.errors()]
    return []


def _exchange_faults(exchanges: object) -> list[str]:
    if not isinstance(exchanges, tuple | list) or not all(
        isinstance(e, Exchange) for e in exchanges
    ):
        return [f"expected a tuple of Exchange, got {_shown(exchanges)}"]
    faults = []
    for exchange in exchanges:
        found = _schema_faults(exchange.upload)
        if exchange.kind not in EXCHANGE_KINDS:
            found.append(f"its kind is none of {', '.join(EXCHANGE_KINDS)}")
        if not any(_counts_samples(spec) for spec in exchange.upload.tensors):
            found.append("its upload lacks the samples used, count_spec('n', 1)")
        faults += [f"{exchange.kind!r}: {fault}" for fault in found]
    return faults


def _counts_samples(spec: TensorSpec) -> bool:
    return (spec.name, spec.dtype, spec.shape, spec.optional) == ("n", "I64", (1,), False)


def _broadcast_faults(schemas: object) -> list[str]:
    if not isinstance(schemas, Mapping):
        return [f"expected a mapping of PayloadSchema, got {_shown(schemas)}"]
    return [f"{kind!r}: {f}" for kind, schema in schemas.items() for f in _schema_faults(schema)]


def _schema_faults(schema: object) -> list[str]:
    if not isinstance(schema, PayloadSchema):
        return [f"expected a PayloadSchema, got {_shown(schema)}"]
    faults = declaration_faults(schema)
    return faults or [
        f"tensor {spec.name!r} has its kind as text, expected Kind.{Kind(spec.kind).name}"
        for spec in schema.tensors
        if not isinstance(spec.kind, Kind)
    ]


def _dims_faults(dims: object) -> list[str]:
    if not isinstance(dims, Mapping) or not all(isinstance(n, Integral) for n in dims.values()):
        return [f"expected a dict of whole numbers, got {_shown(dims)}"]
    return []


def _shown(value: object) -> str:
    """Return a value's type, with those of its elements."""
    name = type(value).__name__
    if not isinstance(value, Mapping | tuple | list):
        return name
    elements = value.values() if isinstance(value, Mapping) else value
    return f"{name} of {', '.join(sorted({type(e).__name__ for e in elements})) or 'nothing'}"


def check_averaging(method: Method, hparams: Hparams, rule: str) -> None:
    """Check that a method can work with a rule of averaging.

    Raises:
        ConfigError: it cannot; the message names the rules that it can work with.
    """
    offered = method.averagings(hparams)
    if rule not in offered:
        raise ConfigError(
            f"trust.averaging is {rule!r}, but the method {method.name} with these options works "
            f"only with: {', '.join(offered)}.",
            action=f"Set trust.averaging to {offered[0]!r}, or choose another method or options.",
        )


def check_asynchronous(method: Method, hparams: Hparams, backbone: BackboneInfo) -> None:
    """Check that a method has rounds that can be asynchronous.

    Raises:
        ConfigError: it has none.
    """
    if not any(e.averaged for e in method.exchanges(hparams, backbone)):
        raise ConfigError(
            f"round.mode is 'async', but the server of the method {method.name} with these options "
            "does more with updates than average them, so all must start from the same state.",
            action="Set round.mode to 'sync', or choose a method that averages alone "
            "(docs/asynchronous-rounds.md lists them).",
        )


def check_uploads(method: Method, hparams: Hparams, backbone: BackboneInfo) -> None:
    """Check that a method declares nothing in its uploads that may not leave a client.

    Raises:
        EgressRefused: names every such tensor and field.
    """
    first = TaskInfo(0, (0,))  # the known symbols are the same in every task
    known = method.dims(hparams, backbone, first)
    faults = [
        f"{exchange.kind}: {fault}"
        for exchange in method.exchanges(hparams, backbone)
        for fault in schema_faults(exchange.upload, known)
    ]
    if faults:
        raise EgressRefused(
            f"method {method.name!r} declares data that may not leave a client: "
            f"{'; '.join(faults[:10])}.",
            action="Report it to the method's author: nothing is sent with it.",
        )


def unprotected(method: Method, hparams: Hparams, backbone: BackboneInfo) -> tuple[str, ...]:
    """Return the kinds of tensors that a method sends and noise does not cover, sorted.

    Counts are left out: clients send them exactly (docs/privacy.md).

    Raises:
        ConfigError: the method's options exclude noise.
    """
    return tuple(sorted(set(_unprotected(method, hparams, backbone))))


def _unprotected(method: Method, hparams: Hparams, backbone: BackboneInfo) -> Iterator[str]:
    for exchange in method.exchanges(hparams, backbone):
        covered, sometimes = (
            {n for s in method.statistics(hparams, exchange.kind, task) for n in s.tensors}
            for task in (_USUAL, _SINGLE)
        )
        for spec in exchange.upload.tensors:
            known = spec.name in covered or (spec.optional and spec.name in sometimes)
            if not known and spec.kind is not Kind.COUNT:
                yield str(spec.kind)


def check_privacy(
    method: Method, hparams: Hparams, backbone: BackboneInfo, terms: PrivacyTerms
) -> None:
    """Check that a method can keep the terms.

    Raises:
        ConfigError: with noise, it would send tensors that noise does not cover, and the terms do
            not allow it; or its options exclude noise.
    """
    if terms.noise_multiplier == 0:
        return
    open_kinds = unprotected(method, hparams, backbone)
    if open_kinds and not terms.partial:
        raise ConfigError(
            f"privacy.noise_multiplier is {terms.noise_multiplier:g}, but the method {method.name} "
            f"also sends trained tensors, which noise does not cover: {', '.join(open_kinds)}.",
            action="Choose a method that sends statistics only, such as running_mean, or set "
            "privacy.partial to true if noise on the statistics alone is enough.",
        )
