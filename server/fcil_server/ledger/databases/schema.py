"""The ledger's tables, as SQL: one script per schema version, applied in order.

A published script never changes; a new version appends one. Times are unix seconds, ids are
the texts of `fcil_protocol.ids`, JSON columns hold ASCII JSON. ``NULL`` means "not yet" or
"does not apply", never zero.
"""

from __future__ import annotations

APPLICATION_ID = 0x4643494C  # "FCIL" in the SQLite header: names the file's owner

_V1 = """
CREATE TABLE clients (
  client_id   TEXT PRIMARY KEY,
  name        TEXT NOT NULL,
  curve       BLOB NOT NULL,
  signing     BLOB NOT NULL,
  sealing     BLOB NOT NULL,
  enrolled_at REAL NOT NULL,
  not_after   REAL,
  revoked_at  REAL,
  last_seen   REAL,
  device      TEXT NOT NULL DEFAULT ''
);
-- An erased client keeps its row without keys; a revoked one gives its name free.
CREATE UNIQUE INDEX clients_curve ON clients (curve) WHERE length(curve) > 0;
CREATE UNIQUE INDEX clients_name ON clients (name) WHERE revoked_at IS NULL;

CREATE TABLE runs (
  run_id         TEXT PRIMARY KEY,
  created_at     REAL NOT NULL,
  method         TEXT NOT NULL,
  method_version TEXT NOT NULL,
  config         TEXT NOT NULL,
  hparams        TEXT NOT NULL,
  backbone       TEXT NOT NULL,
  schema_digest  TEXT NOT NULL,
  seed           INTEGER NOT NULL,
  status         TEXT NOT NULL CHECK (status IN ('running', 'done', 'failed', 'stopped')),
  parent_run     TEXT REFERENCES runs,
  parent_state   INTEGER,
  environment    TEXT NOT NULL,
  CHECK ((parent_run IS NULL) = (parent_state IS NULL))
);

CREATE TABLE classes (
  run           TEXT NOT NULL REFERENCES runs,
  key           TEXT NOT NULL,
  name          TEXT NOT NULL,
  class_id      INTEGER,
  planned_task  INTEGER,
  task          INTEGER,
  first_seen_by TEXT REFERENCES clients,
  seen_at       REAL NOT NULL,
  hidden        INTEGER NOT NULL DEFAULT 0 CHECK (hidden IN (0, 1)),
  PRIMARY KEY (run, key),
  UNIQUE (run, class_id),
  CHECK (task IS NULL OR class_id IS NOT NULL)
);
CREATE TABLE class_aliases (
  run    TEXT NOT NULL,
  key    TEXT NOT NULL,
  name   TEXT NOT NULL,
  target TEXT NOT NULL,
  PRIMARY KEY (run, key),
  FOREIGN KEY (run, target) REFERENCES classes (run, key) ON UPDATE CASCADE
);

CREATE TABLE tasks (
  run       TEXT NOT NULL REFERENCES runs,
  task      INTEGER NOT NULL CHECK (task >= 0),
  class_ids TEXT NOT NULL,
  opened_at REAL NOT NULL,
  closed_at REAL,
  PRIMARY KEY (run, task)
);

CREATE TABLE rounds (
  run         TEXT NOT NULL REFERENCES runs,
  task        INTEGER NOT NULL,
  kind        TEXT NOT NULL,
  round       INTEGER NOT NULL,
  seq         INTEGER NOT NULL,
  opened_at   REAL NOT NULL,
  remaining_s REAL,
  asked       TEXT NOT NULL,
  reopened    INTEGER NOT NULL DEFAULT 0,
  closed_at   REAL,
  outcome     TEXT CHECK (outcome IN ('done', 'short', 'reopened', 'skipped')),
  base_state  INTEGER NOT NULL,
  new_state   INTEGER,
  phases      TEXT NOT NULL DEFAULT '{}',
  metrics     TEXT NOT NULL DEFAULT '{}',
  PRIMARY KEY (run, task, kind, round),
  UNIQUE (run, seq),
  FOREIGN KEY (run, task) REFERENCES tasks
);
-- At most one round of a run is open.
CREATE UNIQUE INDEX rounds_open ON rounds (run) WHERE closed_at IS NULL;

CREATE TABLE updates (
  run          TEXT NOT NULL,
  client       TEXT NOT NULL REFERENCES clients,
  task         INTEGER NOT NULL,
  kind         TEXT NOT NULL,
  round        INTEGER NOT NULL,
  update_id    TEXT NOT NULL UNIQUE,
  accepted_at  REAL NOT NULL,
  samples      INTEGER NOT NULL CHECK (samples >= 0),
  tensor_bytes INTEGER NOT NULL,
  sealed_bytes INTEGER NOT NULL,
  status       TEXT NOT NULL CHECK (status IN ('accepted', 'counted', 'excluded')),
  reason       TEXT NOT NULL DEFAULT '',
  UNIQUE (run, client, task, kind, round),
  FOREIGN KEY (run, task, kind, round) REFERENCES rounds
);
CREATE INDEX updates_round ON updates (run, task, kind, round);

CREATE TABLE answers (
  run    TEXT NOT NULL,
  task   INTEGER NOT NULL,
  kind   TEXT NOT NULL,
  round  INTEGER NOT NULL,
  client TEXT NOT NULL REFERENCES clients,
  answer TEXT NOT NULL CHECK (answer IN ('declined', 'straggler', 'lost')),
  reason TEXT NOT NULL,
  at     REAL NOT NULL,
  PRIMARY KEY (run, task, kind, round, client),
  FOREIGN KEY (run, task, kind, round) REFERENCES rounds
);

CREATE TABLE bytes (
  run         TEXT REFERENCES runs,
  task        INTEGER,
  kind        TEXT,
  round       INTEGER,
  client      TEXT,
  direction   TEXT NOT NULL CHECK (direction IN ('up', 'down')),
  cause       TEXT NOT NULL CHECK (cause IN
    ('update', 'broadcast', 'catch_up', 'handshake', 'control', 'connection')),
  source      TEXT NOT NULL CHECK (source IN ('predicted', 'kernel')),
  tensor      INTEGER NOT NULL,
  sealed      INTEGER NOT NULL,
  application INTEGER NOT NULL,
  wire        INTEGER NOT NULL,
  -- The kernel knows a connection, not what its bytes mean.
  CHECK ((source = 'kernel') = (cause = 'connection')),
  CHECK (source = 'predicted' OR (tensor = 0 AND sealed = 0 AND application = 0))
);
CREATE UNIQUE INDEX bytes_key ON bytes (
  ifnull(run, ''), ifnull(task, -1), ifnull(kind, ''), ifnull(round, -1), ifnull(client, ''),
  direction, cause, source
);

CREATE TABLE evaluations (
  run      TEXT NOT NULL REFERENCES runs,
  task     INTEGER NOT NULL,
  client   TEXT NOT NULL,
  class_id INTEGER NOT NULL,
  correct  INTEGER NOT NULL,
  total    INTEGER NOT NULL,
  PRIMARY KEY (run, task, client, class_id),
  CHECK (0 <= correct AND correct <= total)
);

CREATE TABLE states (
  run        TEXT NOT NULL REFERENCES runs,
  state      INTEGER NOT NULL,
  digest     TEXT NOT NULL,
  parent     TEXT,
  task       INTEGER NOT NULL,
  kind       TEXT NOT NULL,
  round      INTEGER NOT NULL,
  created_at REAL NOT NULL,
  PRIMARY KEY (run, state)
);

CREATE TABLE parts (
  run          TEXT NOT NULL REFERENCES runs,
  name         TEXT NOT NULL,
  plain_digest TEXT NOT NULL,
  digest       TEXT NOT NULL,
  file         TEXT NOT NULL,
  plain_bytes  INTEGER NOT NULL,
  sealed_bytes INTEGER NOT NULL,
  wrapped      BLOB NOT NULL,
  created_at   REAL NOT NULL,
  PRIMARY KEY (run, digest),
  UNIQUE (run, name, plain_digest)
);

CREATE TABLE events (
  id     INTEGER PRIMARY KEY AUTOINCREMENT,
  at     REAL NOT NULL,
  level  TEXT NOT NULL CHECK (level IN ('info', 'warning', 'error')),
  run    TEXT,
  client TEXT,
  code   TEXT NOT NULL,
  text   TEXT NOT NULL
);
CREATE INDEX events_run ON events (run, id);

CREATE TABLE refusals (
  id     INTEGER PRIMARY KEY AUTOINCREMENT,
  at     REAL NOT NULL,
  client TEXT,
  code   TEXT NOT NULL,
  reason TEXT NOT NULL
);
CREATE TABLE refusal_counts (
  code  TEXT PRIMARY KEY,
  count INTEGER NOT NULL
);

CREATE TABLE audit (
  id     INTEGER PRIMARY KEY AUTOINCREMENT,
  at     REAL NOT NULL,
  actor  TEXT NOT NULL,
  action TEXT NOT NULL,
  detail TEXT NOT NULL
);
CREATE TRIGGER audit_no_update BEFORE UPDATE ON audit
  BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;
CREATE TRIGGER audit_no_delete BEFORE DELETE ON audit
  BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;
"""

