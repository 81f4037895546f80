"""Command line of a swarm in groups: options for each group, and the shared output."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from fcil_client.notes import Note
from fcil_client.swarm.groups import Group, GroupShare, as_text, divide
from fcil_client.swarm.ray import spread
from fcil_client.swarm.screen import Screen
from fcil_client.swarm.seats import Seat
from fcil_protocol.errors import UsageError
from fcil_protocol.process.log_file import LogFile
from fcil_protocol.process.terminal import Format

# Options of the swarm, not passed on to each group.
OWN = frozenset(
    (
        "slots", "spread", "groups", "cpus_per_group", "gpus_per_group", "ray_address", "log",
        "log_format", "log_mb", "form", "json_flag",
    )
)  # fmt: skip


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
