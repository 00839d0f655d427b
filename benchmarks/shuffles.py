"""How well orders mix: neighbours of a listing that is sorted by class, and the classes of each batch.

    python benchmarks/shuffles.py [--samples 100000] [--classes 10] [--batch 64] [--epochs 5]

Beside the full shuffle and the order of the listing: blocks of several sizes, and what a loader does that reads whole
shards in a drawn order in some workers, each with a buffer of samples from which it draws (WebDataset's `shuffle`; its
batches come by turns). For each, over all epochs:

* together: neighbours of the listing that come in the same batch, in percent;
* apart: how many places neighbours stand apart, the median;
* spread: the standard deviation of a class's count in a batch, relative to that of the full shuffle (1.0);
* worst: the most samples of one class in a batch, and the fewest classes in one;
* memory: encoded samples that are held to mix them.
"""

import argparse

import numpy as np

from frostline.ordering import BlockOrder, BlockShuffle, Order

# Photographs of 57 kB in shards of 8 MiB, as in benchmarks/compare.py.
SHARD = 146
BUFFER = 1000


def main():
    wanted = arguments()
    labels = np.arange(wanted.samples) * wanted.classes // wanted.samples
    full = spread(labels, batches_of(whole(wanted, 0), wanted.batch), wanted.classes)
    print("| order | together | apart | spread | worst | memory |\n| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, memory, order in orders(wanted):
        found = [measured(order(epoch), labels, wanted) for epoch in range(wanted.epochs)]
        together, apart, deviation = (
            np.mean([item[name] for item in found]) for name in ("together", "apart", "spread")
        )
        maximum, fewest = max(item["most"] for item in found), min(item["fewest"] for item in found)
        mixed = f"{100 * together:.2f} % | {apart:,.0f} | {deviation / full:.2f} | {maximum}, {fewest}"
        print(f"| {name} | {mixed} | {memory:,} |")


def orders(wanted):
    """Name, samples held, and the rows of an epoch, of each order."""
    yield "full shuffle", 0, lambda epoch: whole(wanted, epoch)
    for samples, mixed in ((16, 16), (16, 64), (16, 256), (64, 16), (SHARD, 8)):
        blocks = BlockShuffle(samples=samples, mixed=mixed)
        yield (
            f"blocks of {samples}, {mixed} mixed",
            blocks.group,
            lambda epoch, blocks=blocks: in_blocks(wanted, blocks, epoch),
        )
    for workers in (1, 4):
        yield (
            f"shards, {workers} x {BUFFER}",
            workers * BUFFER,
            lambda epoch, workers=workers: in_shards(wanted, workers, epoch),
        )
    yield "as listed", 0, lambda epoch: np.arange(wanted.samples)


def whole(wanted, epoch):
    return Order(size=wanted.samples, seed=0, epoch=epoch).indices(0, wanted.samples)


def in_blocks(wanted, blocks, epoch):
    return BlockOrder(size=wanted.samples, seed=0, epoch=epoch, blocks=blocks).at(np.arange(wanted.samples))


def in_shards(wanted, workers, epoch):
    """Shards in a drawn order, dealt to workers; each gives a drawn sample of its buffer for each that comes."""
    draw = np.random.default_rng(epoch)
    shards = draw.permutation(-(-wanted.samples // SHARD))
    streams = []
    for worker in range(workers):
        rows = np.concatenate(
            [np.arange(shard * SHARD, min((shard + 1) * SHARD, wanted.samples)) for shard in shards[worker::workers]]
        )
        buffer, given = list(rows[:BUFFER]), []
        for row in rows[BUFFER:]:
            place = draw.integers(len(buffer))
            given.append(buffer[place])
            buffer[place] = row
        streams.append(np.concatenate([given, draw.permutation(buffer)]).astype(np.int64))
    turns = [batches_of(stream, wanted.batch) for stream in streams]
    by_turns = [turn[number] for number in range(max(map(len, turns))) for turn in turns if number < len(turn)]
    return np.concatenate(by_turns)


def batches_of(rows, batch):
    return rows[: len(rows) // batch * batch].reshape(-1, batch)


def measured(rows, labels, wanted):
    place = np.full(len(labels), -1)
    place[rows] = np.arange(len(rows))
    place = place[place >= 0]  # a worker's last samples may fill no batch
    batches = batches_of(rows, wanted.batch)
    counts = counted(labels, batches, wanted.classes)
    return {
        "together": np.mean(place[1:] // wanted.batch == place[:-1] // wanted.batch),
        "apart": np.median(np.abs(np.diff(place))),
        "spread": counts.std(),
        "most": int(counts.max()),
        "fewest": int((counts > 0).sum(axis=1).min()),
    }


def spread(labels, batches, classes):
    return counted(labels, batches, classes).std()


def counted(labels, batches, classes):
    """How many of each class a batch has: ``int64[batches, classes]``."""
    return np.stack([(labels[batches] == index).sum(axis=1) for index in range(classes)], axis=1)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