_V2 = """
ALTER TABLE clients ADD COLUMN revoked_why TEXT NOT NULL DEFAULT '';
CREATE TABLE tickets (
  curve        BLOB PRIMARY KEY,
  signing      BLOB NOT NULL,
  name         TEXT NOT NULL,
  issued_at    REAL NOT NULL,
  expires_at   REAL NOT NULL,
  used_at      REAL,
  withdrawn_at REAL,
  client       TEXT REFERENCES clients,
  CHECK ((used_at IS NULL) = (client IS NULL))
);
"""

_V3 = """
-- A relay is enrolled like a client; it and the clients and tickets behind it are marked.
ALTER TABLE clients ADD COLUMN role TEXT NOT NULL DEFAULT 'client'
  CHECK (role IN ('client', 'relay'));
ALTER TABLE clients ADD COLUMN via TEXT REFERENCES clients;
ALTER TABLE clients ADD COLUMN address TEXT NOT NULL DEFAULT '';
ALTER TABLE tickets ADD COLUMN role TEXT NOT NULL DEFAULT 'client'
  CHECK (role IN ('client', 'relay'));
ALTER TABLE tickets ADD COLUMN via TEXT REFERENCES clients;
"""

_V4 = """
-- What the kernel counts beside the TCP payload: sent again, and as frames of the link.
ALTER TABLE bytes ADD COLUMN retransmitted INTEGER NOT NULL DEFAULT 0;
ALTER TABLE bytes ADD COLUMN link INTEGER NOT NULL DEFAULT 0;
"""

