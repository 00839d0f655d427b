"""A worker of tf.distribute, one of several or alone with two devices: reads its share and prints what it saw."""

import json
import os
import sys

import keras
import tensorflow as tf

import frostline as fl
from frostline.core.config import LoaderSettings
from frostline.core.errors import OrderMismatch
from frostline.loaders.adapters.tensorflow import TensorFlowLoader, ranks
from support.images import tiny_preprocess

BATCH = 4


def main(rank: int, ports: list[str], folder: str) -> None:
    strategy = one_of_several(rank, ports) if ports else alone_with_two_devices()
    settings = LoaderSettings(samples_per_request=8)
    with fl.offload(None, fl.Dataset(folder), preprocess=tiny_preprocess(), settings=settings) as job:
        options = {"shuffle": True, "last": "drop", "ranks": ranks(strategy)}
        seen = read(strategy, job.arrays(BATCH, **options))
        if ports:
            seen["said"] = said(lambda: list(TensorFlowLoader(job.arrays(BATCH, **options, seed=rank))))
        else:
            seen["weights"] = [fitted(job, item) for item in (strategy, tf.distribute.get_strategy())]
    print(json.dumps(seen), flush=True)
    os._exit(0)  # at its end TensorFlow waits for the other workers, which may be gone


def one_of_several(rank, ports):
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})
    return tf.distribute.MultiWorkerMirroredStrategy()


def alone_with_two_devices():
    (processor,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(processor, [tf.config.LogicalDeviceConfiguration()] * 2)
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def read(strategy, arrays):
    """A pass over the loader, a batch to each device at a time."""
    devices = len(strategy.extended.worker_devices)
    loader = TensorFlowLoader(arrays, columns=("ids", "labels"), prefetch=1, ahead=2 * devices)

    @tf.function
    def step(ids, labels):
        return strategy.run(lambda ids, labels: (ids, tf.reduce_sum(labels)), (ids, labels))

    seen = {"ids": [], "labels": [], "positions": [], "replicas": strategy.num_replicas_in_sync}
    for ids, labels in strategy.distribute_datasets_from_function(lambda _: loader.dataset()):
        found, sums = step(ids, labels)
        local = [result.numpy().tolist() for result in strategy.experimental_local_results(found)]
        loader.count_taken(sum(map(bool, local)))
        seen["ids"].append(local)
        seen["labels"].append(int(strategy.reduce("SUM", sums, axis=None)))
        seen["positions"].append(loader.state_dict()["position"])
    return seen


def fitted(job, strategy):
    """Weights after Keras has trained for two epochs; each batch is divided among the strategy's devices."""
    loader = TensorFlowLoader(job.arrays(8, shuffle=True, last="drop").epochs(range(2)), ahead=4)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3, 32, 32)), keras.layers.Flatten(), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(loader.dataset(), epochs=2, verbose=0, shuffle=False, callbacks=[loader.callback()])
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (1, 45), state
    return [weights.tolist() for weights in model.get_weights()]


def said(call):
    try:
        call()
    except OrderMismatch as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main(int(sys.argv[1]), [port for port in sys.argv[2].split(",") if port], sys.argv[3])
