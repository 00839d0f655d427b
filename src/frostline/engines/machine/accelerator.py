"""Asks an accelerator for its name and free memory, through torch; ``engines.machine.hardware`` knows when to ask."""

__all__ = ("accelerator_name", "free_bytes")


def accelerator_name(device: str) -> str:
    """As its driver has it.

    Args:
        device: in torch's words.
    """
    import torch

    return torch.cuda.get_device_name(device)


def free_bytes(device: str) -> int:
    """What nobody has taken of its memory now.

    What this process keeps for its next runs counts as taken, so that it is to be asked for before the first.

    Args:
        device: in torch's words.
    """
    import torch

    found, _ = torch.cuda.mem_get_info(device)
    return found
