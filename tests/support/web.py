"""A plain web server in this process: it gives objects and ranges of them, and lists nothing."""

import re
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

__all__ = ("ETAG", "WebServer", "web_server")

ETAG = '"1"'


class WebServer:
    """What the server holds and does.

    Attributes:
        url: where it listens.
        objects: contents by path, without the first slash.
        seen: method and path of each request.
        pieces: how many a body is sent in.
        pause_s: before each of them.
        is_silent: it takes requests and never answers.
        redirects: where a path, without the first slash, is said to have gone to: the status and the location.
        connections: how many were made.
        ranges: what is said of a range in a body: its first and last byte, and the size of the whole.
        versions: headers that say which version an object is, by its path; ``ETAG`` for the others.
    """

    def __init__(self, url):
        self.url = url
        self.objects = {}
        self.seen = []
        self.pieces = 1
        self.pause_s = 0.0
        self.is_silent = False
        self.redirects = {}
        self.connections = 0
        self.ranges = lambda first, last, size: f"bytes {first}-{last}/{size}"
        self.versions = {}
        self.ends = threading.Event()


@contextmanager
def web_server():
    """Run one until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.held = WebServer(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.held
    finally:
        server.held.ends.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self):
        super().setup()
        self.server.held.connections += 1

    def do_GET(self):
        held = self.server.held
        held.seen.append((self.command, self.path))
        if held.is_silent:
            held.ends.wait()
            self.close_connection = True
            return
        if (gone := held.redirects.get(self.path.lstrip("/"))) is not None:
            self._answer(gone[0], b"", {"Location": gone[1]})
            return
        data = held.objects.get(unquote(self.path).lstrip("/"))
        if data is None:
            self._answer(404, b"", {})
            return
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if asked is None:
            self._answer(200, data, {})
            return
        first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
        self._answer(206, data[first : last + 1], {"Content-Range": held.ranges(first, last, len(data))})

    do_HEAD = do_PROPFIND = do_GET

    def _answer(self, status, body, headers):
        self.send_response(status)
        version = self.server.held.versions.get(unquote(self.path).lstrip("/"), {"ETag": ETAG})
        for name, value in {**headers, **version, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        step = max(1, -(-len(body) // self.server.held.pieces))
        with suppress(OSError):  # who asked may have left
            for start in range(0, len(body), step):
                time.sleep(self.server.held.pause_s)
                self.wfile.write(body[start : start + step])

    def log_message(self, *_):
        pass
