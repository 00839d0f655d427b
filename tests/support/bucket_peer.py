"""A bucket over HTTP in this process: as much of Google's interfaces as a store of objects uses, and its refusals.

No real server of Google Cloud Storage can be run here; this one is for what Frostline sends and what it makes of the
answers.
"""

import hashlib
import json
import re
import threading
from contextlib import contextmanager, suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

__all__ = ("BucketPeer", "bucket_peer")


class BucketPeer:
    """What the server holds and does.

    Attributes:
        url: where it listens.
        bucket: the name of its only bucket.
        token: what requests must carry as a bearer's; None asks for nothing.
        gives_ranges: whether it answers requests for ranges with ranges.
        answers: asked before each request; an answer ``(status, headers, body)`` in place of the peer's own, or None.
        seen: method and path of each request.
    """

    def __init__(self, url, bucket):
        self.url = url
        self.bucket = bucket
        self.token = None
        self.knows_folders = False
        self.gives_ranges = True
        self.answers = lambda: None
        self.seen = []
        self.objects = {}

    def answer(self, method, target, headers, body):
        parts = urlsplit(target)
        self.seen.append((method, target))
        if (said := self.answers()) is not None:
            return said
        if self.token and headers.get("Authorization") != f"Bearer {self.token}":
            return _error(401, "AuthenticationRequired")
        if parts.path == f"/storage/v1/b/{self.bucket}/o":
            return 200, {"Content-Type": "application/json"}, self._json_listing(parse_qs(parts.query))
        bucket, _, name = unquote(parts.path).lstrip("/").partition("/")
        if bucket != self.bucket:
            return _error(404, "NoSuchBucket")
        if not name:
            return 200, {}, self._listing(parse_qs(parts.query))
        if method == "PUT":
            self.objects[name] = body
            return 200, {"ETag": _etag(body)}, b""
        if name not in self.objects:
            return _error(404, "NoSuchKey")
        if method == "DELETE":
            del self.objects[name]
            return 204, {}, b""
        return self._part(self.objects[name], headers.get("Range"))

    def _part(self, data, range_):
        about = {"ETag": _etag(data), "Last-Modified": formatdate(0, usegmt=True)}
        if not range_ or not self.gives_ranges:
            return 200, about, data
        first, last = (int(group) for group in re.fullmatch(r"bytes=(\d+)-(\d+)", range_).groups())
        if first >= len(data):
            return _error(416, "InvalidRange")
        last = min(last, len(data) - 1)
        about["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        return 206, about, data[first : last + 1]

    def _json_listing(self, asked):
        (prefix,) = asked.get("prefix", [""])
        about = {"bucket": self.bucket, "timeCreated": "2026-01-01T00:00:00.000Z", "generation": "1"}
        names = [name for name in sorted(self.objects) if name.startswith(prefix)]
        items = [{**about, "name": name, "size": str(len(self.objects[name]))} for name in names]
        return json.dumps({"kind": "storage#objects", "items": items}).encode()

    def _listing(self, asked):
        (prefix,) = asked.get("prefix", [""])
        (delimiter,) = asked.get("delimiter", [""]) if self.knows_folders else ("",)
        names = [name for name in sorted(self.objects) if name.startswith(prefix)]
        below = {name: name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "") for name in names}
        found = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(self.objects[name])}</Size>"
            f"<ETag>{escape(_etag(self.objects[name]))}</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for name in names
            if not below[name][1]
        )
        folders = dict.fromkeys(f"{prefix}{first}{mark}" for first, mark, _ in below.values() if mark)
        found += "".join(f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in folders)
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>".encode()


@contextmanager
def bucket_peer(bucket="photos"):
    """Run one until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.peer = BucketPeer(f"http://127.0.0.1:{server.server_port}", bucket)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.peer
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _etag(data):
    return f'"{hashlib.sha256(data).hexdigest()[:16]}"'


def _error(status, code):
    return status, {}, f"<Error><Code>{code}</Code></Error>".encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _serve(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, headers, data = self.server.peer.answer(self.command, self.path, self.headers, body)
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        with suppress(OSError):  # who asked may have left
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else data)

    do_DELETE = do_GET = do_HEAD = do_PUT = do_PROPFIND = _serve

    def log_message(self, *_):
        pass
