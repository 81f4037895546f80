"""Metrics of a federation in Prometheus' text format: their catalogue and their values.

No IO: `metrics.source` gathers a `Snapshot`, and `render` writes it down. Names follow Prometheus'
rules (base units, ``_total`` for counters); a label takes few values, and never a class name. Byte
counts of different levels have separate names, since a sum over levels would count everything
several times.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from fcil_server.ledger.enums import SILENT, Cause, CountSource, Direction, Outcome, UpdateStatus
from fcil_server.web.metrics.totals import Counts, Totals

PHASES = (
    "starting",
    "opening",
    "publishing",
    "gathering",
    "collecting",
    "aggregating",
    "evaluating",
    "paused",
    "drained",
    "done",
)
NEWEST_TASKS = 100  # tasks with an accuracy of their own
_SEALED = (Cause.UPDATE, Cause.BROADCAST, Cause.CATCH_UP)
_ENDS = tuple(outcome.value for outcome in Outcome if outcome is not Outcome.REOPENED)


@dataclass(frozen=True)
class Spec:
    """One metric: its name, its help text, its labels; names that end in ``_total`` only grow."""

    name: str
    says: str
    labels: tuple[str, ...] = ()


_FLOW = ("direction", "cause")

CATALOGUE = (
    Spec("fcil_up", "1 if the server answers."),
    Spec("fcil_build_info", "Always 1; the installed versions.", ("version", "python")),
    Spec("fcil_server_start_time_seconds", "When the server was started, unix time."),
    Spec("fcil_run_info", "Always 1; the newest run.", ("run", "method", "backbone", "parent")),
    Spec("fcil_run_status", "1 for the status of the newest run.", ("status",)),
    Spec("fcil_run_start_time_seconds", "When the newest run began, unix time."),
    Spec("fcil_run_tasks", "Tasks of the run that have opened."),
    Spec("fcil_run_tasks_done", "Tasks of the run that are learned."),
    Spec("fcil_run_classes", "Class names that have entered a task."),
    Spec("fcil_run_classes_waiting", "Class names that wait for a task."),
    Spec("fcil_run_state", "Number of the newest state."),
    Spec("fcil_task_number", "The task under way, from 0."),
    Spec("fcil_round_number", "The round under way, from 0 in its task and kind.", ("kind",)),
    Spec("fcil_round_phase", "1 for what the server is doing now.", ("phase",)),
    Spec("fcil_round_remaining_seconds", "Until the deadline of the round under way."),
    Spec("fcil_round_asked", "Clients asked in the round under way."),
    Spec("fcil_round_answered", "Asked clients whose update is on disk."),
    Spec("fcil_members", "Members that may join.", ("role",)),
    Spec("fcil_clients_connected", "Clients with a session."),
    Spec("fcil_clients_ready", "Clients that have said which classes they hold."),
    Spec("fcil_intake_connections", "Connections of each intake process.", ("process",)),
    Spec(
        "fcil_intake_updates_total",
        "Updates that each has handed over since the server's start.",
        ("process",),
    ),
    Spec("fcil_rounds_total", "Closed rounds.", ("kind", "outcome")),
    Spec(
        "fcil_rounds_reopened_total", "Times a round missed its quorum and stayed open.", ("kind",)
    ),
    Spec(
        "fcil_round_phase_seconds_total",
        "Seconds of closed rounds, by activity (collect, aggregate, save); the server's restarts "
        "in a round count as collect.",
        ("kind", "phase"),
    ),
    Spec("fcil_updates_accepted_total", "Updates that were acknowledged.", ("kind",)),
    Spec("fcil_updates_counted_total", "Updates that are part of a state.", ("kind",)),
    Spec("fcil_updates_excluded_total", "Updates that were excluded, with a reason.", ("kind",)),
    Spec(
        "fcil_updates_stale_total",
        "Accepted updates that start from an older state than their round.",
        ("kind",),
    ),
    Spec("fcil_clients_silent_total", "Asked clients without an update, and why.", ("answer",)),
    Spec("fcil_messages_refused_total", "Messages that were refused.", ("code",)),
    Spec("fcil_tensor_bytes_total", "Tensors alone.", _FLOW),
    Spec("fcil_sealed_bytes_total", "Envelopes.", _FLOW),
    Spec("fcil_application_bytes_total", "All messages.", _FLOW),
    Spec("fcil_predicted_wire_bytes_total", "TCP payload, predicted exactly, by cause.", _FLOW),
    Spec("fcil_kernel_wire_bytes_total", "TCP payload as the kernel counts it.", ("direction",)),
    Spec("fcil_kernel_retransmitted_bytes_total", "Of these, retransmitted.", ("direction",)),
    Spec("fcil_kernel_link_bytes_total", "The same as Ethernet frames.", ("direction",)),
    Spec("fcil_object_store_bytes_total", "Parts from an object store, as clients report them."),
    Spec(
        "fcil_wire_source_info",
        "Always 1; kernel, or predicted where no kernel counts.",
        ("source",),
    ),
    Spec(
        "fcil_accuracy_ratio",
        "Accuracy on a task's classes after the newest evaluated task, 0 to 1.",
        ("task",),
    ),
    Spec("fcil_accuracy_final_ratio", "FAA: mean of these accuracies over the tasks."),
    Spec("fcil_accuracy_incremental_ratio", "AIA: mean of FAA over the evaluated tasks."),
    Spec("fcil_forgetting_ratio", "Mean loss of accuracy since a task's best."),
    Spec("fcil_training_loss", "Training loss of the newest round whose clients report it."),
    Spec("fcil_training_accuracy_ratio", "Accuracy on its training images, 0 to 1."),
    Spec("fcil_worker_starts_total", "Starts of the server's worker since the server's start."),
    Spec("fcil_worker_deaths_total", "Of these, how many ended by a crash, a kill or a hang."),
    Spec(
        "fcil_loop_lag_seconds",
        "How late the server's loop was since the last round, at most and in 99 of 100 moments.",
        ("of",),
    ),
    Spec("fcil_ledger_bytes", "The ledger with its log."),
    Spec("fcil_spool_bytes", "Updates that are kept until the next state, sealed."),
    Spec("fcil_disk_free_bytes", "Free to the server on the disk of the federation."),
    Spec("fcil_disk_size_bytes", "Size of that disk."),
    Spec("fcil_process_resident_memory_bytes", "Memory of each process.", ("process",)),
    Spec("fcil_process_cpu_seconds_total", "CPU time of each process.", ("process",)),
    Spec("fcil_process_open_fds", "Open files of each process.", ("process",)),
    Spec("fcil_collect_seconds", "Time taken to gather these metrics."),
    Spec("fcil_client_connected", "1 for a client with a session.", ("client",)),
    Spec("fcil_client_updates_counted_total", "Updates of a client in a state.", ("client",)),
    Spec(
        "fcil_client_predicted_wire_bytes_total",
        "TCP payload of a client, predicted exactly.",
        ("client", "direction"),
    ),
)


@dataclass(frozen=True)
class Usage:
    """Resources used by a process."""

    memory_bytes: int
    cpu_s: float
    files: int


@dataclass(frozen=True)
class Snapshot:
    """All inputs of the metrics.

    Attributes:
        live: the server's answer (`gauges`); None if it does not answer.
        usage: server, worker, metrics and `intake_name` -> their resources.
        disk: free and all bytes.
    """

    version: str
    totals: Totals
    live: Mapping[str, Any] | None
    usage: Mapping[str, Usage] = field(default_factory=dict)
    disk: tuple[int, int] | None = None
    spool_bytes: int = 0
    collect_s: float = 0.0


Sample = tuple[str, tuple[str, ...], float | None]


def samples(snapshot: Snapshot) -> Iterator[Sample]:
    """Yield (name, label values, value); a metric that does not apply has the value None."""
    version = (snapshot.version, platform.python_version())
    yield "fcil_build_info", version, 1
    yield "fcil_up", (), snapshot.live is not None
    yield from _of_run(snapshot.totals)
    yield from _of_counts(snapshot.totals.counts)
    yield from _of_accuracy(snapshot.totals)
    yield from _of_members(snapshot.totals, snapshot.live)
    if snapshot.live is not None:
        yield from _of_server(snapshot.live)
    yield from _of_machine(snapshot)


def _of_run(totals: Totals) -> Iterator[Sample]:
    yield "fcil_ledger_bytes", (), totals.size_bytes
    for code, count in totals.refusals.items():
        yield "fcil_messages_refused_total", (code,), count
    run = totals.run
    if run is None:
        return
    about = (run.run_id, run.method, str(run.backbone.get("name", "")), run.parent_run or "")
    yield "fcil_run_info", about, 1
    for status in type(run.status):
        yield "fcil_run_status", (status.value,), status is run.status
    yield "fcil_run_start_time_seconds", (), run.created_at
    yield "fcil_run_tasks", (), totals.tasks
    yield "fcil_run_tasks_done", (), totals.tasks_done
    yield "fcil_run_classes", (), totals.classes
    yield "fcil_run_classes_waiting", (), totals.waiting
    yield "fcil_run_state", (), totals.state


def _of_counts(counts: Counts) -> Iterator[Sample]:
    for kind, count in counts.reopened.items():
        yield "fcil_rounds_reopened_total", (kind,), count
        for outcome in _ENDS:
            yield "fcil_rounds_total", (kind, outcome), counts.rounds.get((kind, outcome), 0)
        for status in UpdateStatus:
            updates = counts.updates.get((kind, status.value), 0)
            yield f"fcil_updates_{status.value}_total", (kind,), updates
        yield "fcil_updates_stale_total", (kind,), counts.updates.get((kind, "stale"), 0)
    for kind_phase, seconds in counts.seconds.items():
        yield "fcil_round_phase_seconds_total", kind_phase, seconds
    for answer in SILENT:
        yield "fcil_clients_silent_total", (answer.value,), counts.answers.get(answer.value, 0)
    for flow in counts.flows:
        yield from _of_flow(*flow, counts.flows[flow])
    if counts.flows:
        kernel = any(source is CountSource.KERNEL for _, _, source in counts.flows)
        source = CountSource.KERNEL if kernel else CountSource.PREDICTED
        yield "fcil_wire_source_info", (source.value,), 1


def _of_flow(
    direction: Direction, cause: Cause, source: CountSource, sizes: tuple[int, ...]
) -> Iterator[Sample]:
    tensor, sealed, application, wire, retransmitted, link = sizes
    if source is CountSource.KERNEL:
        way = (direction.value,)
        yield "fcil_kernel_wire_bytes_total", way, wire
        yield "fcil_kernel_link_bytes_total", way, link
        if direction is Direction.DOWN:  # only clients can see losses on the way up
            yield "fcil_kernel_retransmitted_bytes_total", way, retransmitted
        return
    if source is CountSource.REPORTED:
        yield "fcil_object_store_bytes_total", (), wire
        return
    why = (direction.value, cause.value)
    if cause in _SEALED:
        yield "fcil_tensor_bytes_total", why, tensor
        yield "fcil_sealed_bytes_total", why, sealed
    yield "fcil_application_bytes_total", why, application
    yield "fcil_predicted_wire_bytes_total", why, wire


def _of_accuracy(totals: Totals) -> Iterator[Sample]:
    trained = totals.training or {}
    yield "fcil_training_loss", (), trained.get("loss")
    yield "fcil_training_accuracy_ratio", (), trained.get("accuracy")
    found = totals.accuracy
    if found is None:
        return
    newest = list(enumerate(found.matrix[-1]))[-NEWEST_TASKS:]
    for task, percent in newest:
        yield "fcil_accuracy_ratio", (str(task),), _ratio(percent)
    yield "fcil_accuracy_final_ratio", (), _ratio(found.faa)
    yield "fcil_accuracy_incremental_ratio", (), _ratio(found.aia)
    yield "fcil_forgetting_ratio", (), _ratio(found.forgetting["max"])


def _ratio(percent: float | None) -> float | None:
    return None if percent is None else percent / 100


def _of_members(totals: Totals, live: Mapping[str, Any] | None) -> Iterator[Sample]:
    for role, count in totals.members.items():
        yield "fcil_members", (role,), count
    for client, name in totals.named.items():
        counted, up, down = totals.counts.clients.get(client, (0, 0, 0))
        yield "fcil_client_updates_counted_total", (name,), counted
        yield "fcil_client_predicted_wire_bytes_total", (name, Direction.UP.value), up
        yield "fcil_client_predicted_wire_bytes_total", (name, Direction.DOWN.value), down
        if live is not None and client in live["here"]:  # newcomers are not in it yet
            yield "fcil_client_connected", (name,), live["here"][client]


def _of_server(live: Mapping[str, Any]) -> Iterator[Sample]:
    yield "fcil_server_start_time_seconds", (), live["started_at"]
    yield "fcil_task_number", (), live["task"]
    if live["kind"] is not None:
        yield "fcil_round_number", (str(live["kind"]),), live["round"]
    for phase in dict.fromkeys((*PHASES, str(live["phase"]))):
        yield "fcil_round_phase", (phase,), phase == live["phase"]
    yield "fcil_round_remaining_seconds", (), live["remaining_s"]
    yield "fcil_round_asked", (), live["asked"]
    yield "fcil_round_answered", (), live["answered"]
    yield "fcil_clients_connected", (), live["connected"]
    yield "fcil_clients_ready", (), live["ready"]
    for number, process in enumerate(live["intake"], 1):
        yield "fcil_intake_connections", (intake_name(number),), process["connections"]
        yield "fcil_intake_updates_total", (intake_name(number),), process["updates"]
    yield "fcil_worker_starts_total", (), live["worker_starts"]
    yield "fcil_worker_deaths_total", (), live["worker_deaths"]
    yield "fcil_loop_lag_seconds", ("max",), live["loop_lag_max_s"]
    yield "fcil_loop_lag_seconds", ("p99",), live["loop_lag_p99_s"]


def intake_name(number: int) -> str:
    """Return what metrics call an intake process; notes number them from 1, too."""
    return f"intake {number}"


def _of_machine(snapshot: Snapshot) -> Iterator[Sample]:
    if snapshot.disk is not None:
        yield "fcil_disk_free_bytes", (), snapshot.disk[0]
        yield "fcil_disk_size_bytes", (), snapshot.disk[1]
    yield "fcil_spool_bytes", (), snapshot.spool_bytes
    yield "fcil_collect_seconds", (), snapshot.collect_s
    for process, usage in snapshot.usage.items():
        yield "fcil_process_resident_memory_bytes", (process,), usage.memory_bytes
        yield "fcil_process_cpu_seconds_total", (process,), usage.cpu_s
        yield "fcil_process_open_fds", (process,), usage.files


class _Families(Collector):
    """Input of the library's encoders."""

    def __init__(self, found: Iterable[Sample]) -> None:
        self._by_name: dict[str, list[tuple[tuple[str, ...], float]]] = {}
        for name, labels, value in found:
            if value is not None and math.isfinite(value):
                self._by_name.setdefault(name, []).append((labels, value))

    def collect(self) -> Iterator[Metric]:
        """Yield every metric that has a value, in the order of the catalogue."""
        for spec in CATALOGUE:
            kind = CounterMetricFamily if spec.name.endswith("_total") else GaugeMetricFamily
            family = kind(spec.name, spec.says, labels=spec.labels)
            for labels, value in self._by_name.get(spec.name, []):
                family.add_metric(labels, value)
            if family.samples:
                yield family


def render(snapshot: Snapshot, accept: str = "") -> tuple[bytes, str]:
    """Return the text and its content type, in the format that an ``Accept`` header prefers."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(samples(snapshot)))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type
