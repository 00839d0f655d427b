"""What a rule of tuning is shown of a real prefetcher, and what becomes of its answers."""

import time

import numpy as np
import pytest

from frostline.core.config import TUNING, LoaderSettings
from frostline.core.errors import SettingError
from frostline.core.events import Tuned
from frostline.prefetch import Prefetcher, Tuner, Window, plan_requests
from frostline.testing import ScriptedTransport
from frostline.tuning import NewBounds, Setting, rule_of
from prefetch.test_prefetcher import features, ids_of, table
from support.mixing import one_way

ROWS = 8


class Scripted:
    """A rule that goes through settings, one a look, and keeps what it was shown."""

    def __init__(self, *settings):
        self.setting, *self.left = settings
        self.looks = []

    def look(self, look):
        self.looks.append(look)
        if not self.left:
            return None
        before, self.setting = self.setting, self.left.pop(0)
        return NewBounds(before=before, after=self.setting, reason=f"look {len(self.looks)}")


class Clock:
    """Each reading is later than a look needs."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 0.01
        return self.now


def run(rule, *, count=400, tuner=None, events=None, **chosen):
    settings = LoaderSettings(samples_per_request=ROWS, **chosen)
    order = np.random.default_rng(0).permutation(count)
    asked = plan_requests(table(count), order, np.arange(count), one_way(ROWS, 16))
    tuner = tuner or Tuner(rule, 0.0)
    window = Window(asked, settings)
    with Prefetcher(
        window,
        features(ScriptedTransport()),
        threads=16,
        clock=Clock(),
        on_event=(events if events is not None else []).append,
        tuner=tuner,
    ) as deliveries:
        return ids_of(deliveries), order.tolist()


@pytest.mark.parametrize("tuning", ["auto", "fixed", "prisma"])
def test_whatever_the_rule_the_same_samples_come_in_the_same_order(tuning):
    came, order = run(rule_of(LoaderSettings(tuning=tuning, samples_per_request=ROWS)))
    assert came == order


def test_changing_bounds_keeps_the_order_and_reports_each_reason():
    settings = [Setting(requests=1 + 5 * number % 16, window_bytes=1 + 999 * number) for number in range(20)]
    rule, events = Scripted(*settings), []
    came, order = run(rule, events=events)
    assert came == order
    tuned = [event for event in events if isinstance(event, Tuned)]
    assert [(item.requests, item.window_bytes) for item in tuned] == [
        (setting.requests, setting.window_bytes) for setting in settings[1:]
    ]
    assert [item.reason for item in tuned] == [f"look {number}" for number in range(1, 20)]


def test_shows_a_rule_all_that_the_window_did():
    rule = Scripted(Setting(requests=4, window_bytes=1 << 20))
    run(rule)
    total = sum(look.bytes_arrived for look in rule.looks)
    assert 0.5 * total < sum(look.bytes_handed_out for look in rule.looks) <= total
    assert 0 < sum(len(look.took_s) for look in rule.looks) <= 400 // ROWS
    assert all(look.seconds > 0 and 0 <= look.stalled_s <= look.seconds + 1e-9 for look in rule.looks)
    assert max(look.requests_in_flight for look in rule.looks) <= 4
    assert rule.looks[-1].is_ending


def test_keeps_what_was_learned_in_the_previous_epoch():
    rule = Scripted(Setting(requests=1, window_bytes=1 << 20), Setting(requests=7, window_bytes=1 << 20))
    tuner = Tuner(rule, 0.0)
    run(rule, tuner=tuner)
    seen = len(rule.looks)
    run(rule, tuner=tuner)
    assert len(rule.looks) > seen
    assert max(look.requests_allowed for look in rule.looks[seen:]) == 7


def test_tunes_one_of_two_simultaneous_windows():
    rule = Scripted(Setting(requests=3, window_bytes=1 << 20))
    tuner = Tuner(rule, 0.0)
    settings = LoaderSettings(samples_per_request=ROWS)
    held = [
        Window(plan_requests(table(80), np.arange(80), np.arange(80), one_way(ROWS, 16)), settings) for _ in range(2)
    ]
    for window in held:
        tuner.begin(window, 0.0)
        for second in range(1, 4):
            window.asks(float(second))
            tuner.look(window, stalled_s=0.0, now=float(second))
    assert len(rule.looks) == 3
    assert {window.statistics().requests_allowed for window in held} == {2}
    tuner.end(held[0])
    tuner.begin(held[1], 5.0)
    tuner.look(held[1], stalled_s=0.0, now=6.0)
    assert len(rule.looks) == 4


def test_a_given_number_of_requests_stays_within_the_settings_bounds():
    assert rule_of(LoaderSettings(requests_in_flight=5)).setting.requests == 5
    assert rule_of(LoaderSettings(tuning="fixed")).setting.requests == 8


def test_only_a_tuned_window_begins_with_fewer_bytes():
    begins = {item: rule_of(LoaderSettings(tuning=item), window_bytes=1000).setting.window_bytes for item in TUNING}
    maximum = LoaderSettings().window_bytes
    assert begins == {"auto": 1000, "prisma": maximum, "fixed": maximum}
    assert LoaderSettings(requests_in_flight=5).last_requests == 5
    assert LoaderSettings(max_requests=3).first_requests == 3
    assert LoaderSettings(max_requests=99).last_requests == 99
    with pytest.raises(SettingError, match="tuning must be one of auto, fixed, prisma"):
        LoaderSettings(tuning="best")


def test_a_look_is_worth_little_and_none_is_made_too_soon():
    rule = Scripted(Setting(requests=3, window_bytes=1 << 20))
    tuner = Tuner(rule, 0.0)
    window = Window(
        plan_requests(table(80), np.arange(80), np.arange(80), one_way(ROWS, 16)),
        LoaderSettings(samples_per_request=ROWS),
    )
    tuner.begin(window, time.monotonic())
    tuner.look(window, stalled_s=0.0, now=0.0)
    assert rule.looks == []
