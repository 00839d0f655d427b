"""What a run says on a terminal or in a log, from its events."""

from typing import get_args

from frostline.cli import show
from frostline.cli.show import ProgressBar
from frostline.core import events
from frostline.core.events import BatchDelivered, EpochStarted, Evaluated, NodeBack, NodeLost, RowsNotFinite
from frostline.jobs.statistics import warn_user


def test_figures_of_an_epoch_are_its_own_and_not_those_since_the_start(monkeypatch, capsys):
    now = [10.0]
    monkeypatch.setattr(show.time, "monotonic", lambda: now[0])
    with ProgressBar() as shown:
        for epoch, samples in enumerate((100, 400)):
            shown(EpochStarted(epoch=epoch, samples=samples))
            now[0] += 2
            shown(BatchDelivered(epoch=epoch, samples=samples, from_cache=0, stall_s=0.5))
            shown(Evaluated(epoch=epoch, samples=10, loss=0.5, scores={"accuracy": 0.75}))
    first, second = [line for line in capsys.readouterr().err.split("epoch ") if "held-out" in line]
    assert "(50 samples/s, waiting 25%)" in first
    assert "(200 samples/s, waiting 25%)" in second


def test_a_node_that_is_lost_and_comes_back_is_said_with_its_address_and_why(capsys):
    with ProgressBar() as shown:
        shown(NodeLost(url="http://store-2:7070", reason="it said nothing for too long"))
        shown(NodeBack(url="http://store-2:7070"))
    first, second = capsys.readouterr().err.splitlines()  # of whole lines, since this is no terminal
    assert "http://store-2:7070 is asked nothing for now: it said nothing for too long" in first
    assert "http://store-2:7070 answers again" in second


def test_a_loop_without_an_observer_finds_a_lost_node_in_the_log(caplog):
    warn_user(NodeLost(url="http://store-2:7070", reason="it said nothing for too long"))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "http://store-2:7070" in record.getMessage()
    assert "it said nothing for too long" in record.getMessage()


def test_the_first_row_that_is_not_finite_is_said_and_no_other(capsys):
    with ProgressBar() as shown:
        for total in (2, 4):
            shown(RowsNotFinite(rows=2, total=total, first=f"Inf for sample {total}"))
    said = capsys.readouterr().err
    assert "Inf for sample 2; more are counted" in said
    assert "sample 4" not in said


def test_every_event_stands_in_the_union_and_is_given_by_its_module():
    kinds = {name for name, kind in vars(events).items() if getattr(kind, "__module__", "") == events.__name__}
    assert kinds >= {"NodeLost", "event_name"}
    assert {kind.__name__ for kind in get_args(events.Event)} == kinds - {"event_name"}
    assert set(events.__all__) == kinds | {"Event", "Observer"}
