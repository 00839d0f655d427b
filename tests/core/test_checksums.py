"""The checksum of bytes that are kept is zlib's own, so that what other versions wrote still passes."""

import zlib

from hypothesis import given
from hypothesis import strategies as st

from frostline.core.system import crc32


@given(data=st.binary(max_size=10_000), start=st.integers(0, 2**32 - 1))
def test_it_is_that_of_zlib_whatever_the_bytes_and_whatever_came_before(data: bytes, start: int) -> None:
    assert crc32(memoryview(data), start) == zlib.crc32(data, start)
