"""Selects the engine for a prefix: searches known trials first, then makes new ones that pay."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from frostline.core import EXACT, REFERENCE, Levels
from frostline.core.errors import BadRequest, EngineNotReady
from frostline.core.files import make_private_folder
from frostline.engines.catalog import OFFERS, Offer, absence, build
from frostline.engines.choice import (
    Choice,
    Prospect,
    accuracy_refusal,
    choose,
    comparison_prospect,
    is_short,
    may_use,
    missing_ability,
    prospects,
    too_coarse,
    trial_refusal,
)
from frostline.engines.machine import ENVIRONMENT, abilities
from frostline.engines.protocols import Engine, Footprint, Pixels, evaluation_name, identity, levels_of, offer_name
from frostline.models.artifact import Prefix
from frostline.node.trials.processes import Reference, TrialJob, TrialProcess, TrialRunner
from frostline.node.trials.queue import EngineMemory, Requester, TrialPolicy, TrialQueue
from frostline.node.trials.store import TrialStore
from frostline.profiles import Trial
from frostline.wire.messages import ProfileRequest

__all__ = (
    "AccuracyCheck",
    "Search",
    "Trials",
)


class AccuracyCheck:
    """Errors of engines on one job's samples; speed and memory do not depend on the samples.

    Args:
        store: store of trials and errors.
        runner: runner that tries engines on the samples.
        turn: function that returns a context that lasts while anything is tried.
    """

    def __init__(
        self, store: TrialStore, runner: TrialRunner, turn: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.runner = runner
        self._store = store
        self._turn = turn
        self._digest = runner.job.digest
        self._samples = evaluation_name(runner.job.pixels, runner.job.levels)
        self._found: dict[tuple[str, int], Trial] = {}

    def keep(self, trial: Trial) -> None:
        """Store the error of a trial that was made on these samples.

        Raises:
            OSError: The error cannot be written.
        """
        self._found[trial.engine, trial.cut] = trial
        if trial.why_not is None:
            self._store.put_error(self._digest, trial, self._samples)

    def unknown_trials(self, trials: Sequence[Trial]) -> list[Trial]:
        """The successful trials whose error on these samples is unknown."""
        return [trial for trial in trials if trial.samples_per_s is not None and self._known(trial) is None]

    def measure(self, trials: Sequence[Trial]) -> None:
        """Measure the error of one engine at some cuts, in one process.

        Raises:
            Unavailable: The node is stopping.
        """
        with self._turn():
            compared = self.runner.compare(trials)
        for found in compared:
            try:
                self.keep(found)
            except OSError as error:
                self._found[found.engine, found.cut] = replace(found, why_not=f"cannot be tried here: {error}")

    def measure_here(self, trial: Trial) -> Trial:
        """The trial with its error on these samples; an unknown error is 0, so that the engine is considered."""
        known = trial if trial.samples_per_s is None else self._known(trial)
        if known is None:
            return replace(trial, error=0.0)
        if known.why_not is not None:
            return replace(trial, seconds=0.0, why_not=known.why_not)
        return replace(trial, error=known.error)

    def judge(self, trial: Trial, accuracy: str | float) -> Trial:
        """The trial with its error on these samples, measured if needed; failed if the error is too large.

        Raises:
            Unavailable: The node is stopping.
        """
        if unknown := self.unknown_trials([trial]):
            self.measure(unknown)
        here = self.measure_here(trial)
        return here if here.samples_per_s is None else replace(here, why_not=accuracy_refusal(here, accuracy))

    def fill_errors(self, choice: Choice, trials: Sequence[Trial]) -> Choice:
        """The choice with errors from other samples for the engines that were not measured on these."""
        unseen = {(trial.engine, trial.cut): trial.error for trial in self.unknown_trials(trials)}
        said = (replace(trial, error=unseen.get((trial.engine, trial.cut), trial.error)) for trial in choice.trials)
        return replace(choice, trials=tuple(said))

    def _known(self, trial: Trial) -> Trial | None:
        if trial.engine == REFERENCE:
            return trial
        found = self._found.get((trial.engine, trial.cut))
        if found is None:
            error = self._store.error(self._digest, trial, self._samples)
            found = None if error is None else replace(trial, error=error)
        return found


class Search:
    """One job's search for its engine, up to one cut.

    Args:
        own: function that measures the reference for this job, where that is needed; its result is kept here.
        kept: trial of the reference, measured with the known trials; None if there are none.
        keep: function that stores the reference's trial beside those made with it.
        known: trials of other engines, from earlier jobs.
        refused: trials of engines that cannot be used here, with the reason.
        empty: the unfilled trials by name of the engine's offer.
        left: engines that may be tried, the best prospect first.
        accuracy: accuracy that the job needs.
        samples: number of samples that the job still has to compute; None if trials need not pay.
        here: True if engines that are ready in a moment are tried in the node's own process.
    """

    def __init__(
        self,
        *,
        own: Callable[[], Trial],
        kept: Trial | None,
        keep: Callable[[Trial], None],
        known: Sequence[Trial],
        refused: Sequence[Trial],
        empty: Mapping[str, Trial],
        left: Sequence[Prospect],
        accuracy: str | float,
        samples: int | None,
        here: bool = False,
    ) -> None:
        self._own = own
        self._here = here
        self._keep = keep
        self._reference = kept or own()
        self._is_own_kept = False
        self._known = list(known)
        self._refused = list(refused)
        self._empty = empty
        self._left = list(left)
        self._accuracy = accuracy
        self._samples = samples

    def run(self, accuracy_check: AccuracyCheck, tried: Callable[[str], Trial]) -> Choice:
        """Choose the engine.

        Args:
            accuracy_check: check that gives the errors on the job's samples.
            tried: function that tries the engine of an offer, by the offer's name.
        """
        while True:
            choice = self._choice(accuracy_check)
            chosen = next(trial for trial in self._trials if trial.engine == choice.engine)
            spent_s = accuracy_check.runner.spent_s
            if unknown := accuracy_check.unknown_trials([chosen]):
                self._compare(unknown, accuracy_check, spent_s)
                continue
            reasons = {prospect.engine: self._why_not(prospect, chosen.seconds, spent_s) for prospect in self._left}
            worth = next((name for name, why_not in reasons.items() if why_not is None), None)
            if worth is None:
                self._refused += [replace(self._empty[name], why_not=why_not) for name, why_not in reasons.items()]
                return accuracy_check.fill_errors(self._choice(accuracy_check), self._trials)
            self._try(worth, accuracy_check, tried)

    @property
    def _trials(self) -> list[Trial]:
        return [self._reference, *self._known]

    def _choice(self, accuracy_check: AccuracyCheck) -> Choice:
        return choose([*map(accuracy_check.measure_here, self._trials), *self._refused], self._accuracy)

    def _try(self, name: str, accuracy_check: AccuracyCheck, tried: Callable[[str], Trial]) -> None:
        before_s = accuracy_check.runner.spent_s
        self._left = [prospect for prospect in self._left if prospect.engine != name]
        self._known.append(tried(name))
        if accuracy_check.runner.spent_s > before_s and not self._is_own_kept:
            self._reference = self._own()  # compared speeds must be measured at the same time
            self._keep(self._reference)
            self._is_own_kept = True

    def _compare(self, unknown: Sequence[Trial], accuracy_check: AccuracyCheck, spent_s: float) -> None:
        """Have errors measured on this job's samples, if that pays."""
        speed_up = self._reference.seconds / unknown[0].seconds
        gain = comparison_prospect(offer_name(unknown[0].engine), speed_up, here=self._here)
        why_not = self._why_not(gain, self._reference.seconds, spent_s)
        if why_not is None:
            accuracy_check.measure(unknown)
            return
        self._known = [trial for trial in self._known if trial not in unknown]
        self._refused += [replace(trial, seconds=0.0, why_not=why_not) for trial in unknown]

    def _why_not(self, prospect: Prospect, best_s: float, spent_s: float) -> str | None:
        reference_s = self._reference.seconds
        return trial_refusal(prospect, reference_s=reference_s, best_s=best_s, samples=self._samples, spent_s=spent_s)


