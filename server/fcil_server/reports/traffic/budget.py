"""Choice of a run's options to fit a budget: bytes per client and round, up and down together.

Bytes are wire bytes as the ledger predicts them: an update with its seal and messages, the parts
that an earlier client fetches, and control. A method offers economies
(`fcil_adapters.contract.traffic`); the first of them that make the largest round fit are adopted
when a run begins, and stay with it. A newcomer's catch-up is not part of a round.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fcil_adapters.contract import BackboneInfo, Hparams, Method, registry
from fcil_adapters.contract.half_precision import WEIGHTS, forms_of
from fcil_adapters.contract.manifest_checks import check_averaging, check_privacy
from fcil_adapters.contract.traffic import Economy
from fcil_protocol.envelopes.header import chunk_bytes_for, sealed_size
from fcil_protocol.envelopes.window import MAX_SPAN_BYTES
from fcil_protocol.errors import ConfigError
from fcil_protocol.formats import format_bytes
from fcil_server.federation.config import Config
from fcil_server.federation.sections import MethodSection
from fcil_server.ledger.enums import Cause, CountSource
from fcil_server.ledger.rows import ByteCount
from fcil_server.reports.traffic.broadcast_parts import TrafficSetting
from fcil_server.reports.traffic.prediction import RoundTraffic, task_rounds
from fcil_server.reports.traffic.sizes import Size

# TCP payload besides tensors, fitted to docs/benchmarks/wire-bytes.md, "What the wire adds to
# tensors"; messages with MACs: to the counts of the run in tests/system/test_budget.py.
ENVELOPE_BYTES = 1_760  # wrapped key, header without hashes, signatures, the message around them
HASH_BYTES = 34  # per chunk, in the header
MESSAGE_BYTES = 235  # per message with chunks
WANT_BYTES = 190  # per requested part
CONTROL_BYTES, PART_REF_BYTES = 750, 110  # per round; per named part
DIGEST_BYTES = 32  # of each of these that names an envelope, less in a compact run
CLASS_BYTES = 10  # per class, in `round_open` and in the registry
JOINING_BYTES = 9_000  # greeting and list of classes; no part of a round, but counted alike

ASSUMED_TASKS, ASSUMED_CLASSES = 10, 10
COUNTED = (Cause.UPDATE, Cause.BROADCAST, Cause.CONTROL)  # catching up and joining are not


@dataclass(frozen=True)
class Cost:
    """Wire bytes of one client in the largest round, and that round."""

    up: int
    down: int
    task: int
    kind: str
    round: int

    @property
    def bytes(self) -> int:
        """Both directions together."""
        return self.up + self.down


@dataclass(frozen=True)
class BudgetChoice:
    """Result of fitting a run to a budget.

    Attributes:
        limit: the budget in bytes.
        taken: economies in the order of their adoption.
        kept: options that the operator set and economies would have changed.
        cost: of the largest round with them.
        basis: the assumptions.
    """

    limit: int
    taken: tuple[Economy, ...]
    kept: tuple[str, ...]
    cost: Cost
    basis: str

    @property
    def fits(self) -> bool:
        """True if the largest round is within the budget."""
        return self.cost.bytes <= self.limit

    @property
    def options(self) -> dict[str, Any]:
        """The chosen method options."""
        return {k: v for economy in self.taken for k, v in economy.options.items()}

    def text(self) -> str:
        """Return the result in one line."""
        cost = self.cost
        does = ", ".join(f"{e.what} (gives up {e.gives_up})" for e in self.taken)
        kept = f"; kept as set: {', '.join(self.kept)}" if self.kept else ""
        return (
            f"budget {format_bytes(self.limit)} a round: {does or 'nothing is given up'}{kept}; "
            f"{format_bytes(cost.up)} up + {format_bytes(cost.down)} down expected in the largest "
            f"round (task {cost.task}, {cost.kind}), {self.basis}"
        )

    def fields(self) -> dict[str, Any]:
        """Return plain data for the run's record."""
        return {
            "bytes": self.limit,
            "options": self.options,
            "up": self.cost.up,
            "down": self.cost.down,
            "text": self.text(),
        }


def choose(
    method: Method, config: Config, settings: Sequence[TrafficSetting], basis: str, limit: int
) -> BudgetChoice:
    """Adopt economies until the largest round of some tasks fits, or there are none left.

    Options that the operator set stay; economies that would not make the round cheaper are skipped.

    Args:
        method: as its manifest is.
        config: with the operator's own options.
        settings: the tasks.
        basis: their description, in words.
        limit: bytes of one client in one round.

    Raises:
        ConfigError: the method's options are wrong.
    """
    taken: tuple[Economy, ...] = ()
    cost = _cost(method, config, settings)
    kept = ["wire.half"] if cost.bytes > limit and config.wire.half != WEIGHTS else []
    for economy in method.economies:
        if cost.bytes <= limit:
            break
        own = [name for name in economy.options if name in config.method.options]
        if own:
            kept += [name for name in own if name not in kept]
            continue
        tried = _tried(method, config, settings, (*taken, economy))
        if tried is not None and tried.bytes < cost.bytes:
            taken, cost = (*taken, economy), tried
    return BudgetChoice(limit, taken, tuple(kept), cost, basis)


