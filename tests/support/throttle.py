"""A server's limit: it lets so many requests a second through, and refuses the others, as S3 and its like do."""

import threading

from frostline.core.request_timing import TokenBucket

__all__ = ("Throttle",)


class Throttle:
    """What a ``BucketPeer`` answers in place of its own while too much is asked of it. Safe for threads.

    Attributes:
        taken: requests that were let through.
        refused: those that were not.

    Args:
        per_s: requests that are let through each second, a tenth of them at once.
        now: what time it is.
        answer: status and body of a refusal; it asks to wait a second, which the driver tells nobody.
    """

    def __init__(self, per_s, now, answer=(503, b"<Error><Code>SlowDown</Code></Error>")):
        self._now = now
        self._answer = answer
        self._lock = threading.Lock()
        self._bucket = TokenBucket.create(per_s, maximum=max(1, per_s / 10), now_s=now())
        self.taken = self.refused = 0

    def __call__(self):
        with self._lock:
            after, must_wait = self._bucket.take(self._now())
            if must_wait:
                self.refused += 1
                status, body = self._answer
                return status, {"Retry-After": "1"}, body
            self._bucket = after
            self.taken += 1
            return None
