"""The checksum of bytes that are kept: CRC-32, the same as zlib's, by instructions of vectors."""

from zlib_ng.zlib_ng import crc32

__all__ = ("crc32",)
