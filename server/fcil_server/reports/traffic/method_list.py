"""The installed methods as plain data: for ``fcil-server methods`` and the HTTP API."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fcil_adapters.backbones.known import backbone_by_name
from fcil_adapters.contract import Hparams, Method, manifest_checks, registry
from fcil_adapters.contract.half_precision import forms_of
from fcil_adapters.contract.source_code import blaming
from fcil_adapters.masks.exchanges import kinds_without_sums
from fcil_protocol.errors import ConfigError, UsageError
from fcil_server.federation.config import Config, load
from fcil_server.federation.environment import environment_settings
from fcil_server.federation.sections import MethodSection
from fcil_server.reports.traffic.broadcast_parts import TrafficSetting
from fcil_server.reports.traffic.budget import applied, choose
from fcil_server.reports.traffic.prediction import Traffic, predict


def describe_methods(
    name: str | None,
    *,
    directory: Path | None = None,
    overrides: Sequence[str] = (),
    backbone: str | None = None,
    classes: int = 10,
    past: int = 0,
    clients: int = 10,
    budget: int | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Describe one method, or all of them that can be imported.

    Args:
        name: None: all.
        directory: a federation whose method options, backbone and rounds are the defaults.
        overrides: ``section.key=value``; ``method.`` options need a name.
        backbone: ``embedded`` or a timm name; None: the configured one.
        classes: per task.
        past: classes of earlier tasks.
        clients: that answer each round.
        budget: bytes that one client may cost in one round; what it would choose is shown, for
            the task that is described.
        notify: receives a sentence about each method that cannot be imported.

    Raises:
        ConfigError: an unknown method, option, preset or backbone.
        UsageError: options without a name.
        StorageError: the directory holds no federation.
    """
    if name is None and any(text.strip().startswith("method.") for text in overrides):
        raise UsageError(
            "options were given, but no method.",
            action="For example: fcil-server methods pilora -c method.rank=8",
        )
    config = (
        load(_config_file(directory), (*environment_settings(), *overrides))
        if directory
        else load(None, overrides)
    )
    setting = TrafficSetting(
        backbone=backbone_by_name(backbone or config.run.backbone),
        classes=classes,
        past=past,
        clients=clients,
        rounds=config.round.rounds_per_task,
        evaluate=config.run.evaluate,
    )
    rows = []
    for found in _methods(name, setting, notify):
        own = _config_for(found, config, overrides, named=name is not None)
        choice = None
        with blaming(found):  # options may lead to other lines than the defaults
            if budget is not None:
                given = f"a task of {classes} classes after {past}, {clients} clients in a round"
                choice = choose(found, own, [setting], given, budget)
                own = applied(own, choice.options)
            method = registry.with_forms(found, forms_of(own.wire.half, found.name, found.half))
            hparams = registry.make_hparams(method, own.method.options)
            row = describe_method(method, hparams, setting)
        row["budget"] = None if choice is None else {**choice.fields(), "fits": choice.fits}
        rows.append(row)
    return rows


def _methods(
    name: str | None, setting: TrafficSetting, notify: Callable[[str], None]
) -> Iterator[Method]:
    """Yield one method, or all of them that are in order, with their manifests checked."""
    for one in [name] if name else registry.method_names():
        try:
            method = registry.load_method(one)
            manifest_checks.check_manifest(method, setting.backbone)
        except ConfigError as error:
            if name:
                raise
            # Another's package, or one that is being written.
            notify(f"{error.message} {error.action}")
        else:
            yield method


def describe_method(method: Method, hparams: Hparams, setting: TrafficSetting) -> dict[str, Any]:
    """Return a method's manifest, its options and its traffic as plain data."""
    return {
        "name": method.name,
        "version": method.version,
        "title": method.title,
        "citation": method.citation,
        "presets": {name: dict(_dotted(preset)) for name, preset in method.presets.items()},
        "options": dict(_options(method.hparams(), hparams)),
        "setting": {
            "backbone": setting.backbone.name if method.needs_backbone else None,
            "dim": setting.backbone.dim if method.needs_backbone else None,
            "classes": setting.classes,
            "past": setting.past,
            "clients": setting.clients,
            "rounds": setting.rounds,
        },
        "masks": not kinds_without_sums(method, hparams, setting.backbone),
        "traffic": _traffic_fields(predict(method, hparams, setting)),
    }


def _dotted(options: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{before}{name}.")
        else:
            yield before + name, _plain(value)


def _options(
    defaults: Hparams, values: Hparams, before: str = ""
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every option by its dotted name: default, value here, meaning."""
    for name, field in type(values).model_fields.items():
        default, value = getattr(defaults, name), getattr(values, name)
        if isinstance(value, Hparams):
            yield from _options(default, value, f"{before}{name}.")
        else:
            meaning = field.description or ""
            fields = {"default": _plain(default), "value": _plain(value), "help": meaning}
            yield before + name, fields


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _traffic_fields(traffic: Traffic) -> dict[str, Any]:
    return {
        "up": [
            {"exchange": up.exchange, "rounds": up.rounds, **up.size.fields()} for up in traffic.up
        ],
        "down": [
            {
                "part": down.part,
                "cadence": down.cadence.value,
                "every": down.every,
                **down.each.fields(),
                "task_bytes": down.task.bytes,
                "missed_bytes": down.missed.bytes,
            }
            for down in traffic.down
        ],
        "round": {"up": traffic.round[0].fields(), "down": traffic.round[1].fields()},
        "task": {"up": traffic.task[0].fields(), "down": traffic.task[1].fields()},
        "missed": traffic.missed.fields(),
    }


def _config_for(method: Method, config: Config, overrides: Sequence[str], *, named: bool) -> Config:
    """Return a configuration for a method: of a list of kinds in half, those that it offers."""
    own = MethodSection(name=method.name, **_configured(method.name, config, overrides))
    half = config.wire.half
    if not named and isinstance(half, list):
        half = [kind for kind in half if kind in method.half]
    wire = config.wire.model_copy(update={"half": half})
    return config.model_copy(update={"method": own, "wire": wire})


def _config_file(directory: Path) -> Path:
    # Federations bring the ledger and the ciphers, which the list itself does without.
    from fcil_server.federation.directory import CONFIG, find_directory

    return find_directory(directory) / CONFIG


def _configured(name: str, config: Config, overrides: Sequence[str]) -> dict[str, Any]:
    """Return a method's options: the configured ones only if they are that method's."""
    if config.method.name == name:
        return config.method.options
    return load(None, overrides).method.options
