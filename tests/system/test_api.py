"""The API while a federation runs: one program drives all of it by what the OpenAPI document says."""

import base64
import hashlib
import hmac
import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import uuid
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from urllib.parse import quote

import pytest
from safetensors.numpy import load

from fcil_server.lab.local.federation import LocalFederation
from fcil_server.reports.export_records import ExportRecord
from system.kit import command, open_ledger, settings, write_client

pytestmark = pytest.mark.processes

SECRET = bytes(range(32))


class GeneratedClient:
    """A client made of an OpenAPI document: a method for each operation, and nothing by hand."""

    def __init__(self, address: str, token: str) -> None:
        self.host, _, self._base = address.removeprefix("http://").partition("/")
        self._token = token
        self.document = self._request("GET", f"/{self._base}/openapi.json")[1]
        self._operations = {
            operation["operationId"]: (method.upper(), path, operation)
            for path, methods in self.document["paths"].items()
            for method, operation in methods.items()
        }

    def __getattr__(self, name):
        method, path, operation = self._operations[name]

        def call(*, key=None, **given):
            where, query, body = path, [], dict(given)
            for one in operation["parameters"]:
                if one["name"] in body and one["in"] in ("path", "query"):
                    value = quote(str(body.pop(one["name"])), safe="")
                    if one["in"] == "path":
                        where = where.replace(f"{{{one['name']}}}", value)
                    else:
                        query.append(f"{one['name']}={value}")
            takes = "requestBody" in operation
            assert takes or not body, f"{name} takes no {body}"
            target = f"{where}?{'&'.join(query)}" if query else where
            status, content = self._request(method, target, body if takes else None, key)
            known = operation["responses"]
            if status >= 400:
                self.check(content, known["default"], "application/problem+json")
                raise ValueError(f"{status} {content['code']}: {content['detail']}")
            self.check(content, known[str(status)], "application/json")
            return content["data"]

        return call

    def check(self, content, response, media):
        """Hold an answer against its schema."""
        self._fits(content, response["content"][media]["schema"], media)

    def _fits(self, value, schema, where):
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            schema, where = self.document["components"]["schemas"][name], name
        if "anyOf" in schema:
            kinds = [s for s in schema["anyOf"] if (s.get("type") == "null") == (value is None)]
            assert kinds, (where, value)
            return self._fits(value, kinds[0], where) if len(kinds) == 1 else None
        if "const" in schema:
            assert value == schema["const"], where
        kinds = {
            "object": dict,
            "array": list,
            "string": str,
            "integer": int,
            "number": (int, float),
            "boolean": bool,
            "null": type(None),
        }
        if "type" in schema:
            assert isinstance(value, kinds[schema["type"]]), (where, schema, value)
        for name in schema.get("required", ()):
            assert name in value, (where, name)
        for name, inner in schema.get("properties", {}).items():
            if name in value:
                self._fits(value[name], inner, f"{where}.{name}")
        for one in value if isinstance(value, list) else ():
            self._fits(one, schema.get("items", {}), where)
        return None

    def _request(self, method, path, body=None, key=None):
        connection = HTTPConnection(self.host, timeout=120)
        headers = {"Authorization": f"Bearer {self._token}"}
        if key is not None:
            headers["Idempotency-Key"] = key
        if body is not None:
            headers["Content-Type"] = "application/json"
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, headers)
        answer = connection.getresponse()
        content = json.loads(answer.read())
        connection.close()
        return answer.status, content

    def fetch(self, path):
        """Return the content of a file."""
        connection = HTTPConnection(self.host, timeout=120)
        headers = {"Authorization": f"Bearer {self._token}"}
        connection.request("GET", f"/{self._base}/{path}", headers=headers)
        with closing(connection), connection.getresponse() as answer:
            assert answer.status == 200
            return answer.read()

    def stream(self, last=""):
        """Yield (name, id, data) of events as they come."""
        connection = HTTPConnection(self.host, timeout=120)
        headers = {"Authorization": f"Bearer {self._token}", "Last-Event-ID": last}
        connection.request("GET", f"/{self._base}/stream", headers=headers)
        with closing(connection), connection.getresponse() as answer:
            assert answer.status == 200
            fields = {}
            while line := answer.readline().decode().rstrip("\n"):
                name, _, value = line.partition(": ")
                fields[name] = value
                if name == "data":
                    answer.readline()
                    yield fields["event"], fields.get("id", ""), json.loads(value)
                    fields = {}


