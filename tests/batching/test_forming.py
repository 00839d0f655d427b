import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from frostline.batching import FairMerging, FairShares, FirstCome, Hapi, QueuedRequest

RUN_ROWS = {"a": 32, "b": 32, "c": 8}


@st.composite
def queues(draw):
    waiting = []
    for number in range(draw(st.integers(1, 9))):
        kind = draw(st.sampled_from(sorted(RUN_ROWS)))
        waiting.append(
            QueuedRequest(
                number=number,
                tenant=draw(st.sampled_from(["one", "two", "three"])),
                kind=kind,
                rows=draw(st.integers(1, RUN_ROWS[kind])),
                run_rows=RUN_ROWS[kind],
                is_apart=draw(st.booleans()),
                bytes_per_row=draw(st.integers(1, 1000)),
                model_bytes=draw(st.integers(0, 10_000)),
            )
        )
    return waiting


TAGS = st.fixed_dictionaries({name: st.floats(0, 100) for name in ("one", "two", "three")})


def after(waiting, turn):
    """What still waits when a turn has run."""
    ran = Counter({part.number: part.rows for part in turn.parts})
    left = [(item, item.rows - ran[item.number]) for item in waiting]
    assert all(rows >= 0 for _, rows in left)
    return [
        QueuedRequest(number=item.number, tenant=item.tenant, kind=item.kind, rows=rows, run_rows=item.run_rows)
        for item, rows in left
        if rows
    ]


@given(queues(), TAGS)
def test_a_run_holds_one_kind_of_request_and_at_most_its_rows(waiting, tags):
    by_number = {item.number: item for item in waiting}
    for rule in (FairMerging(), FirstCome(), Hapi(100_000)):
        turn = rule.next(waiting, tags.get)
        lead = by_number[turn.parts[0].number]
        assert turn.rows <= lead.run_rows
        assert sum(part.rows for part in turn.parts) <= turn.rows
        assert {by_number[part.number].kind for part in turn.parts} == {lead.kind}
        assert len({part.number for part in turn.parts}) == len(turn.parts)
        assert all(1 <= part.rows <= by_number[part.number].rows for part in turn.parts)
        if lead.is_apart:
            assert len(turn.parts) == 1


@given(queues(), TAGS)
def test_a_run_has_room_to_spare_only_where_nothing_else_could_fill_it(waiting, tags):
    turn = FairMerging().next(waiting, tags.get)
    ran = Counter({part.number: part.rows for part in turn.parts})
    lead = next(item for item in waiting if item.number == turn.parts[0].number)
    if sum(ran.values()) < turn.rows and not lead.is_apart:
        for item in waiting:
            assert item.is_apart or item.kind != lead.kind or ran[item.number] == item.rows


@given(queues(), TAGS)
def test_the_tenant_whose_turn_it_is_goes_first_and_loses_nothing_by_merging(waiting, tags):
    turn = FairMerging().next(waiting, tags.get)
    lead = next(item for item in waiting if item.number == turn.parts[0].number)
    assert tags[lead.tenant] == min(tags[item.tenant] for item in waiting)
    assert turn.parts[0].rows == lead.rows


@given(queues(), TAGS)
def test_merging_never_takes_more_runs_than_a_fixed_batch(waiting, tags):
    runs = []
    for rule in (FairMerging(), FirstCome()):
        left, count = waiting, 0
        while left:
            left, count = after(left, rule.next(left, tags.get)), count + 1
        runs.append(count)
    assert runs[0] <= runs[1] == len(waiting)


def test_rows_of_other_requests_fill_a_run_up():
    waiting = [QueuedRequest(number=number, tenant=str(number), kind="a", rows=20, run_rows=32) for number in range(8)]
    count = 0
    while waiting:
        waiting = after(waiting, FairMerging().next(waiting, lambda _: 0.0))
        count += 1
    assert count == 5  # 160 rows, 32 a run


def test_device_seconds_stay_fair_where_rows_are_merged_and_pieces_differ():
    """Three tenants with two networks, always two pieces each: whoever fills a run up pays for its rows."""
    draw = random.Random(0)
    shares = FairShares({"one": 1.0, "two": 1.0, "three": 2.0})
    row_s = {"a": 0.01, "b": 0.05}
    kinds = {"one": "a", "two": "b", "three": "a"}
    waiting, had, number = [], Counter(), 0
    for name in kinds:
        shares.arrive(name)
    for _ in range(3000):
        for name, kind in kinds.items():
            while sum(item.tenant == name for item in waiting) < 2:
                rows = draw.randint(5, 32)
                waiting.append(QueuedRequest(number=number, tenant=name, kind=kind, rows=rows, run_rows=32))
                number += 1
        turn = FairMerging().next(waiting, shares.tag)
        by_number = {item.number: item for item in waiting}
        lead = by_number[turn.parts[0].number]
        shares.begin(lead.tenant)
        run_s = 32 * row_s[lead.kind]
        for part in turn.parts:
            mine = run_s * part.rows / sum(part.rows for part in turn.parts)
            had[by_number[part.number].tenant] += mine
            shares.charge(by_number[part.number].tenant, mine)
        waiting = after(waiting, turn)
    per_weight = [had["one"], had["two"], had["three"] / 2]
    assert max(per_weight) - min(per_weight) < 0.02 * max(per_weight)
