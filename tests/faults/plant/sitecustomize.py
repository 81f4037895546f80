"""Faults planted into a process from outside: kills, torn writes, and errors of the disk.

Python imports a module of this name at its start, so ``PYTHONPATH`` and ``FCIL_PLANT`` (a file
with the plan) are enough: no production code knows of it. A *point* is one call that changes
the disk or speaks to a peer, named ``operation path place``::

    sync federation/runs/#/spool/#.seg spool.Spool.sync
    send ack sessions.ClientSessions.send

Numbers and digests in paths are ``#``; the place is the innermost three fcil functions that led
there, or as many as a rule's ``depth``.

The plan is JSON: ``program`` (the module after ``-m``), ``root`` (only files under it count),
``points`` (a file that gets every point, one a line), ``hits`` (one that gets the ``name`` of
every rule that was met), ``rules``, ``turns`` (only one rule holds at a time, until it was
met so often, over all lives of the process) and ``walk``.

A rule is ``{"op", "where", "place": regular expressions, "nth": which match (0: each), "do",
"when", "depth", "flag": a file; the rule holds while it exists}``. ``do`` is ``kill``, ``stop``
(until it is sent SIGCONT) or the name of an errno; ``when`` is ``before``, ``after`` or ``half`` (a
write that stops in the middle).

A walk is ``{"done": a file, "part": [k, n], "chance", "seed", "rest": points at the start of a
life that are passed unharmed, "only": a regular expression; other points do not count, "depth"}``:
the process kills itself at the first point (before, after, or half through it) that is not in
``done`` and whose checksum modulo n is k, and notes it there. Started again and again, it is killed
at every point once.
"""

import builtins
import contextlib
import errno
import importlib.abc
import importlib.machinery
import io
import itertools
import json
import os
import random
import re
import signal
import sqlite3
import sys
import threading
import zlib

