"""What a job is told: one frozen value for every verb, and what its samples are, checked before anything starts."""

import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from frostline.core import CELLS, FLOAT32, URLS
from frostline.core.config import CHANGED, LoaderSettings, NodeSettings
from frostline.core.errors import SampleError, SettingError
from frostline.datasets import Dataset
from frostline.datasets.dataset import roots_of
from frostline.datasets.formats.folders import SOUND_SUFFIXES, suffix_of
from frostline.datasets.reading import open_samples
from frostline.datasets.source import listing_nodes
from frostline.planning import ALL_IN_STORE, POLICIES
from frostline.preprocess import Preprocess, array, audio
from frostline.preprocess.images import header_of
from frostline.preprocess.sounds import LACKS_SOUND, has_sound_packages, is_sound, seconds_of
from frostline.preprocess.steps import is_argument, unframe_parts
from frostline.training.recipe import LowRank, Unfreezing
from frostline.wire.recipes import LOSSES, SCHEDULES, TASKS, Recipe

__all__ = (
    "FAMILIES",
    "IMAGES",
    "RANDOM",
    "TEXTS",
    "CheckpointEvery",
    "ExtractSettings",
    "JobSettings",
    "TrainSettings",
    "by_input",
    "describe_parts",
    "describe_samples",
    "is_factory",
    "preprocess_of",
)


RANDOM = "random"
"""The word in place of a weights file that asks for weights that have learned nothing."""

FAMILIES = ("torchvision", "timm", "hf", "demo")
"""What stands before the colon of a network's name; any other is a module of the user's own."""

