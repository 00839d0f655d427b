"""Ends a worker whose training process is gone, where PyTorch would not notice: under a fork server."""

import multiprocessing
import os
import threading
from multiprocessing.process import BaseProcess

__all__ = ("end_with_trainer",)


def end_with_trainer() -> None:
    """Let this process end when the one that asked for it does, however that ends.

    PyTorch's workers look whether they have another parent than at first. A child of a fork server has the server for
    its parent, which lives as long as one of its children does: so neither would ever end. Such a child is told by a
    pipe instead, that its training process alone holds open.
    """
    trainer = multiprocessing.parent_process()
    if trainer is not None and trainer.pid != os.getppid():
        threading.Thread(target=_end_after, args=(trainer,), name="frostline-trainer-watch", daemon=True).start()


def _end_after(trainer: BaseProcess) -> None:
    trainer.join()
    os._exit(1)  # nobody is left who would take a batch, or be told why
