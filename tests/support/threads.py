"""Which threads a test began and left, and what is asked of pools of threads."""

import gc
import threading
from contextlib import contextmanager

__all__ = ("asked_of_threads", "no_thread_is_left")


def asked_of_threads():
    """Calls that pools of threads of this process have not begun."""
    return sum(type(item).__name__ == "_WorkItem" for item in gc.get_objects())


@contextmanager
def no_thread_is_left():
    """Fail where a thread that began meanwhile is left: one of ours at once, another if it does not end by itself.

    Threads of tests before this one may end meanwhile, and a timer's thread ends after what it does.
    """
    before = set(threading.enumerate())
    yield
    begun = set(threading.enumerate()) - before
    left = [item for item in begun if item.name.startswith("frostline-")]
    assert not left, left
    for item in begun:
        item.join(60)
        assert not item.is_alive(), item
