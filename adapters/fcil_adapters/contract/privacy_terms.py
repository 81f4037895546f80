"""Check of the privacy terms that a method can keep, and of the tensors left unprotected."""

from __future__ import annotations

from collections.abc import Iterator

from fcil_adapters.contract.backbone_info import BackboneInfo
from fcil_adapters.contract.context import Hparams, TaskInfo
from fcil_adapters.contract.manifest import Method
from fcil_protocol.errors import ConfigError
from fcil_protocol.messages.messages import PrivacyTerms
from fcil_protocol.payloads.schema import Kind

_USUAL, _SINGLE = TaskInfo(0, (0, 1)), TaskInfo(0, (0,))


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
