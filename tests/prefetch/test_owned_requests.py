"""Requests by owner: each sample once, requests of one owner and large, and rows in order again behind the window."""

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from frostline.core import FeatureBatch, Samples, Skipped
from frostline.core.config import LoaderSettings
from frostline.core.errors import NodeUnreachable
from frostline.prefetch import Delivery, OwnedRequests, Window
from frostline.prefetch.owned_requests import in_pieces
from support.mixing import one_way

ROW_BYTES = 8


@dataclass
class Owners:
    """Owners of rows, by a table that is given."""

    table: np.ndarray
    nodes: tuple

    def of_rows(self, rows):
        return self.table[rows]

    def second(self, row):
        return None if len(self.nodes) < 2 else (int(self.table[row]) + 1) % len(self.nodes)


def owners(count, nodes, seed=0):
    table = np.random.default_rng(seed).integers(0, nodes, count).astype(np.int32)
    return Owners(table, tuple(f"node {number}" for number in range(nodes)))


def samples(count):
    ids = np.arange(count, dtype=np.int64) * 7 + 3
    zeros = np.zeros(count, np.int64)
    return Samples(ids=ids, objects=[str(item) for item in ids], offsets=zeros, lengths=zeros + 9, labels=zeros)


def owned(found, request_rows, max_rows=1 << 20):
    return OwnedRequests(lambda: found, lambda rows: rows, request_rows=request_rows, max_rows=max_rows)


def answer(ids, unreadable):
    kept = ids[~np.isin(ids, unreadable)]
    skipped = tuple(Skipped(id=int(item), object="x", reason="no image") for item in ids if item in unreadable)
    return FeatureBatch(ids=kept, tensors=(kept.astype(np.float64)[:, None],), skipped=skipped)


@settings(deadline=None)
@given(
    count=st.integers(1, 150),
    nodes=st.integers(1, 5),
    request_rows=st.integers(1, 12),
    max_rows=st.integers(1, 200),
    requests=st.integers(1, 6),
    data=st.data(),
)
def test_behind_the_window_rows_come_once_and_in_order_whatever_fails(
    count, nodes, request_rows, max_rows, requests, data
):
    random = np.random.default_rng(data.draw(st.integers(0, 99), "seed"))
    table, rows = samples(count), random.permutation(count)
    positions = np.sort(random.choice(3 * count, count, replace=False))
    unreadable = table.ids[random.random(count) < 0.1]
    planned = owned(owners(count, nodes), request_rows, max_rows)
    asked = planned.plan(table, rows, positions, one_way(request_rows, ROW_BYTES))
    window = Window(asked, LoaderSettings(samples_per_request=request_rows, requests_in_flight=requests, ramp=False))

    def deliveries():
        now, under_way = 0.0, []
        while not window.is_done:
            under_way += window.asks(now)
            if under_way:
                ask = under_way.pop(int(random.integers(len(under_way))))
                if random.random() < 0.2:
                    window.fail(ask, NodeUnreachable("gone"), now)
                else:
                    middle = int(random.integers(len(ask.samples) + 1))
                    for part in (ask.samples.ids[:middle], ask.samples.ids[middle:]):
                        window.take_rows(ask, answer(part, unreadable))
                    window.finish(ask, now)
            now += 0.05
            delivery = window.take()
            while delivery is not None:
                yield delivery
                delivery = window.take()
            yield None

    found = [delivery for delivery in planned.in_order(deliveries()) if delivery is not None]
    places = np.concatenate([delivery.positions for delivery in found])
    ids = np.concatenate([delivery.batch.ids for delivery in found])
    kept = ~np.isin(table.ids[rows], unreadable)
    assert places.tolist() == positions[kept].tolist()
    assert ids.tolist() == table.ids[rows][kept].tolist()
    for delivery in found:
        assert np.array_equal(delivery.batch.tensors[0][:, 0] if len(delivery.batch) else [], delivery.batch.ids)
        assert delivery.stop == delivery.reach
        assert (delivery.positions < delivery.stop).all()
    assert found[-1].stop == positions[-1] + 1


def test_none_says_that_the_window_has_nothing_and_not_that_rows_wait():
    planned = owned(owners(6, 2), 8)
    asked = list(planned.plan(samples(6), *[np.arange(6)] * 2, one_way(8, ROW_BYTES)))

    def deliveries():
        for request in asked:
            yield Delivery(positions=request.positions, stop=6, reach=6, batch=answer(request.samples.ids, ()))

    # Whoever is told None waits for rows to arrive, and here all have.
    assert None not in list(planned.in_order(deliveries()))


