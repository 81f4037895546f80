"""The options of ``join`` that say what a client takes of its machine, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fcil_client.policy.policy import Rules

MaxMemoryOption = Annotated[
    str | None,
    typer.Option(help="Memory limit of this client, such as '1.5 GB'.", metavar="SIZE"),
]
MaxThreadsOption = Annotated[
    int, typer.Option(min=0, help="Threads of the worker; 0: one for each core it may use.")
]
ThreadsOption = Annotated[int, typer.Option("--threads", min=0, hidden=True)]  # its older name
NiceOption = Annotated[
    int,
    typer.Option(min=0, max=19, help="Niceness of the worker: 19 yields most to other programs."),
]
ImagesOption = Annotated[
    int,
    typer.Option(
        "--memory-mb",
        min=0,
        help="Share of it for decoded images, MB; 0: a quarter, at most 2000.",
    ),
]
OnMainsOption = Annotated[
    bool,
    typer.Option("--only-on-mains", help="Pause on battery power (where the system reports it)."),
]
MinBatteryOption = Annotated[
    int, typer.Option(min=0, max=100, help="Pause when the battery is below this percentage.")
]
WhenIdleOption = Annotated[
    bool,
    typer.Option("--only-when-idle", help="Pause while other programs or people use the machine."),
]
HoursOption = Annotated[
    str | None,
    typer.Option(
        help="Work only during these hours, such as 22-6 or 12:30-14:00.", metavar="FROM-TO"
    ),
]
MaxTemperatureOption = Annotated[
    float,
    typer.Option(
        min=0, help="Pause above this temperature in degrees C; 0: near the system's own limits."
    ),
]
PatienceOption = Annotated[
    float,
    typer.Option(min=0, help="Seconds that paused work waits before its round is declined."),
]


def rules(
    *,
    only_on_mains: bool,
    min_battery: int,
    only_when_idle: bool,
    hours: str | None,
    max_temperature: float,
    patience: float,
) -> Rules:
    """Return the owner's rules.

    Raises:
        UsageError: the hours are none.
    """
    from fcil_client.policy.policy import Rules, read_hours

    return Rules(
        only_on_mains=only_on_mains,
        min_battery=min_battery,
        only_when_idle=only_when_idle,
        hours=None if hours is None else read_hours(hours),
        max_temperature=max_temperature or None,
        patience_s=patience,
    )
