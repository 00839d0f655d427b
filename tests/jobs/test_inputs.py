"""Arrays and sounds through frozen layers: the losses of a plain loop.

Arrays in class folders, tars and Parquet files, classified by a network with frozen layers, as a plain loop does.

Sounds in class folders, classified by networks with frozen layers, as a plain loop does.
"""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from frostline import Dataset, LoaderSettings, NodeSettings, freeze, loader, offload, preprocess
from frostline.core.events import SampleSkipped, SetupWarning
from frostline.node import resources as opener
from frostline.preprocess.apply import decode_into
from support.signals import UNTIL, job_losses, plain_losses, rows_by_id, small_network, some_arrays, write_arrays
from support.sounds import encoded_sound, some_waves, write_sounds

SHAPE = (3, 40)
SMALL = NodeSettings(memory_bytes=1 << 29, device_batch=8)
STILL = LoaderSettings(replan=False)


def declared():
    return preprocess.array(SHAPE)


def frozen():
    return freeze(small_network(SHAPE[0]), UNTIL, input_shape=declared().inputs)


@pytest.mark.parametrize("kind", ["folders", "tar", "parquet"])
@pytest.mark.parametrize("cut", [None, 0, 1])
def test_losses_of_the_head_are_those_of_a_plain_loop(tmp_path, kind, cut):
    arrays, labels = some_arrays(shape=SHAPE)
    column = write_arrays(tmp_path / "data", kind, arrays, labels)
    data = Dataset(tmp_path / "data", cache=tmp_path / "cache", column=column)
    with offload(frozen(), data, preprocess=declared(), cut=cut, settings=STILL, node=SMALL) as job:
        assert job.fallback is None
        losses, orders = job_losses(job, rows_by_id(data, kind), (0, 1))
    np.testing.assert_allclose(losses, plain_losses(frozen(), arrays, labels, orders), atol=1e-5, rtol=0)
    assert sorted(row for rows in orders[: len(orders) // 2] for row in rows) == list(range(len(arrays)))


@pytest.fixture(scope="module")
def node(shared_node, tmp_path_factory):
    """A node in a process of its own, the folder that it serves, and what lies there."""
    folder = tmp_path_factory.mktemp("served")
    arrays, labels = some_arrays(shape=SHAPE)
    write_arrays(folder, "folders", arrays, labels)
    return shared_node.url, folder, arrays, labels


@pytest.mark.parametrize("cut", [None, 1, -1])
def test_a_node_reads_arrays_and_the_second_epoch_asks_for_no_sample(node, tmp_path, cut):
    url, folder, arrays, labels = node
    data = Dataset(folder, cache=tmp_path)
    cut = freeze_line(data) if cut == -1 else cut
    with offload(frozen(), data, preprocess=declared(), near=url, cut=cut, settings=STILL) as job:
        assert job.fallback is None
        losses, orders = job_losses(job, rows_by_id(data), (0,))
        first = job.statistics()
        assert first.wire_bytes > 0
        more, later = job_losses(job, rows_by_id(data), (1,))
        second = job.statistics()  # whose other bytes are those of a look at the node, now and then
        assert (second.fetched, second.answered) == (first.fetched, first.answered)
    meant = plain_losses(frozen(), arrays, labels, [*orders, *later])
    np.testing.assert_allclose([*losses, *more], meant, atol=1e-5, rtol=0)


def freeze_line(data):
    with offload(frozen(), data, preprocess=declared(), settings=STILL, node=SMALL) as job:
        return job.frost_line.number


def test_numbers_on_the_node_and_on_the_trainer_are_the_same_to_the_bit(node, tmp_path):
    url, folder, arrays, _ = node
    data = Dataset(folder, cache=tmp_path)
    places = rows_by_id(data)
    with (
        offload(None, data, preprocess=declared(), near=url, settings=STILL) as far,
        offload(None, data, preprocess=declared(), settings=STILL, node=SMALL) as near,
    ):
        for job in (far, near):
            for batch in job.loader(8):
                for id, features in zip(batch.ids.tolist(), batch.features, strict=True):
                    assert features.numpy().tobytes() == arrays[places[id]].tobytes()


def test_passes_whole_numbers_to_a_network_unchanged(tmp_path):
    class Embedded(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.words = torch.nn.Embedding(20, 6)
            self.head = torch.nn.Linear(6, 2)

        def forward(self, words):
            return self.head(self.words(words).mean(1))

    draw = np.random.default_rng(0)
    arrays, labels = [draw.integers(0, 20, 9).astype(np.int16) for _ in range(16)], [row % 2 for row in range(16)]
    write_arrays(tmp_path / "data", "folders", arrays, labels)
    data, made = Dataset(tmp_path / "data", cache=tmp_path / "cache"), preprocess.array((9,), "int64")
    model, twin = (freeze(Embedded(), "words", input_shape=made.inputs) for _ in range(2))
    with offload(model, data, preprocess=made, settings=STILL, node=SMALL) as job:
        assert job.fallback is None
        losses, orders = job_losses(job, rows_by_id(data), (0,))
    meant = plain_losses(twin, [array.astype(np.int64) for array in arrays], labels, orders)
    np.testing.assert_allclose(losses, meant, atol=1e-5, rtol=0)


@pytest.mark.parametrize("cut", [0, 1])
def test_an_array_of_another_shape_is_skipped_and_named(tmp_path, cut):
    arrays, labels = some_arrays(rows=8, shape=SHAPE)
    write_arrays(tmp_path / "data", "folders", [*arrays[:7], arrays[7].T], labels)
    events, settings = [], LoaderSettings(max_skipped_fraction=0.5, replan=False)
    data = Dataset(tmp_path / "data", cache=tmp_path / "cache")
    asked = {"preprocess": declared(), "settings": settings, "node": SMALL, "on_event": events.append}
    with offload(frozen(), data, cut=cut, **asked) as job:
        assert sum(len(batch) for batch in job.loader(batch_size=4)) == 7
    skipped = next(event for event in events if isinstance(event, SampleSkipped))
    assert skipped.object == "1/007.npy"
    assert "has the shape [40, 3], and the preprocessing says [3, 40]" in skipped.reason


def test_a_job_without_a_model_gives_arrays(tmp_path):
    arrays, labels = some_arrays(rows=8, shape=(5,))
    write_arrays(tmp_path / "data", "folders", arrays, labels)
    batch = next(iter(loader(Dataset(tmp_path / "data", cache=tmp_path), 8, preprocess=preprocess.array((5,)))))
    assert batch.features.shape == (8, 5)
    assert batch.features.dtype == torch.float32


pytest.importorskip("soundfile")
pytest.importorskip("soxr")

RATE = 22_050
MEL = "log_mel"


def declared_of_sound_jobs(features=MEL):
    return preprocess.audio(0.3, n_mels=40, features=features)


class OfWaves(torch.nn.Module):
    """A network for waves without a channel, as Wav2Vec2 takes them."""

    def __init__(self):
        super().__init__()
        self.layers = small_network(1, dimensions=1)

    def forward(self, wave):
        return self.layers(wave[:, None])


def frozen_of_sound_jobs(features=MEL):
    model, until = (small_network(1, dimensions=2), UNTIL) if features == MEL else (OfWaves(), f"layers.{UNTIL}")
    return freeze(model, until, input_shape=declared_of_sound_jobs(features).inputs)


def samples_of(folder, data, features=MEL):
    """What a plain loop decodes, by row of the written sounds, and their labels."""
    made, places = declared_of_sound_jobs(features), rows_by_id(data)
    samples = [None] * len(data)
    for id, name in zip(data.samples.ids.tolist(), data.samples.objects, strict=True):
        samples[places[id]] = np.empty(made.shape, np.float32)
        decode_into(made, (folder / name).read_bytes(), samples[places[id]], id=id, view=None)
    return samples, [row % 2 for row in range(len(data))]


@pytest.fixture(scope="module", params=["WAV", "FLAC", "OGG"])
def folder(request, tmp_path_factory):
    made = tmp_path_factory.mktemp("sounds")
    write_sounds(made, *some_waves(rate=RATE), request.param, RATE)
    return made


@pytest.mark.parametrize("features", [MEL, "waveform"])
@pytest.mark.parametrize("cut", [None, 0, 1])
def test_losses_over_sounds_are_those_of_a_plain_loop(folder, tmp_path, features, cut):
    data = Dataset(folder, cache=tmp_path)
    assert data.classes == ("0", "1")
    with offload(
        frozen_of_sound_jobs(features),
        data,
        preprocess=declared_of_sound_jobs(features),
        cut=cut,
        settings=STILL,
        node=SMALL,
    ) as job:
        assert job.fallback is None
        losses, orders = job_losses(job, rows_by_id(data), (0, 1))
    samples, labels = samples_of(folder, data, features)
    np.testing.assert_allclose(
        losses, plain_losses(frozen_of_sound_jobs(features), samples, labels, orders), atol=1e-5, rtol=0
    )
    assert len({row for rows in orders for row in rows}) == len(data)


@pytest.fixture(scope="module")
def node_of_sound_jobs(shared_node, tmp_path_factory):
    """A node in a process of its own, and the folder that it serves."""
    made = tmp_path_factory.mktemp("served")
    write_sounds(made, *some_waves(rate=RATE), "FLAC", RATE)
    return shared_node.url, made


@pytest.mark.parametrize("features", [MEL, "waveform"])
@pytest.mark.parametrize("is_cut_behind", [False, True])
def test_a_node_decodes_sounds_and_the_second_epoch_asks_for_no_sample(
    node_of_sound_jobs, tmp_path, features, is_cut_behind
):
    url, folder = node_of_sound_jobs
    data = Dataset(folder, cache=tmp_path)
    with offload(
        frozen_of_sound_jobs(features), data, preprocess=declared_of_sound_jobs(features), settings=STILL, node=SMALL
    ) as job:
        line = job.frost_line.number
    asked = {
        "preprocess": declared_of_sound_jobs(features),
        "near": url,
        "cut": line if is_cut_behind else 1,
        "settings": STILL,
    }
    with offload(frozen_of_sound_jobs(features), data, **asked) as job:
        assert job.fallback is None
        losses, orders = job_losses(job, rows_by_id(data), (0,))
        first = job.statistics()
        assert first.wire_bytes > 0
        more, later = job_losses(job, rows_by_id(data), (1,))
        second = job.statistics()  # whose other bytes are those of a look at the node, now and then
        assert (second.fetched, second.answered) == (first.fetched, first.answered)
    meant = plain_losses(frozen_of_sound_jobs(features), *samples_of(folder, data, features), [*orders, *later])
    np.testing.assert_allclose([*losses, *more], meant, atol=1e-5, rtol=0)


@pytest.mark.parametrize("features", [MEL, "waveform"])
def test_numbers_of_a_node_and_of_the_trainer_are_the_same_to_the_bit(node_of_sound_jobs, tmp_path, features):
    url, folder = node_of_sound_jobs
    data, made = Dataset(folder, cache=tmp_path), declared_of_sound_jobs(features)
    meant, places = samples_of(folder, data, features)[0], rows_by_id(data)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(meant[0].size, 2))
    for cut in (0, 1):
        model = freeze(network, "0", input_shape=made.inputs)
        with offload(model, data, preprocess=made, near=url, cut=cut, settings=STILL) as job:
            assert job.fallback is None
            for batch in job.loader(8):
                for id, found in zip(batch.ids.tolist(), batch.features, strict=True):
                    assert found.numpy().tobytes() == meant[places[id]].tobytes()


@pytest.mark.parametrize("cut", [0, 1])
def test_a_broken_sound_is_skipped_and_named(tmp_path, cut):
    write_sounds(tmp_path / "data", *some_waves(8), kind="WAV")
    broken = tmp_path / "data" / "1" / "007.wav"
    broken.write_bytes(broken.read_bytes()[:2000])
    events, settings = [], LoaderSettings(max_skipped_fraction=0.5, replan=False)
    data = Dataset(tmp_path / "data", cache=tmp_path / "cache")
    asked = {"preprocess": declared_of_sound_jobs(), "settings": settings, "node": SMALL, "on_event": events.append}
    with offload(frozen_of_sound_jobs(), data, cut=cut, **asked) as job:
        assert sum(len(batch) for batch in job.loader(batch_size=4)) == 7
    skipped = next(event for event in events if isinstance(event, SampleSkipped))
    assert skipped.object == "1/007.wav"
    assert "cut off: its header says 9600 bytes of sound, and 1956 are there" in skipped.reason


def test_a_node_without_the_packages_leaves_the_work_to_the_trainer(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(opener, "has_sound_packages", lambda: False)
    events, data = [], Dataset(folder, cache=tmp_path)
    with offload(
        frozen_of_sound_jobs(), data, preprocess=declared_of_sound_jobs(), node=SMALL, on_event=events.append
    ) as job:
        assert "decodes no sounds" in job.fallback
        losses, orders = job_losses(job, rows_by_id(data), (0,))
    meant = plain_losses(frozen_of_sound_jobs(), *samples_of(folder, data), orders)
    np.testing.assert_allclose(losses, meant, atol=1e-5, rtol=0)
    assert any("soundfile" in event.reason for event in events if isinstance(event, SetupWarning))


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_a_small_wav2vec2_is_cut_and_trained(tmp_path):
    from torch.nn.utils.parametrize import remove_parametrizations
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    made = preprocess.audio(0.3, features="waveform", normalize=True)
    write_sounds(tmp_path / "data", *some_waves(8))
    data = Dataset(tmp_path / "data", cache=tmp_path / "cache")
    config = Wav2Vec2Config(
        # Both draw by the value of a tensor, in the frozen part too.
        layerdrop=0.0,
        apply_spec_augment=False,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(8, 8),
        conv_kernel=(10, 8),
        conv_stride=(5, 8),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        num_labels=2,
        classifier_proj_size=8,
        vocab_size=8,
        **dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout"), 0.0),
    )

    def network():
        torch.manual_seed(0)
        model = Wav2Vec2ForSequenceClassification(config)
        # What is frozen needs no norm of its weights beside them, and nodes run none.
        remove_parametrizations(model.wav2vec2.encoder.pos_conv_embed.conv, "weight")
        return freeze(model, "wav2vec2.encoder.layers.0", input_shape=made.inputs)

    with offload(network(), data, preprocess=made, settings=STILL, node=SMALL, frozen_in_eval=True) as job:
        assert job.fallback is None
        assert "encoder.layers.0" in job.frost_line.name
        losses, orders = job_losses(job, rows_by_id(data), (0, 1))
    samples = [np.empty(made.shape, np.float32) for _ in range(8)]
    for wave, out in zip(some_waves(8)[0], samples, strict=True):
        decode_into(made, encoded_sound(wave), out, id=0, view=None)
    meant = plain_losses(network(), samples, [row % 2 for row in range(8)], orders)
    np.testing.assert_allclose(losses, meant, atol=1e-5, rtol=0)


def test_a_job_without_a_model_gives_waves(tmp_path):
    write_sounds(tmp_path / "data", *some_waves(8))
    made = preprocess.audio(0.1, features="waveform")
    batch = next(iter(loader(Dataset(tmp_path / "data", cache=tmp_path / "cache"), 8, preprocess=made)))
    assert batch.features.shape == (8, 1600)
    assert encoded_sound(batch.features[0].numpy())
