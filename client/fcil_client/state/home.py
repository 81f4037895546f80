"""A client's persistent files: keys, enrolment, outbox, parts, state.

One directory per (federation, data folder), or slot of a partition of it::

    <state home>/fcil/<federation>/<digest of the data path>[-<partition>-<slot>]/
        lock  control.sock  salt
        client.json            the client's identity in this federation (0600)
        left.json              the same, once the client has left
        keys.json              private keys (0600); keys.next.json until a ticket is used
        outbox/<digest>.update sealed updates that the server has not acknowledged
        parts/<digest>.part    sealed parts of broadcasts
        model.json  model/     the current model, for predict and export (`current_model`)
        incoming/              parts that are still arriving
        state.safetensors      the method's state after the last counted update
        provisional/<digest>.safetensors  states whose updates are not counted yet
        egress.jsonl           data that left, one line per event (0600); full ones are numbered
        privacy.jsonl          what was spent of the images' privacy (0600)
        masks.json             secrets of the newest masked round (0600)
        masked.safetensors     the upload that its masks hide (0600)
        peers.lock             held while peers.json changes
        peers.json             the other clients of masked rounds, and which are pinned (0600)
        worker.log             what the worker and the method print
        manifest.json          the images, and the permanent side of each
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import platformdirs

from fcil_adapters.images import named_sets
from fcil_protocol.errors import CorruptFile, StorageError, WireError
from fcil_protocol.ids import ClientId, FederationId, is_client_id
from fcil_protocol.payloads.payload import Payload, pieces, unpack
from fcil_protocol.process.terminal import command
from fcil_protocol.storage.atomic_files import make_private, storage_errors, write_atomic

SALT_BYTES = 16
FOLDERS = ("outbox", "parts", "incoming", "provisional")
FORMER = "left.json"  # identity of a former client, next to the journal that it leaves behind


def state_home() -> Path:
    """Return the user's state directory for fcil (``XDG_STATE_HOME`` moves it)."""
    return Path(platformdirs.user_state_dir("fcil", appauthor=False))


def client_command(verb: str, data: Path | str, *words: str, seat: str = "") -> str:
    """Return the command about the client of a data folder, for its owner to copy.

    Args:
        verb: of ``fcil-client``.
        data: the folder, or what else `--data` takes.
        words: further ones; capital letters are for the owner to replace.
        seat: its seat among clients that share the folder; empty: it is alone.
    """
    number = seat.rpartition("-")[2]
    slot = ["--slot", str(int(number))] if number.isdecimal() else []
    partition = ["--partition", "FILE"] if slot and verb == "join" else []
    return command("fcil-client", verb, "--data", data, *partition, *slot, *words)


def data_digest(data: Path, seat: str = "") -> str:
    """Return the name that a data folder gives to its client directory.

    Args:
        data: the folder, or what else `--data` takes.
        seat: its seat among clients that share it (`partition_file.seat`); empty: it is alone.
    """
    digest = hashlib.sha256(os.fsencode(named_sets.located(data).resolve())).hexdigest()[:16]
    return f"{digest}-{seat}" if seat else digest


@dataclass(frozen=True)
class Enrolment:
    """A client's record of its enrolment.

    Attributes:
        certificate: hex of the server's root-signed certificate, as given at enrolment.
        addresses: HOST:PORT of the server; if one does not answer, the next one is tried.
        ticket: digest of the ticket that it enrolled with; empty without one.
        link_key: hex of the CURVE key of the relay that it connects to; empty: the server's.
    """

    client_id: ClientId
    name: str
    federation: FederationId
    certificate: str
    addresses: tuple[str, ...]
    data: str
    ticket: str = ""
    link_key: str = ""