_V5 = """
-- A forked run begins with copies of its parent's rounds: those with seq < inherited. So an
-- update is unique within its run only.
ALTER TABLE runs ADD COLUMN inherited INTEGER NOT NULL DEFAULT 0;
CREATE TABLE updates_v5 (
  run          TEXT NOT NULL,
  client       TEXT NOT NULL REFERENCES clients,
  task         INTEGER NOT NULL,
  kind         TEXT NOT NULL,
  round        INTEGER NOT NULL,
  update_id    TEXT NOT NULL,
  accepted_at  REAL NOT NULL,
  samples      INTEGER NOT NULL CHECK (samples >= 0),
  tensor_bytes INTEGER NOT NULL,
  sealed_bytes INTEGER NOT NULL,
  status       TEXT NOT NULL CHECK (status IN ('accepted', 'counted', 'excluded')),
  reason       TEXT NOT NULL DEFAULT '',
  UNIQUE (run, update_id),
  UNIQUE (run, client, task, kind, round),
  FOREIGN KEY (run, task, kind, round) REFERENCES rounds
);
INSERT INTO updates_v5 SELECT * FROM updates ORDER BY rowid;
DROP TABLE updates;
ALTER TABLE updates_v5 RENAME TO updates;
CREATE INDEX updates_round ON updates (run, task, kind, round);
"""

