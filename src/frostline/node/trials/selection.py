"""Finds the engine for a prefix: has those tried that pay for a job, once on each hardware, and keeps the trials."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from frostline.core import EXACT, REFERENCE, Levels
from frostline.engines.backends.catalog import OFFERS, Offer, absence, build
from frostline.engines.base.identity import Pixels, identity, judged_on, levels_of, offer_name
from frostline.engines.base.protocols import Engine, Footprint
from frostline.engines.choice.choice import Choice, may_use
from frostline.engines.choice.prospects import not_worth, prospects, too_coarse, unequipped
from frostline.engines.machine.hardware import abilities
from frostline.errors import BadRequest, EngineNotReady
from frostline.models.files.artifact import Prefix
from frostline.node.trials.accuracy_check import Judging
from frostline.node.trials.requesters import NOBODY, Patron
from frostline.node.trials.search import Search
from frostline.node.trials.trial_policy import EngineMemory, TrialPolicy
from frostline.node.trials.trial_processes import Children, Reference, Workshop
from frostline.node.trials.trial_queue import TrialTurns
from frostline.node.trials.trial_store import TrialShelf
from frostline.private import make_private_folder
from frostline.profiles import Trial
from frostline.wire.messages import ProfileRequest

__all__ = ("Trials",)

# Two of three samples calibrate and the others judge; with fewer an error is chance.
_MIN = 8


class Trials:
    """What is known of engines on this hardware. Safe for threads; one engine is tried at a time.

    Args:
        folder: where trials and converted files are kept, a folder a prefix; made when it is needed.
        terms: how engines are tried.
        room: that they must fit.
        longest_s: for all trials of one request; 0 tries none, and the reference is used.
        engines: names of those that may be tried; None for all.
        max_bytes: that the folder may take; prefixes longest unused go first.
    """

    def __init__(
        self,
        folder: Path,
        terms: TrialPolicy,
        room: EngineMemory,
        *,
        longest_s: float,
        engines: Collection[str] | None = None,
        max_bytes: int = 8 << 30,
    ) -> None:
        self._shelf = TrialShelf(folder, terms, max_bytes)
        self._terms = terms
        self._room = room
        self._longest_s = longest_s
        self._offers = tuple(one for one in OFFERS if engines is None or one.name in (REFERENCE, *engines))
        self._children = Children(terms.niceness)
        self._turns = TrialTurns()

    def wanted(
        self,
        request: ProfileRequest,
        prefix: Prefix,
        pixels: Pixels,
        reference: Reference,
        patron: Patron = NOBODY,
        levels: Levels | None = None,
    ) -> Choice:
        """The engine for the job that asks for a profile; where it names one, that is made ready and no other tried.

        Args:
            request: of the job.
            prefix: to be run.
            pixels: real samples.
            reference: runs the prefix as the user's own network does.
            patron: for whom it is.
            levels: what they mean where they are as they are kept, as engines then take them too; else None.

        Raises:
            BadRequest: There is no such cut.
            EngineNotReady: The engine that it names cannot be used there.
            Abandoned: Nobody waits for it any more.
            Overloaded: The tenant has to wait before more is tried for it.
            Unavailable: The node is stopping.
        """
        features = request.features
        assert features.prefix is not None, "the prefix was found by its name"
        is_here = features.engine != REFERENCE or request.only_here
        if is_here and not 1 <= features.cut <= len(prefix.cuts):
            raise BadRequest(f"cut must be from 1 to {len(prefix.cuts)} for this prefix, not {features.cut}")
        if features.engine != REFERENCE:
            engine, cut, accuracy = features.engine, features.cut, request.accuracy
            trial = self.prepare(
                features.prefix, prefix, pixels, engine, cut, reference, patron, levels, accuracy=accuracy
            )
            if trial.why_not is not None:
                raise EngineNotReady(f"{engine} cannot be used at cut {cut}: {trial.why_not}")
            return Choice(engine=REFERENCE, trials=(trial,))
        if len(pixels) < _MIN:
            return Choice(engine=REFERENCE, trials=())
        return self.choose(
            features.prefix,
            prefix,
            pixels,
            request.accuracy,
            reference,
            patron,
            levels,
            only=features.cut if request.only_here else None,
            max_s=request.trial_s,
            samples=request.samples_left,
        )

    def are_wanted(self, request: ProfileRequest, reference_s: float) -> bool:
        """Whether a job that asks for a profile has any engine looked at beside the reference.

        Args:
            request: of the job.
            reference_s: of the reference up to the frost line, a sample.
        """
        digest = request.features.prefix
        if digest is None or request.features.engine != REFERENCE or not self._tries(request.accuracy):
            return digest is not None and request.features.engine != REFERENCE
        if request.samples_left is None or self._shelf.place(digest).is_dir():
            return True
        names = [one.name for one in self._allowed(request.accuracy) if absence(one.name, self._terms.device) is None]
        return any(
            not_worth(prospect, reference_s=reference_s, best_s=reference_s, samples=request.samples_left) is None
            for prospect in prospects(names, abilities(self._terms.device), here=self._terms.here)
        )

    def choose(
        self,
        digest: str,
        prefix: Prefix,
        pixels: Pixels,
        accuracy: str | float,
        reference: Reference,
        patron: Patron = NOBODY,
        levels: Levels | None = None,
        *,
        only: int | None = None,
        max_s: float | None = None,
        samples: int | None = None,
    ) -> Choice:
        """The engine for a job: the fastest that is exact enough, of those that are known or worth a trial.

        The best prospects are tried first. What is known costs nothing and is always looked at.

        Args:
            digest: of the prefix.
            prefix: to be run.
            pixels: real samples.
            accuracy: that the job allows.
            reference: runs the prefix as the user's own network does.
            patron: for whom it is.
            levels: what the pixels mean, as for ``wanted``.
            only: number of the one cut that the job stops at; None where the plan is still to choose: the frost line.
            max_s: that the job allows for trials; None leaves it to the node.
            samples: that the job has still to compute, for which trials must pay; None where they need not.

        Raises:
            Abandoned: Nobody waits for it any more.
            Overloaded: The tenant has to wait before more is tried for it.
            Unavailable: The node is stopping.
        """
        if len(prefix.cuts) == 1 or not self._tries(accuracy):
            return Choice(engine=REFERENCE, trials=())
        cut = prefix.cuts[-1].number if only is None else only
        others = [one for one in self._allowed(accuracy) if one.name != REFERENCE]
        empty = {other.name: _empty(other, cut, pixels, levels) for other in others}
        own = Trial(engine=REFERENCE, precision="fp32", cut=cut, seconds=reference.seconds(cut))
        search = self._search(digest, empty, own, accuracy, samples, patron)
        with self._judging(digest, prefix, pixels, reference, patron, levels, max_s) as judging:
            return search.run(judging, lambda name: self._tried(digest, [empty[name]], judging)[0])

    def prepare(
        self,
        digest: str,
        prefix: Prefix,
        pixels: Pixels,
        engine: str,
        cut: int,
        reference: Reference,
        patron: Patron = NOBODY,
        levels: Levels | None = None,
        *,
        accuracy: str | float = EXACT,
    ) -> Trial:
        """Have an engine ready for one cut; the trial says why it cannot be, where it cannot.

        One whose name says nothing of pixels gets what the network takes, whatever ``pixels`` are.

        Args:
            digest: of the prefix.
            prefix: to be run.
            pixels: real samples.
            engine: its name.
            cut: up to which it is to run.
            reference: runs the prefix as the user's own network does.
            patron: for whom it is.
            levels: what the pixels mean, as for ``wanted``.
            accuracy: that the engine must have on these samples; ``exact`` where its asker has seen to that.

        Raises:
            BadRequest: There is no such engine.
            Abandoned: Nobody waits for it any more.
            EngineNotReady: This node may not use it.
            Overloaded: The tenant has to wait before more is tried for it.
            Unavailable: The node is stopping.
        """
        offer = self._offered(engine)
        if offer is None and any(one.name == offer_name(engine) for one in OFFERS):
            raise EngineNotReady(f"this node was started without {offer_name(engine)} (--engines)")
        if offer is None:
            raise BadRequest(f"engine: this node has no engine {engine!r}")
        if len(pixels) < _MIN:
            pixels = np.resize(pixels, (_MIN, *pixels.shape[1:]))
        wanted = Trial(engine=engine, precision=offer.precision, cut=cut)
        here = identity(offer.name, offer.precision, pixels, levels, takes_pixels=bool(levels_of(engine)))
        if engine != here and self._shelf.known(digest, wanted) is None:
            return replace(wanted, why_not=f"was calibrated on other samples: on these it would be {here}")
        with self._judging(digest, prefix, pixels, reference, patron, levels, None) as judging:
            trial = self._tried(digest, [wanted], judging)[0]
            return trial if accuracy == EXACT else judging.allowed(trial, accuracy)

    def ready(self, digest: str, engine: str, cut: int) -> Trial | None:
        """What was measured of an engine that can be made without a trial; None where there has to be one."""
        offer = self._offered(engine)
        if offer is None or absence(engine, self._terms.device) is not None:
            return None
        found = self._shelf.get(digest, Trial(engine=engine, precision=offer.precision, cut=cut))
        return None if found is None or self._room.lacks(found) is not None else found

    def made(
        self,
        digest: str,
        prefix: Prefix,
        trial: Trial,
        levels: Levels | None = None,
        checked: Footprint | None = None,
    ) -> Engine:
        """Make an engine from what its trial left.

        Args:
            digest: of the prefix.
            prefix: to be run.
            trial: of the engine.
            levels: what pixels mean, where the engine's name says that it takes them.
            checked: the reference's memory up to there, where the graph was checked.

        Raises:
            EngineUnfit: The pixels of its name mean something else.
        """
        return build(
            trial.engine,
            prefix.graph,
            prefix.cuts,
            prefix.tensors,
            cut=trial.cut,
            device=self._terms.device,
            max_rows=max(self._terms.rows),
            threads=trial.threads,
            levels=levels,
            folder=self._shelf.place(digest) / f"cut-{trial.cut}",
            checked=checked,
        )

    def tidy(self) -> None:
        """Remove what conversions left that a killed node had begun."""
        self._shelf.tidy()

    def wake(self) -> None:
        """Give up what nobody waits for any more, and end it where it runs."""
        self._turns.wake()
        self._children.wake()

    def close(self) -> None:
        """End what is being tried."""
        self._children.close()

    @contextmanager
    def _judging(
        self,
        digest: str,
        prefix: Prefix,
        pixels: Pixels,
        reference: Reference,
        patron: Patron,
        levels: Levels | None,
        max_s: float | None,
    ) -> Iterator[Judging]:
        with Workshop(
            prefix,
            pixels,
            levels,
            self._terms,
            reference,
            converted=self._shelf.place(digest),
            children=self._children,
            longest_s=self._longest_s if max_s is None else min(max_s, self._longest_s),
            patron=patron,
        ) as workshop:
            yield Judging(self._shelf, digest, judged_on(pixels, levels), workshop, lambda: self._turn(workshop))

    @contextmanager
    def _turn(self, workshop: Workshop) -> Iterator[None]:
        """The turn of a tenant, which may run processes meanwhile."""
        self._check(workshop)
        with self._turns.turn(workshop.patron.name, workshop.patron.is_abandoned):
            yield

    def _allowed(self, accuracy: str | float) -> list[Offer]:
        """The reference, and what a job may use beside it."""
        return [offer for offer in self._offers if offer.name == REFERENCE or may_use(offer.precision, accuracy)]

    def _tries(self, accuracy: str | float) -> bool:
        return len(self._allowed(accuracy)) > 1 and self._longest_s > 0

    def _offered(self, engine: str) -> Offer | None:
        return next((offer for offer in self._offers if offer.name == offer_name(engine)), None)

    def _search(
        self,
        digest: str,
        empty: Mapping[str, Trial],
        own: Trial,
        accuracy: str | float,
        samples: int | None,
        patron: Patron,
    ) -> Search:
        """What cannot be used, what is known of the others, and what may be tried."""
        device = self._terms.device
        able = abilities(device)
        refused, known, unknown = list[Trial](), list[Trial](), list[str]()
        for name, one in empty.items():
            why_not = absence(name, device) or unequipped(name, able)
            if why_not is not None:
                refused.append(replace(one, why_not=why_not))
            elif (found := self._shelf.known(digest, one)) is not None:
                known.append(self._judged(found, patron))
            elif (coarse := too_coarse(one.precision, accuracy)) is not None:
                refused.append(replace(one, why_not=coarse))
            else:
                unknown.append(name)
        return Search(
            own=own,
            kept=self._shelf.get(digest, own),
            keep=lambda trial: self._keep(digest, trial),
            known=known,
            refused=refused,
            empty=empty,
            left=prospects(unknown, able, here=self._terms.here),
            accuracy=accuracy,
            samples=samples,
            here=self._terms.here,
        )

    def _keep(self, digest: str, own: Trial) -> None:
        with suppress(OSError):  # then the next job measures it again
            self._shelf.put(digest, own)

    def _tried(self, digest: str, empty: Sequence[Trial], judging: Judging) -> list[Trial]:
        """What is known of one engine at some cuts, and what was missing of it."""
        missing = absence(empty[0].engine, self._terms.device)
        if missing is not None:
            return [replace(one, why_not=missing) for one in empty]
        found = [self._shelf.known(digest, one) for one in empty]
        if None in found:
            with self._turn(judging.workshop):
                found = self._found_out(digest, empty, judging)
        return [self._judged(one, judging.workshop.patron) for one in found if one is not None]

    def _found_out(self, digest: str, empty: Sequence[Trial], judging: Judging) -> list[Trial | None]:
        known = {one.cut: self._shelf.known(digest, one) for one in empty}  # somebody may have been faster
        unknown = [one for one in empty if known[one.cut] is None]
        if unknown:
            self._check(judging.workshop)  # others of the same tenant had their turn meanwhile
        try:
            make_private_folder(self._shelf.place(digest))
            for trial in judging.workshop.tried(unknown) if unknown else []:
                known[trial.cut] = trial
                self._shelf.learn(digest, trial, is_late=judging.workshop.is_late)
                judging.keep(trial)
        except OSError as error:
            why_not = f"cannot be tried here: {error}"
            known.update({one.cut: replace(one, why_not=why_not) for one in unknown if known[one.cut] is None})
        finally:
            self._shelf.tidy(digest)  # of what was killed
        return [known[one.cut] for one in empty]

    def _check(self, workshop: Workshop) -> None:
        """A request that has begun ends its trials, so that they are not lost."""
        if not workshop.has_begun:
            workshop.patron.check()

    def _judged(self, one: Trial, patron: Patron) -> Trial:
        """As if it had not run, where the node has no room for it; the reference's memory is not the trial's to say."""
        why_not = self._room.lacks(one, patron.room_bytes) if one.engine != REFERENCE else None
        return one if why_not is None else replace(one, seconds=0.0, why_not=why_not)


def _empty(offer: Offer, cut: int, pixels: Pixels, levels: Levels | None) -> Trial:
    """What is to be known of an engine."""
    name = identity(offer.name, offer.precision, pixels, levels, takes_pixels=offer.takes_pixels)
    return Trial(engine=name, precision=offer.precision, cut=cut)