def address_of(federation):
    return federation.status()["federation"]["api"]["address"]


def client_of(federation, role):
    made = command(federation, "token", "new", f"test-{role}", "--role", role, "--json")
    return GeneratedClient(address_of(federation), made["token"])


@contextmanager
def hooks(folder):
    """Receive webhooks; yields the settings of one that takes all, and of one that hangs."""
    got = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            signed = f"{self.headers['webhook-id']}.{self.headers['webhook-timestamp']}.".encode()
            mac = base64.b64encode(hmac.new(SECRET, signed + body, hashlib.sha256).digest())
            assert self.headers["webhook-signature"] == f"v1,{mac.decode()}"
            got.append(json.loads(body))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    secret = folder / "webhook.secret"
    secret.write_text(f"whsec_{base64.b64encode(SECRET).decode()}")
    secret.chmod(0o600)
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        given = {}
        for name, port in (("good", server.server_port), ("hangs", silent.getsockname()[1])):
            given[f"webhooks.{name}.url"] = json.dumps(f"http://127.0.0.1:{port}/")
            given[f"webhooks.{name}.secret_file"] = json.dumps(str(secret))
        yield given, got
        server.shutdown()


def join(federation, device, data, ticket):
    device.mkdir()
    path = device / "ticket"
    path.write_text(ticket)
    federation.join(
        device.name, data, "--ticket", str(path), env={"XDG_STATE_HOME": str(device / "state")}
    )


