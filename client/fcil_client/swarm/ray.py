"""A swarm over a Ray cluster: groups of slots are placed by resources, as processes of their own.

Ray carries only text and numbers: the options of ``fcil-client swarm`` to a node, and the lines
that it prints back. Keys, tickets, homes, images and payloads never pass through Ray; each group
reads them on its node and connects to the server itself.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from fcil_client.swarm.groups import Group, GroupShare, exit_code, together
from fcil_protocol.errors import ConfigError, Unreachable, UsageError
from fcil_protocol.process.children import LAUNCHER, ChildProcess, module_command

LOCAL = "local"  # address of a cluster that is started on this machine, and ends with the swarm
BEAT_S = 2.0  # an actor answers at least this often
GROUP_END_WAIT_S = 30.0  # for groups to end when asked
STORE_BYTES = 80_000_000  # Ray's minimum for its object store, which fcil does not use
Heard = tuple[str, list[str], int | None]  # node, lines, exit code

Notify = Callable[[str, str], None]  # level, sentence
Count = Callable[[dict[str, Any]], None]  # the summary of all


class Actor:
    """One group's process, on the node where Ray places this actor."""

    def __init__(self) -> None:
        self._child: ChildProcess | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # None: the last

    def start(self, words: list[str]) -> None:
        """Start the swarm with these words of a command line."""
        command = module_command(LAUNCHER, "fcil_client", "swarm", *words)
        self._child = ChildProcess(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        threading.Thread(target=self._read, args=(self._child,), daemon=True).start()

    def _read(self, child: ChildProcess) -> None:
        assert child.stdout is not None
        with child:
            for line in child.stdout:
                self._lines.put(line.decode(errors="replace"))
        self._lines.put(None)

    def hear(self, most_s: float) -> Heard:
        """Return its node, its new output, and its exit code if that was the last.

        Waits at most ``most_s`` for the first line.
        """
        import ray

        node, lines = str(ray.get_runtime_context().get_node_id()), []
        try:
            line = self._lines.get(timeout=most_s)
            while line is not None:
                lines.append(line)
                line = self._lines.get_nowait()
        except queue.Empty:
            return node, lines, None
        assert self._child is not None
        return node, lines, self._child.returncode

    def stop(self) -> None:
        """Ask it to end in order."""
        if self._child is not None:
            self._child.send_signal(signal.SIGINT)


def load_ray(where: str) -> Any:
    """Import Ray without usage reports; a cluster started here requires a token.

    Raises:
        ConfigError: it is not installed.
    """
    if find_spec("ray") is None:
        raise ConfigError(
            "--spread ray needs the package ray, which is not installed here.",
            action="Install it here and on every node: pip install 'fcil[ray]'",
        )
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if where == LOCAL and "RAY_AUTH_MODE" not in os.environ:
        # Its ports are open to the network and run commands: only for holders of this token.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    import ray  # it reads the environment here

    return ray


def connect(ray: Any, where: str) -> None:
    """Connect to a cluster, or start one on this machine.

    Raises:
        Unreachable: no cluster answers.
    """
    own = {"include_dashboard": False, "object_store_memory": STORE_BYTES}
    more = own if where == LOCAL else {}
    try:
        # Ray's workers look for modules in the caller's directory, before all others.
        with contextlib.chdir(os.sep):
            ray.init(address=where, log_to_driver=False, logging_level="error", **more)
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        raise Unreachable(
            f"no Ray cluster answers at {where}: {' '.join(str(error).split())[:300]}",
            action="Start one (ray start --head), or leave --ray-address out for one on this "
            "machine.",
        ) from error


@dataclass
class Running:
    """A group, its actor, and the pending answer."""

    group: Group
    actor: Any
    answer: Any


class RayGroups:
    """Starts groups, reads their output, and restarts those that were killed.

    Args:
        ray: the module, connected.
        groups: with their slots.
        words: each group's command line, without the slots.
        share: resources of each group.
        notify: shows a sentence.
        count: shows the summary of all.
    """

    def __init__(
        self, ray: Any, groups: Sequence[Group], words: Sequence[str], share: GroupShare,
        notify: Notify, count: Count,
    ) -> None:  # fmt: skip
        self._ray = ray
        self._groups = list(groups)
        self._words = list(words)
        self._together = "--together" in words
        self._share = share
        self._notify = notify
        self._count = count
        self._running: dict[Any, Running] = {}
        self._ends: float | None = None  # deadline of an orderly end

    def run(self) -> int:
        """Run all groups to their end; return the exit code.

        Raises:
            UsageError: the cluster can never hold them.
        """
        total = self._ray.cluster_resources()
        if why := self._share.lacking_resources(len(self._groups), total):
            raise UsageError(
                f"the Ray cluster cannot hold {len(self._groups)} groups: {why}.",
                action="Take fewer --groups, or less with --cpus-per-group or --gpus-per-group.",
            )
        nodes = sum(node["Alive"] for node in self._ray.nodes())
        has = ", ".join(f"{total[kind]:g} {kind}s" for kind in ("CPU", "GPU") if kind in total)
        self._notify("info", f"{len(self._groups)} groups on a Ray cluster: nodes {nodes}, {has}")
        for group in self._groups:
            self._start(group)
        while self._running:
            try:
                self._step()
            except KeyboardInterrupt:
                if self._ends is not None:
                    self._kill()
                    break
                self._stop()
        return exit_code(self._groups)

    def _start(self, group: Group) -> None:
        options: dict[str, Any] = {"num_cpus": self._share.cpus, "num_gpus": self._share.gpus}
        options |= {"max_restarts": 0, "scheduling_strategy": "SPREAD"}
        if group.node:  # its homes are there
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as Same

            options["scheduling_strategy"] = Same(group.node, soft=True)
        actor = self._ray.remote(Actor).options(**options).remote()
        actor.start.remote([*self._words, "--slots", group.slots])
        self._listen(Running(group, actor, None))

    def _listen(self, running: Running) -> None:
        running.answer = running.actor.hear.remote(BEAT_S)
        self._running[running.answer] = running

    def _step(self) -> None:
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=BEAT_S)
        for answer in ready:
            running = self._running.pop(answer)
            try:
                self._hear(running, *self._ray.get(answer))
            except self._ray.exceptions.RayError:
                self._left(running, None)
            except KeyboardInterrupt:  # interrupted while fetching: it is fetched again
                self._running[answer] = running
                raise
        if any(group.summary for group in self._groups):
            self._count(together(self._groups))
        if self._ends is not None and time.monotonic() > self._ends:
            self._kill()

    def _hear(self, running: Running, node: str, lines: Sequence[str], code: int | None) -> None:
        group = running.group
        group.node = node
        for line in lines:
            if shown := group.on_output(line):
                self._notify(*shown)
        if code is None:
            self._listen(running)
            return
        self._ray.kill(running.actor)
        self._left(running, code)

    def _left(self, running: Running, code: int | None) -> None:
        group = running.group
        name = f"group {group.number} (slots {group.slots})"
        match group.left(code, stopping=self._ends is not None):
            case "again":
                self._notify("warning", f"{name} was killed; it is restarted.")
                self._start(group)
            case "lost":
                self._notify("error", f"{name} was killed {group.kills} times and is left out.")
            case "over" if group.code and not group.ended:
                self._notify("error", f"{name} ended with code {group.code}: {group.words[:500]}")
            case "over":
                self._notify("info", f"{name} has ended.")
        if self._together and group.code and self._ends is None:
            self._stop()

    def _stop(self) -> None:
        self._ends = time.monotonic() + GROUP_END_WAIT_S
        self._notify("info", "stopping all groups (Ctrl-C stops them immediately)")
        for running in self._running.values():
            running.actor.stop.remote()

    def _kill(self) -> None:
        """End all groups at once: each ends with its actor."""
        for running in self._running.values():
            self._ray.kill(running.actor)
            running.group.left(None, stopping=True)
        self._running.clear()


def spread(
    groups: Sequence[Group], words: Sequence[str], share: GroupShare, address: str | None,
    notify: Notify, count: Count,
) -> int:  # fmt: skip
    """Run a swarm's groups on a Ray cluster; return the exit code.

    Raises:
        ConfigError: Ray is not installed.
        Unreachable: no cluster answers.
        UsageError: the cluster cannot hold the groups.
    """
    where = address or os.environ.get("RAY_ADDRESS") or LOCAL
    ray = load_ray(where)
    connect(ray, where)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return RayGroups(ray, groups, words, share, notify, count).run()
    finally:
        signal.signal(signal.SIGTERM, before)
        ray.shutdown()