def fitted(method: Method, config: Config, info: BackboneInfo) -> BudgetChoice:
    """Choose for a run's future tasks, and require that its ``[wire] budget_mb`` fits.

    Raises:
        ConfigError: no choice of the method fits; the message names a budget that would.
    """
    settings, basis = known_settings(config, info)
    choice = choose(method, config, settings, basis, round(config.wire.budget_mb * 1e6))
    if choice.fits:
        return choice
    gave = f" with {', '.join(e.what for e in choice.taken)}" if choice.taken else ""
    kept = f" and without your own settings ({', '.join(choice.kept)})" if choice.kept else ""
    raise ConfigError(
        f"a budget of {format_bytes(choice.limit)} a round is too small for {method.name}: its "
        f"largest round takes at least {format_bytes(choice.cost.bytes)}{gave}, {choice.basis}.",
        action=f"Set a budget of {math.ceil(choice.cost.bytes / 1e4) / 100} MB or more{kept}, "
        "make tasks smaller, or choose another method (fcil-server methods --budget SIZE).",
    )


def applied(config: Config, options: Mapping[str, Any]) -> Config:
    """Return the configuration with a budget's chosen options."""
    own = config.method
    method = MethodSection(name=own.name, **{**own.options, **options})
    return config.model_copy(update={"method": method})


def over_budget(counts: Sequence[ByteCount], limit: int) -> tuple[str, int] | None:
    """Return the client with the highest cost of a round, and its bytes, if above the budget.

    The ledger does not separate a round's control bytes from those of joining in it, which are
    allowed.
    """
    spent: dict[str, int] = {}
    for count in counts:
        if count.client and count.cause in COUNTED and count.source is CountSource.PREDICTED:
            spent[count.client] = spent.get(count.client, 0) + count.wire
    worst = max(spent, key=lambda client: spent[client], default=None)
    if worst is None or spent[worst] <= limit + JOINING_BYTES:
        return None
    return worst, spent[worst]


def known_settings(config: Config, info: BackboneInfo) -> tuple[list[TrafficSetting], str]:
    """Return one setting per task, and the assumptions in words."""
    rounds = config.round
    clients = rounds.take or rounds.clients_per_round or rounds.min_clients
    sizes = [len(names) for names in config.tasks.classes]
    basis = f"with {len(sizes)} listed tasks"
    if not sizes:
        sizes = [ASSUMED_CLASSES] * ASSUMED_TASKS
        basis = f"assuming {ASSUMED_TASKS} tasks of {ASSUMED_CLASSES} classes"
    who = "" if rounds.take or rounds.clients_per_round else " (round.min_clients)"
    made = [
        TrafficSetting(
            backbone=info,
            classes=size,
            past=sum(sizes[:task]),
            clients=clients,
            rounds=rounds.rounds_per_task,
            evaluate=config.run.evaluate,
            earlier=tuple(sizes[:task]),
        )
        for task, size in enumerate(sizes)
    ]
    return made, f"{basis} and {clients} clients{who} in a round"


def _tried(
    method: Method,
    config: Config,
    settings: Sequence[TrafficSetting],
    economies: tuple[Economy, ...],
) -> Cost | None:
    """Return the cost with some economies; None if they contradict the configuration."""
    options = {k: v for economy in economies for k, v in economy.options.items()}
    try:
        return _cost(method, applied(config, options), settings)
    except ConfigError:
        return None


def _cost(method: Method, config: Config, settings: Sequence[TrafficSetting]) -> Cost:
    """Return the cost of the largest round of all tasks."""
    hparams = registry.make_hparams(method, config.method.options)
    check_averaging(method, hparams, config.trust.averaging)
    check_privacy(method, hparams, settings[0].backbone, config.privacy.terms)
    formed = registry.with_forms(method, forms_of(config.wire.half, method.name, method.half))
    compact = config.wire.compact
    costs = (cost for setting in settings for cost in _costs(formed, hparams, setting, compact))
    return max(costs, key=lambda cost: cost.bytes)


def _costs(
    method: Method, hparams: Hparams, setting: TrafficSetting, compact: bool
) -> Iterator[Cost]:
    less = DIGEST_BYTES if compact else 0
    task = setting.tasks[-1].index
    classes = setting.past + setting.classes
    for one in task_rounds(method, hparams, setting):
        parts = [*one.down, *_registry(one, classes)]
        up = envelope_wire(one.up, compact=compact) + (WANT_BYTES - less) * len(parts)
        named = (PART_REF_BYTES - less) * (len(parts) + task) + CLASS_BYTES * classes
        sent = sum(envelope_wire(part, compact=compact) for part in parts)
        down = sent + CONTROL_BYTES - 2 * less + named
        yield Cost(up, down, task, one.kind, one.round)


def _registry(one: RoundTraffic, classes: int) -> list[Size]:
    """Return the list of class names, sent in a task's first round."""
    # Two ids of 8 bytes for each, and a name.
    listed = (16 + CLASS_BYTES) * classes
    return [] if one.round else [Size({}, frame=180 + listed, compact_frame=80 + listed)]


def envelope_wire(size: Size, *, compact: bool) -> int:
    """Return the TCP payload of one sealed payload: header, key, chunks and their messages."""
    sealed = sealed_size(size.bytes + (size.compact_frame if compact else size.frame))
    chunks = math.ceil(sealed / chunk_bytes_for(sealed))
    messages = math.ceil(sealed / MAX_SPAN_BYTES)
    less = DIGEST_BYTES * (1 + messages) if compact else 0
    return sealed + ENVELOPE_BYTES + HASH_BYTES * chunks + MESSAGE_BYTES * messages - less
