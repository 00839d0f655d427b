"""Ends with 0 where a node answers at a URL, and with 1 where it does not: healthy.py URL [CERTIFICATE KEY].

Nothing that needs protection is sent, so nobody asks whose certificate the node has; where it asks for one itself, the
files of one may follow the URL.

A node with tenants answers 401 to whoever has no token: it works all the same, and no token need lie in the container.
"""

import ssl
import sys
import urllib.error
import urllib.request

_WAIT_S = 8.0


def is_healthy(url: str, *certificate: str) -> bool:
    """Whether a node answers there."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        if certificate:
            context.load_cert_chain(*certificate)
        with urllib.request.urlopen(url, timeout=_WAIT_S, context=context) as answer:  # noqa: S310 (the image names it)
            return bool(answer.status == 200)
    except urllib.error.HTTPError as error:
        return error.code == 401
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(not is_healthy(*sys.argv[1:]))
