"""A federation of processes with refusals and kills, watched for whatever it gives away."""

import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import Request, urlopen

from fcil_protocol.envelopes.envelope import StoredEnvelope, read_envelope, unwrap_key
from fcil_protocol.ids import Digest
from fcil_protocol.process import control_socket
from fcil_protocol.trust.keys import PrivateKeys
from fcil_protocol.trust.ticket import Ticket
from fcil_server.aggregation.store import PartStore
from fcil_server.lab.local.federation import LocalFederation
from system.kit import open_ledger, settings, write_client
from system.needles import Needles

KEY_FILES = ("keys.json", "root.json", "server.json", "page.key")
SECRETS = ("curve", "signing", "sealing")  # of a key file; a root key has one of them


@dataclass
class Story:
    """What is left of the federation, and what was seen of it while it ran.

    Attributes:
        temporary: the directory for temporary files; nothing should be there.
        needles: every secret that there was.
        told: process -> its command line, environment and open files.
        held: worker, or the server's daemon -> names of secrets in its memory.
        ended: exit codes and words of clients that were to be refused.
    """

    directory: Path
    temporary: Path
    needles: Needles = field(default_factory=Needles)
    told: dict[str, bytes] = field(default_factory=dict)
    held: dict[str, list[str]] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)

    def files(self):
        """Return all files and directories, those with keys apart."""
        found = sorted((*self.directory.rglob("*"), *self.temporary.rglob("*")))
        keys = [p for p in found if p.name in KEY_FILES]
        return keys, [p for p in found if p not in keys and "images" not in p.parts]


def key_secrets(path):
    """Yield (name, secret) of a key file, and what a sealing seed is expanded to."""
    fields = json.loads(path.read_bytes())
    where = f"{path.parent.name}/{path.name}"
    for name in SECRETS:
        if name in fields:
            yield f"{where} {name}", base64.b64decode(fields[name])
    if "sealing" in fields:
        seed = hashlib.shake_256(base64.b64decode(fields["sealing"])).digest(96)
        yield f"{where} ML-KEM seed", seed[:64]
        yield f"{where} X-Wing's X25519", seed[64:]


def guest_secrets(ticket):
    yield "ticket", ticket.secret
    keys = ticket.guest_keys()
    yield from (("guest's curve", keys._curve), ("guest's signing", keys._signing))


# --- processes ------------------------------------------------------------------------------


def family(pid):
    """Yield a process and all its descendants."""
    yield pid
    with suppress(FileNotFoundError):
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in task.read_text().split():
                yield from family(int(child))


def pointed_at(fd):
    """Return where a descriptor of a running process leads; nothing if it was closed meanwhile."""
    try:
        return os.fsencode(os.readlink(fd))
    except FileNotFoundError:
        return b""


def memory(pid):
    """Yield what a process may write to, piece by piece, without what it never touched."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as mem:
        for line in maps:
            start, end = (int(n, 16) for n in line.split()[0].split("-"))
            if line.split()[1].startswith("rw") and "[v" not in line:
                with suppress(OSError, ValueError):
                    mem.seek(start)
                    piece = mem.read(end - start)
                    if piece.strip(b"\0"):
                        yield piece


def look(story, processes):
    """Take down what all processes show, and search the workers' memory."""
    for parent, process in processes.items():
        for pid in family(process.pid):
            proc = Path(f"/proc/{pid}")
            words = (proc / "cmdline").read_bytes()
            page = "page" if b"page.server" in words else "daemon"
            kind = "worker" if b"worker" in words else page
            name = f"{parent}'s {kind} {pid}"
            links = [link for fd in (proc / "fd").iterdir() if (link := pointed_at(fd))]
            story.told[name] = b"\0".join((words, (proc / "environ").read_bytes(), *links))
            if kind == "worker" or parent == "server":  # one daemon shows that the search works
                held = (story.needles.plain_in(piece) for piece in memory(pid))
                story.held[name] = sorted(set().union(*held))


# --- the story ------------------------------------------------------------------------------