@pytest.mark.full
def test_a_program_runs_a_whole_federation_by_the_document_alone(tmp_path):
    with hooks(tmp_path) as (webhooks, got), LocalFederation(tmp_path) as federation:
        federation.serve("--api", "127.0.0.1:0", *settings(round__rounds_per_task=2, **webhooks))
        api = client_of(federation, "administer")
        assert api.get_token()["role"] == "administer"
        assert api.get_federation()["addresses"] == federation.status()["federation"]["addresses"]

        paused = api.post_rounds_pause(key="first")
        assert paused == {"mode": "paused", "round_open": False}
        for name, offset in (("a", 0), ("b", 12)):
            key = str(uuid.uuid4())
            ticket = api.post_tickets(name=name, lasts="1h", key=key)
            assert api.post_tickets(name=name, lasts="1h", key=key) == ticket
            data = write_client(tmp_path / f"data-{name}", range(4), offset=offset)
            join(federation, tmp_path / name, data, ticket["ticket"])
        spare = api.post_tickets(name="spare")
        assert api.post_clients_client_revoke(client="spare")["withdrawn"] is True
        assert spare["ticket"].startswith("FCIL")

        news = api.stream("0.0..-1")  # from the beginning
        seen = []

        def until(wanted, **said):
            while True:
                name, number, data = next(news)
                seen.append((name, number, data))
                if name == wanted and data.items() >= said.items():
                    return data

        until("note", code="enrolled")
        until("note", code="enrolled")
        # The notes are read from the ledger, the progress is asked of the server: either may be first.
        if not any(name == "progress" and data["ready"] == 2 for name, _, data in seen):
            until("progress", ready=2)
        assert [c["state"] for c in api.get_clients()["clients"]] == ["ready", "ready"]
        with pytest.raises(ValueError, match="409 not_now: Nothing was done: the round"):
            api.post_rounds_close(only={"task": 9, "kind": "train", "round": 0})
        more = api.post_queue(title="night", settings={"run": {"seed": 2}})
        assert more == {"number": 1, "title": "night", "before": 0, "begins": False}
        (row,) = api.get_queue()["queue"]
        assert (row["number"], row["title"], row["refused"]) == (1, "night", None)
        with pytest.raises(ValueError, match="409 config_invalid: No installed package offers"):
            api.post_queue(settings={"method": {"name": "pilor"}})
        assert api.post_queue_number_cancel(number=1) == {"number": 1, "title": "night"}
        with pytest.raises(ValueError, match="404 usage: "):
            api.post_queue_number_cancel(number=1)
        assert api.post_rounds_resume()["mode"] == "running"
        first = until("round_closed", task=0, kind="train", round=0)
        assert (first["outcome"], first["counted"]) == ("done", 2)
        os.kill(federation.status()["federation"]["api"]["pid"], signal.SIGKILL)
        *_, last = [number for _, number, _ in seen if number]
        federation.until("api", text="signal 9")
        news.close()
        news = api.stream(last)  # resumes where the killed process was
        until("task_learned", task=0)
        until("run_done")
        news.close()
        assert api.post_rounds_pause(key="first") == paused  # remembered by the next process

        numbers = [number for _, number, _ in seen if number]
        assert len(numbers) == len(set(numbers))
        closed = [d["seq"] for n, _, d in seen if n == "round_closed"]
        rows = api.get_runs_run_rounds(run="newest", limit=100)["rounds"]
        assert closed == [row["seq"] for row in rows]
        run = api.get_runs_run(run="newest")
        assert (run["run_status"], len(run["tasks"])) == ("done", 2)
        assert api.get_runs_run_accuracy(run="newest")["faa"] == run["faa"]
        assert {f["name"] for f in api.get_runs_run_files(run=run["run"])["files"]} > {"bytes.csv"}

        best = run["best_state"]["state"]
        told = api.post_runs_newest_promote(state="best")
        assert (told["state"], told["promoted"], told["clients"]) == (best, True, 2)
        assert command(federation, "status", "--json")["run"]["promoted"] == best
        with pytest.raises(ValueError, match="409 usage: .*kept are the states"):
            api.post_runs_newest_promote(state="999")
        export = api.post_exports(format="statistics", state="best")
        assert (export["status"], export["state"]) == ("running", str(best))
        federation.until("exported")
        done = api.get_exports_id(id=export["id"])
        assert (done["status"], done["name"]) == ("done", "statistics.safetensors")
        content = api.fetch(f"exports/{export['id']}/file")
        assert len(content) == done["bytes"]
        assert {"classes", "mean"} & set(load(content))
        assert api.get_exports()["exports"] == [done]
        # The hanging webhook is noted when its request times out: not between two answers below.
        news = api.stream("0.0..-1")
        until("note", code="webhook")
        news.close()
        same_as_the_commands(federation, api)
        until_sent(got, "run_done")
        federation.stop()
    kinds = [one["type"] for one in got]
    assert kinds.count("round_closed") == len(rows)
    assert kinds.count("task_learned") == 2
    with open_ledger(federation) as ledger:
        acts = [(a.actor.partition(", ")[2], a.action) for a in ledger.audit.newest()]
        warned = [e.text for e in ledger.events.newest() if e.code == "webhook"]
    assert ("api test-administer", "pause") in acts
    assert ("api test-administer", "enrol") in acts
    assert any(text.startswith("webhook hangs: ") for text in warned)
    assert not any(text.startswith("webhook good: ") for text in warned)


@pytest.mark.full
def test_a_stream_ends_with_the_run_that_the_server_was_started_for(tmp_path):
    with LocalFederation(tmp_path) as federation:
        more = ("--until-done", "--api", "127.0.0.1:0")
        federation.serve(*more, *settings(round__min_clients=1, round__rounds_per_task=1))
        news = client_of(federation, "read").stream()
        next(news)  # it is open
        federation.join("a", write_client(tmp_path / "data-a", range(4), offset=0))
        kinds = [name for name, _, _ in news]
        assert [kind for kind in kinds if kind != "progress"][-1] == "run_done"
        assert federation.server.wait(60) == 0


