"""Says how much memory an accelerator has free; the processor's own is the node's budget."""

import torch

__all__ = ("free_device_bytes",)


def free_device_bytes(device: str) -> int | None:
    """What nobody has taken of an accelerator's memory now; None where engines run in the processor's own.

    What this process keeps for its next runs counts as taken, so that it is to be asked for before the first.

    Args:
        device: in torch's words.
    """
    if torch.device(device).type != "cuda":
        return None
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return free_bytes