def tell(directory, temporary, monkeypatch):
    """Run the federation to its end and return what can be searched."""
    monkeypatch.setenv("TMPDIR", str(temporary))
    story = Story(directory, temporary)
    folders = {
        n: write_client(directory / "images" / n, range(4), offset=12 * i)
        for i, n in enumerate("abcd")
    }
    # Nobody holds the second task's class at first, so the run waits for what is done to it.
    arguments = settings(tasks__classes=[["0", "1"], ["zebra"], ["2", "3"]])
    mask = os.umask(0)  # nothing of what is checked is the umask's merit
    try:
        with LocalFederation(directory) as federation:
            federation.serve("--until-done", "--page", "127.0.0.1:0", *arguments)
            let_a_browser_in(federation, story)
            ticket = enrol(federation, directory, story)
            federation.join("a", folders["a"])
            federation.join("b", folders["b"], "--ticket", str(ticket))
            federation.until("task_done", text="task 0")
            collect_keys(story)
            look(story, {"server": federation.server, **federation.clients})
            refuse(story, federation, folders)
            for name in "ab":
                write_client(folders[name], [4], names={4: "zebra"})
            federation.until("update")
            federation.kill_client("b")
            federation.kill_server()
            collect_content_keys(story)
            federation.serve("--until-done", *arguments)
            kill_worker(federation.clients["a"])
            federation.join("b", folders["b"])
            assert federation.server.wait(120) == 0, federation.last_words("server")
    finally:
        os.umask(mask)
    collect_keys(story)
    collect_content_keys(story)
    return story


def enrol(federation, directory, story):
    """Make a ticket and a file for it, as somebody would who hands it over."""
    command = ["enrol", "camera", "--dir", str(federation.federation)]
    done = subprocess.run(
        [sys.executable, "-m", "fcil_server", *command],
        env=federation.environment(), capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    text = done.stdout.strip()
    for name, secret in guest_secrets(Ticket.from_text(text)):
        story.needles.add(name, secret)
    path = directory / "images" / "ticket"
    path.write_text(text)
    return path


def let_a_browser_in(federation, story):
    """Enter the page as a browser does, and look at it."""
    url = control_socket.ask(federation.federation, "page_link")["url"]
    origin, _, token = url.partition("/enter#")
    headers = {"Content-Type": "application/json", "Origin": origin}
    body = json.dumps({"token": token}).encode()
    with urlopen(Request(f"{origin}/enter", body, headers), timeout=60) as answer:
        cookie = answer.headers["Set-Cookie"].partition(";")[0]
    with urlopen(Request(origin, headers={"Cookie": cookie}), timeout=60) as page:
        assert b"<main" in page.read()
    story.needles.add("page: a link's token", base64.urlsafe_b64decode(token + "="))
    story.needles.add("page: a session's cookie", cookie.partition("=")[2].encode())
    key = (federation.federation / "page.key").read_bytes()
    story.needles.add("page: page.key", key)


def refuse(story, federation, folders):
    """Clients whose key files are open to others, or cut, say so and end."""
    for name in "cd":
        federation.join(name, folders[name])
        federation.until("connected", text=f":{name}")
        federation.clients[name].send_signal(signal.SIGINT)
        assert federation.clients.pop(name).wait(60) == 0
    collect_keys(story)
    for name, damage in (("c", open_to_all), ("d", cut)):
        for path in (federation.directory / "state").rglob("client.json"):
            if json.loads(path.read_bytes())["data"] == str(folders[name]):
                damage(path.with_name("keys.json"))
        federation.join(name, folders[name])
        story.ended.append(federation.clients.pop(name).wait(60))


def open_to_all(path):
    path.chmod(0o644)


def cut(path):
    path.write_bytes(path.read_bytes()[:-40])


def kill_worker(daemon):
    for pid in family(daemon.pid):
        with suppress(FileNotFoundError):
            if b"worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


# --- secrets --------------------------------------------------------------------------------


def collect_keys(story):
    for path in story.directory.rglob("*.json"):
        with suppress(ValueError):  # one was cut on purpose, after its keys had been collected
            if path.name in KEY_FILES:
                for name, secret in key_secrets(path):
                    story.needles.add(name, secret)


def collect_content_keys(story):
    """Open every wrap that lies around, with the keys of whom it is for."""
    server = PrivateKeys.load(story.directory / "federation" / "keys" / "server.json")
    with open_ledger(LocalFederation(story.directory)) as ledger:
        run = ledger.runs.newest().run_id
        parts = PartStore(story.directory / "federation" / "runs" / run / "parts")
        for row in ledger.parts.all(run):
            header = StoredEnvelope.from_bytes(parts.get(Digest(row.digest))).header
            key = unwrap_key(row.wrapped, header, server)
            story.needles.add(f"content key of part {row.name}", key.value)
    for path in story.directory.glob("state/fcil/*/*/outbox/*.update"):
        sealed = read_envelope(path)
        key = unwrap_key(sealed.wrap, sealed.header, server)
        story.needles.add(f"content key of {path.name}", key.value)
