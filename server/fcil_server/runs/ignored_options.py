"""Warnings about settings that have no effect on a run."""

from __future__ import annotations

from collections.abc import Callable

from fcil_adapters.contract import Hparams, Method
from fcil_server.federation.config import Config
from fcil_server.federation.sections import TrustSection


def tell_ignored(
    notify: Callable[[str, str, str], None], method: Method, hparams: Hparams, config: Config
) -> None:
    """Warn of a cap on weights or of `keep_updates` if the method ignores it.

    The default cap counts as not set, for a federation's file has every key; and 1 caps nothing.
    """
    trust = config.trust
    share, default = trust.max_weight_share, TrustSection().max_weight_share
    reason = method.uncapped(hparams)
    if reason and share not in (default, 1):
        notify("warning", "ignored", f"[trust] max_weight_share = {share} has no effect: {reason}")
    reason = method.forgets(hparams)
    if reason and config.run.keep_updates:
        text = f"[run] keep_updates has no effect: {method.name} cannot forget a client exactly"
        notify("warning", "ignored", f"{text}, for {reason}")
