"""A server that speaks S3 (moto), for tests and benchmarks."""

import contextlib
import os
import subprocess
import threading
import urllib.request

PROGRAM = "FCIL_S3_SERVER"  # names moto's program
KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "eu-west-1"}


def environment(url):
    """Return the environment of a federation's server whose store is at this URL."""
    return {**KEYS, "AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true"}


@contextlib.contextmanager
def s3_server(address, port, before=()):
    """Yield the URL of a server with an empty bucket.

    ``before``: words before its command, if it runs on another host.
    """
    url = f"http://{address}:{port}"
    command = [*before, os.environ[PROGRAM], "-H", address, "-p", str(port)]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        )
        stack.callback(server.kill)
        while "Running on" not in (line := server.stderr.readline()):
            assert line, "it has ended"
        reader = threading.Thread(target=server.stderr.read)
        reader.start()
        stack.callback(reader.join)
        stack.callback(server.kill)  # which ends the reader
        urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
        yield url
