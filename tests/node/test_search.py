"""The search for one job's engine, without running any engine."""

from types import SimpleNamespace

from frostline.core import REFERENCE
from frostline.engines.choice import Prospect
from frostline.node.trials.selection import Search
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
        return [trial for trial in trials if trial.engine in self.missing]

    def measure(self, trials):
        self.measured += [trial.engine for trial in trials]
        self.missing -= {trial.engine for trial in trials}

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


def test_the_search_ends_if_no_other_engine_is_expected_to_be_faster():
    choice, asked, kept = searched()
    assert (choice.engine, asked) == ("fast", ["fast"])
    assert "not expected to be faster" in next(trial.why_not for trial in choice.trials if trial.engine == "slow")
    assert kept == [OWN]


def test_tries_the_next_prospect_if_the_first_one_fails():
    failed = {"fast": trial("fast", seconds=0.0, why_not="cannot take this network")}
    choice, asked, _ = searched(results=failed)
    assert (choice.engine, asked) == ("slow", ["fast", "slow"])


def test_uses_the_engine_found_before_the_time_was_used_up():
    late = {"slow": trial("slow", seconds=0.0, why_not="was not tried: the time for trials was used up")}
    found = {"fast": trial("fast", seconds=REFERENCE_S * 0.9)}
    choice, asked, _ = searched(results={**late, **found})
    assert asked == ["fast", "slow"]
    assert choice.engine == "fast"
    assert {trial.engine: trial.why_not for trial in choice.trials}[REFERENCE].startswith("is slower")


def test_a_job_too_short_for_trials_tries_nothing_and_says_so():
    choice, asked, kept = searched(samples=100)
    assert (choice.engine, asked, kept) == (REFERENCE, [], [])
    why_not = {trial.engine: trial.why_not for trial in choice.trials}
    assert "it would save this job 1.50 s" in why_not["fast"]


def test_a_job_of_any_size_uses_the_trials_of_earlier_jobs():
    known = (trial("fast"),)
    choice, asked, _ = searched(samples=8, known=known, left=(SLOW,), kept=OWN)
    assert (choice.engine, asked) == ("fast", [])


def test_a_large_job_checks_an_engine_that_was_tried_on_other_samples():
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
    assert {trial.engine: trial.seconds for trial in choice.trials}[REFERENCE] == kept.seconds
