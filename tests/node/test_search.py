"""The search for one job's engine: nothing here runs one."""

from types import SimpleNamespace

from frostline.core import REFERENCE
from frostline.engines.choice.prospects import Prospect
from frostline.node.trials.search import Search
from frostline.profiles import Trial

REFERENCE_S = 0.03
OWN = Trial(engine=REFERENCE, precision="fp32", cut=5, seconds=REFERENCE_S)
FAST = Prospect(engine="fast", speed_up=2.0, ready_s=10)
SLOW = Prospect(engine="slow", speed_up=1.2, ready_s=10)


def trial(engine, **changes):
    return Trial(
        **{"engine": engine, "precision": "fp32", "cut": 5, "seconds": REFERENCE_S / 2, "error": 1e-6, **changes}
    )


class KnownErrors:
    """Knows the errors of all, but of those that are named; to measure one takes a second."""

    def __init__(self, *unknown):
        self.runner = SimpleNamespace(spent_s=0.0)
        self.missing = set(unknown)
        self.measured = []

    def here(self, one):
        return one

    def unknown(self, trials):
        return [one for one in trials if one.engine in self.missing]

    def measure(self, trials):
        self.measured += [one.engine for one in trials]
        self.missing -= {one.engine for one in trials}

    def said(self, choice, trials):
        return choice


def searched(accuracy_check=None, results=None, **changes):
    """The choice, what was tried, and what was kept of the reference."""
    accuracy_check, asked, kept = accuracy_check or KnownErrors(), [], []

    def tried(name):
        asked.append(name)
        accuracy_check.runner.spent_s += 1
        return (results or {}).get(name, trial(name))

    search = Search(
        **{
            "own": OWN,
            "kept": None,
            "keep": kept.append,
            "known": (),
            "refused": (),
            "empty": {name: trial(name, seconds=0.0, error=0.0) for name in ("fast", "slow")},
            "left": (FAST, SLOW),
            "accuracy": "float32",
            "samples": None,
            **changes,
        }
    )
    return search.run(accuracy_check, tried), asked, kept


def test_the_search_ends_where_no_other_engine_is_expected_to_beat_what_was_found():
    choice, asked, kept = searched()
    assert (choice.engine, asked) == ("fast", ["fast"])
    assert "not expected to be faster" in next(one.why_not for one in choice.trials if one.engine == "slow")
    assert kept == [OWN]


def test_the_next_prospect_is_tried_where_the_first_one_fails():
    failed = {"fast": trial("fast", seconds=0.0, why_not="cannot take this network")}
    choice, asked, _ = searched(results=failed)
    assert (choice.engine, asked) == ("slow", ["fast", "slow"])


def test_an_engine_that_was_found_is_used_where_the_time_ended_before_the_others_were_tried():
    late = {"slow": trial("slow", seconds=0.0, why_not="was not tried: the time for trials was used up")}
    found = {"fast": trial("fast", seconds=REFERENCE_S * 0.9)}
    choice, asked, _ = searched(results={**late, **found})
    assert asked == ["fast", "slow"]
    assert choice.engine == "fast"
    assert {one.engine: one.why_not for one in choice.trials}[REFERENCE].startswith("is slower")


def test_a_job_that_cannot_win_a_trial_back_tries_nothing_and_says_so():
    choice, asked, kept = searched(samples=100)
    assert (choice.engine, asked, kept) == (REFERENCE, [], [])
    why_not = {one.engine: one.why_not for one in choice.trials}
    assert "it would save this job 1.50 s" in why_not["fast"]


def test_what_earlier_jobs_tried_is_used_at_once_by_a_job_of_any_size():
    known = (trial("fast"),)
    choice, asked, _ = searched(samples=8, known=known, left=(SLOW,), kept=OWN)
    assert (choice.engine, asked) == ("fast", [])


def test_an_engine_tried_on_other_samples_is_looked_at_where_the_job_is_large_enough():
    known = (trial("fast"),)
    for samples, expected in ((10_000, "fast"), (100, REFERENCE)):
        accuracy_check = KnownErrors("fast")
        choice, asked, _ = searched(accuracy_check, samples=samples, known=known, left=(), kept=OWN)
        assert choice.engine == expected
        assert accuracy_check.measured == (["fast"] if expected == "fast" else [])
        assert asked == []


def test_the_references_speed_is_the_one_measured_with_the_engines():
    kept = Trial(engine=REFERENCE, precision="fp32", cut=5, seconds=REFERENCE_S / 10)
    known = (trial("fast", seconds=REFERENCE_S / 20),)
    choice, _, _ = searched(samples=10, known=known, left=(), kept=kept)
    assert choice.engine == "fast"
    assert {one.engine: one.seconds for one in choice.trials}[REFERENCE] == kept.seconds
