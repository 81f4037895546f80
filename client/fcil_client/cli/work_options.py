"""Options that ``join`` and ``swarm`` share: compute, resources, schedule and limits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fcil_protocol.process.cli_options import COMPUTE_PANEL, PRIVACY_PANEL, SCHEDULE_PANEL

if TYPE_CHECKING:
    from fcil_client.policy.policy import PolicyRules
    from fcil_client.rounds.options import ClientOptions


@dataclass(frozen=True, kw_only=True)
class WorkOptions:
    """A client's compute settings, resource limits, working hours and privacy limits."""

    engine: Annotated[
        str,
        typer.Option(
            help="Runs the backbone: torch, onnx, or auto (torch if installed).",
            rich_help_panel=COMPUTE_PANEL,
        ),
    ] = "auto"
    device: Annotated[
        str,
        typer.Option(
            help="auto, cpu, cuda or cuda:N; with onnx also tensorrt.",
            rich_help_panel=COMPUTE_PANEL,
        ),
    ] = "auto"
    precision: Annotated[
        str,
        typer.Option(
            help="Training precision: fp32, amp (mixed), or auto (fp32).",
            rich_help_panel=COMPUTE_PANEL,
        ),
    ] = "auto"
    weights: Annotated[
        Path | None,
        typer.Option(
            help="Local file with the backbone's weights: .safetensors, .onnx for onnx.",
            rich_help_panel=COMPUTE_PANEL,
        ),
    ] = None
    max_threads: Annotated[
        int,
        typer.Option(
            min=0,
            help="Threads of the worker; 0: one for each core it may use.",
            rich_help_panel=COMPUTE_PANEL,
        ),
    ] = 0
    threads: Annotated[int, typer.Option("--threads", min=0, hidden=True)] = 0  # its older name
    nice: Annotated[
        int,
        typer.Option(
            min=0,
            max=19,
            help="Niceness of the worker: 19 yields most to other programs.",
            rich_help_panel=COMPUTE_PANEL,
        ),
    ] = 10
    max_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory limit of this client, such as '1.5 GB'.",
            metavar="SIZE",
            rich_help_panel=COMPUTE_PANEL,
        ),
    ] = None
    memory_mb: Annotated[
        int,
        typer.Option(
            min=0,
            help="Share of it for decoded images, MB; 0: a quarter, at most 2000.",
            rich_help_panel=COMPUTE_PANEL,
        ),
    ] = 0
    micro_batch: Annotated[
        int,
        typer.Option(
            min=0,
            help="At most this many images in one pass; 0: the method's batch.",
            rich_help_panel=COMPUTE_PANEL,
        ),
    ] = 0
    work_timeout: Annotated[
        float,
        typer.Option(
            min=0,
            help="Abort training after this many seconds without progress; 0: never.",
            rich_help_panel=COMPUTE_PANEL,
        ),
    ] = 1800
    only_on_mains: Annotated[
        bool,
        typer.Option(
            "--only-on-mains",
            help="Pause on battery power (where the system reports it).",
            rich_help_panel=SCHEDULE_PANEL,
        ),
    ] = False
    min_battery: Annotated[
        int,
        typer.Option(
            min=0,
            max=100,
            help="Pause when the battery is below this percentage.",
            rich_help_panel=SCHEDULE_PANEL,
        ),
    ] = 0
    only_when_idle: Annotated[
        bool,
        typer.Option(
            "--only-when-idle",
            help="Pause while other programs or people use the machine.",
            rich_help_panel=SCHEDULE_PANEL,
        ),
    ] = False
    hours: Annotated[
        str | None,
        typer.Option(
            help="Work only during these hours, such as 22-6 or 12:30-14:00.",
            metavar="FROM-TO",
            rich_help_panel=SCHEDULE_PANEL,
        ),
    ] = None
    max_temperature: Annotated[
        float,
        typer.Option(
            min=0,
            help="Pause above this temperature in degrees C; 0: near the system's own limits.",
            rich_help_panel=SCHEDULE_PANEL,
        ),
    ] = 0.0
    patience: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds that paused work waits before its round is declined.",
            rich_help_panel=SCHEDULE_PANEL,
        ),
    ] = 120.0
    min_noise: Annotated[
        float,
        typer.Option(
            min=0,
            help="Decline rounds with a smaller noise multiplier.",
            rich_help_panel=PRIVACY_PANEL,
        ),
    ] = 0.0
    max_epsilon: Annotated[
        float,
        typer.Option(
            min=0,
            help="Decline noised rounds beyond this epsilon (delta 1e-5); 0: no limit.",
            rich_help_panel=PRIVACY_PANEL,
        ),
    ] = 0.0
    min_count: Annotated[
        int,
        typer.Option(
            min=1, help="Exclude classes with fewer images.", rich_help_panel=PRIVACY_PANEL
        ),
    ] = 1
    allow_partial: Annotated[
        bool,
        typer.Option(
            "--allow-partial",
            help="Accept noise on the statistics alone.",
            rich_help_panel=PRIVACY_PANEL,
        ),
    ] = False
    min_masked: Annotated[
        int,
        typer.Option(
            min=0,
            help="Train only in masked sums of so many clients or more; 0: no limit.",
            rich_help_panel=PRIVACY_PANEL,
        ),
    ] = 0
    training_metrics: Annotated[
        bool,
        typer.Option(
            "--training-metrics/--no-training-metrics",
            help="Send a round's training loss and accuracy.",
            rich_help_panel=PRIVACY_PANEL,
        ),
    ] = True
    link_only: Annotated[
        bool,
        typer.Option(
            "--link-only",
            help="Fetch broadcasts from the server alone, not from its object store.",
            rich_help_panel=PRIVACY_PANEL,
        ),
    ] = False

    def options(self, data: Path, partition: Path | None = None, slot: int = -1) -> ClientOptions:
        """Return a client's options for a data folder, or for one slot of its partition.

        Raises:
            UsageError, ConfigError: a value is not possible, or not on this machine.
        """
        from fcil_adapters.backbones.engines import check_engine
        from fcil_adapters.backbones.precision import check_choice
        from fcil_client.rounds.options import ClientOptions
        from fcil_client.rounds.resources import read_bound
        from fcil_client.state.privacy_budget import PrivacyLimits

        check_choice(self.precision)
        check_engine(self.engine)
        return ClientOptions(
            data=data,
            engine=self.engine,
            device=self.device,
            precision=self.precision,
            weights=self.weights,
            threads=self.max_threads or self.threads,
            nice=self.nice,
            micro_batch=self.micro_batch or None,
            max_memory=read_bound(self.max_memory),
            image_bytes=self.memory_mb * 1_000_000,
            manners=self._rules(),
            work_timeout_s=self.work_timeout,
            limits=PrivacyLimits(
                self.min_noise,
                self.max_epsilon,
                self.min_count,
                self.allow_partial,
                self.min_masked,
            ),
            partition=partition.resolve() if partition else None,
            slot=slot,
            training_metrics=self.training_metrics,
            link_only=self.link_only,
        )

    def _rules(self) -> PolicyRules:
        from fcil_client.policy.policy import PolicyRules, read_hours

        return PolicyRules(
            only_on_mains=self.only_on_mains,
            min_battery=self.min_battery,
            only_when_idle=self.only_when_idle,
            hours=None if self.hours is None else read_hours(self.hours),
            max_temperature=self.max_temperature or None,
            patience_s=self.patience,
        )