def same_as_the_commands(federation, api):
    """Hold the API's answers against those of the commands."""
    run = command(federation, "run", "ls", "--json")
    assert api.get_runs() == run
    assert api.get_runs_run_classes(run="newest") == command(federation, "classes", "ls", "--json")
    moving = ("last_seen", "wire_up", "wire_down", "up_s", "loop")
    found = api.get_runs_run_rounds(run="newest", limit=1000)
    del found["next"]
    assert without_times(found, *moving) == without_times(
        command(federation, "rounds", "--json"), *moving
    )
    report = command(federation, "report", "--json")
    assert without_times(api.get_runs_run(run="newest")) == without_times(report)
    for ours, theirs in (
        (api.get_clients(), command(federation, "clients", "--json")),
        (api.get_status(), command(federation, "status", "--json")),
    ):
        assert without_times(ours, *moving) == without_times(theirs, *moving)


def without_times(data, *names):
    """Leave out what changes by itself."""
    if isinstance(data, dict):
        return {
            k: without_times(v, *names)
            for k, v in data.items()
            if k not in (*names, "bytes", "outside_run")
        }
    return [without_times(v, *names) for v in data] if isinstance(data, list) else data


def until_sent(got, kind):
    """Wait until a webhook of this kind has come."""
    waiting = threading.Event()
    for _ in range(600):
        if any(one["type"] == kind for one in got):
            return
        waiting.wait(0.1)
    raise AssertionError(f"no webhook {kind!r} among {[one['type'] for one in got]}")


def test_an_address_that_others_reach_needs_a_certificate(tmp_path):
    given = ["serve", "--dir", str(tmp_path / "f"), "--api", "0.0.0.0:0"]
    done = subprocess.run(
        [sys.executable, "-m", "fcil_server", *given],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 4
    assert re.search(r"federation\.api: 0\.0\.0\.0:0 can be reached from other", done.stderr)
    assert not (tmp_path / "f").exists()


@pytest.mark.full
def test_tokens_are_made_listed_and_revoked_by_commands(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve("--api", "127.0.0.1:0", *settings())
        made = command(federation, "token", "new", "ci", "--expires", "30d", "--json")
        file = tmp_path / "token"
        told = command(
            federation, "token", "new", "b", "--role", "operate", "--out", str(file), "--json"
        )
        assert "token" not in told
        assert file.stat().st_mode & 0o777 == 0o600
        api = GeneratedClient(address_of(federation), made["token"])
        with pytest.raises(ValueError, match="403 not_trusted.*this needs operate"):
            api.post_rounds_pause()
        assert GeneratedClient(address_of(federation), file.read_text().strip()).post_rounds_pause()
        command(federation, "token", "revoke", "ci", "--json")
        with pytest.raises(ValueError, match="401 not_trusted"):
            api.get_status()
        federation.stop()
        late = command(federation, "token", "new", "late", "--json")  # the server is stopped
        rows = command(federation, "token", "ls", "--json")["tokens"]
        assert [(r["name"], r["role"]) for r in rows] == [("b", "operate"), ("late", "read")]
        with open_ledger(federation) as ledger:
            acts = [a.detail for a in ledger.audit.newest() if a.action.startswith("token")]
        assert acts == ["ci, read", "b, operate", "ci", "late, read"]
        secrets = [made["token"], late["token"], file.read_text().strip()]
        for path in federation.directory.rglob("*"):
            if path.is_file() and path != file:
                content = path.read_bytes()
                assert not [s for s in secrets if s.encode() in content], path


@pytest.mark.full
def test_an_export_that_a_kill_cut_off_has_failed_once_the_server_runs_again(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve("--api", "127.0.0.1:0", *settings())
        run = federation.status()["run"]["id"]
        federation.stop()
        left = ExportRecord("a" * 16, run, "1", "onnx", "me", "running", 1.0)
        left.save(federation.federation)
        half = left.folder(federation.federation) / "new-model.onnx"
        half.write_bytes(b"half")
        federation.serve("--api", "127.0.0.1:0", *settings())
        told = client_of(federation, "administer").get_exports_id(id=left.id)
        assert (told["status"], told["error"]["code"]) == ("failed", "worker_died")
        assert not half.exists()
        federation.stop()