def _empty_trial(offer: Offer, cut: int, job: TrialJob) -> Trial:
    """An unfilled trial of an engine at one cut."""
    name = identity(offer.name, offer.precision, job.pixels, job.levels, takes_pixels=offer.takes_pixels)
    return Trial(engine=name, precision=offer.precision, cut=cut)


# Minimum number of samples: two of three calibrate and the others test; with fewer, the error is a matter of chance.
_MIN = 8


class Trials:
    """The trials of engines on this hardware. Safe for threads; one engine is tried at a time.

    Args:
        folder: folder for trials and converted files, with a folder per prefix; created when it is needed.
        policy: the way that engines are tried.
        memory: memory that engines must fit.
        longest_s: maximum seconds for all trials of one request; 0 tries none, and the reference is used.
        engines: names of the engines that may be tried; None for all.
        max_bytes: maximum size of the folder; least recently used prefixes are removed first.
        keep: function that takes each engine that was tried in this process, by its name; None where none is used.
    """

    def __init__(
        self,
        folder: Path,
        policy: TrialPolicy,
        memory: EngineMemory,
        *,
        longest_s: float,
        engines: Collection[str] | None = None,
        max_bytes: int = 8 << 30,
        keep: Callable[[str, Engine], None] | None = None,
    ) -> None:
        self._kept_by = keep
        self._store = TrialStore(folder, policy, max_bytes)
        self._policy = policy
        self._memory = memory
        self._longest_s = longest_s
        self._offers = tuple(offer for offer in OFFERS if engines is None or offer.name in (REFERENCE, *engines))
        # Its environment is that with which the node was started; variables that the user has set are passed on too.
        self._process = TrialProcess(ENVIRONMENT if policy.keeps_freed else {}, policy.niceness)
        self._queue = TrialQueue()

    def choose_engine(
        self,
        request: ProfileRequest,
        prefix: Prefix,
        pixels: Pixels,
        reference: Reference,
        requester: Requester,
        levels: Levels | None,
    ) -> Choice:
        """The engine for the job that asks for a profile; if it names one, only that engine is prepared.

        What is beside the request is as in ``TrialJob``.

        Raises:
            BadRequest: The prefix has no such cut.
            EngineNotReady: The engine that the job names cannot be used there.
            Cancelled: The request was cancelled.
            Overloaded: The tenant has to wait before more is tried for it.
            Unavailable: The node is stopping.
        """
        features = request.features
        assert features.prefix is not None, "the prefix was found by its name"
        job = TrialJob(
            digest=features.prefix,
            prefix=prefix,
            pixels=pixels,
            reference=reference,
            requester=requester,
            levels=levels,
        )
        is_here = features.engine != REFERENCE or request.only_here
        if is_here and not 1 <= features.cut <= len(job.prefix.cuts):
            raise BadRequest(f"cut must be from 1 to {len(job.prefix.cuts)} for this prefix, not {features.cut}")
        if features.engine != REFERENCE:
            trial = self.prepare(job, features.engine, features.cut, request.accuracy)
            if trial.why_not is not None:
                raise EngineNotReady(f"{features.engine} cannot be used at cut {features.cut}: {trial.why_not}")
            return Choice(engine=REFERENCE, trials=(trial,))
        if len(job.pixels) < _MIN:
            return Choice(engine=REFERENCE, trials=())
        return self.choose(
            job,
            request.accuracy,
            only=features.cut if request.only_here else None,
            max_s=request.trial_s,
            samples=request.samples_left,
        )

    def are_wanted(self, request: ProfileRequest, reference_s: Callable[[], float]) -> bool:
        """Whether a job that asks for a profile considers any engine beside the reference.

        Args:
            request: request of the job.
            reference_s: function that returns the seconds per sample of the reference up to the frost line, measured
                where need be.
        """
        digest = request.features.prefix
        if digest is None or request.features.engine != REFERENCE or not self._tries(request.accuracy):
            return digest is not None and request.features.engine != REFERENCE
        if request.samples_left is None or self._store.place(digest).is_dir():
            return True
        names = [
            offer.name for offer in self._allowed(request.accuracy) if absence(offer.name, self._policy.device) is None
        ]
        each_s = reference_s()
        return any(
            trial_refusal(prospect, reference_s=each_s, best_s=each_s, samples=request.samples_left) is None
            for prospect in prospects(names, abilities(self._policy.device), here=self._policy.here)
        )

    def choose(
        self,
        job: TrialJob,
        accuracy: str | float,
        *,
        only: int | None = None,
        max_s: float | None = None,
        samples: int | None = None,
    ) -> Choice:
        """The engine for a job: the fastest that is accurate enough, among those that are known or worth a trial.

        The best prospects are tried first. Known engines cost nothing and are always considered.

        Args:
            job: prefix, samples and tenant.
            accuracy: accuracy that the job needs.
            only: number of the cut at which the job stops; None before it has a plan, which means the frost line.
            max_s: maximum seconds for trials that the job allows; None leaves it to the node.
            samples: number of samples that the job still has to compute; None if trials need not pay.

        Raises:
            Cancelled: The request was cancelled.
            Overloaded: The tenant has to wait before more is tried for it.
            Unavailable: The node is stopping.
        """
        if len(job.prefix.cuts) == 1 or not self._tries(accuracy):
            return Choice(engine=REFERENCE, trials=())
        cut = job.prefix.cuts[-1].number if only is None else only
        others = [offer for offer in self._allowed(accuracy) if offer.name != REFERENCE]
        empty = {other.name: _empty_trial(other, cut, job) for other in others}
        unmeasured = Trial(engine=REFERENCE, precision="fp32", cut=cut)
        kept = self._store.get(job.digest, unmeasured)
        # A job that finds all that it may use need not run the reference.
        own = cache(lambda: replace(unmeasured, seconds=job.reference.seconds(cut)))
        search = self._search(job, empty, own, kept, accuracy, samples)
        is_brief = samples is not None and is_short(reference_s=(kept or own()).seconds, samples=samples)
        with self._accuracy_check(job, max_s=max_s, is_brief=is_brief) as accuracy_check:
            return search.run(accuracy_check, lambda name: self._tried([empty[name]], accuracy_check)[0])

    def prepare(self, job: TrialJob, engine: str, cut: int, accuracy: str | float = EXACT) -> Trial:
        """Make an engine ready for one cut; if that fails, the trial says why.

        An engine whose name does not mention pixels gets the network's input, whatever the job's pixels are.

        Args:
            job: prefix, samples and tenant.
            engine: name of the engine.
            cut: number of the cut up to which it runs.
            accuracy: accuracy that the engine must have on these samples; ``exact`` if the requester has checked it.

        Raises:
            BadRequest: No engine has that name.
            Cancelled: The request was cancelled.
            EngineNotReady: This node may not use the engine.
            Overloaded: The tenant has to wait before more is tried for it.
            Unavailable: The node is stopping.
        """
        offer = self._offered(engine)
        if offer is None and any(offer.name == offer_name(engine) for offer in OFFERS):
            raise EngineNotReady(f"this node was started without {offer_name(engine)} (--engines)")
        if offer is None:
            raise BadRequest(f"engine: this node has no engine {engine!r}")
        if len(job.pixels) < _MIN:
            job = replace(job, pixels=np.resize(job.pixels, (_MIN, *job.pixels.shape[1:])))
        wanted = Trial(engine=engine, precision=offer.precision, cut=cut)
        here = identity(offer.name, offer.precision, job.pixels, job.levels, takes_pixels=bool(levels_of(engine)))
        if engine != here and self._store.find(job.digest, wanted) is None:
            return replace(wanted, why_not=f"was calibrated on other samples: on these its name would be {here}")
        with self._accuracy_check(job) as accuracy_check:
            trial = self._tried([wanted], accuracy_check)[0]
            return trial if accuracy == EXACT else accuracy_check.judge(trial, accuracy)

    def find_ready(self, digest: str, engine: str, cut: int) -> Trial | None:
        """The trial of an engine that can be made from it; None if the engine has to be tried first."""
        offer = self._offered(engine)
        if offer is None or absence(engine, self._policy.device) is not None:
            return None
        found = self._store.get(digest, Trial(engine=engine, precision=offer.precision, cut=cut))
        if found is None or self._memory.lacks(found) is not None:
            return None
        found = self._policy.limit_rows(found)
        return None if found.samples_per_s is None else found

    def make_engine(
        self, digest: str, prefix: Prefix, trial: Trial, levels: Levels | None, checked: Footprint | None, device: str
    ) -> Engine:
        """Make an engine from the files that its trial has kept.

        Args:
            digest: digest of the prefix.
            prefix: prefix to be run.
            trial: trial of the engine.
            levels: meaning of pixels, if the engine's name says that it takes them.
            checked: memory of the reference up to the cut, if the graph was checked.
            device: device that runs it, of the same kind as that of the trial.

        Raises:
            EngineUnsupported: The engine's int8 levels were made for pixels of another kind.
        """
        return build(
            trial.engine,
            prefix.graph,
            prefix.cuts,
            prefix.tensors,
            cut=trial.cut,
            device=device,
            max_rows=max(self._policy.rows),
            threads=trial.threads,
            levels=levels,
            folder=self._store.place(digest) / f"cut-{trial.cut}",
            checked=checked,
        )

    def warm(self) -> None:
        """Start the process of the first trial, so that a job does not wait for what it imports."""
        if self._longest_s > 0 and not self._policy.here and len(self._offers) > 1:
            self._process.warm()

    def tidy(self) -> None:
        """Remove unfinished conversions of a node that was killed."""
        self._store.tidy()

    def wake(self) -> None:
        """Cancel trials whose request was cancelled, also a running one."""
        self._queue.wake()
        self._process.wake()

    def close(self) -> None:
        """Cancel the running trial."""
        self._process.close()

    @contextmanager
    def _accuracy_check(
        self, job: TrialJob, *, max_s: float | None = None, is_brief: bool = False
    ) -> Iterator[AccuracyCheck]:
        with TrialRunner(
            job,
            self._policy,
            converted=self._store.place(job.digest),
            process=self._process,
            longest_s=self._longest_s if max_s is None else min(max_s, self._longest_s),
            is_brief=is_brief,
            keep=self._kept_by,
        ) as runner:
            yield AccuracyCheck(self._store, runner, lambda: self._turn(runner))

    @contextmanager
    def _turn(self, runner: TrialRunner) -> Iterator[None]:
        """Hold the turn of a tenant, during which it may run trials."""
        runner.check()
        requester = runner.job.requester
        with self._queue.turn(requester.name, requester.is_abandoned):
            yield

    def _allowed(self, accuracy: str | float) -> list[Offer]:
        """The reference, and the engines that a job of this accuracy may use."""
        return [offer for offer in self._offers if offer.name == REFERENCE or may_use(offer.precision, accuracy)]

    def _tries(self, accuracy: str | float) -> bool:
        return len(self._allowed(accuracy)) > 1 and self._longest_s > 0

    def _offered(self, engine: str) -> Offer | None:
        return next((offer for offer in self._offers if offer.name == offer_name(engine)), None)

    def _search(
        self,
        job: TrialJob,
        empty: Mapping[str, Trial],
        own: Callable[[], Trial],
        kept: Trial | None,
        accuracy: str | float,
        samples: int | None,
    ) -> Search:
        """Sort engines into those that cannot be used, those that are known and those that may be tried."""
        device = self._policy.device
        able = abilities(device)
        refused, known, unknown = list[Trial](), list[Trial](), list[str]()
        for name, trial in empty.items():
            why_not = absence(name, device) or missing_ability(name, able)
            if why_not is not None:
                refused.append(replace(trial, why_not=why_not))
            elif (found := self._store.find(job.digest, trial)) is not None:
                known.append(self._policy.admit(found, self._memory, job.requester.max_engine_bytes))
            elif (coarse := too_coarse(trial.precision, accuracy)) is not None:
                refused.append(replace(trial, why_not=coarse))
            else:
                unknown.append(name)
        return Search(
            own=own,
            kept=kept,
            keep=lambda trial: self._keep(job.digest, trial),
            known=known,
            refused=refused,
            empty=empty,
            left=prospects(unknown, able, here=self._policy.here),
            accuracy=accuracy,
            samples=samples,
            here=self._policy.here,
        )

    def _keep(self, digest: str, own: Trial) -> None:
        with suppress(OSError):  # the next job measures it again
            self._store.put(digest, own)

    def _tried(self, empty: Sequence[Trial], accuracy_check: AccuracyCheck) -> list[Trial]:
        """The trials of one engine at some cuts; missing ones are made."""
        missing = absence(empty[0].engine, self._policy.device)
        if missing is not None:
            return [replace(trial, why_not=missing) for trial in empty]
        job = accuracy_check.runner.job
        found = [self._store.find(job.digest, trial) for trial in empty]
        if None in found:
            with self._turn(accuracy_check.runner):
                found = self._found_out(job.digest, empty, accuracy_check)
        tenant_bytes = job.requester.max_engine_bytes
        return [self._policy.admit(trial, self._memory, tenant_bytes) for trial in found if trial is not None]

    def _found_out(self, digest: str, empty: Sequence[Trial], accuracy_check: AccuracyCheck) -> list[Trial | None]:
        known = {trial.cut: self._store.find(digest, trial) for trial in empty}  # another request may have tried them
        unknown = [trial for trial in empty if known[trial.cut] is None]
        if unknown:
            accuracy_check.runner.check()  # other requests of the tenant had their turn meanwhile
        try:
            make_private_folder(self._store.place(digest))
            for trial in accuracy_check.runner.run_trials(unknown) if unknown else []:
                known[trial.cut] = trial
                self._store.learn(digest, trial, is_late=accuracy_check.runner.is_late)
                accuracy_check.keep(trial)
        except OSError as error:
            why_not = f"cannot be tried here: {error}"
            known.update({trial.cut: replace(trial, why_not=why_not) for trial in unknown if known[trial.cut] is None})
        finally:
            self._store.tidy(digest)  # unfinished conversions of a killed trial
        return [known[trial.cut] for trial in empty]
