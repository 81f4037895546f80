"""The secrets of the newest masked round, and a record of the use that was made of them.

``masks.json`` in the client's directory (0600). It is on disk before anything that depends on it
can leave the device: a mask hides one vector, a client signs one set of survivors, and of two sums
that differ by one client the difference is that client's update.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fcil_adapters.masks.shares import RoundSecrets
from fcil_protocol.errors import CorruptFile, TrustError
from fcil_protocol.ids import RoundKey
from fcil_protocol.storage.atomic_files import storage_errors, write_atomic
from fcil_protocol.trust.keys import PrivateKeys

NAME = "masks.json"
HIDDEN_NAME = "masked.safetensors"  # the upload that the newest masks hide
SIGNER_NAME = "mask-keys.json"  # replaced keys that the round's list has
MOST_RUNS = 100  # that are remembered, the newest ones


@dataclass(frozen=True)
class RunNotes:
    """The masked rounds of one run.

    Attributes:
        newest: task and cycle of the newest one.
        summed: what can be summed once -> task and cycle of the masked round that it was hidden in.
    """

    newest: tuple[int, int]
    summed: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class MaskNotes:
    """The newest masked round.

    Attributes:
        run, task, cycle: which one it is.
        terms: digest of the run's terms, with the fewest clients of a sum and its noise.
        mask, own, letters: seeds of its secrets (hex); empty once they are erased.
        members: digest of the list that shares were made for; empty: none yet.
        delivered: digest of the letters, and of the set of clients that have sent shares.
        masked: digest of the upload that the masks hide.
        about: digest of all that it is about.
        survivors: digest of the set that was signed, and that shares are given for.
    """

    run: str
    task: int
    cycle: int
    mask: str = field(repr=False)
    own: str = field(repr=False)
    letters: str = field(repr=False)
    terms: str = ""
    members: str = ""
    delivered: str = ""
    masked: str = ""
    about: str = ""
    survivors: str = ""

    @property
    def secrets(self) -> RoundSecrets:
        """The secrets."""
        return RoundSecrets(*(bytes.fromhex(text) for text in (self.mask, self.own, self.letters)))


class MaskFile:
    """The file with a client's `MaskNotes`; each change is on disk when its method returns.

    Attributes:
        lock: held around several calls that belong together; threads of one client may work on two
            rounds, of which one was abandoned.
    """

    def __init__(self, directory: Path) -> None:
        self.lock = threading.RLock()
        self._path = directory / NAME
        self._hidden = directory / HIDDEN_NAME
        self._signer = directory / SIGNER_NAME
        self._known: tuple[MaskNotes | None, dict[str, RunNotes]] | None = None

    def begin(self, key: RoundKey) -> RoundSecrets:
        """Return the secrets of a masked round, drawn at the first call for it.

        Args:
            key: of the round of keys; its number is that of the masked round.

        Raises:
            TrustError: a later one has begun, so the secrets of this one are gone.
        """
        with self.lock:
            notes, runs = self._read()
            this = (key.task, key.round)
            before = runs.get(key.run)
            if before is not None and before.newest >= this:
                if notes is None or (notes.run, notes.task, notes.cycle) != (key.run, *this):
                    raise _over(key.task, key.round)
                return _secrets(notes)
            drawn = RoundSecrets.draw()
            texts = (drawn.mask.hex(), drawn.own.hex(), drawn.letters.hex())
            runs = {run: of for run, of in runs.items() if run != key.run}
            runs[key.run] = RunNotes(this, {} if before is None else before.summed)
            runs = dict(list(runs.items())[-MOST_RUNS:])
            self._drop_signer()
            self._write(MaskNotes(key.run, key.task, key.round, *texts), runs)
            return drawn

    def of(self, run: str, task: int, cycle: int) -> RoundSecrets:
        """Return the secrets of the newest masked round, which must be this one.

        Raises:
            TrustError: it is another one.
        """
        with self.lock:
            notes, _ = self._read()
            if notes is None or (notes.run, notes.task, notes.cycle) != (run, task, cycle):
                raise _over(task, cycle)
            return _secrets(notes)

    def erase(self) -> None:
        """Erase the secrets of a masked round that is over, and the upload that they hide."""
        with self.lock:
            notes, runs = self._read()
            if notes is not None and notes.mask:
                self._write(replace(notes, mask="", own="", letters=""), runs)
            with storage_errors("remove", self._hidden):
                self._hidden.unlink(missing_ok=True)
            self._drop_signer()

    def keep_signer(self, keys: PrivateKeys) -> None:
        """Keep the keys that a list of clients has, before the client replaces them.

        Not if the notes are damaged: then it takes no part in masked rounds.

        Raises:
            DiskFull, StorageError: they cannot be kept.
        """
        with self.lock, contextlib.suppress(CorruptFile):
            notes, _ = self._read()
            if notes is not None and notes.mask and not self._signer.exists():
                keys.save(self._signer)

    def signer(self, public: bytes, keys: PrivateKeys) -> PrivateKeys:
        """Return the keys that sign in the masked round under way.

        Args:
            public: the signing key of this client in the round's list.
            keys: the client's own, newer than that if they were replaced meanwhile.

        Raises:
            KeyFileError, StorageError: the kept ones cannot be read.
        """
        if public == keys.public.signing or not self._signer.exists():
            return keys
        return PrivateKeys.load(self._signer)

    def _drop_signer(self) -> None:
        with storage_errors("remove", self._signer):
            self._signer.unlink(missing_ok=True)

    def check_unused(self, run: str, cycle: tuple[int, int], once: Collection[str]) -> None:
        """Check that nothing of this was hidden in another masked round of the run.

        Its sum may have been opened, and two sums that differ by one client show its part.

        Args:
            run: id of the run.
            cycle: task and number of the masked round under way.
            once: names of what can be summed once.

        Raises:
            TrustError: something was.
        """
        with self.lock:
            _, runs = self._read()
            before = runs[run].summed if run in runs else {}
            if any(before.get(name, cycle) != cycle for name in once):
                raise TrustError(
                    "masked round: images of these classes are in a sum of this run already, and "
                    "of two sums that differ by one client the difference is its update.",
                    action="Nothing was sent. The client takes part again in the next task.",
                )

    def settle_terms(self, digest: str) -> None:
        """Note the terms of the masked round.

        Raises:
            TrustError: it began with others: noise of many would hide a sum of few.
        """
        self._settle("terms", digest, "the run had other terms when this masked round began")

    def settle_members(self, digest: str) -> None:
        """Note the list of clients that shares are made for.

        Raises:
            TrustError: they were made for another list.
        """
        self._settle("members", digest, "shares were made for another list of clients")

    def settle_delivered(self, digest: str) -> None:
        """Note the letters that masks and shares come from.

        Raises:
            TrustError: others were used before.
        """
        self._settle("delivered", digest, "another set of clients or letters was shown before")

    def kept(self, about: str) -> bytes | None:
        """Return the upload that the masks hide, to be sent again; None: there is none yet.

        Args:
            about: digest of all that it is to be about.

        Raises:
            TrustError: it is about something else.
            CorruptFile, StorageError: it is gone or damaged, or cannot be read.
        """
        with self.lock:
            notes, _ = self._read()
            if notes is None or not notes.masked:
                return None
            self.check_about(about)
            with storage_errors("read", self._hidden):
                data = self._hidden.read_bytes() if self._hidden.exists() else b""
            if hashlib.sha256(data).hexdigest() != notes.masked:
                raise CorruptFile(
                    f"{self._hidden} is damaged, and its masks can hide nothing else.",
                    action="Tell the operator: a sum of a statistic waits for this client until "
                    "fcil-server close-round gives it up. It takes part in later masked rounds.",
                )
            return data

    def check_about(self, about: str) -> None:
        """Check that what a server says the sums are about is what this client's are about.

        Raises:
            TrustError: they are about something else.
        """
        with self.lock:
            notes, _ = self._read()
            if notes is not None and notes.about and notes.about != about:
                raise _refused("the server showed another model, round or class ids before")

    def settle_masked(self, upload: bytes, about: str, once: Collection[str] = ()) -> None:
        """Keep the upload that the masks hide, and note it, before it can leave.

        Args:
            upload: its bytes.
            about: digest of all that it is about.
            once: names of what it holds and may be summed once in a run.

        Raises:
            TrustError: they hide another one; some of it was in another sum; or the set of
                survivors was signed before, so that shares may have been given.
        """
        with self.lock:
            notes, runs = self._read()
            assert notes is not None, "begin or of comes first"
            this = (notes.task, notes.cycle)
            self.check_unused(notes.run, this, once)
            if notes.survivors and not notes.masked:
                raise _refused("it was voted or unmasked before this client was asked for its sums")
            digest = hashlib.sha256(upload).hexdigest()
            if notes.masked and (notes.masked, notes.about) != (digest, about):
                raise _refused("another update was hidden with the same masks")
            write_atomic(self._hidden, upload)
            of = runs[notes.run]
            summed = {**of.summed, **dict.fromkeys(once, this)}
            runs = {**runs, notes.run: replace(of, summed=summed)}
            self._write(replace(notes, masked=digest, about=about), runs)

    def settle_survivors(self, digest: str) -> None:
        """Note the set of clients that is signed, before it is.

        Raises:
            TrustError: another one was signed.
        """
        self._settle("survivors", digest, "another set of clients was signed or opened")

    def _settle(self, name: str, value: str, other: str) -> None:
        """Set a field once; a second, different value is refused."""
        with self.lock:
            notes, runs = self._read()
            assert notes is not None, "begin or of comes first"
            before = getattr(notes, name)
            if before and before != value:
                raise _refused(other)
            if not before:
                changed: dict[str, Any] = {name: value}
                self._write(replace(notes, **changed), runs)

    def _read(self) -> tuple[MaskNotes | None, dict[str, RunNotes]]:
        if self._known is not None:
            return self._known
        with storage_errors("read", self._path):
            data = self._path.read_bytes() if self._path.exists() else None
        if data is None:
            return None, {}
        try:
            fields: dict[str, Any] = json.loads(data)
            notes = MaskNotes(**fields["newest"])
            _ = notes.secrets
            runs = {
                str(run): RunNotes(
                    _pair(of["newest"]), {str(k): _pair(v) for k, v in of["summed"].items()}
                )
                for run, of in fields["runs"].items()
            }
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise CorruptFile(
                f"{self._path} is damaged ({type(error).__name__}).",
                action="Do not restore it from a backup: masks that were used since would be used "
                "again. Remove it when this run is over; until then this client takes no part in "
                "masked rounds.",
            ) from error
        self._known = (notes, runs)
        return self._known

    def _write(self, notes: MaskNotes, runs: dict[str, RunNotes]) -> None:
        fields = {"newest": asdict(notes), "runs": {run: asdict(of) for run, of in runs.items()}}
        write_atomic(self._path, json.dumps(fields, indent=1).encode())
        self._known = (notes, runs)


def _refused(why: str) -> TrustError:
    return TrustError(
        f"masked round: {why}.",
        action="The server asks for more than the protocol allows, or was restored from a "
        "backup: ask its operator.",
    )


def _pair(numbers: list[int]) -> tuple[int, int]:
    task, cycle = numbers
    return int(task), int(cycle)


def _secrets(notes: MaskNotes) -> RoundSecrets:
    if not notes.mask:
        raise _over(notes.task, notes.cycle)
    return notes.secrets


def _over(task: int, cycle: int) -> TrustError:
    return TrustError(
        f"this client has no secrets of the masked round {cycle} of task {task}: it took no part "
        "in it, or it is over.",
        action="Nothing to do: it takes part in the next one.",
    )
