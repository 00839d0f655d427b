"""A bucket over HTTP in this process: as much of Google's interfaces as a store of objects uses, and its refusals.

No real server of Google Cloud Storage can be run here; this one is for what Frostline sends and what it makes of the
answers. It lists as Azure and as WebDAV do, too: real servers of both refuse some of the names that Azure itself takes.
"""

import hashlib
import json
import re
import threading
from contextlib import contextmanager, suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

__all__ = ("BucketPeer", "bucket_peer")


class BucketPeer:
    """What the server holds and does.

    Attributes:
        url: where it listens.
        bucket: the name of its only bucket.
        token: what requests must carry as a bearer's; None asks for nothing.
        knows_folders: whether listings are by folder where they are asked for so.
        page_size: most objects in one answer to Azure's clients.
        gives_ranges: whether it answers requests for ranges with ranges.
        answers: asked before each request; an answer ``(status, headers, body)`` in place of the peer's own, or None.
        seen: method and path of each request.
        headers: those of the last request.
    """

    def __init__(self, url, bucket):
        self.url = url
        self.bucket = bucket
        self.token = None
        self.knows_folders = False
        self.gives_ranges = True
        self.page_size = 1000
        self.answers = lambda: None
        self.seen = []
        self.headers = {}
        self.objects = {}

    def answer(self, method, target, headers, body):
        parts = urlsplit(target)
        self.seen.append((method, target))
        self.headers = headers
        if (said := self.answers()) is not None:
            return said
        if self.token and headers.get("Authorization") != f"Bearer {self.token}":
            return _error(401, "AuthenticationRequired")
        if parts.path == f"/storage/v1/b/{self.bucket}/o":
            return 200, {"Content-Type": "application/json"}, self._json_listing(parse_qs(parts.query))
        bucket, _, name = unquote(parts.path).lstrip("/").partition("/")
        if bucket != self.bucket:
            return _error(404, "NoSuchBucket")
        if method == "PROPFIND":
            return 207, {}, self._web_listing(name, headers.get("Depth"))
        if not name:
            asked = parse_qs(parts.query)
            return 200, {}, self._azure_listing(asked) if "comp" in asked else self._listing(asked)
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

    def _below(self, asked):
        """The names of objects right below a prefix, and of the folders there."""
        (prefix,) = asked.get("prefix", [""])
        (delimiter,) = asked.get("delimiter", [""]) if self.knows_folders else ("",)
        names = [name for name in sorted(self.objects) if name.startswith(prefix)]
        below = {name: name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "") for name in names}
        folders = dict.fromkeys(f"{prefix}{first}{mark}" for first, mark, _ in below.values() if mark)
        return [name for name in names if not below[name][1]], list(folders)

    def _azure_listing(self, asked):
        # In pages, each of which names where the next begins; names that XML cannot hold are escaped, and say so.
        names, folders = self._below(asked)
        start = int(asked.get("marker", ["0"])[0])
        page = names[start : start + self.page_size]
        found = "".join(
            f"<Blob>{_azure_name(name)}<Properties><Creation-Time>Thu, 01 Jan 2026 00:00:00 GMT</Creation-Time>"
            "<Last-Modified>Thu, 01 Jan 2026 00:00:00 GMT</Last-Modified>"
            f"<Etag>{_etag(self.objects[name])[1:-1]}</Etag>"
            f"<Content-Length>{len(self.objects[name])}</Content-Length><Content-Type>image/jpeg</Content-Type>"
            "</Properties></Blob>"
            for name in page
        )
        found += "".join(f"<BlobPrefix>{_azure_name(folder)}</BlobPrefix>" for folder in folders if not start)
        more = start + len(page) if start + len(page) < len(names) else ""
        said = f"<Blobs>{found}</Blobs><NextMarker>{more}</NextMarker>"
        return f'\ufeff<?xml version="1.0" encoding="utf-8"?><EnumerationResults>{said}</EnumerationResults>'.encode()

    def _web_listing(self, folder, depth):
        names, folders = self._below({"prefix": [folder], "delimiter": ["/" if depth == "1" else ""]})
        found = [(name, f"<getcontentlength>{len(self.objects[name])}</getcontentlength>") for name in names]
        found += [(name, "<resourcetype><collection/></resourcetype>") for name in folders]
        said = "".join(
            f"<response><href>/{self.bucket}/{quote(name)}</href><propstat><prop>{about}</prop></propstat></response>"
            for name, about in found
        )
        return f'<?xml version="1.0"?><multistatus xmlns="DAV:">{said}</multistatus>'.encode()

    def _listing(self, asked):
        names, folders = self._below(asked)
        found = "".join(
            f"<Contents><Key>{_escaped(name)}</Key><Size>{len(self.objects[name])}</Size>"
            f"<ETag>{escape(_etag(self.objects[name]))}</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for name in names
        )
        found += "".join(f"<CommonPrefixes><Prefix>{_escaped(folder)}</Prefix></CommonPrefixes>" for folder in folders)
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


def _azure_name(name):
    if re.search("[^\t\n -\ufffd\U00010000-\U0010ffff]", name):
        return f'<Name Encoded="true">{quote(name)}</Name>'
    return f"<Name>{_escaped(name)}</Name>"


def _escaped(name):
    return escape(name, {"\r": "&#13;"})


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

    do_DELETE = do_GET = do_HEAD = do_POST = do_PUT = do_PROPFIND = _serve

    def log_message(self, *_):
        pass
