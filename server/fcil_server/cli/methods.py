"""Input of ``fcil-server methods``: methods, options, backbone, setting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fcil_adapters.backbones.known import backbone_by_name
from fcil_adapters.contract import Method, registry
from fcil_adapters.contract.half_precision import forms_of
from fcil_protocol.errors import UsageError
from fcil_server.cli.show_methods import describe_method
from fcil_server.federation.config import Config, load
from fcil_server.federation.environment import environment_settings
from fcil_server.federation.sections import MethodSection
from fcil_server.reports.traffic.broadcast_parts import TrafficSetting
from fcil_server.reports.traffic.budget import applied, choose


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
) -> list[dict[str, Any]]:
    """Describe one method, or all of them.

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
    for one in [name] if name else registry.method_names():
        method = registry.load_method(one)
        own = _config_for(method, config, overrides, named=name is not None)
        choice = None
        if budget is not None:
            given = f"a task of {classes} classes after {past}, {clients} clients in a round"
            choice = choose(method, own, [setting], given, budget)
            own = applied(own, choice.options)
        method = registry.with_forms(method, forms_of(own.wire.half, method.name, method.half))
        row = describe_method(method, registry.make_hparams(method, own.method.options), setting)
        row["budget"] = None if choice is None else {**choice.fields(), "fits": choice.fits}
        rows.append(row)
    return rows


def _config_for(method: Method, config: Config, overrides: Sequence[str], *, named: bool) -> Config:
    """Return a configuration for a method: of a list of kinds in half, those that it offers."""
    own = MethodSection(name=method.name, **_options(method.name, config, overrides))
    half = config.wire.half
    if not named and isinstance(half, list):
        half = [kind for kind in half if kind in method.half]
    wire = config.wire.model_copy(update={"half": half})
    return config.model_copy(update={"method": own, "wire": wire})


def _config_file(directory: Path) -> Path:
    # Federations bring the ledger and the ciphers, which the list itself does without.
    from fcil_server.federation.directory import CONFIG, find_directory

    return find_directory(directory) / CONFIG


def _options(name: str, config: Config, overrides: Sequence[str]) -> dict[str, Any]:
    """Return a method's options: the configured ones only if they are that method's."""
    if config.method.name == name:
        return config.method.options
    return load(None, overrides).method.options
