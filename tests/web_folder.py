"""A web server over a folder: what an object store is for a client. It may also go wrong."""

import http.server
import re
import threading
from contextlib import contextmanager


class _Files(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        data = (self.server.folder / self.path.lstrip("/").partition("?")[0]).read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        part, status = data, 200
        if wanted and self.server.ranges:
            part, status = data[int(wanted[1]) : int(wanted[2]) + 1], 206
        self.server.sent.append(self.server.answer(self, status, part))

    def log_message(self, *_):
        pass


def whole(request, status, data):
    """Answer as it should be; returns the bytes of the part that are right."""
    request.send_response(status)
    request.send_header("Content-Length", str(len(data)))
    request.end_headers()
    request.wfile.write(data)
    return len(data)


def half_of_it(request, status, data):
    request.send_response(status)
    request.send_header("Content-Length", str(len(data)))
    request.end_headers()
    request.wfile.write(data[: len(data) // 2])
    request.close_connection = True
    return 0


def flipped(request, status, data):
    return whole(request, status, data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])


def refused(request, _status, _data):
    request.send_error(403)
    return 0


def sent_elsewhere(request, _status, _data):
    request.send_response(302)
    request.send_header("Location", "http://127.0.0.1:1/")
    request.end_headers()
    return 0


@contextmanager
def web_server(folder, *, ranges=True, answer=whole):
    """Serve a folder; `asked` has the paths of requests, `sent` what `answer` returned."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Files)
    server.folder, server.ranges, server.answer = folder, ranges, answer
    server.asked, server.sent = [], []
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
