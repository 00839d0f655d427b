"""Decides the plan: the fastest mixture, one way where that is as fast, a published rule's, or the user's own."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from frostline.core import EXACT
from frostline.errors import SettingError
from frostline.planning.candidates import Candidate, Option, in_store, options, resources
from frostline.planning.optimum import optimum
from frostline.planning.plan import Plan, Share
from frostline.planning.policies import ALL_IN_STORE, BEST, POLICIES, RULES
from frostline.planning.situation import Situation
from frostline.planning.text import against, bounds, in_the_store, mixed, named, over_epochs, single

__all__ = ("NOISE", "fixed", "make_plan")

NOISE = 0.05
"""Two runs of one measurement differ by this share on a busy machine; a smaller gain is none."""
# Of mixtures this near to the fastest the one with the fewest bytes is taken. The last percent of a busy link, and the
# processors' work for its bytes, which nobody measured, cost more than that: ResNet-18 over 1 Gbit/s got 38 samples/s
# of 57 predicted from a mixture that shipped pixels for half of the samples (benchmarks/results).
_LIGHTER = 0.02
# A way with a smaller share gains less than it takes to keep it ready.
_MIN_SHARE = 0.01
# A user's loop stays where it is; that it could run elsewhere is worth saying from this gain on.
_WORTH_SAYING = 0.25
# Rates and loads this near to each other are the same but for rounding.
_ROUNDING = 1e-6


def make_plan(situation: Situation, policy: str = BEST, *, noise: float = NOISE) -> Plan:
    """Decide which share of the samples takes which way.

    The policy ``best`` finds the mixture of cuts and codecs with the greatest throughput (``optimum``). Where one way
    for all samples is as fast within ``noise``, that is taken instead, and of several such the one with the fewest
    bytes, or on one machine the fastest codec at its cut; and of mixtures as fast within 2 % too. Cut 0 ships the
    encoded samples and is possible wherever the trainer has memory for the frozen layers, so that no job is planned
    slower than loading without a node by more than that.
    Every other policy is a published rule (``policies``).

    Features that are kept between epochs are those at the frost line, whatever the way: later epochs then cost the
    same for every candidate, so the choice for the first epoch is the choice for all.

    Args:
        situation: situation: measurements and what is allowed.
        policy: one of ``POLICIES``.
        noise: a gain below this share is none; 0 gives the exact optimum.

    Raises:
        SettingError: No policy has that name, or no cut fits the memory of both sides.
    """
    if policy == BEST:
        return _best(situation, noise)
    if policy not in RULES:
        raise SettingError(f"there is no policy {policy!r}: it is one of {', '.join(POLICIES)}")
    return _by_rule(situation, policy)


def fixed(situation: Situation, cut: int, codec: str | None = None) -> Plan:
    """Take the cut that the user named, with the named codec, or with the one that ``best`` would take there.

    Raises:
        SettingError: There is no such cut or codec, the cut does not fit the memory of both sides, or the job's
            accuracy does not allow the codec.
    """
    found = options(situation)
    here = [option for option in found if option.candidate.cut == cut]
    if not here:
        raise SettingError(f"there is no cut {cut}: this job has cuts 0 to {situation.frost_line.number}")
    known = [option.candidate.codec for option in here]
    if codec is not None and codec not in known:
        raise SettingError(f"codec {codec!r} was not measured at cut {cut}; there are {', '.join(known)}")
    here = [option for option in here if codec in (None, option.candidate.codec)]
    possible = [option for option in here if option.candidate.is_possible]
    if not possible:
        raise _refusal(here[0].candidate)
    fastest = max(option.candidate.samples_per_s for option in possible)
    chosen = _near(possible, fastest, NOISE, same_host=situation.same_host)[0]
    return _alone(situation, "fixed", found, chosen, f"{named(chosen.candidate)} was asked for")


def _best(situation: Situation, noise: float) -> Plan:
    found, names = options(situation), resources(situation)
    possible = _possible(found)
    exact = optimum(
        np.array([[option.seconds[name] for name in names] for option in possible]),
        np.array([option.candidate.wire_bytes_per_sample for option in possible], np.float64),
        slack=min(noise, _LIGHTER),
    )
    greatest = 1 / exact.seconds if exact.seconds > 0 else math.inf
    near = _near(possible, greatest, noise, same_host=situation.same_host)
    if near:
        mix = _Mix.of([(near[0], 1.0)])
        fewest = min(option.candidate.wire_bytes_per_sample for option in near)
        why = single(near[0].candidate, near=len(near), noise=noise, encoded=found[0].candidate, min_bytes=fewest)
    else:
        mix = _Mix.of(_used(possible, exact.shares.tolist(), minimum=_MIN_SHARE if noise else 0.0))
        fastest = max(option.candidate.samples_per_s for option in possible)
        why = mixed([(option.candidate, share) for option, share in mix.ways], gain=mix.samples_per_s / fastest - 1)
    prices = dict(zip(names, exact.prices.tolist(), strict=True))
    judged = _judged(found, mix, lambda item: against(item, mix.samples_per_s, mix.wire_bytes_per_sample, noise=noise))
    plan = _plan(situation, BEST, mix, prices, why, judged)
    return replace(plan, reason=f"{plan.reason}{_elsewhere(situation, plan)}")


def _elsewhere(situation: Situation, plan: Plan) -> str:
    """That training in the store would be faster, where it would; only the user can move the loop there."""
    has_network = situation.frost_line.number > 1
    if not has_network or situation.same_host or plan.later_samples_per_s is not None:
        return ""
    moved = in_store(situation).candidate
    is_faster = moved.samples_per_s > (1 + _WORTH_SAYING) * plan.samples_per_s
    return in_the_store(moved) if moved.is_possible and is_faster else ""


def _by_rule(situation: Situation, policy: str) -> Plan:
    """What a published rule takes; where a side cannot run that, the first cut that both can run."""
    found = options(situation)
    exact = [option for option in found if option.candidate.codec == EXACT]
    possible = _possible(exact)
    number = RULES[policy]([option.candidate for option in possible], situation)
    chosen = next(option for option in exact if option.candidate.cut == number)
    why = f"the rule {policy} takes {named(chosen.candidate)}"
    if not chosen.candidate.is_possible:
        instead = possible[0]
        why = f"{why}, which cannot be used ({chosen.candidate.rejected}), so it is {named(instead.candidate)} instead"
        chosen = instead
    elif policy == ALL_IN_STORE:
        chosen = in_store(situation)
        found = tuple(chosen if option.candidate.route == chosen.candidate.route else option for option in found)
    return _alone(situation, policy, found, chosen, why)


def _possible(found: Sequence[Option]) -> list[Option]:
    possible = [option for option in found if option.candidate.is_possible]
    if not possible:
        first, last = found[0].candidate, found[-1].candidate
        raise SettingError(f"{_refusal(first)}; {_refusal(last)}")
    return possible


def _alone(situation: Situation, policy: str, found: Sequence[Option], chosen: Option, why: str) -> Plan:
    """A plan of one way, whatever others would give: only more of its busiest resource makes it faster."""
    mix = _Mix.of([(chosen, 1.0)])
    bottleneck = mix.bottleneck({})
    is_bound = mix.loads[bottleneck] > 0
    prices = {name: float(is_bound and name == bottleneck) for name in mix.loads}
    return _plan(situation, policy, mix, prices, why, _judged(found, mix, lambda _: why))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mix:
    """Ways with their shares, the largest first, and the seconds that each resource works for an average sample."""

    ways: tuple[tuple[Option, float], ...]
    loads: Mapping[str, float]

    @classmethod
    def of(cls, ways: Sequence[tuple[Option, float]]) -> "_Mix":
        names = ways[0][0].seconds
        loads = {name: sum(share * option.seconds[name] for option, share in ways) for name in names}
        return cls(ways=tuple(ways), loads=loads)

    @property
    def samples_per_s(self) -> float:
        max_s = max(self.loads.values())
        return 1 / max_s if max_s > 0 else math.inf

    @property
    def wire_bytes_per_sample(self) -> float:
        return sum(share * option.candidate.wire_bytes_per_sample for option, share in self.ways)

    def bottleneck(self, prices: Mapping[str, float]) -> str:
        """The busiest resource; of several equally busy ones the one with the highest price."""
        max_s = max(self.loads.values())
        busiest = [name for name, load_s in self.loads.items() if load_s >= (1 - _ROUNDING) * max_s]
        return max(busiest, key=lambda name: prices.get(name, 0.0))


def _plan(
    situation: Situation,
    policy: str,
    mix: _Mix,
    prices: Mapping[str, float],
    why: str,
    candidates: tuple[Candidate, ...],
) -> Plan:
    bottleneck, ranked = mix.bottleneck(prices), tuple(sorted(prices.items(), key=lambda item: -item[1]))
    plan = Plan(
        policy=policy,
        mixture=tuple(Share(route=option.candidate.route, share=share) for option, share in mix.ways),
        samples_per_s=mix.samples_per_s,
        bottleneck=bottleneck,
        prices=ranked,
        reason=f"{why}, {bounds(mix.samples_per_s, bottleneck, ranked)}",
        candidates=candidates,
        link=situation.link,
        epochs=situation.epochs,
        later_samples_per_s=_later(situation),
        engine=situation.store.engine,
        trials=situation.store.trials,
    )
    return replace(plan, reason=f"{plan.reason}{over_epochs(plan)}")


def _later(situation: Situation) -> float | None:
    """Samples a second of the epochs after the first, where those come from the cache: the head alone bounds them."""
    if not situation.keeps_features or situation.epochs == 1:
        return None
    return 1 / situation.head_s if situation.head_s > 0 else math.inf


def _used(possible: Sequence[Option], shares: Sequence[float], *, minimum: float) -> list[tuple[Option, float]]:
    """The ways with more than the least share, the largest first; together they take all samples."""
    used = [(option, share) for option, share in zip(possible, shares, strict=True) if share > minimum]
    total = sum(share for _, share in used)
    used = [(option, share / total) for option, share in used]
    return sorted(used, key=lambda way: (-round(way[1], 4), way[0].candidate.route))


def _near(possible: Sequence[Option], samples_per_s: float, noise: float, *, same_host: bool) -> list[Option]:
    """The ways that are alone as fast as that within the noise, the fewest bytes first.

    On one machine nobody waits for a byte, and packing takes the cores that do the rest: of the codecs at that cut the
    fastest comes first. The cut stays, because what its bytes cost the cores beside packing nobody measured.
    """
    enough = (1 - max(noise, _ROUNDING)) * samples_per_s
    near = sorted(
        (option for option in possible if option.candidate.samples_per_s >= enough),
        key=lambda item: _preference(item.candidate),
    )
    if near and same_host:
        cut = near[0].candidate.cut
        near.sort(key=lambda item: (item.candidate.cut != cut, -item.candidate.samples_per_s))
    return near


def _preference(one: Candidate) -> tuple[float, float, int]:
    return one.wire_bytes_per_sample, -one.samples_per_s, -one.cut


def _judged(found: Sequence[Option], mix: _Mix, why_not: Callable[[Candidate], str]) -> tuple[Candidate, ...]:
    """All candidates, each that is not in use with its reason."""
    used = {option.candidate.route for option, _ in mix.ways}
    return tuple(
        replace(candidate, rejected=None if candidate.route in used else candidate.rejected or why_not(candidate))
        for candidate in (option.candidate for option in found)
    )


def _refusal(one: Candidate) -> SettingError:
    return SettingError(f"{named(one)} cannot be used: {one.rejected}")
