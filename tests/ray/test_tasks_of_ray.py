"""Tasks of Ray read ranges of a manifest: rows and files are those that one process makes, also after kills."""

import json
import re
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest

import frostline as fl
from frostline.training.extract import extract
from support.cassandra import KEYSPACE, USER
from support.feature_jobs import small_extraction
from support.images import image_folder

pytest.importorskip("ray", reason="tasks of Ray need the extra frostline[ray]")
# Ray starts a process of Python with torch for each of its workers.
pytestmark = pytest.mark.timeout(900)

ON_NODES = """
import json, sys
import numpy as np
import ray
import frostline as fl
import frostline.ray
from support.images import tiny_preprocess
from support.many_nodes import frozen, job

ray.init("auto", log_to_driver=False)
ray.data.DataContext.get_current().enable_progress_bars = False
data = fl.Dataset(sys.argv[1])
with job(sys.argv[1], "ray://frostline") as alone:
    expected = [(batch.ids, batch.labels, batch.features) for batch in alone.arrays(16)]
ids, labels, features = (np.concatenate(parts) for parts in zip(*expected))
settings = fl.LoaderSettings(samples_per_request=8, device_batch=8)
options = dict(preprocess=tiny_preprocess(), accuracy="exact", settings=settings)
found = frostline.ray.read(data, frozen(), near="ray://frostline", batch_size=16, **options)
rows = found.sort("id").take_all()
order = np.argsort(ids)
assert [row["id"] for row in rows] == ids[order].tolist()
assert [row["label"] for row in rows] == labels[order].tolist()
assert all(np.array_equal(row["features"], wanted) for row, wanted in zip(rows, features[order], strict=True))
plain = frostline.ray.read(data, near=None, preprocess=tiny_preprocess())
assert plain.count() == len(data)
print(json.dumps({"rows": len(rows), "schema": found.schema().names}))
"""

NOT_FINITE = """
import sys
import numpy as np
import ray
import frostline as fl
import frostline.ray
from support.images import tiny_preprocess
from support.networks import Rooted

ray.init("auto", log_to_driver=False)
ray.data.DataContext.get_current().enable_progress_bars = False
settings = fl.LoaderSettings(samples_per_request=8, device_batch=8, allow_nonfinite=True)
model = fl.freeze(Rooted().eval(), "stem", input_shape=(3, 32, 32))
options = dict(preprocess=tiny_preprocess(), accuracy="exact", settings=settings)
found = frostline.ray.read(fl.Dataset(sys.argv[1]), model, near="ray://frostline", batch_size=16, **options)
rows = found.take_all()
print(len(rows), sum(not np.isfinite(row["features"]).all() for row in rows))
"""

BROKEN_OFF = """
import os, signal, sys
from pathlib import Path
from frostline.core.events import ProgressMade
import frostline as fl
from frostline.training.extract import extract
from support.cassandra import KEYSPACE, USER
from support.feature_jobs import small_extraction
from support.images import image_folder
from support.ray_here import awaited_workers_of_ray

killed = []

def on_event(event):
    if isinstance(event, ProgressMade) and event.total == 36:
        if not killed:
            killed.extend(awaited_workers_of_ray("ray::_part"))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        elif event.done >= 21:
            print(len(killed), flush=True)
            os._exit(0)

folder, out, part_bytes = sys.argv[1:]
asked = small_extraction(folder, Path(out), "ray://frostline", part_bytes=int(part_bytes), on_ray=True)
extract(asked, on_event)
print("not broken off", flush=True)
"""

KILLED = """
import os, signal, sys
from frostline.cli import ingest, main
from frostline.cli.show import ProgressBar
from frostline.datasets.copy import cql
from frostline.core.events import ProgressMade
from support.ray_here import awaited_workers_of_ray

cql._ROWS_A_PART = 60
killed = []

class Killing(ProgressBar):
    def __call__(self, event):
        super().__call__(event)
        if isinstance(event, ProgressMade) and len(killed) < 2 and event.done >= 120 * (len(killed) + 1):
            # Several tasks were handed to Ray, which go on meanwhile.
            for pid in awaited_workers_of_ray("ray::_make")[:1]:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
                print("sent SIGKILL to", pid, file=sys.stderr)

ingest.ProgressBar = Killing
main()
"""


