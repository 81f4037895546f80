"""``fcil-client swarm``: many clients in one process over one backbone."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fcil_client.cli.target_options import ServerOption
from fcil_client.cli.work_options import WorkOptions
from fcil_protocol.errors import UsageError
from fcil_protocol.process.cli_options import FormatOption, JsonOption, grouped
from fcil_protocol.process.log_file import LogOptions
from fcil_protocol.process.terminal import Format, chosen, errors

if TYPE_CHECKING:
    from fcil_client.swarm.groups import GroupShare
    from fcil_client.swarm.seats import Seat
    from fcil_protocol.process.log_file import LogFile

# Options of the swarm, not passed on to each group.
OWN = frozenset(
    (
        "slots", "spread", "groups", "cpus_per_group", "gpus_per_group", "ray_address", "log",
        "log_format", "log_mb", "form", "json_flag",
    )
)  # fmt: skip


class Spread(StrEnum):
    """Places where a swarm's members run."""

    LOCAL = "local"
    RAY = "ray"


@grouped
def swarm(
    *,
    ctx: typer.Context,
    data: Annotated[
        Path,
        typer.Option(help="A folder with one folder per client; with --partition: the data."),
    ],
    partition: Annotated[
        Path | None, typer.Option(help="Partition file written by fcil-client split.")
    ] = None,
    slots: Annotated[
        str | None, typer.Option(help="Only these clients of the partition.", metavar="0-9,12")
    ] = None,
    name: Annotated[str, typer.Option(help="Members are named NAME-000, NAME-001 ...")] = "swarm",
    until_done: Annotated[
        bool,
        typer.Option("--until-done", help="Exit when the run ends or the server stops."),
    ] = False,
    together: Annotated[
        bool,
        typer.Option("--together", help="Stop all clients as soon as one leaves."),
    ] = False,
    tickets: Annotated[
        Path | None, typer.Option(help="A folder with MEMBER.ticket for each member.")
    ] = None,
    server: ServerOption = None,
    no_wait: Annotated[
        bool,
        typer.Option(
            "--no-wait",
            help="If no server can be reached at the first start, fail with code 1.",
        ),
    ] = False,
    work: WorkOptions,
    spread: Annotated[
        Spread,
        typer.Option(
            help="Run in this process, or on a Ray cluster in groups of slots.",
            rich_help_panel="Ray cluster",
        ),
    ] = Spread.LOCAL,
    groups: Annotated[
        int,
        typer.Option(
            min=1,
            help="With ray: number of processes, one worker each.",
            rich_help_panel="Ray cluster",
        ),
    ] = 1,
    cpus_per_group: Annotated[
        float,
        typer.Option(min=0.1, help="With ray: cores per group.", rich_help_panel="Ray cluster"),
    ] = 1.0,
    gpus_per_group: Annotated[
        float,
        typer.Option(
            min=0,
            help="With ray: GPUs per group; may be a fraction.",
            rich_help_panel="Ray cluster",
        ),
    ] = 0.0,
    ray_address: Annotated[
        str | None,
        typer.Option(
            help="With ray: a running cluster; default: RAY_ADDRESS, or a new one.",
            rich_help_panel="Ray cluster",
        ),
    ] = None,
    log: LogOptions,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Run many clients in this process: each with keys, connection and home of its own.

    One worker with one backbone computes for all of them in turn. Started again, every member
    resumes. The exit code is 1 if a member failed, or with --until-done if the
    server stopped before the run was complete.
    """
    form = chosen(form, json_flag)
    with errors(form):
        if form is Format.JSON:
            raise UsageError("a swarm reports continuously: use --format jsonl.")
        import asyncio

        from fcil_client.swarm.screen import watched
        from fcil_client.swarm.seats import Enroller, find_seats
        from fcil_client.swarm.swarm import Ends

        options = work.options(data)
        seats = find_seats(data, partition, slots, name)
        enroller = Enroller(server, tickets, waits=not no_wait)
        file = log.open()
        if spread is Spread.RAY:
            from fcil_client.swarm.groups import GroupShare

            words = forwarded_arguments(ctx)
            share = GroupShare(cpus_per_group, gpus_per_group)
            raise SystemExit(watched_groups(seats, groups, words, share, ray_address, form, file))
        ends = Ends(until_done, together)
        code = asyncio.run(watched(seats, options, enroller, form, file, ends))
    raise SystemExit(code)


def forwarded_arguments(ctx: typer.Context) -> list[str]:
    """Return the command line's words for each group; paths are made absolute."""
    words: list[str] = []
    for parameter in ctx.command.params:
        name = str(parameter.name)
        source = ctx.get_parameter_source(name)
        if name in OWN or source is None or source.name != "COMMANDLINE":
            continue
        value: Any = ctx.params[name]
        if isinstance(value, bool):  # --no-NAME, where it has one, says False
            words += (parameter.opts if value else parameter.secondary_opts)[:1]
            continue
        words.append(parameter.opts[0])
        words.append(str(value.resolve() if isinstance(value, Path) else value))
    return words


def watched_groups(
    seats: Sequence[Seat],
    count: int,
    words: Sequence[str],
    share: GroupShare,
    address: str | None,
    form: Format,
    log: LogFile | None,
) -> int:
    """Run a swarm in groups over a Ray cluster and show it; return the exit code.

    Raises:
        UsageError: the members are no slots of a partition, or do not fit the cluster.
        ConfigError, Unreachable: Ray is not installed, or no cluster answers.
    """
    import time

    from fcil_client.notes import Note
    from fcil_client.swarm.groups import Group, as_text, divide
    from fcil_client.swarm.ray import spread
    from fcil_client.swarm.screen import Screen

    if seats[0].partition is None:
        raise UsageError(
            "--spread ray divides the slots of a partition, and none was given.",
            action="Give --partition FILE (fcil-client split), or start one swarm on each machine.",
        )
    parts = divide([seat.slot for seat in seats], count)
    groups = [Group(i, as_text(slots)) for i, slots in enumerate(parts)]
    line = [*words, "--format", "jsonl"]
    if "--max-threads" not in words and "--threads" not in words:
        line += ["--max-threads", str(share.threads)]
    screen = Screen(form, log)

    def tell(level: str, text: str) -> None:
        screen.note("", Note(time.time(), level, text))

    code = spread(groups, line, share, address, tell, screen.summary)
    tell("error" if code else "info", f"all {len(groups)} groups have ended, exit code {code}")
    return code
