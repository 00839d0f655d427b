"""The process that ``wire.node_lists`` starts: it joins Ray, and says which nodes there are whenever it is asked."""

import json
import os
import selectors
import sys
import time
from typing import Any

from frostline.core.errors import FrostlineError
from frostline.ray.control import join, leave_if_ended
from frostline.wire.node_lists import said_by_supervisor

__all__ = ("main",)

_IDLE_S = 60.0
_LOOK_S = 1.0


def main(namespace: str) -> None:
    """Answer each line on stdin with a line of JSON, until stdin ends or nobody has asked for a minute."""
    # What Ray prints goes elsewhere: stdout has answers alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asked_s = time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        while time.monotonic() - asked_s < _IDLE_S:
            if selector.select(_LOOK_S):
                if not os.read(0, 4096):
                    return
                answers.write(json.dumps(_said(namespace)) + "\n")
                answers.flush()
                asked_s = time.monotonic()
            leave_if_ended()


def _said(namespace: str) -> dict[str, Any]:
    try:
        return said_by_supervisor(join(), namespace)
    except FrostlineError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    main(sys.argv[1])
    os._exit(0)  # Ray's own exit takes seconds
