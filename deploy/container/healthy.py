"""Ends with 0 where a node answers at a URL, and with 1 where it does not.

A node with tenants answers 401 to whoever has no token: it works all the same, and no token need lie in the container.
"""

import sys
import urllib.error
import urllib.request

_WAIT_S = 8.0


def is_healthy(url: str) -> bool:
    """Whether a node answers there."""
    try:
        with urllib.request.urlopen(url, timeout=_WAIT_S) as answer:  # noqa: S310 (the image names it)
            return bool(answer.status == 200)
    except urllib.error.HTTPError as error:
        return error.code == 401
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(not is_healthy(sys.argv[1]))
