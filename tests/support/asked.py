"""What a store was asked for: of made-up objects, or of a real driver."""

from frostline.core.errors import ObjectNotFound
from frostline.stores.cloud import DriverStore


class Bytes:
    """A store of made-up objects of so many bytes, which remembers what it was asked."""

    def __init__(self, size=1000):
        self.size = size
        self.asked = []

    def read_version(self, object, offset, length):
        self.asked.append((object, offset, length))
        if offset + length > self.size:
            raise ObjectNotFound(f"{object} ends before that")
        return bytes((ord(object) + place) % 251 for place in range(offset, offset + length)), f"v{object}"


def versions_read(monkeypatch):
    """A list to which each read of a driver's store adds what it asked for, while the patch lasts."""
    made, read_version = [], DriverStore.read_version

    def counted(self, object, offset, length):
        made.append((object, offset, length))
        return read_version(self, object, offset, length)

    monkeypatch.setattr(DriverStore, "read_version", counted)
    return made