_HELD_OUT = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """What a job is about.

    Attributes:
        data: folder or URL of the data.
        format: name of the format that it has (``datasets.formats``); None takes what it looks like.
        column: name of the column of Parquet files that has the samples, such as texts (``datasets.Dataset``); or the
            columns of several inputs, as in ``pixel_values=image,input_ids=caption``.
        file_column: name of the column of lists that says which file each sample is (``datasets.Dataset``).
        label: name of the column with the labels (``datasets.Dataset``); None takes one that is called so.
        relist: list the data; False takes the manifest that was built last (``datasets.Dataset``).
        on_change: policy for objects that changed since they were listed (``datasets.Dataset``).
        where: a selection, such as ``"label != 'trash'"``: the samples to use; None takes all.
        split: name of a split: of it alone; None takes all, and a training the split for that which the data brings.
        model: name of the network (``training.networks.load_model``).
        until: the last frozen module, or ``features``: all but the classifier. Of several encoders the last frozen
            modules, joined by ``+``.
        near: URL of a node beside the data, or of a list of nodes; None starts one in a process of its own.
        also_near: URLs of further nodes beside the same data; the work is spread over all of them.
        list_locally: list the data with this process's own credentials, though a node could list it.
        weights: safetensors file of the whole network; ``random`` for none; None takes the name's own.
        tokenizer: tokenizer of a network that takes texts (``training.networks.load_model``); None takes the
            network's own.
        max_length: number of tokens that every text is padded or cut to; None takes 128, or fewer where the network
            has positions for no more.
        samples: kind of the samples (``training.settings``); None goes by the data's suffixes.
        seed: seed of the order, the split, the fresh classifier, dropout and random preprocessing.
        cut: number of the cut to use; None lets the plan choose.
        codec: name of the codec to use with that cut; None takes the fastest one that ``accuracy`` allows.
        policy: the rule that chooses (``planning.POLICIES``).
        accuracy: accuracy that engine and codecs must keep (``offload``).
        augment: random crops and flips, computed anew each epoch.
        targets: column of targets to learn (``datasets.Dataset``); None learns the classes.
        loss: ``cross-entropy`` over classes, ``mse`` of numbers or ``bce`` over lists of classes; or
            ``FILE.py:FUNCTION``, which takes scores and targets and gives the mean loss of a batch.
        task: ``classes``, ``labels`` or ``numbers``: what a function of the user's own is the loss of; None for a loss
            that has a name, and else takes numbers where ``targets`` names a column, or classes.
        lora: layers that get low-rank adapters, as ``training.recipe.LowRank.parse`` reads them; behind the
            frost line these and the classifier alone are trained. None adds none.
        outputs: number of scores that the network gives for a sample, where the data need not say what is learned;
            None takes as many as its classes or targets need.
        loader: the way to ask.
        node: settings of the node that is started when ``near`` is None.
    """

    data: str
    model: str
    until: str
    format: str | None = None
    column: str | None = None
    file_column: str | None = None
    label: str | None = None
    relist: bool = True
    on_change: str = CHANGED[0]
    where: str | None = None
    split: str | None = None
    near: str | None = None
    also_near: tuple[str, ...] = ()
    list_locally: bool = False
    weights: str | None = None
    tokenizer: str | None = None
    max_length: int | None = None
    samples: str | None = None
    seed: int = 0
    cut: int | None = None
    codec: str | None = None
    policy: str = POLICIES[0]
    accuracy: str | float = FLOAT32
    augment: bool = False
    targets: str | None = None
    loss: str = LOSSES[0]
    task: str | None = None
    lora: str | None = None
    outputs: int | None = None
    loader: LoaderSettings = field(default_factory=LoaderSettings)
    node: NodeSettings = field(default_factory=NodeSettings)

    @property
    def listed_by(self) -> tuple[str, ...]:
        """URLs of the nodes that list the data; none where it is listed here.

        The nodes of a job list its data. It is listed here where that was asked for, where its format names other
        hosts, and where it is a folder of this machine beside a node of this machine.
        """
        near = tuple(url for url in (self.near, *self.also_near) if url is not None)
        if self.list_locally or self.format == URLS:
            return ()
        return listing_nodes(near, self.data)

    @property
    def learns(self) -> str:
        """What is learned: ``classes``, ``labels`` or ``numbers``."""
        return TASKS.get(self.loss) or self.task or ("classes" if self.targets is None else "numbers")

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 63:
            raise SettingError(f"seed must be from 0 to 2^63 - 1, not {self.seed}")
        if self.max_length is not None and self.max_length < 1:
            raise SettingError(f"max_length must be at least 1, not {self.max_length}")
        if "" in (self.near, *self.also_near):
            raise SettingError(
                "--near is empty: write --near http://store-1:7070, or leave it out, and a node begins here"
            )
        if not self.relist and self.on_change == "rebuild":
            raise SettingError("--on-change rebuild lists the data, and --no-relist does not: leave one of them out")
        self._check_loss()
        if self.lora is not None:
            LowRank.parse(self.lora)  # which refuses what makes no sense
            if self.policy == ALL_IN_STORE:
                raise SettingError("policy all_in_store trains no adapters: choose another policy, or leave out lora")
        if self.codec is not None and self.cut is None:
            raise SettingError(f"codec {self.codec} needs the cut that it is for: give both, or let the plan choose")

    def _check_loss(self) -> None:
        if self.loss not in LOSSES and not _OF_A_FILE.fullmatch(self.loss):
            raise SettingError(f"loss is one of {', '.join(LOSSES)} or FILE.py:FUNCTION, not {self.loss!r}")
        if self.task not in (None, *TASKS.values()):
            raise SettingError(f"task is one of {', '.join(TASKS.values())}, not {self.task!r}")
        if self.task not in (None, self.learns):
            raise SettingError(f"the loss {self.loss} is for {self.learns}, not for {self.task}: leave out --task")
        if self.learns != "classes" and self.targets is None:
            raise SettingError(f"the loss {self.loss} needs the column of targets that it is for: name it (--targets)")
        if self.targets is not None and self.policy == ALL_IN_STORE:
            raise SettingError(
                "policy all_in_store trains on classes alone: choose another policy, or leave out targets"
            )
        if self.loss not in LOSSES and self.policy == ALL_IN_STORE:
            raise SettingError("policy all_in_store runs no functions of one's own: choose another policy or loss")


