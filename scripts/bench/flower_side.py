"""Flower for `rounds.py`: a SuperLink and N SuperNodes as processes, TLS on, no telemetry."""

import datetime as dt
import ipaddress
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from processes import children, peak_mb

APP = Path(__file__).parent / "flower_app"


def _certificate(directory: Path) -> dict[str, Path]:
    """Make a certificate for 127.0.0.1 that signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime.now(dt.UTC)
    addresses = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
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


def flower(case: Any, directory: Path, venv: Path) -> tuple[list[float], float, float]:
    """Return seconds of the rounds but the first, and memory at most (sampled)."""
    env, files = _environment(directory, venv), _certificate(directory)
    log = (directory / "flower.log").open("wb")
    started: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        started.append(process)
        return process

    try:
        server = start(
            "flower-superlink",
            "--disable-runtime-dependency-installation",
            *("--ssl-ca-certfile", str(files["cert"]), "--ssl-certfile", str(files["cert"])),
            *("--ssl-keyfile", str(files["key"])),
        )
        time.sleep(5)
        nodes = [
            start(
                "flower-supernode",
                *("--root-certificates", str(files["cert"]), "--superlink", "127.0.0.1:8000"),
                *("--host", "127.0.0.1", "--port", str(9200 + i)),
            )
            for i in range(case.clients)
        ]
        settings = f"clients={case.clients} rounds={case.rounds} kilobytes={case.kilobytes}"
        (directory / "flwr" / "config.toml").write_text(
            '[superlink]\ndefault = "bench"\n[superlink.bench]\naddress = "127.0.0.1:8000"\n'
            f'root-certificates = "{files["cert"]}"\n'
        )
        app = ["flwr", "run", str(APP), "bench", "--stream", "--run-config"]
        start(*app, f"{settings} tensors={case.tensors}")
        return _watch(case, directory / "flower.log", server.pid, [n.pid for n in nodes])
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()
        log.close()


def _watch(case: Any, log: Path, server: int, nodes: list[int]) -> tuple[list[float], float, float]:
    peaks, ends = {"server": 0.0, "client": 0.0}, time.monotonic() + 900
    while time.monotonic() < ends:
        lines = log.read_text(errors="replace").splitlines()
        seconds = [float(x.rpartition("ROUND ")[2]) for x in lines if "ROUND " in x]
        trees = [peak_mb(*_tree(n)) for n in nodes]
        peaks["client"] = max(peaks["client"], *trees)
        peaks["server"] = max(peaks["server"], peak_mb(*_tree(server)))
        if len(seconds) >= case.rounds:
            return seconds[1:], peaks["server"], peaks["client"]
        time.sleep(0.25)
    raise SystemExit("\n".join(log.read_text(errors="replace").splitlines()[-30:]))


def _tree(pid: int) -> list[int]:
    return [pid, *(p for child in children(pid) for p in _tree(child))]