def test_rows_of_ray_data_are_those_of_a_loader(folder, here):
    said = json.loads(here.script(ON_NODES, folder).splitlines()[-1])
    assert said == {"rows": 36, "schema": ["id", "label", "features"]}


def test_rows_that_are_not_finite_are_counted_by_the_process_that_asked(folder, here, tmp_path):
    verb = ["extract", "--data", folder, "--model", "support.networks:Rooted", "--until", "stem", "--json"]
    size = 7 * 8 * 111**2 * 4
    more = ["--near", "ray://frostline", "--executor", "ray", "--out", tmp_path / "f.parquet", "--part-size", size]
    said = json.loads(here.script("from frostline.cli import main; main()", *verb, *more, "--allow-nonfinite"))
    table = pq.read_table(tmp_path / "f.parquet")
    broken = table.filter(~np.isfinite(table["features"].combine_chunks().to_numpy_ndarray()).all((1, 2, 3)))
    assert said["nonfinite"] == len(broken) > 1
    assert broken["class"].unique().to_pylist() == ["circle"]
    one = f"sample {broken['object'][0]} (id {broken['id'][0]}) at stem.3:relu, in float32 by {said['engine']}"
    assert said["first_nonfinite"] == f"the frozen layers gave Inf or NaN for {one}"


def test_tasks_of_ray_data_tell_of_rows_that_are_not_finite(folder, here):
    rows = here.script(NOT_FINITE, folder)
    count, broken = map(int, rows.splitlines()[0].split())
    assert count == 36
    said = rf"\b{broken} of rows 0 to 35 are not finite; the frozen layers gave Inf or NaN for sample circle/\d+\.jpg"
    assert broken > 1
    # This Ray has no process that brings the logs of tasks to whoever asked, as others have.
    logs = here.state.parent.glob("ray/session_*/logs/worker-*")
    assert re.search(said, "".join(file.read_text() for file in logs))


def test_an_interrupted_extraction_by_killed_tasks_ends_in_the_same_file(folder, here, tmp_path):
    whole, out = tmp_path / "whole.parquet", tmp_path / "f.parquet"
    extract(small_extraction(folder, whole, here.node(0)["url"]), lambda _: None)
    expected = pq.read_table(whole)
    size = 7 * expected["features"].combine_chunks().to_numpy_ndarray()[0].nbytes
    killed = "not broken off"
    for _ in range(8):  # where the machine is busy all progress may come at once, behind the last part
        out.unlink(missing_ok=True)
        killed = here.script(BROKEN_OFF, folder, out, size).splitlines()[-1]
        if killed != "not broken off":
            break
    assert int(killed) > 0
    assert not out.exists()
    verb = ["extract", "--data", folder, "--model", "support.networks:Small", "--until", "stem", "--json"]
    more = ["--near", "ray://frostline", "--executor", "ray", "--out", out, "--part-size", size]
    said = json.loads(here.script("from frostline.cli import main; main()", *verb, *more))
    assert said["taken_up"] >= 14
    assert said["computed"] + said["taken_up"] == said["samples"] == 36
    assert said["wire_bytes"] > 0
    assert pq.read_table(out).equals(expected)


@pytest.mark.long
def test_a_table_has_every_object_once_after_tasks_that_fill_it_were_killed(here, cql, tmp_path):
    images = fl.Dataset(image_folder(tmp_path / "many", per_class=160, size=(96, 80)))
    url = f"cql://{USER}@{cql.place}/{KEYSPACE}/by_tasks?protocol=3"
    done, said = here.script_that_says(
        KILLED, "ingest", tmp_path / "many", url, "--format", "cql", "--executor", "ray", "--json"
    )
    assert said.count("sent SIGKILL") in (1, 2)
    done = json.loads(done)
    assert (done["samples"], done["made"], done["skipped"]) == (480, 480, [])
    with cql.session() as session:
        rows = list(session.execute(f"SELECT name, label, data FROM {KEYSPACE}.by_tasks"))
    expected = {(name, name.partition("/")[0], (tmp_path / "many" / name).read_bytes()) for name in images.names}
    assert Counter((row.name, row.label, bytes(row.data)) for row in rows) == Counter(expected)