def test_requests_of_an_owner_are_whole_but_for_its_last():
    count, found = 40_000, owners(40_000, 8)
    asked = list(owned(found, 32).plan(samples(count), *[np.arange(count)] * 2, one_way(32, ROW_BYTES)))
    assert all(len(set(found.table[request.positions].tolist())) == 1 for request in asked)
    assert sum(map(len, asked)) == count
    assert sum(len(request) < 32 for request in asked) <= 8


def test_a_node_that_owns_little_holds_rows_up_for_a_bounded_number_of_places():
    table = np.zeros(2000, np.int32)
    table[::100] = 1
    asked = owned(Owners(table, ("much", "little")), 8, max_rows=96).plan(
        samples(2000), *[np.arange(2000)] * 2, one_way(8, ROW_BYTES)
    )
    seen, missing = np.zeros(2000, bool), 0
    for request in asked:
        seen[request.positions] = True
        while missing < 2000 and seen[missing]:
            missing += 1
        assert np.flatnonzero(seen)[-1] - missing < 96


def test_a_request_names_its_owner_and_whom_to_ask_next_and_attempts_take_turns():
    found = owners(64, 3)
    planned = owned(found, 8)
    window = Window(
        planned.plan(samples(64), *[np.arange(64)] * 2, one_way(8, ROW_BYTES)),
        LoaderSettings(samples_per_request=8, requests_in_flight=1, ramp=False),
    )
    nodes = []
    for now in (0.0, 1.0, 3.0):
        (ask,) = window.asks(now)
        nodes.append(ask.nodes)
        window.fail(ask, NodeUnreachable("gone"), now)
    assert nodes[0] == nodes[2] == nodes[1][::-1]
    assert nodes[0][0] == found.nodes[found.table[(ask.samples.ids[0] - 3) // 7]]


def test_owners_that_change_hold_for_what_was_not_asked_for():
    first, then = owners(600, 2, seed=1), owners(600, 3, seed=2)
    now = [first]
    planned = OwnedRequests(lambda: now[0], lambda rows: rows, request_rows=8, max_rows=100)
    asked = planned.plan(samples(600), *[np.arange(600)] * 2, one_way(8, ROW_BYTES))
    by_then = [next(asked)]
    now[0] = then
    by_then += list(asked)
    seen = {request.nodes[0] for request in by_then if request.positions[0] >= 100}
    assert seen == set(then.nodes)
    assert sum(map(len, by_then)) == 600


@given(st.lists(st.integers(0, 4), min_size=1, max_size=80), st.integers(1, 9), st.integers(0, 200))
def test_pieces_fill_requests_and_the_rest_waits_unless_it_is_old(numbers, request_rows, oldest):
    table, places = np.array(numbers, np.int32), np.arange(len(numbers)) * 3
    pieces, waiting = in_pieces(table, places, request_rows, oldest)
    assert sorted([*np.concatenate([*pieces, waiting]).tolist()]) == places.tolist()
    assert [piece[0] for piece in pieces] == sorted(piece[0] for piece in pieces)
    assert waiting.tolist() == sorted(waiting.tolist())
    assert not len(waiting) or waiting[0] >= oldest
    for piece in pieces:
        assert len(set(table[piece // 3].tolist())) == 1
        assert len(piece) == request_rows or (len(piece) < request_rows and piece[0] < oldest)
    assert (np.bincount(table[waiting // 3], minlength=1) < request_rows).all()


def test_encoded_and_decoded_rows_come_in_order_too():
    planned = owned(owners(6, 2), 8)
    asked = list(planned.plan(samples(6), *[np.arange(6)] * 2, one_way(8, ROW_BYTES)))
    encoded, decoded = asked

    def deliveries():
        some = FeatureBatch(ids=encoded.samples.ids, encoded=[b"x"] * len(encoded))
        yield Delivery(positions=encoded.positions, stop=6, reach=6, batch=some)
        yield Delivery(positions=decoded.positions, stop=6, reach=6, batch=answer(decoded.samples.ids, ()))

    found = [delivery for delivery in planned.in_order(deliveries()) if delivery is not None]
    assert np.concatenate([delivery.positions for delivery in found]).tolist() == list(range(6))
    assert found[-1].stop == 6
