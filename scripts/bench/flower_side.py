"""Flower for the other benchmarks: a SuperLink and N SuperNodes, TLS on, no telemetry."""

import datetime as dt
import ipaddress
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from processes import peak_mb, tree

APP = Path(__file__).parent / "flower_app"


def _certificate(directory: Path, address: str) -> dict[str, Path]:
    """Make a certificate for an address that signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime.now(dt.UTC)
    addresses = [x509.IPAddress(ipaddress.ip_address(address)), x509.DNSName("localhost")]
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName(addresses), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = {"cert": directory / "server.pem", "key": directory / "server.key"}
    pem = serialization.Encoding.PEM
    files["cert"].write_bytes(made.public_bytes(pem))
    plain, none = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    files["key"].write_bytes(key.private_bytes(pem, plain, none))
    return files


def _environment(directory: Path, venv: Path) -> dict[str, str]:
    home = directory / "flwr"
    home.mkdir()
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return env | {
        "PATH": f"{venv / 'bin'}:{env['PATH']}",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }


@dataclass(frozen=True)
class Deployed:
    """A SuperLink and its SuperNodes, as processes that run an app.

    Attributes:
        log: of all of them; the server app's lines are there too.
        server, nodes: their process ids.
    """

    log: Path
    server: int
    nodes: list[int]

    def lines(self, word: str) -> list[list[str]]:
        """Return what follows this word in the log, line by line."""
        text = self.log.read_text(errors="replace")
        return [x.rpartition(f"{word} ")[2].split() for x in text.splitlines() if f"{word} " in x]

    def failed(self) -> SystemExit:
        """Return what to raise if it has taken too long."""
        return SystemExit("\n".join(self.log.read_text(errors="replace").splitlines()[-30:]))


@contextmanager
def deployed(
    case: Any,
    directory: Path,
    venv: Path,
    app: Path = APP,
    settings: str = "",
    *,
    address: str = "127.0.0.1",
    there: Sequence[str] = (),
) -> Iterator[Deployed]:
    """Start an app on a SuperLink at this address, and clients with this prefix of commands."""
    env, files = _environment(directory, venv), _certificate(directory, address)
    log = (directory / "flower.log").open("wb")
    started: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        started.append(process)
        return process

    try:
        server = start(
            *("flower-superlink", "--host", address),
            "--disable-runtime-dependency-installation",
            *("--ssl-ca-certfile", str(files["cert"]), "--ssl-certfile", str(files["cert"])),
            *("--ssl-keyfile", str(files["key"])),
        )
        time.sleep(5)
        nodes = [
            start(
                *(*there, "flower-supernode"),
                *("--root-certificates", str(files["cert"]), "--superlink", f"{address}:8000"),
                *("--host", "127.0.0.1", "--port", str(9200 + i)),
            )
            for i in range(case.clients)
        ]
        sizes = f"clients={case.clients} rounds={case.rounds} kilobytes={case.kilobytes}"
        (directory / "flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "bench"\n[superlink.bench]\naddress = "{address}:8000"\n'
            f'root-certificates = "{files["cert"]}"\n'
        )
        run = ["flwr", "run", str(app), "bench", "--stream", "--run-config"]
        start(*run, f"{sizes} tensors={case.tensors} {settings}".strip())
        yield Deployed(directory / "flower.log", server.pid, [n.pid for n in nodes])
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()
        log.close()


def flower(case: Any, directory: Path, venv: Path) -> tuple[list[float], float, float]:
    """Return seconds of the rounds but the first, and memory at most (sampled)."""
    peaks, ends = {"server": 0.0, "client": 0.0}, time.monotonic() + 900
    with deployed(case, directory, venv) as running:
        while time.monotonic() < ends:
            rounds = running.lines("TOOK")
            trees = [peak_mb(*tree(n)) for n in running.nodes]
            peaks["client"] = max(peaks["client"], *trees)
            peaks["server"] = max(peaks["server"], peak_mb(*tree(running.server)))
            if len(rounds) >= case.rounds:
                return [float(r[0]) for r in rounds[1:]], peaks["server"], peaks["client"]
            time.sleep(0.25)
        raise running.failed()
