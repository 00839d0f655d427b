"""The way to a node in this process takes over what a job says of asking twice."""

from contextlib import ExitStack

import pytest

import frostline as fl
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.jobs import connect as reaching
from support.nodes import make_images


@pytest.mark.parametrize(
    ("of_job", "of_node", "holds"), [(0.95, 0.95, 0.95), (1.0, 0.95, 1.0), (0.95, 0.99, 0.99), (0.5, 0.9, 0.9)]
)
def test_halves_the_rate_when_asked_twice(tmp_path, monkeypatch, of_job, of_node, holds):
    made = []

    class Told(reaching.Node):
        def __init__(self, settings, roots):
            made.append(settings)
            super().__init__(settings, roots)

    monkeypatch.setattr(reaching, "Node", Told)
    make_images(tmp_path / "images" / "cats", 2)
    data = fl.Dataset(tmp_path / "images")
    with ExitStack() as stack:
        settings, node = LoaderSettings(hedge_quantile=of_job), NodeSettings(hedge_quantile=of_node)
        reaching.reach((), data, settings, node, lambda *_: None, stack)
    assert [item.hedge_quantile for item in made] == [holds]