_OPEN, _WRITE, _CLOSE, _READLINK = os.open, os.write, os.close, os.readlink
_VARIABLE = re.compile(r"[0-9a-f]{16,}|r\d{8}-\d{6}-[0-9a-f]+|\d+-[0-9a-f]{8}(?=\.tmp)|\d+")
_SQLITE = {"ENOSPC": 13, "EROFS": 8, "EACCES": 14, "EIO": 10}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def _append(path, line):
    fd = _OPEN(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        _WRITE(fd, (line + "\n").encode())
    finally:
        _CLOSE(fd)


class Planter:
    def __init__(self, plan):
        self.root = plan.get("root", "/")
        self.points, self.hits, self.turns = plan.get("points"), plan.get("hits"), plan.get("turns")
        self.rules = [
            {
                **rule,
                "found": 0,
                "patterns": [re.compile(rule.get(k, "")) for k in ("op", "where", "place")],
            }
            for rule in plan.get("rules", ())
        ]
        self.walk = plan.get("walk")
        self.done = set()
        if self.walk:
            with contextlib.suppress(FileNotFoundError), open(self.walk["done"]) as file:
                self.done = set(file.read().splitlines())
            self.random = random.Random(f"{self.walk.get('seed', 0)} {len(self.done)}")
        self.passed = 0
        self.busy = threading.local()

    # --- names ------------------------------------------------------------------------------

    def path_of(self, target):
        """The path of a file or descriptor, relative to the root; None if it is none of ours."""
        if isinstance(target, int):
            try:
                target = _READLINK(f"/proc/self/fd/{target}")
            except OSError:
                return None
        try:
            path = os.path.abspath(os.fsdecode(target))
        except TypeError:
            return None
        return path[len(self.root) :].lstrip("/") if path.startswith(self.root) else None

    @staticmethod
    def place(most=3):
        frame, found = sys._getframe(3), []
        while frame is not None and len(found) < most:
            code = frame.f_code
            if "/fcil_" in code.co_filename:
                module = os.path.basename(code.co_filename)[:-3]
                if module != "database":  # every statement comes from there
                    found.append(f"{module}.{code.co_qualname}")
            frame = frame.f_back
        return "<".join(found)

    # --- what happens at a point ------------------------------------------------------------

    def at(self, op, where, when):
        """Do what is planned here; returns the errno name to raise, if any."""
        if getattr(self.busy, "now", False):
            return None
        self.busy.now = True
        try:
            return self._at(op, where, when)
        finally:
            self.busy.now = False

    def _at(self, op, where, when):
        place, path = self.place(), _VARIABLE.sub("#", where)
        if self.points and when == "before":
            _append(self.points, f"{op} {path} {place}")
        if self.walk:
            deep = self.place(self.walk["depth"]) if "depth" in self.walk else place
            if self.due(f"{when} {op} {path} {deep}"):
                os.kill(os.getpid(), signal.SIGKILL)
        for rule in self.rules if self.turns is None else self.turn():
            if "depth" in rule:
                place = self.place(rule["depth"])
            if rule.get("when", "before") != when or not self.meets(rule, (op, where, place)):
                continue
            if self.hits:
                _append(self.hits, rule["name"])
            if rule["do"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if rule["do"] == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
                continue
            return rule["do"]
        return None

    def turn(self):
        """The first rule that was not met as often as it should be, over all lives."""
        met = []
        if os.path.exists(self.hits):
            with open(self.hits) as file:
                met = file.read().split()
        return [r for r in self.rules if met.count(r["name"]) < self.turns][:1]

    def meets(self, rule, names):
        if not all(p.search(n) for p, n in zip(rule["patterns"], names, strict=True)):
            return False
        if rule.get("flag") and not os.path.exists(rule["flag"]):
            return False
        rule["found"] += 1
        return rule.get("nth", 0) in (0, rule["found"])

    def due(self, key):
        if not re.match(self.walk.get("only", ""), key):
            return False
        k, n = self.walk.get("part", (0, 1))
        self.passed += 1
        if self.passed <= self.walk.get("rest", 0):
            return False
        if key in self.done or zlib.crc32(key.encode()) % n != k:
            return False
        if self.random.random() >= self.walk.get("chance", 1.0):
            return False
        self.done.add(key)
        _append(self.walk["done"], key)
        return True

    # --- calls ------------------------------------------------------------------------------

    def call(self, op, target, original, *args, **kwargs):
        where = self.path_of(target)
        if where is None:
            return original(*args, **kwargs)
        name = self.at(op, where, "before")
        if name:
            raise OSError(getattr(errno, name), os.strerror(getattr(errno, name)), where)
        result = original(*args, **kwargs)
        self.at(op, where, "after")
        return result

    def write(self, original, fd, data, *args):
        where = self.path_of(fd)
        if where is None:
            return original(fd, data, *args)
        if name := self.at("write", where, "before"):
            raise OSError(getattr(errno, name), os.strerror(getattr(errno, name)), where)
        if len(data) > 1:
            # The half is written first: whoever is killed now has torn this write.
            half = original(fd, bytes(data[: len(data) // 2]), *args)
            if name := self.at("write", where, "half"):
                raise OSError(getattr(errno, name), os.strerror(getattr(errno, name)), where)
            offset = [args[0] + half] if args else []
            written = half + original(fd, bytes(data[half:]), *offset)
            self.at("write", where, "after")
            return written
        written = original(fd, data, *args)
        self.at("write", where, "after")
        return written


def _first(op, name, planter):
    original = getattr(os, name)

    def planted(target, *args, **kwargs):
        return planter.call(op, target, original, target, *args, **kwargs)

    setattr(os, name, planted)


def _files(planter):
    for op, names in {
        "sync": ("fsync", "fdatasync"), "replace": ("replace", "rename", "link"),
        "unlink": ("unlink", "remove", "rmdir"), "mkdir": ("mkdir",),
        "resize": ("ftruncate", "truncate", "posix_fallocate"),
    }.items():  # fmt: skip
        for name in names:
            _first(op, name, planter)
    write, pwrite, system_open, io_open = os.write, os.pwrite, os.open, io.open

    def planted_open(path, flags, *args, **kwargs):
        if not flags & _WRITING:
            return system_open(path, flags, *args, **kwargs)
        return planter.call("open", path, system_open, path, flags, *args, **kwargs)

    def planted_io_open(file, mode="r", *args, **kwargs):
        if isinstance(file, int) or not set(mode) & set("wax+"):
            return io_open(file, mode, *args, **kwargs)
        return planter.call("open", file, io_open, file, mode, *args, **kwargs)

    os.write = lambda fd, data: planter.write(write, fd, data)
    os.pwrite = lambda fd, data, offset: planter.write(pwrite, fd, data, offset)
    os.open = planted_open
    io.open = builtins.open = planted_io_open


def _sql(planter):
    """Points are statements that change the file; in a walk the commits."""
    connect = sqlite3.connect

    class Connection(sqlite3.Connection):
        where = None

        def _planted(self, original, sql, *args):
            verb = sql.split(None, 1)[0].upper()
            if self.where is None or verb in (
                "PRAGMA",
                "SELECT",
                "ROLLBACK",
                "SAVEPOINT",
                "RELEASE",
            ):
                return original(sql, *args)
            op = "commit" if verb == "COMMIT" or "COMMIT;" in sql else "sql"
            if planter.walk and op == "sql":
                return original(sql, *args)
            if name := planter.at(op, self.where, "before"):
                error = sqlite3.OperationalError(f"planted {name}")
                error.sqlite_errorcode = _SQLITE[name]
                raise error
            result = original(sql, *args)
            planter.at(op, self.where, "after")
            return result

        def execute(self, sql, *args):
            return self._planted(super().execute, sql, *args)

        def executescript(self, sql):
            return self._planted(super().executescript, sql)

    def planted(database, *args, **kwargs):
        db = connect(database, *args, factory=Connection, **kwargs)
        path = str(database).removeprefix("file:").partition("?")[0]
        db.where = None if "mode=ro" in str(database) else planter.path_of(path)
        return db

    sqlite3.connect = planted


# --- messages: the transport is patched when it is imported -----------------------------------


def _type_of(frames):
    """The type of a message, out of its msgpack body."""
    match = re.search(rb"\xa1t[\xa0-\xbf]([a-z_]+)", bytes(frames[0])[:4096]) if frames else None
    return match[1].decode() if match else "other"


def _transport(module, planter):
    def planted_send(original, has_route):
        def send(self, *args):
            name = _type_of(args[has_route])
            planter.at("send", name, "before")
            result = original(self, *args)
            planter.at("send", name, "after")
            return result

        return send

    def planted_recv(original):
        async def recv(self):
            news = await original(self)
            frames = getattr(news, "frames", news)
            if isinstance(frames, tuple) and frames:
                planter.at("recv", _type_of(frames), "before")
            return news

        return recv

    for name, has_route in (("Router", 1), ("Dealer", 0)):
        cls = getattr(module, name)
        cls.send = planted_send(cls.send, has_route)
        cls.recv = planted_recv(cls.recv)


def _pipe(module, planter):
    """A worker's words to its daemon are points too."""
    original = module.Pipe.send

    def send(self, message, *args):
        name = "progress" if "progress" in str(message)[:200] else "reply"
        planter.at("send", name, "before")
        original(self, message, *args)
        planter.at("send", name, "after")

    module.Pipe.send = send


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, planter):
        self.patches = {
            "fcil_protocol.link.zmq_link": lambda m: _transport(m, planter),
            "fcil_adapters.worker.pipe": lambda m: _pipe(m, planter),
        }

    def find_spec(self, name, path, target=None):
        patch = self.patches.pop(name, None)
        if patch is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


def _main():
    with open(os.environ["FCIL_PLANT"]) as file:
        plans = json.load(file)
    words = [w for w in sys.orig_argv if w != "fcil_protocol.process.child"]  # it runs the next
    module = next((b for a, b in itertools.pairwise(words) if a == "-m"), "")
    mine = [p for p in plans if p.get("program", module) == module]
    if not mine:
        return
    assert len(mine) == 1, f"one plan for {module}"
    planter = Planter(mine[0])
    _files(planter)
    _sql(planter)
    sys.meta_path.insert(0, _Finder(planter))


if os.environ.get("FCIL_PLANT"):
    _main()
