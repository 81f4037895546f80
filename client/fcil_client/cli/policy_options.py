"""The options of ``join`` that say what a client takes of its machine, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fcil_client.policy.policy import Rules

MaxMemoryOption = Annotated[
    str | None,
    typer.Option(help="Memory that this client may take in all, such as '1.5 GB'.", metavar="SIZE"),
]
MaxThreadsOption = Annotated[
    int, typer.Option(min=0, help="Threads of the worker; 0: the cores that it may use.")
]
ThreadsOption = Annotated[int, typer.Option("--threads", min=0, hidden=True)]  # its older name
NiceOption = Annotated[
    int, typer.Option(min=0, max=19, help="How much the worker gives way to other programs.")
]
ImagesOption = Annotated[
    int,
    typer.Option(
        "--memory-mb",
        min=0,
        help="Of that, for decoded images, MB; 0: a quarter, and at most 2000.",
    ),
]
OnMainsOption = Annotated[
    bool, typer.Option("--only-on-mains", help="Do not work on battery (systems that tell).")
]
MinBatteryOption = Annotated[
    int, typer.Option(min=0, max=100, help="Do not work on a battery below so many percent.")
]
WhenIdleOption = Annotated[
    bool, typer.Option("--only-when-idle", help="Do not work while other programs or people do.")
]
HoursOption = Annotated[
    str | None, typer.Option(help="Work only then, such as 22-6 or 12:30-14:00.", metavar="FROM-TO")
]
MaxTemperatureOption = Annotated[
    float,
    typer.Option(
        min=0, help="Rest above so many degrees C; 0: near the marks that the system names."
    ),
]
PatienceOption = Annotated[
    float,
    typer.Option(min=0, help="How long begun work rests before its round is declined, s."),
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