_OF_A_FILE = re.compile(r".+\.py:\w+")
_EVERY = re.compile(r"(\d+) *(|s|min|h)")
_SECONDS = {"s": 1, "min": 60, "h": 3600}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEvery:
    """How often a checkpoint is written within an epoch.

    Attributes:
        steps: steps from one to the next; None counts seconds.
        seconds: seconds from one to the next, where no steps are given.
    """

    steps: int | None = None
    seconds: float = 60.0

    @classmethod
    def parse(cls, text: str) -> "CheckpointEvery":
        """Read steps (``500``) or a time (``60s``, ``5min``, ``1h``).

        Raises:
            SettingError: the text is neither, or says 0.
        """
        match = _EVERY.fullmatch(text.strip())
        if match is None or not int(match[1]):
            raise SettingError(f"checkpoint_every is steps such as 500 or a time such as 60s or 5min, not {text!r}")
        number, unit = int(match[1]), match[2]
        return cls(seconds=number * _SECONDS[unit]) if unit else cls(steps=number)

    def is_due(self, *, steps: int, seconds: float) -> bool:
        """Whether another one is due, so long after the last."""
        return seconds >= self.seconds if self.steps is None else steps >= self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """How a head is trained.

    Attributes:
        job: the settings of data and node.
        epochs: passes over the training samples; None makes as many as suit the job (``wire.recipes``).
        batch_size: samples of one optimiser step.
        val_share: share of each class, held out and scored after each epoch; 0 holds out none. None is the split for
            that which the data brings, and where there is none a fifth (``training.run``).
        val_split: name of a split, which is held out instead of a share.
        optimizer: ``adam``, ``adamw`` or ``sgd`` (momentum 0.9).
        learning_rate: learning rate of the optimiser.
        weight_decay: weight decay of the optimiser; None takes its own default.
        label_smoothing: share of every sample's class that cross-entropy spreads over all classes.
        schedule: ``constant``, ``cosine`` or ``linear`` (``wire.recipes.Recipe``).
        warm_up: steps in which the learning rate rises, or below 1 a share of all steps.
        patience: epochs without a lower held-out loss after which training ends (``wire.recipes.Recipe``); with
            ``unfreeze`` counted from where the last layers are unfrozen.
        bf16: compute what is trained in bfloat16, by autocast.
        metrics: names of metrics of held-out samples; none takes those of what is learned.
        unfreeze: layers that are trained from later epochs on (``training.recipe.Unfreezing.parse``).
        out: folder for the files; None writes none.
        checkpoint_every: steps or time from one checkpoint to the next, as ``CheckpointEvery.parse`` reads them.
    """

    job: JobSettings
    epochs: int | None = None
    batch_size: int = 32
    val_share: float | None = None
    val_split: str | None = None
    optimizer: str = "adam"
    learning_rate: float = 2e-3
    weight_decay: float | None = None
    label_smoothing: float = 0.0
    schedule: str = SCHEDULES[0]
    warm_up: float = 0.0
    patience: int | None = None
    bf16: bool = False
    metrics: tuple[str, ...] = ()
    unfreeze: str | None = None
    out: Path | None = None
    checkpoint_every: str = "60s"

    def __post_init__(self) -> None:
        CheckpointEvery.parse(self.checkpoint_every)  # which refuses what makes no sense
        if not 0 <= self.held_out_share < 1:
            raise SettingError(f"val_share is a share from 0 to below 1, not {self.val_share}")
        _ = self.recipe  # which refuses what makes no sense
        if self.label_smoothing and self.job.loss != LOSSES[0]:
            raise SettingError(f"label_smoothing is of the loss {LOSSES[0]}, and the loss is {self.job.loss}")
        if self.unfreeze is not None:
            self._check_unfreezing(self.unfreeze)
        if self.metrics and self.job.policy == ALL_IN_STORE:
            raise SettingError("policy all_in_store gives accuracy alone: choose another policy, or leave out metrics")

    def _check_unfreezing(self, unfreeze: str) -> None:
        last = Unfreezing.parse(unfreeze).steps[-1]
        if self.epochs is None or last.epoch > self.epochs:
            raise SettingError(f"unfreeze trains more from epoch {last.epoch} on: say so many epochs or more (epochs)")
        for name, is_set in (
            ("cut", self.job.cut is not None),
            ("policy all_in_store", self.job.policy == ALL_IN_STORE),
        ):
            if is_set:
                raise SettingError(
                    f"unfreeze moves the frost line while the run goes on, and {name} is for one: leave one out"
                )

    @property
    def held_out_share(self) -> float:
        """The share of each class that is held out, where no split is scored."""
        return _HELD_OUT if self.val_share is None else self.val_share

    @property
    def recipe(self) -> Recipe:
        """What of it the training loop follows."""
        return Recipe(
            epochs=self.epochs,
            batch_size=self.batch_size,
            optimizer=self.optimizer,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            label_smoothing=self.label_smoothing,
            schedule=self.schedule,
            warm_up=self.warm_up,
            bf16=self.bf16,
            patience=self.patience,
            seed=self.job.seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractSettings:
    """A job whose features go to a file.

    Attributes:
        job: the settings of data and node.
        out: path that ends in ``.parquet`` or ``.safetensors``, which says what is written.
        part_bytes: features of one part, the least that a run that was broken off has to make again.
        on_ray: Parts are read by tasks of Ray, on whichever of its hosts.
    """

    job: JobSettings
    out: Path
    part_bytes: int = 64 << 20
    on_ray: bool = False

    def __post_init__(self) -> None:
        if self.part_bytes < 1:
            raise SettingError(f"part_bytes must be at least 1, not {self.part_bytes}")


def is_factory(model: str) -> bool:
    """Whether the name of a network is a function of the user's own, which runs where the network is built."""
    return model.partition(":")[0] not in FAMILIES


IMAGES = "images"
"""The word for samples that a network's own preprocessing takes."""

TEXTS = "texts"
"""The word for a part of samples that a tokenizer takes."""

_SOUNDS = re.compile(r"(?P<kind>sounds|waves):(?P<seconds>\d{1,9}(?:\.\d+)?)(?:@(?P<rate>\d{1,9}))?")
_ARRAYS = re.compile(r"arrays:(?P<shape>\d{1,18}(?:x\d{1,18})*)(?::(?P<dtype>float32|int64))?")
_WORDS = (
    "images, sounds:SECONDS (log-mel spectrograms), waves:SECONDS, both with @RATE if it is not 16000, or "
    "arrays:SHAPE such as arrays:12x5000, with :int64 if the network takes whole numbers"
)
# Sounds that say how long all are cut to or padded to, and the longest that nobody has to ask for.
_LISTENED_TO = 16
_MAX_SECONDS = 10.0
_HEAD_BYTES = 2048
_ARRAY_SUFFIX = ".npy"


def preprocess_of(samples: str) -> Preprocess | None:
    """The preprocessing of samples; None where the network's own takes them.

    Args:
        samples: words such as ``images``, ``sounds:2.5``, ``waves:1@8000`` or ``arrays:12x5000``.

    Raises:
        SettingError: the words say nothing of that kind, or a length makes no sense.
    """
    if samples == IMAGES:
        return None
    if (found := _SOUNDS.fullmatch(samples)) is not None:
        seconds, rate = float(found["seconds"]), int(found["rate"] or 16_000)
        if found["kind"] == "waves":
            return audio(seconds, sample_rate=rate, features="waveform")
        return audio(seconds, sample_rate=rate)
    if (found := _ARRAYS.fullmatch(samples)) is not None:
        shape = tuple(int(length) for length in found["shape"].split("x"))
        return array(shape, "int64" if found["dtype"] == "int64" else "float32")
    raise SettingError(f"--samples says {_WORDS}; not {samples!r}")


def describe_samples(data: Dataset, *, is_column_named: bool = False) -> str:
    """What the samples of a data set are, in words that ``preprocess_of`` takes.

    Names that end as sounds do are sounds, as long as the longest of some, and up to 10 seconds. Arrays that are no
    images have the shape of the first one. Everything else is taken for images, without reading any.

    Args:
        data: data set.
        is_column_named: the user named the column of Parquet files, so that its first cell is looked at.

    Raises:
        SettingError: a node listed the data, so that no sample can be read here; or none of the sounds is whole, or the
            packages for them are not installed.
        StoreError: the store failed.
    """
    suffix = "" if data.manifest.applied is not None else suffix_of(data.names[0])
    is_in_cells = is_column_named and data.manifest.reading == CELLS
    if suffix not in SOUND_SUFFIXES and suffix != _ARRAY_SUFFIX and not is_in_cells:
        return IMAGES
    if suffix in SOUND_SUFFIXES and not has_sound_packages():
        raise SettingError(LACKS_SOUND)
    if data.source.near:
        if suffix in SOUND_SUFFIXES:
            raise SettingError(
                "the node listed these sounds, and their length is not known here: say it (--samples sounds:SECONDS)"
            )
        return IMAGES
    first = _read(data, 0, _HEAD_BYTES if data.manifest.reading != CELLS else None)
    if is_sound(first):
        return f"sounds:{_longest(data, lambda row: _read(data, row, None)):g}"
    return _array_words(first) if first.startswith(npy.MAGIC_PREFIX) else IMAGES


def by_input(said: str | None, option: str) -> dict[str, str]:
    """What an option says of each input, as in ``pixel_values=image,input_ids=caption``; none where it names no input.

    Args:
        said: the option's value; None says nothing.
        option: name of the option, for the sentence.

    Raises:
        SettingError: an input has no name, or two have one, or nothing is said of it.
    """
    if said is None or "=" not in said:
        return {}
    pairs = [part.partition("=") for part in said.split(",")]
    found = {name.strip(): value.strip() for name, _, value in pairs}
    if len(found) != len(pairs) or not all(is_argument(name) and value for name, value in found.items()):
        raise SettingError(
            f"{option} says NAME=VALUE once for each input of the network, joined by commas, as in "
            f"pixel_values=image,input_ids=caption; not {said!r}"
        )
    return found


def describe_parts(data: Dataset, names: Sequence[str], said: str | None, *, looks: bool) -> str:
    """What the parts of samples are, in words that ``by_input`` takes apart: ``pixel_values=images,input_ids=texts``.

    What ``input_ids`` is made of is a text. Arrays and sounds are known by the first sample, and all else is an image.

    Args:
        data: data set whose samples have several parts.
        names: inputs that are made of these parts.
        said: the user's words on some of them; None says nothing.
        looks: read the first sample; False where the network's library knows what it takes.

    Raises:
        SettingError: The text names an unknown input, or makes no sense.
        StoreError: the store failed.
    """
    asked = by_input(said, "--samples")
    unknown = [name for name in asked if name not in names]
    if unknown or (said is not None and not asked):
        raise SettingError(
            f"--samples says what inputs are by their names, as in {names[-1]}=arrays:12; --column names "
            f"{', '.join(names)}, and it is {said!r}"
        )
    for word in asked.values():
        if word != TEXTS:
            preprocess_of(word)  # which refuses what makes no sense before a node is started
    looks = looks and not data.source.near
    found = {name: TEXTS if name == "input_ids" else IMAGES for name in names}
    for place, name in enumerate(names):
        if looks and name not in asked and found[name] == IMAGES:
            found[name] = _part_words(data, place, len(names))
    return ",".join(f"{name}={word}" for name, word in {**found, **asked}.items())


def _part_words(data: Dataset, place: int, parts: int) -> str:
    def part(row: int) -> bytes:
        return bytes(unframe_parts(_read(data, row, None), parts)[place])

    first = part(0)
    if is_sound(first):
        return f"sounds:{_longest(data, part):g}"
    return _array_words(first) if first.startswith(npy.MAGIC_PREFIX) else IMAGES


def _longest(data: Dataset, read: Callable[[int], bytes]) -> float:
    """The length of the longest of some sounds in seconds, in tenths."""
    rows = np.unique(np.linspace(0, len(data) - 1, min(len(data), _LISTENED_TO)).astype(np.int64))
    lengths = []
    for row in rows.tolist():
        with suppress(SampleError):  # it is skipped and named later
            lengths.append(seconds_of(read(row)))
    if not lengths:
        raise SettingError(f"none of {len(rows)} sounds of {data.url} can be read: say how long they are (--samples)")
    return min(_MAX_SECONDS, max(0.1, math.ceil(10 * max(lengths)) / 10))


def _array_words(first: bytes) -> str:
    try:
        shape, dtype = header_of(first)
    except SampleError:
        return IMAGES
    is_image = dtype == np.uint8 and (len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3, 4)))
    if is_image or not shape:
        return IMAGES
    return f"arrays:{'x'.join(map(str, shape))}" + (":int64" if dtype.kind in "iu" and dtype.itemsize == 8 else "")


def _read(data: Dataset, row: int, max_bytes: int | None) -> bytes:
    """A sample's bytes, or the first of them."""
    sample = data.samples.take(np.array([row]))
    length = int(sample.lengths[0])
    store = open_samples(data.url, data.manifest.reading, roots=roots_of(data))
    wanted = length if max_bytes is None else min(length, max_bytes)
    return bytes(store.read(sample.objects[0], int(sample.offsets[0]), wanted))
