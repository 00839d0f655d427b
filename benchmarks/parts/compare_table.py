"""What compare.py found, as tables and as a picture."""

import statistics

from harness import markdown, pyplot

OURS = "Frostline"
SETTINGS = """\
| loader | reads | settings, and what its documentation says of them |
| --- | --- | --- |
| Frostline | single objects | defaults, but nothing kept between epochs: the node in its process decodes |
| Frostline, not listed again | single objects | the same with `relist=False`: the manifest that was built last, as \
others read an index that was made once |
| Frostline, shards in blocks | tars of 8 MiB | the same of WebDataset's shards: `shuffle=Blocks()`, blocks of 16 \
samples, 64 of them mixed |
| Frostline, node beside the store | single objects | defaults, but `near=` and nothing kept: samples come encoded |
| DataLoader, s3torchconnector | single objects | `S3MapDataset`; 16 workers, 4 at 0 ms; `prefetch_factor` 2, the \
default. PyTorch suggests no more workers than cores, which is for computing: here each waits for one read at a time |
| SPDL | single objects | 64 reads at once in threads of their own, decoding in a thread a core, as its guide has it \
for stages that wait and stages that compute; obstore reads |
| tf.data | single objects | 64 reads at once in a pool of as many threads, all else `AUTOTUNE`, as its guide says; \
obstore reads, as its own files are not in S3 |
| Ray Data | single objects | `read_binary_files` in tasks of a batch each, as many at once as `num_cpus` allows: 4, \
and 2 at 0 ms; `prefetch_batches=4`; decoding is fused with the read, as its tips say |
| LitData | chunks of 8 MiB | 4 workers, two chunks ahead each (its default), obstore beneath |
| MosaicML Streaming | shards of 8 MiB | 4 workers, `predownload` of eight batches (its default), `batch_size` given |
| WebDataset | tars of 8 MiB | 8 workers (4 at 0 and 20 ms); curl reads, as in its guide; batched in the workers, \
shuffled over 1,000 samples |
| DataLoader, local files | files of this machine | 2 workers; no link at all |
| decoding alone | memory | no loader: what the core decodes where it does nothing else |

Shards are smaller than those projects ask for (64 MB and more), so that there are several for each worker.
"""


def table(found):
    """Tables for each kind of sample: rates, and what they cost; and how each loader was set."""
    runs = found["runs"]
    kinds = dict.fromkeys(run["what"] for run in runs)
    return "\n".join([*(part for what in kinds for part in _tables(what, _groups(runs, what))), SETTINGS])


def _groups(runs, what):
    groups = {}
    for run in runs:
        if run["what"] == what:
            groups.setdefault((run["loader"], run["round_trip_ms"]), []).append(run)
    return groups


def _tables(what, groups):
    round_trips = sorted({group for _, group in groups})
    loaders = list(dict.fromkeys(loader for loader, _ in groups))
    columns = [
        (f"{what}, samples/s steady (least to most)", lambda found, at: _rate(found, groups.get((OURS, at)))),
        (f"{what}, samples/s of the whole pass", lambda found, at: f"{middle(found, 'whole_samples_per_s'):.0f}"),
        (f"{what}, ms of CPU a sample", lambda found, at: f"{1e3 * middle(found, 'cpu_s_per_sample'):.2f}"),
        (f"{what}, MB of memory", lambda found, at: f"{middle(found, 'memory_bytes') / 1e6:.0f}"),
        (f"{what}, seconds to the first batch", lambda found, at: f"{middle(found, 'first_batch_s'):.2f}"),
        (f"{what}, seconds to the second batch", lambda found, at: f"{middle(found, 'second_batch_s'):.2f}"),
        (f"{what}, samples after 2 and 4 s", lambda found, at: _after(found)),
        (f"{what}, % of the processors that the host took", lambda found, at: f"{100 * middle(found, 'stolen'):.0f}"),
    ]
    head = [f"{trip:.0f} ms" for trip in round_trips]
    for title, cell in columns:
        rows = [
            [loader, *(cell(groups[loader, at], at) if (loader, at) in groups else None for at in round_trips)]
            for loader in loaders
        ]
        yield markdown([title, *head], rows) + "\n"


def _rate(found, ours):
    rates = [item["samples_per_s"] for item in found]
    span = f" ({min(rates):.0f} to {max(rates):.0f})" if len(rates) > 1 else ""
    ratio = f", ours {middle(ours, 'samples_per_s') / middle(found, 'samples_per_s'):.2f}x" if ours else ""
    return f"{middle(found, 'samples_per_s'):.0f}{span}{ratio if ours is not found else ''}"


def _after(found):
    return ", ".join(
        f"{statistics.median(item['samples_after'][at] for item in found):.0f}" for at in found[0]["samples_after"]
    )


def middle(found, name):
    return statistics.median(item[name] for item in found)


def draw(found, path):
    """Steady samples a second by the round trip, a line a loader, a panel a kind of sample."""
    plt, runs = pyplot(), found["runs"]
    kinds = list(dict.fromkeys(run["what"] for run in runs))
    figure, panels = plt.subplots(1, len(kinds), figsize=(5 * len(kinds), 4), squeeze=False)
    for panel, what in zip(panels[0], kinds, strict=True):
        groups = _groups(runs, what)
        for loader in dict.fromkeys(loader for loader, _ in groups):
            at = sorted(group for name, group in groups if name == loader)
            rates = [middle(groups[loader, item], "samples_per_s") for item in at]
            panel.plot(at, rates, marker="o", linewidth=3 if loader == OURS else 1, label=loader)
        panel.set(xlabel="round trip, ms", ylabel="samples/s", title=what)
        panel.set_ylim(bottom=0)
    panels[0][-1].legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