_V6 = """
-- An asked client that was not needed any more; what closed a round; names that wait for an
-- operator's word.
CREATE TABLE answers_6 (
  run    TEXT NOT NULL,
  task   INTEGER NOT NULL,
  kind   TEXT NOT NULL,
  round  INTEGER NOT NULL,
  client TEXT NOT NULL REFERENCES clients,
  answer TEXT NOT NULL CHECK (answer IN ('declined', 'straggler', 'lost', 'surplus')),
  reason TEXT NOT NULL,
  at     REAL NOT NULL,
  PRIMARY KEY (run, task, kind, round, client),
  FOREIGN KEY (run, task, kind, round) REFERENCES rounds
);
INSERT INTO answers_6 SELECT run, task, kind, round, client, answer, reason, at FROM answers;
DROP TABLE answers;
ALTER TABLE answers_6 RENAME TO answers;
ALTER TABLE rounds ADD COLUMN why TEXT NOT NULL DEFAULT '';
ALTER TABLE classes ADD COLUMN admitted INTEGER NOT NULL DEFAULT 1 CHECK (admitted IN (0, 1));
"""

_V7 = """
-- A run that somebody was forgotten from: its states and updates are gone. Digests of the CURVE
-- keys of erased clients, which are never enrolled again.
ALTER TABLE runs ADD COLUMN emptied_at REAL;
CREATE TABLE erased (
  client     TEXT PRIMARY KEY REFERENCES clients,
  erased_at  REAL NOT NULL,
  key_digest BLOB NOT NULL
);
"""

_V8 = """
-- How a client's training of its update went, as it says; NULL: it does not.
ALTER TABLE updates ADD COLUMN train_loss REAL;
ALTER TABLE updates ADD COLUMN train_accuracy REAL;
"""

_V9 = """
-- The state that the operator has promoted: clients use its model.
ALTER TABLE runs ADD COLUMN promoted INTEGER;
"""

_V10 = """
-- The state that an update starts from; NULL: the one that its round starts from.
ALTER TABLE updates ADD COLUMN base_state INTEGER;
"""

_V11 = """
-- What clients fetched from an object store, as they say.
CREATE TABLE bytes_11 (
  run           TEXT REFERENCES runs,
  task          INTEGER,
  kind          TEXT,
  round         INTEGER,
  client        TEXT,
  direction     TEXT NOT NULL CHECK (direction IN ('up', 'down')),
  cause         TEXT NOT NULL CHECK (cause IN
    ('update', 'broadcast', 'catch_up', 'handshake', 'control', 'connection', 'object_store')),
  source        TEXT NOT NULL CHECK (source IN ('predicted', 'kernel', 'reported')),
  tensor        INTEGER NOT NULL,
  sealed        INTEGER NOT NULL,
  application   INTEGER NOT NULL,
  wire          INTEGER NOT NULL,
  retransmitted INTEGER NOT NULL DEFAULT 0,
  link          INTEGER NOT NULL DEFAULT 0,
  CHECK ((source = 'kernel') = (cause = 'connection')),
  CHECK ((source = 'reported') = (cause = 'object_store')),
  CHECK (source = 'predicted' OR (tensor = 0 AND sealed = 0 AND application = 0))
);
INSERT INTO bytes_11 SELECT run, task, kind, round, client, direction, cause, source, tensor,
  sealed, application, wire, retransmitted, link FROM bytes;
DROP TABLE bytes;
ALTER TABLE bytes_11 RENAME TO bytes;
CREATE UNIQUE INDEX bytes_key ON bytes (
  ifnull(run, ''), ifnull(task, -1), ifnull(kind, ''), ifnull(round, -1), ifnull(client, ''),
  direction, cause, source
);
"""

_V12 = """
-- The sum that a relay sent with this update in it: its record in the spool. NULL: the update has
-- a record of its own.
ALTER TABLE updates ADD COLUMN sum_id TEXT;
CREATE INDEX updates_sum ON updates (sum_id) WHERE sum_id IS NOT NULL;
"""

# Script n takes a ledger from version n to version n + 1.
MIGRATIONS: tuple[str, ...] = (_V1, _V2, _V3, _V4, _V5, _V6, _V7, _V8, _V9, _V10, _V11, _V12)
SCHEMA_VERSION = len(MIGRATIONS)
