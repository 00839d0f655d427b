"""Selects the engine for a prefix: tries engines that pay for a job, once per hardware, and keeps the trials."""

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
from frostline.node.trials.search import AccuracyCheck, Search, empty_trial
from frostline.node.trials.trial_policy import NOBODY, EngineMemory, Requester, TrialPolicy
from frostline.node.trials.trial_processes import Reference, TrialProcess, TrialRunner
from frostline.node.trials.trial_queue import TrialQueue
from frostline.node.trials.trial_store import TrialStore
from frostline.private import make_private_folder
from frostline.profiles import Trial
from frostline.wire.messages import ProfileRequest

__all__ = ("Trials",)

# Minimum number of samples: two of three calibrate and the others test; with fewer, the error is a matter of chance.
_MIN = 8


class Trials:
    """The trials of engines on this hardware. Safe for threads; one engine is tried at a time.

    Args:
        folder: folder for trials and converted files, with a folder per prefix; created when it is needed.
        policy: how engines are tried.
        room: memory that engines must fit.
        longest_s: maximum seconds for all trials of one request; 0 tries none, and the reference is used.
        engines: names of the engines that may be tried; None for all.
        max_bytes: maximum size of the folder; least recently used prefixes are removed first.
    """

    def __init__(
        self,
        folder: Path,
        policy: TrialPolicy,
        room: EngineMemory,
        *,
        longest_s: float,
        engines: Collection[str] | None = None,
        max_bytes: int = 8 << 30,
    ) -> None:
        self._store = TrialStore(folder, policy, max_bytes)
        self._policy = policy
        self._room = room
        self._longest_s = longest_s
        self._offers = tuple(offer for offer in OFFERS if engines is None or offer.name in (REFERENCE, *engines))
        self._process = TrialProcess(policy.niceness)
        self._queue = TrialQueue()

    def wanted(
        self,
        request: ProfileRequest,
        prefix: Prefix,
        pixels: Pixels,
        reference: Reference,
        requester: Requester = NOBODY,
        levels: Levels | None = None,
    ) -> Choice:
        """The engine for the job that asks for a profile; if it names one, only that engine is prepared.

        Args:
            request: request of the job.
            prefix: prefix to be run.
            pixels: real samples.
            reference: runs the prefix as the user's own network does.
            requester: tenant and request for which engines are tried.
            levels: meaning of the pixels if they are unprocessed, so that engines take them unprocessed too; else None.

        Raises:
            BadRequest: if there is no such cut.
            EngineNotReady: if the engine that it names cannot be used there.
            Cancelled: if the request was cancelled.
            Overloaded: if the tenant has to wait before more is tried for it.
            Unavailable: if the node is stopping.
        """
        features = request.features
        assert features.prefix is not None, "the prefix was found by its name"
        is_here = features.engine != REFERENCE or request.only_here
        if is_here and not 1 <= features.cut <= len(prefix.cuts):
            raise BadRequest(f"cut must be from 1 to {len(prefix.cuts)} for this prefix, not {features.cut}")
        if features.engine != REFERENCE:
            engine, cut, accuracy = features.engine, features.cut, request.accuracy
            trial = self.prepare(
                features.prefix, prefix, pixels, engine, cut, reference, requester, levels, accuracy=accuracy
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
            requester,
            levels,
            only=features.cut if request.only_here else None,
            max_s=request.trial_s,
            samples=request.samples_left,
        )

    def are_wanted(self, request: ProfileRequest, reference_s: float) -> bool:
        """Whether a job that asks for a profile considers any engine beside the reference.

        Args:
            request: request of the job.
            reference_s: seconds per sample of the reference up to the frost line.
        """
        digest = request.features.prefix
        if digest is None or request.features.engine != REFERENCE or not self._tries(request.accuracy):
            return digest is not None and request.features.engine != REFERENCE
        if request.samples_left is None or self._store.place(digest).is_dir():
            return True
        names = [
            offer.name for offer in self._allowed(request.accuracy) if absence(offer.name, self._policy.device) is None
        ]
        return any(
            not_worth(prospect, reference_s=reference_s, best_s=reference_s, samples=request.samples_left) is None
            for prospect in prospects(names, abilities(self._policy.device), here=self._policy.here)
        )

    def choose(
        self,
        digest: str,
        prefix: Prefix,
        pixels: Pixels,
        accuracy: str | float,
        reference: Reference,
        requester: Requester = NOBODY,
        levels: Levels | None = None,
        *,
        only: int | None = None,
        max_s: float | None = None,
        samples: int | None = None,
    ) -> Choice:
        """The engine for a job: the fastest that is accurate enough, among those that are known or worth a trial.

        The best prospects are tried first. Known engines cost nothing and are always considered.

        Args:
            digest: digest of the prefix.
            prefix: prefix to be run.
            pixels: real samples.
            accuracy: accuracy that the job needs.
            reference: runs the prefix as the user's own network does.
            requester: tenant and request for which engines are tried.
            levels: meaning of the pixels, as for ``wanted``.
            only: number of the cut at which the job stops; None before it has a plan, which means the frost line.
            max_s: maximum seconds for trials that the job allows; None leaves it to the node.
            samples: number of samples that the job still has to compute; None if trials need not pay.

        Raises:
            Cancelled: if the request was cancelled.
            Overloaded: if the tenant has to wait before more is tried for it.
            Unavailable: if the node is stopping.
        """
        if len(prefix.cuts) == 1 or not self._tries(accuracy):
            return Choice(engine=REFERENCE, trials=())
        cut = prefix.cuts[-1].number if only is None else only
        others = [offer for offer in self._allowed(accuracy) if offer.name != REFERENCE]
        empty = {other.name: empty_trial(other, cut, pixels, levels) for other in others}
        own = Trial(engine=REFERENCE, precision="fp32", cut=cut, seconds=reference.seconds(cut))
        search = self._search(digest, empty, own, accuracy, samples, requester)
        with self._accuracy_check(digest, prefix, pixels, reference, requester, levels, max_s) as accuracy_check:
            return search.run(accuracy_check, lambda name: self._tried(digest, [empty[name]], accuracy_check)[0])

    def prepare(
        self,
        digest: str,
        prefix: Prefix,
        pixels: Pixels,
        engine: str,
        cut: int,
        reference: Reference,
        requester: Requester = NOBODY,
        levels: Levels | None = None,
        *,
        accuracy: str | float = EXACT,
    ) -> Trial:
        """Make an engine ready for one cut; if that fails, the trial says why.

        An engine whose name does not mention pixels gets the network's input, whatever ``pixels`` are.

        Args:
            digest: digest of the prefix.
            prefix: prefix to be run.
            pixels: real samples.
            engine: name of the engine.
            cut: number of the cut up to which it runs.
            reference: runs the prefix as the user's own network does.
            requester: tenant and request for which engines are tried.
            levels: meaning of the pixels, as for ``wanted``.
            accuracy: accuracy that the engine must have on these samples; ``exact`` if the requester has checked it.

        Raises:
            BadRequest: if there is no such engine.
            Cancelled: if the request was cancelled.
            EngineNotReady: if this node may not use it.
            Overloaded: if the tenant has to wait before more is tried for it.
            Unavailable: if the node is stopping.
        """
        offer = self._offered(engine)
        if offer is None and any(offer.name == offer_name(engine) for offer in OFFERS):
            raise EngineNotReady(f"this node was started without {offer_name(engine)} (--engines)")
        if offer is None:
            raise BadRequest(f"engine: this node has no engine {engine!r}")
        if len(pixels) < _MIN:
            pixels = np.resize(pixels, (_MIN, *pixels.shape[1:]))
        wanted = Trial(engine=engine, precision=offer.precision, cut=cut)
        here = identity(offer.name, offer.precision, pixels, levels, takes_pixels=bool(levels_of(engine)))
        if engine != here and self._store.known(digest, wanted) is None:
            return replace(wanted, why_not=f"was calibrated on other samples: on these its name would be {here}")
        with self._accuracy_check(digest, prefix, pixels, reference, requester, levels, None) as accuracy_check:
            trial = self._tried(digest, [wanted], accuracy_check)[0]
            return trial if accuracy == EXACT else accuracy_check.allowed(trial, accuracy)

    def ready(self, digest: str, engine: str, cut: int) -> Trial | None:
        """The trial of an engine that can be made from it; None if the engine has to be tried first."""
        offer = self._offered(engine)
        if offer is None or absence(engine, self._policy.device) is not None:
            return None
        found = self._store.get(digest, Trial(engine=engine, precision=offer.precision, cut=cut))
        if found is None or self._room.lacks(found) is not None:
            return None
        found = self._policy.bounded(found)
        return None if found.samples_per_s is None else found

    def made(
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
            EngineUnsupported: if the pixels of its name have other levels.
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
        self,
        digest: str,
        prefix: Prefix,
        pixels: Pixels,
        reference: Reference,
        requester: Requester,
        levels: Levels | None,
        max_s: float | None,
    ) -> Iterator[AccuracyCheck]:
        with TrialRunner(
            prefix,
            pixels,
            levels,
            self._policy,
            reference,
            converted=self._store.place(digest),
            process=self._process,
            longest_s=self._longest_s if max_s is None else min(max_s, self._longest_s),
            requester=requester,
        ) as runner:
            yield AccuracyCheck(self._store, digest, judged_on(pixels, levels), runner, lambda: self._turn(runner))

    @contextmanager
    def _turn(self, runner: TrialRunner) -> Iterator[None]:
        """Hold the turn of a tenant, during which it may run trials."""
        runner.check()
        with self._queue.turn(runner.requester.name, runner.requester.is_abandoned):
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
        digest: str,
        empty: Mapping[str, Trial],
        own: Trial,
        accuracy: str | float,
        samples: int | None,
        requester: Requester,
    ) -> Search:
        """Sort engines into those that cannot be used, those that are known and those that may be tried."""
        device = self._policy.device
        able = abilities(device)
        refused, known, unknown = list[Trial](), list[Trial](), list[str]()
        for name, trial in empty.items():
            why_not = absence(name, device) or unequipped(name, able)
            if why_not is not None:
                refused.append(replace(trial, why_not=why_not))
            elif (found := self._store.known(digest, trial)) is not None:
                known.append(self._policy.allowed(found, self._room, requester.room_bytes))
            elif (coarse := too_coarse(trial.precision, accuracy)) is not None:
                refused.append(replace(trial, why_not=coarse))
            else:
                unknown.append(name)
        return Search(
            own=own,
            kept=self._store.get(digest, own),
            keep=lambda trial: self._keep(digest, trial),
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

    def _tried(self, digest: str, empty: Sequence[Trial], accuracy_check: AccuracyCheck) -> list[Trial]:
        """The trials of one engine at some cuts; missing ones are made."""
        missing = absence(empty[0].engine, self._policy.device)
        if missing is not None:
            return [replace(trial, why_not=missing) for trial in empty]
        found = [self._store.known(digest, trial) for trial in empty]
        if None in found:
            with self._turn(accuracy_check.runner):
                found = self._found_out(digest, empty, accuracy_check)
        tenant_bytes = accuracy_check.runner.requester.room_bytes
        return [self._policy.allowed(trial, self._room, tenant_bytes) for trial in found if trial is not None]

    def _found_out(self, digest: str, empty: Sequence[Trial], accuracy_check: AccuracyCheck) -> list[Trial | None]:
        known = {trial.cut: self._store.known(digest, trial) for trial in empty}  # another request may have tried them
        unknown = [trial for trial in empty if known[trial.cut] is None]
        if unknown:
            accuracy_check.runner.check()  # other requests of the tenant had their turn meanwhile
        try:
            make_private_folder(self._store.place(digest))
            for trial in accuracy_check.runner.tried(unknown) if unknown else []:
                known[trial.cut] = trial
                self._store.learn(digest, trial, is_late=accuracy_check.runner.is_late)
                accuracy_check.keep(trial)
        except OSError as error:
            why_not = f"cannot be tried here: {error}"
            known.update({trial.cut: replace(trial, why_not=why_not) for trial in unknown if known[trial.cut] is None})
        finally:
            self._store.tidy(digest)  # unfinished conversions of a killed trial
        return [known[trial.cut] for trial in empty]
