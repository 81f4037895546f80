"""Ask torch and onnxruntime for their capabilities, in a process that may crash."""

from __future__ import annotations

import json
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import IO, Any, Self

from fcil_adapters.backbones import engines
from fcil_client.doctor.checks.engines import EngineFacts, Gpu, OnnxFacts, TorchFacts
from fcil_protocol.errors import FcilError, Timeout, WorkerDied, WorkerError, from_code
from fcil_protocol.process.children import module_command

IMPORT_S = 60.0  # for torch or onnxruntime to report; a cold disk is slow


def installed() -> dict[str, str]:
    """Return distribution -> version of all engines, without importing any."""
    here = engines.installed()
    found = {"torch": here.torch, "timm": here.timm, **here.distributions}
    if here.onnxruntime and not here.distributions:
        found["onnxruntime"] = here.onnxruntime
    return {name: version for name, version in found.items() if version}


class Bench:
    """The `engine_child` process, started at the first request, and restarted after its death."""

    def __init__(self, program: str = "fcil_client.doctor.probes.engine_child") -> None:
        self._program = program
        self._child: subprocess.Popen[bytes] | None = None
        self._words: IO[bytes] | None = None

    def ask(self, task: str, limit_s: float, **fields: Any) -> dict[str, Any]:
        """Return the answer to one request.

        Raises:
            WorkerDied: the child ended, as a broken driver would make it.
            Timeout: it did not answer within ``limit_s`` seconds.
            FcilError: the child's error.
        """
        child = self._started()
        assert child.stdin is not None
        with suppress(OSError):  # it has ended: reported below, as its output has ended
            child.stdin.write(json.dumps({"task": task, **fields}).encode() + b"\n")
            child.stdin.flush()
        line = self._line(child, limit_s, task)
        try:
            reply: dict[str, Any] = json.loads(line)
        except ValueError:
            raise self._died(child) from None
        if "fault" in reply:
            raise from_code(reply["code"], reply["fault"], reply["action"])
        return reply

    def _line(self, child: subprocess.Popen[bytes], limit_s: float, task: str) -> bytes:
        assert child.stdout is not None
        line, ends = b"", time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, ends - time.monotonic())):
                    self.close()
                    raise Timeout(
                        f"no answer within {limit_s:.0f} s ({task}).",
                        action="Look at the device and its driver; dmesg may say more.",
                    )
                more = child.stdout.read1(65536)  # type: ignore[attr-defined]
                if not more:
                    break
                line += more
        return line

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            self._words = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the child
            self._child = subprocess.Popen(
                module_command(self._program),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._words,
            )
        return self._child

    def _died(self, child: subprocess.Popen[bytes]) -> WorkerError:
        with suppress(subprocess.TimeoutExpired):
            child.wait(5)
        code = child.poll()
        how = "ended" if code is None else f"ended with code {code}"
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        last = self._last_words()
        self.close()
        return WorkerDied(
            f"the process that tried it {how}{f': {last}' if last else ''}.",
            action="It is the driver or the library: install them again, in versions that fit; "
            "dmesg may say more. If memory ran out, free some.",
        )

    def _last_words(self) -> str:
        if self._words is None:
            return ""
        self._words.seek(0)
        lines = self._words.read()[-4000:].decode(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else ""

    def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                with suppress(OSError):
                    assert pipe is not None
                    pipe.close()
        if self._words is not None:
            self._words.close()
            self._words = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def look(bench: Bench, asked: str, device: str, driver: str, *, jetson: bool) -> EngineFacts:
    """Gather the installed engines and their capabilities."""
    found = installed()
    torch, torch_fault = _ask_torch(bench, found)
    onnx, onnx_fault = _ask_onnx(bench, found)
    return EngineFacts(
        asked=asked,
        device=device,
        installed=found,
        torch=torch,
        torch_fault=torch_fault,
        onnx=onnx,
        onnx_fault=onnx_fault,
        driver=driver,
        jetson=jetson,
    )


def _ask_torch(bench: Bench, found: Mapping[str, str]) -> tuple[TorchFacts | None, str]:
    if "torch" not in found:
        return None, ""
    try:
        said = bench.ask("torch", IMPORT_S)
    except FcilError as error:
        return None, error.message
    gpus = tuple(Gpu(str(name), int(free), int(total)) for name, free, total in said["gpus"])
    return TorchFacts(said["version"], said["cuda"], gpus, said["why_not"]), ""


def _ask_onnx(bench: Bench, found: Mapping[str, str]) -> tuple[OnnxFacts | None, str]:
    if not found.keys() - {"torch", "timm"}:
        return None, ""
    try:
        said = bench.ask("onnxruntime", IMPORT_S)
    except FcilError as error:
        return None, error.message
    return OnnxFacts(said["version"], said["providers"]), ""
