"""Peers that speak HTTP by hand."""

import re

__all__ = ("read_request",)


def read_request(peer):
    """All of one request: a socket that is closed with unread bytes resets the connection, and its answer is lost."""
    received = b""
    while (end := received.find(b"\r\n\r\n")) < 0:
        received += _more(peer)
    length = re.search(rb"(?i)content-length: *(\d+)", received[:end])
    whole = end + 4 + (int(length[1]) if length else 0)
    while len(received) < whole:
        received += _more(peer)
    return received


def _more(peer):
    data = peer.recv(1 << 20)
    if not data:
        raise ConnectionError("the request ended early")
    return data
