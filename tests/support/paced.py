"""A link whose rate a test sets: a TCP proxy on loopback that lets so many bytes a second through."""

import socket
import threading
import time
from contextlib import suppress
from urllib.parse import urlsplit

CHUNK = 16 << 10


class PacedLink:
    """Forwards connections; what comes back from the node is paced. A context manager.

    Args:
        url: of the node.
        bytes_per_s: to begin with; set the attribute to change it at once.
    """

    def __init__(self, url, bytes_per_s):
        parts = urlsplit(url)
        self._node = (parts.hostname, parts.port)
        self.bytes_per_s = bytes_per_s
        self._line = threading.Lock()
        self._free_at = 0.0
        self._stopping = threading.Event()
        self._sockets = set()
        self._threads = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def __enter__(self):
        self._start(self._accept)
        return self

    def __exit__(self, *_):
        self._stopping.set()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for entry in list(self._sockets):
            with suppress(OSError):
                entry.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for item in self._sockets:
            item.close()

    def _start(self, call, *args):
        thread = threading.Thread(target=call, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self):
        while not self._stopping.is_set():
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            node = socket.create_connection(self._node)
            for item in (client, node):
                # Small buffers: what waits in them has passed the line already.
                item.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * CHUNK)
                self._sockets.add(item)
            self._start(self._forward, client, node, False)
            self._start(self._forward, node, client, True)

    def _forward(self, source, target, is_paced):
        with suppress(OSError):
            while data := source.recv(CHUNK):
                if is_paced:
                    self._wait_for_the_line(len(data))
                target.sendall(data)
        for item, how in ((source, socket.SHUT_RD), (target, socket.SHUT_WR)):
            with suppress(OSError):
                item.shutdown(how)

    def _wait_for_the_line(self, nbytes):
        with self._line:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + nbytes / self.bytes_per_s
            until = self._free_at
        self._stopping.wait(until - now)
