"""What a run says on a terminal or in a log, from its events."""

from frostline.cli import show
from frostline.cli.show import ProgressBar
from frostline.core.events import BatchDelivered, EpochStarted, Evaluated


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
