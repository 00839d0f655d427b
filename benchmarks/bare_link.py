"""What a link carries: bare connections, each of which asks for one message after the other; nothing of Frostline.

It is the ceiling of whatever asks over HTTP on as many connections for as much at a time.
"""

import socket
import threading
import time

PORT = 29_000


def serve(address):
    """Answer every byte with a message of as many bytes as the connection named first; in threads, until the end."""
    listener = socket.create_server((address, PORT), backlog=256)
    threading.Thread(target=_accept, args=(listener,), daemon=True).start()


def pull(address, *, connections, message_bytes, seconds, steady_after_s):
    """Megabits a second that reached this end from the given second on."""
    started = time.perf_counter()
    received = [0] * connections
    counted = threading.Barrier(connections + 1)
    arguments = (address, message_bytes, started + steady_after_s, started + seconds, received, counted)
    for number in range(connections):
        threading.Thread(target=_pull, args=(number, *arguments), daemon=True).start()
    counted.wait()
    return 8e-6 * sum(received) / (seconds - steady_after_s)


def _accept(listener):
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection):
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection, connection.makefile("rb") as asked:
        message = bytes(int(asked.readline()))
        try:
            while asked.read(1):
                connection.sendall(message)
        except ConnectionError:
            return  # the other end has had enough


def _pull(number, address, message_bytes, since, until, received, counted):
    space = bytearray(1 << 18)
    with socket.create_connection((address, PORT)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(b"%d\n" % message_bytes)
        while time.perf_counter() < until:
            connection.sendall(b"?")
            left = message_bytes
            while left and (now := time.perf_counter()) < until:
                connection.settimeout(max(0.001, until - now))
                try:
                    count = connection.recv_into(space, min(left, len(space)))
                except TimeoutError:
                    break
                left -= count
                if time.perf_counter() >= since:
                    received[number] += count
    counted.wait()
