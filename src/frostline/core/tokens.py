"""Tells by a token who asks: two tokens are valid for each at a time, until they run out, and wrong ones are bounded.

Who guesses gets few answers: an address that sends wrong tokens is told nothing more for a while, but for those on it
whose tokens were right before.
"""

import hashlib
import hmac
import ipaddress
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cachetools import LRUCache

from frostline.core.config import TokenHolder
from frostline.core.errors import Overloaded, SettingError, Unauthenticated
from frostline.core.files import stamp_of
from frostline.core.units import log_named

__all__ = ("FollowedFile", "TokenTable", "site_of")

_LOG = log_named("frostline.tokens")
# Wrong tokens that an address may send at once, and seconds until it may send another.
_AT_ONCE = 10
_EVERY_S = 6.0
_ADDRESSES = 4096
_SAID_EVERY_S = 60.0
# Addresses that the log names in that time: whoever has a network has more addresses than a log can name.
_MAX_NAMED = 16
# Bits of an IPv6 address that one site has: it may use all addresses below.
_SITE = 64


class TokenTable:
    """The tokens that are valid now. Safe for threads.

    Args:
        server: name of the server in sentences, such as ``"this node"``.
        holders: owners of tokens; without any, nobody is known.
        clock: clock that returns seconds since 1970.
        monotonic: clock that returns monotonic seconds.
    """

    def __init__(
        self,
        server: str,
        holders: Sequence[TokenHolder],
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = server
        self._clock = clock
        self._monotonic = monotonic
        self._lock = threading.Lock()
        # When the first of an address's wrong tokens counts no more, and how many it has sent since it was said.
        self._wrong: LRUCache[str, tuple[float, int, float]] = LRUCache(_ADDRESSES)
        self._right: LRUCache[tuple[str, str], None] = LRUCache(_ADDRESSES)
        self._wrong_count = 0
        self._named = 0
        self._named_since_s = -_SAID_EVERY_S
        self.renew(holders)

    def wrong_tokens(self) -> tuple[int, int]:
        """Wrong tokens so far, those that were not looked at included, and addresses that are slowed for them now."""
        with self._lock:
            slowed = sum(self._wait_s(site) > 0 for site in list(self._wrong))
            return self._wrong_count, slowed

    def renew(self, holders: Sequence[TokenHolder]) -> None:
        """Know these from now on, and nobody else."""
        self._tokens = tuple(
            (digest.encode(), ends_at_s, holder.name) for holder in holders for digest, ends_at_s in holder.tokens
        )

    def owner(self, token: str | None, address: str = "") -> str:
        """The name of whose token it is.

        Args:
            token: token that came with a request; None for none.
            address: address that it came from; empty within the process, where nobody guesses.

        Raises:
            Unauthenticated: The token is unknown or expired. The message does not repeat it.
            Overloaded: Too many wrong tokens came from that address.
        """
        if token is None:
            raise Unauthenticated(
                f"{self._server} serves its tenants only: set FROSTLINE_TOKEN to the token you were given"
            )
        site, digest = site_of(address), hashlib.sha256(token.encode()).hexdigest()
        with self._lock:
            if site and (site, digest) not in self._right:
                self._check_site(site)
        found = self._found(digest.encode())
        if found is not None and found[1] > self._clock():
            with self._lock:
                self._right[site, digest] = None
            return found[2]
        with self._lock:
            self._right.pop((site, digest), None)
            self._count_wrong(site)
        if found is not None:
            raise Unauthenticated(
                f"the token of tenant {found[2]} has expired: ask its operator for the next one (FROSTLINE_TOKEN)"
            )
        raise Unauthenticated(f"{self._server} does not know that token: see FROSTLINE_TOKEN")

    def _found(self, digest: bytes) -> tuple[bytes, float, str] | None:
        """The entry of a digest; every one is compared as a whole, so that the time says nothing about them."""
        found = None
        for entry in self._tokens:
            if hmac.compare_digest(entry[0], digest):
                found = entry
        return found

    def _check_site(self, site: str) -> None:
        wait_s = self._wait_s(site)
        if wait_s > 0:
            self._count(site, self._wrong[site][0])
            raise Overloaded(
                f"too many wrong tokens came from your address: ask again in {wait_s:.0f} s", retry_after_s=wait_s
            )

    def _wait_s(self, site: str) -> float:
        until_s, _, _ = self._wrong.get(site, (0.0, 0, 0.0))
        return until_s - self._monotonic() - _EVERY_S * (_AT_ONCE - 1)

    def _count_wrong(self, site: str) -> None:
        if site:
            until_s, _, _ = self._wrong.get(site, (0.0, 0, 0.0))
            self._count(site, max(until_s, self._monotonic()) + _EVERY_S)

    def _count(self, site: str, until_s: float) -> None:
        """Count a wrong token, or one that was not looked at, and say so of each address once a minute."""
        _, count, said_at_s = self._wrong.get(site, (0.0, 0, -_SAID_EVERY_S))
        count, now_s = count + 1, self._monotonic()
        self._wrong_count += 1
        if now_s >= said_at_s + _SAID_EVERY_S:
            self._say(site, count, now_s)
            count, said_at_s = 0, now_s
        self._wrong[site] = until_s, count, said_at_s

    def _say(self, site: str, count: int, now_s: float) -> None:
        if now_s >= self._named_since_s + _SAID_EVERY_S:
            self._named, self._named_since_s = 0, now_s
        self._named += 1
        if self._named <= _MAX_NAMED:
            _LOG.warning("wrong tokens from %s: %d since the last such line", site, count)
        elif self._named == _MAX_NAMED + 1:
            _LOG.warning("wrong tokens from more addresses than are named in a minute: %d in all", self._wrong_count)


def site_of(address: str) -> str:
    """Who may use an address: whoever has one of IPv6 has the whole network of its first 64 bits."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        return str(found.ipv4_mapped or ipaddress.ip_network((found, _SITE), strict=False))
    return str(found)


_LOOK_S = 1.0
# A file that is written piece by piece makes sense before it is whole, and says then less than it should, such as a
# tenant without its roots: one that was written to a moment ago may not be whole yet.
_SETTLED_S = 1.0


class FollowedFile:
    """A file of settings that is read again where it has changed, asked as often as somebody comes. Safe for threads.

    It is read once nobody has written to it for a second, or at once where ``distrust`` says that it is whole. Where it
    makes no sense, what was read before stays, and the log says so.

    Args:
        path: the file, which was read before.
        read: function that reads the file again; raises ``SettingError`` where the file makes no sense.
        monotonic: clock that returns monotonic seconds.
        clock: clock that returns seconds since 1970, as files have them.
    """

    def __init__(
        self,
        path: Path,
        read: Callable[[], None],
        monotonic: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._read = read
        self._monotonic = monotonic
        self._clock = clock
        self._lock = threading.Lock()
        self._stamp = self._seen = stamp_of(path)
        self._looked_at_s = monotonic()
        self._is_distrusted = False

    def distrust(self) -> None:
        """Have it read again whoever looks next. A signal's handler may call it at any moment."""
        self._is_distrusted = True

    def look(self) -> None:
        """Read it again where it has changed, once a second at most."""
        if not self._is_distrusted and self._monotonic() < self._looked_at_s + _LOOK_S:
            return
        with self._lock:
            self._looked_at_s = self._monotonic()
            stamp, is_distrusted = stamp_of(self._path), self._is_distrusted
            is_settled = stamp == self._seen or stamp is None or self._clock() - stamp[0] / 1e9 > _SETTLED_S
            self._seen = stamp
            if not is_distrusted and (stamp == self._stamp or not is_settled):
                return
            self._stamp, self._is_distrusted = stamp, False
            try:
                self._read()
            except SettingError as error:
                _LOG.warning("what was read of %s before stays: %s", self._path, error)
            else:
                _LOG.info("read %s again", self._path)