class Home:
    """Access to one client directory; every write is atomic."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._folders = {name: directory / name for name in FOLDERS}

    @classmethod
    def of(cls, federation: FederationId, data: Path, seat: str = "") -> Home:
        """Return the home of a federation's client for a data folder, created if necessary."""
        home = cls(state_home() / federation / data_digest(data, seat))
        home.make()
        return home

    @classmethod
    def known(cls, data: Path, seat: str | None = "") -> list[Home]:
        """Return the homes of all federations that this data folder is enrolled with.

        Args:
            data: the folder or zip file.
            seat: the seat among clients that share it; None: all of them.
        """
        names = [data_digest(data, seat or "")] + [data_digest(data, "*")] * (seat is None)
        found = {path.parent for n in names for path in state_home().glob(f"*/{n}/client.json")}
        return [cls(directory) for directory in sorted(found)]

    def command(self, verb: str, *words: str) -> str:
        """Return the command about this client; ``FOLDER`` where its enrolment cannot be read."""
        enrolment = None
        with contextlib.suppress(CorruptFile, StorageError):  # what reads it next reports it
            enrolment = self.enrolment()
        data = enrolment.data if enrolment else "FOLDER"
        return client_command(verb, data, *words, seat=self.seat)

    @property
    def seat(self) -> str:
        """Its seat among the clients that share the data; empty: it has all of it."""
        return self.directory.name.partition("-")[2]

    @classmethod
    def all(cls) -> list[Home]:
        """Return every client home of this user."""
        return [cls(path.parent) for path in sorted(state_home().glob("*/*/client.json"))]

    @classmethod
    def with_journal(cls, data: Path | None) -> list[Home]:
        """Return homes, of one data folder or all, whose client is or was a member."""
        digest = "*" if data is None else f"{data_digest(data)}*"
        names = ("client.json", FORMER, "egress*.jsonl")
        found = {p.parent for n in names for p in state_home().glob(f"*/{digest}/{n}")}
        return [cls(directory) for directory in sorted(found)]

    def make(self) -> None:
        """Create the directories, readable by this user alone."""
        with storage_errors("create the client directory", self.directory):
            make_private(self.directory)
            for name in FOLDERS:
                (self.directory / name).mkdir(mode=0o700, exist_ok=True)

    def _folder(self, name: str) -> Path:
        """Return one of the folders; recreate it if it was removed under a running client."""
        folder = self._folders[name]
        # If that fails, the writer into the folder gets the error, and reports it.
        with contextlib.suppress(OSError):
            os.mkdir(folder, 0o700)  # noqa: PTH102  ten times a round: a path object is slow
        return folder

    # --- identity ---------------------------------------------------------------------------

    @property
    def keys_path(self) -> Path:
        """Private keys, 0600."""
        return self.directory / "keys.json"

    @property
    def next_keys_path(self) -> Path:
        """Private keys that their member is reporting to the server, 0600."""
        return self.directory / "keys.next.json"

    def ticket_keys_path(self, digest: str) -> Path:
        """Private keys that are sent with the ticket of this digest, 0600."""
        return self.directory / f"keys.ticket-{digest[:16]}.json"

    def take_keys(self, path: Path, *, keep_state: bool = False) -> None:
        """Begin to use keys that the server accepted; everything signed by the old ones is dropped.

        Args:
            path: their file; if it is gone, they are in use already.
            keep_state: they belong to the same member; else the learned state is dropped too.
        """
        if path.exists():
            if keep_state:
                for digest in self.outbox():
                    self.drop_outgoing(digest)
                self.prune_parts(set())  # they are sealed for the old keys
            else:
                self.reset_state()
                self.drop_model()
            with storage_errors("replace the keys", self.keys_path):
                path.replace(self.keys_path)
            for other in self.directory.glob("keys.*.json"):  # of tickets that failed
                _remove(other)

    def enrolment(self) -> Enrolment | None:
        """Return the client's enrolment, or None before the enrolment.

        Raises:
            CorruptFile: the file exists and cannot be read.
        """
        return self._enrolment(self.directory / "client.json")

    def former_enrolment(self) -> Enrolment | None:
        """Return the enrolment of a client that has left, if recorded."""
        with contextlib.suppress(CorruptFile):
            return self._enrolment(self.directory / FORMER)
        return None

    def _enrolment(self, path: Path) -> Enrolment | None:
        with storage_errors("read", path):
            data = path.read_bytes() if path.exists() else None
        if data is None:
            return None
        try:
            fields = json.loads(data)
            fields["addresses"] = tuple(fields["addresses"])
            enrolment = Enrolment(**fields)
            if not is_client_id(enrolment.client_id):
                raise ValueError("client_id")
            bytes.fromhex(enrolment.link_key)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CorruptFile(
                f"{path} is damaged ({error}).",
                action="Restore it from a backup, or remove it and keys.json next to it and join "
                "again as a new client; the journal of what left the device stays.",
            ) from error
        return enrolment

    def note_leaving(self) -> None:
        """Keep the enrolment for the journal that stays behind."""
        path = self.directory / "client.json"
        if path.exists():
            with storage_errors("read", path):
                write_atomic(self.directory / FORMER, path.read_bytes())

    def save_enrolment(self, enrolment: Enrolment) -> None:
        """Store the enrolment."""
        text = json.dumps(asdict(enrolment), indent=1)
        write_atomic(self.directory / "client.json", text.encode())

    def keep_certificate(self, enrolment: Enrolment, certificate: bytes) -> Enrolment:
        """Store the server's newest certificate: an older one is refused from then on."""
        if enrolment.certificate == certificate.hex():
            return enrolment
        enrolment = replace(enrolment, certificate=certificate.hex())
        self.save_enrolment(enrolment)
        return enrolment

    def salt(self) -> bytes:
        """Return the bytes that fix this client's split of its images, drawn once.

        Raises:
            CorruptFile: the file is damaged, or gone although images were split by it.
        """
        # Another salt means another split: test images would be trained on.
        path = self.directory / "salt"
        with storage_errors("read", path):
            data = path.read_bytes() if path.exists() else None
        if data is None:
            return self._draw_salt(path)
        salt, check = data[:SALT_BYTES], data[SALT_BYTES:]
        # Salts of earlier versions have no checksum after them.
        if len(salt) != SALT_BYTES or check not in (b"", _salt_check(salt)):
            expected = SALT_BYTES + len(_salt_check(b""))
            got = "others" if len(data) == expected else f"{len(data)}"
            raise CorruptFile(
                f"{path} is damaged: expected {expected} bytes that are consistent, got {got}.",
                action=f"Restore it from a backup. Without one, leave ({self.command('leave')}) "
                "and join again as a new client; the journal of what left the device stays.",
            )
        return salt

    def _draw_salt(self, path: Path) -> bytes:
        manifest = self.directory / "manifest.json"
        with storage_errors("read", manifest):
            split_before = manifest.exists()
        if split_before:
            raise CorruptFile(
                f"{path} is gone: expected the salt that {manifest} was made with, got none.",
                action="Restore it from a backup. Without one, remove manifest.json: the images "
                "are split again, and images that were kept for tests are then used for training.",
            )
        salt = os.urandom(SALT_BYTES)
        write_atomic(path, salt + _salt_check(salt))
        return salt

    # --- transfers in progress --------------------------------------------------------------

    def outbox_path(self, digest: str) -> Path:
        """Return the sealed update's file."""
        return self._folder("outbox") / f"{digest}.update"

    def outbox(self) -> list[str]:
        """Return the digests of the updates that the server has not acknowledged."""
        return sorted(p.stem for p in (self.directory / "outbox").glob("*.update"))

    def drop_notes(self) -> None:
        """Remove the notes that earlier versions wrote next to each update."""
        for path in (self.directory / "outbox").glob("*.json"):
            _remove(path)

    def drop_outgoing(self, digest: str) -> None:
        """Remove an update."""
        _remove(self.outbox_path(digest))

    def part_path(self, digest: str) -> Path:
        """Return the sealed part's file."""
        return self._folder("parts") / f"{digest}.part"

    def incoming_path(self, digest: str) -> Path:
        """Return the file in which a large part is assembled."""
        return self._folder("incoming") / digest

    def prune_parts(self, keep: set[str]) -> None:
        """Remove parts, complete or still arriving, that the state of the run no longer names."""
        for name in ("parts", "incoming"):
            for path in (self.directory / name).glob("*"):
                if path.stem not in keep:
                    _remove(path)

    # --- the current model ------------------------------------------------------------------

    @property
    def model_path(self) -> Path:
        """File of the current model's record."""
        return self.directory / "model.json"

    @property
    def model_folder(self) -> Path:
        """Folder of its sealed parts."""
        return self.directory / "model"

    def drop_model(self) -> None:
        """Remove the current model: it was another member's."""
        _remove(self.model_path)
        for path in self.model_folder.glob("*"):
            _remove(path)

    # --- the method's state -----------------------------------------------------------------

    def state(self) -> Payload:
        """Return the state after the last counted update; empty before the first.

        Raises:
            CorruptFile: the file's content is no state.
            StorageError: the system cannot read it now.
        """
        path = self.directory / "state.safetensors"
        with storage_errors("read", path):
            data = path.read_bytes() if path.exists() else None
        if data is None:
            return Payload()
        try:
            return unpack(data)
        except WireError as error:
            raise CorruptFile(
                f"{path} is damaged: {error}.",
                action="Remove it: the client starts with an empty state, and counts unlabelled "
                "images again if it offers any.",
            ) from error

    def enter_run(self, run: str) -> bool:
        """Record the run that the state belongs to; True, and all else forgotten, if it is new."""
        path = self.directory / "run"
        with storage_errors("read", path):
            if path.exists() and path.read_bytes() == run.encode():
                return False
        self.reset_state()
        write_atomic(path, run.encode())
        return True

    def reset_state(self) -> None:
        """Forget everything learned for a run that is no longer the server's."""
        _remove(self.directory / "state.safetensors")
        self.prune_provisional(set())
        for digest in self.outbox():
            self.drop_outgoing(digest)
        self.prune_parts(set())

    def save_provisional(self, digest: str, state: Payload) -> None:
        """Keep the state that came with an update until the server's verdict."""
        write_atomic(self._folder("provisional") / f"{digest}.safetensors", *pieces(state))

    def prune_provisional(self, keep: set[str]) -> None:
        """Remove provisional states whose updates are gone and get no verdict."""
        for path in (self.directory / "provisional").glob("*"):
            if path.stem not in keep:
                _remove(path)

    def settle_provisional(self, digest: str, *, counted: bool) -> bool:
        """Make a provisional state the current one, or discard it; False if there was none."""
        path = self.directory / "provisional" / f"{digest}.safetensors"
        if not path.exists():
            return False
        if counted:
            with storage_errors("keep the client's state", path):
                path.replace(self.directory / "state.safetensors")
        _remove(path)
        return True


def _salt_check(salt: bytes) -> bytes:
    """Return the checksum that follows the salt in its file."""
    return hashlib.sha256(b"fcil/1/salt-file\0" + salt).digest()[:8]


def _remove(path: Path) -> None:
    with storage_errors("remove", path):
        path.unlink(missing_ok=True)


def find_data(data: str) -> Path:
    """Return the path of the images that ``--data`` means.

    Raises:
        DataError: there are none; with the expected layout.
    """
    return named_sets.find(Path(data))
