"""The server's memory: one SQLite file in the federation directory.

`Ledger` is the whole of it; its tables live in four modules: here clients, runs, states and
parts; in `ledger.tickets` tickets; in `ledger.history` what was learned; in `ledger.byte_counts`
what it cost. `ledger.fork` begins a run with another one's history, `ledger.forget` takes
somebody out. Rows are the dataclasses of `ledger.rows`, in the words of `ledger.enums`. After a
kill at any moment, `Ledger.open_round` and `Ledger.accepted` say where to go on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fcil_protocol.errors import UsageError
from fcil_protocol.ids import ClientId, Digest, RoundKey, RunId
from fcil_protocol.trust.keys import PublicKeys
from fcil_server.ledger.byte_counts import AccountTables
from fcil_server.ledger.database import LEDGER_NAME
from fcil_server.ledger.enums import OPENING, Role, RunStatus
from fcil_server.ledger.forget import ForgetTables
from fcil_server.ledger.fork import ForkTables
from fcil_server.ledger.history import HistoryTables
from fcil_server.ledger.rows import Client, PartRow, Run, StateRow
from fcil_server.ledger.tickets import TrustTables

__all__ = ["LEDGER_NAME", "Ledger", "run_named"]


class Ledger(HistoryTables, AccountTables, TrustTables, ForkTables, ForgetTables):
    """Everything the server must know after a restart. See `LedgerFile` for how it is opened."""

    # Clients.

    def add_client(
        self,
        client_id: ClientId,
        name: str,
        *,
        curve: bytes,
        signing: bytes,
        sealing: bytes,
        not_after: float | None = None,
        device: str = "",
        role: Role = Role.CLIENT,
        via: ClientId | None = None,
    ) -> None:
        """Enrol a client with its public keys.

        Raises:
            UsageError: the name or the key belongs to another client, or to an erased one.
        """
        with self.transaction():
            self.refuse_erased_key(curve)
            self.refuse_taken(name)
            holder = self.client_by_curve(curve)
            if holder is not None:
                raise UsageError(
                    f"this key belongs to the enrolled client {holder.name!r}.",
                    action="Let every device make its own keys; do not copy state directories.",
                )
            self._insert(
                "clients",
                {
                    "client_id": client_id,
                    "name": name,
                    "curve": curve,
                    "signing": signing,
                    "sealing": sealing,
                    "enrolled_at": self.now,
                    "not_after": not_after,
                    "device": device,
                    "role": role.value,
                    "via": via,
                },
            )

    def client(self, client_id: ClientId) -> Client | None:
        """Return one client, revoked ones too."""
        return self._one(Client, "SELECT * FROM clients WHERE client_id = ?", (client_id,))

    def client_by_curve(self, key: bytes) -> Client | None:
        """Return the client that a 32-byte CURVE public key belongs to, revoked ones too."""
        sql = "SELECT * FROM clients WHERE curve = ? AND length(curve) > 0"
        return self._one(Client, sql, (key,))

    def client_by_name(self, name: str) -> Client | None:
        """Return the client that bears the name now; a revoked one has given it free."""
        sql = "SELECT * FROM clients WHERE name = ? AND revoked_at IS NULL"
        return self._one(Client, sql, (name,))

    def refuse_taken(self, name: str) -> None:
        """Refuse a name for somebody new that a client bears.

        Raises:
            UsageError: one is called so.
        """
        if self.client_by_name(name) is not None:
            raise UsageError(
                f"a client named {name!r} is enrolled.",
                action="Choose another name, or revoke that client first.",
            )

    def clients(self) -> list[Client]:
        """Return all clients in the order of their enrolment."""
        return self._all(Client, "SELECT * FROM clients ORDER BY enrolled_at, rowid")

    def free_name(self, wanted: str) -> str:
        """Return ``wanted``, or ``wanted-2``, ``wanted-3`` ... if a client bears it."""
        name, number = wanted, 1
        while self.client_by_name(name) is not None:
            number += 1
            name = f"{wanted}-{number}"
        return name

    def touch(self, client_id: ClientId, *, device: str | None = None) -> None:
        """Note that a client, if it is not erased, was seen now, and the device text it gave."""
        self._write(
            "UPDATE clients SET last_seen = ?, device = ifnull(?, device) "
            "WHERE client_id = ? AND length(curve) > 0",
            (self.now, device, client_id),
            durable=False,
        )

    def touch_all(self, clients: Sequence[ClientId]) -> None:
        """Note that these clients are connected now; losing the last note costs seconds only."""
        self._write(
            "UPDATE clients SET last_seen = ? "
            "WHERE client_id IN (SELECT value FROM json_each(?)) AND length(curve) > 0",
            (self.now, json.dumps(list(clients))),
            durable=False,
        )

    def revoke_client(self, client_id: ClientId, why: str = "") -> None:
        """Bar a client from now on; the first revocation's time and reason stay."""
        self._write(
            "UPDATE clients SET revoked_at = ?, revoked_why = ? "
            "WHERE client_id = ? AND revoked_at IS NULL",
            (self.now, why, client_id),
        )

    def replace_keys(self, client_id: ClientId, keys: PublicKeys) -> None:
        """Take over a client's new public keys."""
        self._write(
            "UPDATE clients SET curve = ?, signing = ?, sealing = ? WHERE client_id = ?",
            (keys.curve, keys.signing, keys.sealing, client_id),
        )

    # Runs.

    def new_run(
        self,
        run_id: RunId,
        *,
        method: str,
        method_version: str,
        config: str,
        hparams: Mapping[str, Any],
        backbone: Mapping[str, Any],
        schema_digest: str,
        seed: int,
        environment: Mapping[str, Any] | None = None,
        parent: tuple[RunId, int] | None = None,
    ) -> Run:
        """Start a run.

        ``config`` is the TOML text that it runs with; ``hparams``, ``backbone`` and
        ``environment`` are JSON objects; ``parent`` is the run and state it was forked from.
        """
        parent_run, parent_state = parent or (None, None)
        self._insert(
            "runs",
            {
                "run_id": run_id,
                "created_at": self.now,
                "method": method,
                "method_version": method_version,
                "config": config,
                "hparams": json.dumps(dict(hparams), allow_nan=False),
                "backbone": json.dumps(dict(backbone), allow_nan=False),
                "schema_digest": schema_digest,
                "seed": seed,
                "status": RunStatus.RUNNING,
                "parent_run": parent_run,
                "parent_state": parent_state,
                "environment": json.dumps(dict(environment or {}), allow_nan=False),
            },
        )
        row = self.run(run_id)
        assert row is not None, "the run was just written"
        return row

    def run(self, run_id: RunId) -> Run | None:
        """Return one run."""
        return self._one(Run, "SELECT * FROM runs WHERE run_id = ?", (run_id,))

    def runs(self) -> list[Run]:
        """Return all runs, oldest first."""
        return self._all(Run, "SELECT * FROM runs ORDER BY rowid")

    def newest_run(self) -> Run | None:
        """Return the run that was started last, whatever the clock said then and since."""
        return self._one(Run, "SELECT * FROM runs ORDER BY rowid DESC LIMIT 1")

    def set_run_status(self, run_id: RunId, status: RunStatus) -> None:
        """Say where a run stands."""
        self._write("UPDATE runs SET status = ? WHERE run_id = ?", (status.value, run_id))

    # States and parts.

    def add_state(self, key: RoundKey, state: int, digest: Digest, parent: Digest | None) -> None:
        """Record a state that `StateStore.save` has put on disk; ``key`` is what made it."""
        self._insert(
            "states",
            {
                **key._asdict(),
                "state": state,
                "digest": digest,
                "parent": parent,
                "created_at": self.now,
            },
        )

    def states(self, run: RunId) -> list[StateRow]:
        """Return the run's committed states in order, pruned files too."""
        return self._all(StateRow, "SELECT * FROM states WHERE run = ? ORDER BY state", (run,))

    def newest_state(self, run: RunId) -> StateRow | None:
        """Return the state that was committed last."""
        sql = "SELECT * FROM states WHERE run = ? ORDER BY state DESC LIMIT 1"
        return self._one(StateRow, sql, (run,))

    def newest_combined(self, run: RunId) -> StateRow | None:
        """Return the state that was last made of a round's updates."""
        sql = "SELECT * FROM states WHERE run = ? AND kind <> ? ORDER BY state DESC LIMIT 1"
        return self._one(StateRow, sql, (run, OPENING))

    def add_part(
        self,
        run: RunId,
        name: str,
        *,
        plain_digest: Digest,
        digest: Digest,
        file: str,
        plain_bytes: int,
        sealed_bytes: int,
        wrapped: bytes,
    ) -> None:
        """Record a sealed part whose file was written.

        It may be lost in a power cut, like the file: the part is then sealed anew.
        """
        self._insert(
            "parts",
            {
                "run": run,
                "name": name,
                "plain_digest": plain_digest,
                "digest": digest,
                "file": file,
                "plain_bytes": plain_bytes,
                "sealed_bytes": sealed_bytes,
                "wrapped": wrapped,
                "created_at": self.now,
            },
            durable=False,
        )

    def part(self, run: RunId, digest: Digest) -> PartRow | None:
        """Return a part by the digest that clients ask for."""
        return self._one(PartRow, "SELECT * FROM parts WHERE run = ? AND digest = ?", (run, digest))

    def part_by_plain(self, run: RunId, name: str, plain_digest: Digest) -> PartRow | None:
        """Return the part that already holds this content, so that it is sealed once."""
        sql = "SELECT * FROM parts WHERE run = ? AND name = ? AND plain_digest = ?"
        return self._one(PartRow, sql, (run, name, plain_digest))

    def parts(self, run: RunId) -> list[PartRow]:
        """Return the run's parts in the order in which they were sealed."""
        sql = "SELECT * FROM parts WHERE run = ? ORDER BY rowid"
        return self._all(PartRow, sql, (run,))

    def remove_part(self, run: RunId, digest: Digest) -> None:
        """Forget a part that no client needs any more; its file is the caller's to remove."""
        sql = "DELETE FROM parts WHERE run = ? AND digest = ?"
        self._write(sql, (run, digest), durable=False)


def run_named(ledger: Ledger, run: str | None) -> Run:
    """Return the run that a command means: the newest, or the one with this id or prefix.

    Raises:
        UsageError: there is none, or the prefix fits several.
    """
    rows = ledger.runs()
    if run is not None:
        rows = [r for r in rows if r.run_id.startswith(run)]
    if not rows or (run is not None and len(rows) > 1):
        known = [r.run_id for r in ledger.runs()]
        if not known:
            raise UsageError(
                "the federation has no run yet.", action="Begin one with: fcil-server serve"
            )
        listed = ", ".join([r.run_id for r in rows] or known[-5:])
        begins = f"{len(rows)} runs begin" if rows else "no run's id begins"
        raise UsageError(
            f"{begins} with {run!r}; {'they' if rows else 'the newest'} are {listed}.",
            action="Give more of the id; list all with: fcil-server run ls",
        )
    return rows[-1]
