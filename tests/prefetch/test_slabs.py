"""Memory of batches that nobody holds any more is used again, and no other."""

import gc

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from frostline.prefetch.requests import Slabs

FLOAT = np.dtype(np.float32)
LARGE = (64, 1024)


def filled(slabs, value, shape=LARGE):
    made = slabs.empty(shape, FLOAT)
    made[...] = value
    return made


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 5)), max_size=40))
def test_never_overwrites_arrays_that_are_still_held(steps):
    slabs, held = Slabs(), {}
    for number, (shape, is_view, let_go) in enumerate(steps):
        one = filled(slabs, number, shape=(64, 1024 * (shape + 1)))
        held[number] = torch.from_numpy(one)[3:, 7] if is_view else one
        held.pop(number - let_go, None)
        assert all((np.asarray(values) == key).all() for key, values in held.items())


def test_memory_comes_back_with_the_last_view_of_it():
    slabs = Slabs()
    one = filled(slabs, 1)
    address, view = one.ctypes.data, one[5:].reshape(-1)[::2]
    del one
    assert filled(slabs, 2).ctypes.data != address
    del view
    gc.collect()
    assert address in {filled(slabs, 3).ctypes.data, slabs.empty(LARGE, FLOAT).ctypes.data}


def test_a_tensor_holds_the_memory_that_it_was_made_from():
    slabs = Slabs()
    tensor = torch.from_numpy(filled(slabs, 1))
    row = tensor[3]
    del tensor
    others = [filled(slabs, 2) for _ in range(4)]
    assert (row == 1).all()
    assert all((other == 2).all() for other in others)


def test_reuses_two_buffers_where_the_loop_holds_one_batch():
    slabs, places, batch = Slabs(), set(), None
    for number in range(20):
        batch = filled(slabs, number)
        places.add(batch.ctypes.data)
    assert len(places) == 2
    assert (batch == 19).all()


def test_an_array_outlives_the_slabs():
    one = filled(Slabs(), 4)
    assert (one == 4).all()
