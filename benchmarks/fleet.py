"""Training jobs that share two nodes, a store and a thin link, with and without a control plane.

    python benchmarks/fleet.py --data DIR [--mbit 20] [--seconds 40] [--runs two,five] [--out FILE]

Two nodes read photographs from DIR in one network namespace, up to five jobs train in another, and tc shapes the link
between both. Jobs are processes that read encoded photographs, decode them and train a small network; every second one
is of TensorFlow where scripts/frameworks.sh has installed that, the others of PyTorch. ``frostline control`` runs
beside the nodes, which report to it too. Bytes are counted by each job as its batches arrive. Needs root.

What is divided is ``--part`` of the link's rate: what its headers leave of it, and some 4 % less. Of each run the first
``--settle`` seconds do not count. Processor time of statistics and control is that of their calls in the job's threads,
the outermost ones.
"""

import hashlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

from harness import ROOT, Inside, ShapedLink, doing, markdown, namespaces, processor_s_of, run
from parts import fleet_job

CONTROL_PORT, NODE_PORTS = 7075, (7070, 7071)
CONTROL = f"http://{ShapedLink.address}:{CONTROL_PORT}"
NODES = [f"http://{ShapedLink.address}:{port}" for port in NODE_PORTS]
TENANTS = ("lab", "greedy", "modest", "nodes")
BOTH_CORES = "0,1"
RUNS = ("two", "five", "killed", "greedy", "deadlines", "wide")
QUICK = {"runs": "two", "mbit": 4, "jobs": 2, "nodes": 1, "seconds": 0.8, "settle": 0.2, "tail": 0.1}


def options(parser):
    parser.add_argument("--mbit", type=float, default=20)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--settle", type=float, default=12, help="seconds of the beginning that do not count")
    parser.add_argument("--tail", type=float, default=1, help="seconds of the end that do not count")
    parser.add_argument("--begins", type=float, default=15, help="seconds in which the control plane starts")
    parser.add_argument("--part", type=float, default=0.92)
    parser.add_argument("--jobs", type=int, default=5, help="processes")
    parser.add_argument("--nodes", type=int, default=len(NODES))
    parser.add_argument("--runs", default=",".join(RUNS))


def measure(wanted):
    with tempfile.TemporaryDirectory() as folder, ShapedLink(wanted.mbit) as link:
        fleet = Fleet(wanted, link, Path(folder))
        try:
            yield from measured(wanted, fleet)
        finally:
            fleet.close()


def measured(wanted, fleet):
    """All runs, one after another."""
    two, five = [3, 1], [4, 2, 2, 1, 1]
    fleet.run(five[: wanted.jobs], control=False)  # what is imported and listed first does not count
    fleet.capacity = wanted.part * wanted.mbit * 1e6 / 8
    greedy = {"weights": [1] * 4, "tenants": ["modest"] + ["greedy"] * 3}
    runs = {
        "two": lambda: both(fleet, "two", weights=two),
        "five": lambda: both(fleet, "five", weights=five),
        "killed": lambda: {"killed": fleet.run(five, times=3, kill=True)},
        "greedy": lambda: both(fleet, "greedy", **greedy),
        "deadlines": lambda: {"deadlines": fleet.deadlines()},
        "wide": lambda: fleet.widen() or both(fleet, "wide", weights=[1], per_request=32),
    }
    found = {"link_mbit": wanted.mbit, "capacity_bytes_per_s": fleet.capacity, "frameworks": fleet.frameworks}
    found["runs"] = {}
    for name in wanted.runs.split(","):
        found["runs"] |= runs[name]()
        orders = {job["order"] for one in found["runs"].values() for job in one["jobs"] if job["order"]}
        yield {**found, "different_orders": len(orders)}


def both(fleet, name, **given):
    return {f"{name}_without_control": fleet.run(control=False, **given), name: fleet.run(**given)}


class Fleet:
    """The processes: nodes, jobs, and at times a control plane."""

    def __init__(self, wanted, link, folder):
        self._wanted, self._link, self._folder = wanted, link, folder
        self._runs = 0
        self._control = None
        self.capacity = 0.0
        here = {"environment": {"FROSTLINE_TOKEN": token("nodes")}}
        ports = NODE_PORTS[: wanted.nodes]
        self._nodes = [Inside(link.store, BOTH_CORES, "node", wanted, port=port, **here) for port in ports]
        has_tensorflow = (ROOT / "build" / "frameworks" / "installed.txt").is_file() and not wanted.quick
        kinds = ("pytorch", "tensorflow" if has_tensorflow else "pytorch")
        self.frameworks = [kinds[number % 2] for number in range(wanted.jobs)]
        self._jobs = [self._job(framework) for framework in self.frameworks]
        for process in (*self._nodes, *self._jobs):
            process.answer()

    def run(self, weights, *, control=True, tenants=None, times=1, kill=False, per_request=4):
        """Train for a while; give each job's bytes a second against its weight."""
        tenants = tenants or ["lab"] * len(weights)
        names = [f"job{number}" for number in range(len(weights))]
        tables = [
            {"name": name, "tenant": tenant, "weight": weight}
            for name, tenant, weight in zip(names, tenants, weights, strict=True)
        ]
        if control:
            self._begin_control(tables)
        begin = time.time()
        end = begin + times * self._wanted.seconds
        asked = [
            {
                "name": name,
                "until": end,
                "control": f"{CONTROL}?job={name}" if control else None,
                "token": token(tenant),
                "requests": 32 if tenant == "greedy" else None,
                "per_request": per_request,
            }
            for name, tenant in zip(names, tenants, strict=True)
        ]
        killed = [begin + self._wanted.seconds, begin + 2 * self._wanted.seconds]
        killer = threading.Thread(target=self._kill_between, args=killed)
        if kill:
            killer.start()
        jobs = self._ask(asked)
        if kill:
            killer.join()
        settled = begin + self._wanted.settle
        found = {"jobs": jobs, **shares(jobs, weights, tenants, settled, end - self._wanted.tail)}
        if kill:
            spans = {
                "before": (settled, killed[0]),
                "without": (killed[0] + 1, killed[1]),
                "after": (killed[1] + 1, end - self._wanted.tail),
            }
            found["spans"] = {name: shares(jobs, weights, tenants, *span) for name, span in spans.items()}
        return self._ended(found, control)

    def deadlines(self):
        """One job that can be in time, one that cannot, and two that take their time."""
        seconds, begin = self._wanted.seconds, time.time() + self._wanted.begins
        kept, lost = 0.5 * self.capacity * seconds, 3 * self.capacity * seconds
        base = {"tenant": "lab", "weight": 1}
        names = ["in-time", "too-late", "job2", "job3"]
        tables = [{"name": name, **base} for name in names]
        for table, nbytes in zip(tables, (kept, lost), strict=False):
            table |= {"ends_at": datetime.fromtimestamp(begin + seconds + 10, UTC), "work_bytes": int(nbytes)}
        self._begin_control(tables)
        time.sleep(max(0.0, begin - time.time()))
        asked = [
            {
                "name": name,
                "until": begin + 2 * seconds,
                "control": f"{CONTROL}?job={name}",
                "token": token("lab"),
                "requests": None,
                "per_request": 4,
                "work_bytes": kept if name == "in-time" else None,
            }
            for name in names
        ]
        jobs = self._ask(asked)
        return self._ended(
            {
                "jobs": jobs,
                "must_end_after_s": seconds + 10,
                "in_time_ended_after_s": jobs[0]["ended"] - begin,
                "began": begin,
            },
            True,
        )

    def widen(self):
        """Let neither the link nor the shares hold anybody back."""
        self._link.rate(1000)
        self.capacity = 1e9

    def _ask(self, asked):
        used = self._jobs[: len(asked)]
        for job, question in zip(used, asked, strict=True):
            job.send(do="run", **question)
        return [job.answer() for job in used]

    def _ended(self, found, control):
        """The same without each job's course; with what the control plane used of a processor."""
        jobs = found["jobs"]
        for job in jobs:
            del job["course"]
        watching_s = sum(sum(job["watching_s"].values()) for job in jobs)
        used_s, seconds = (sum(job[name] for job in jobs) for name in ("processor_s", "seconds"))
        found |= {"watching_share": watching_s / used_s, "watching_ms_per_s": 1000 * watching_s / seconds}
        if control:
            found["control_processor_s"] = processor_s_of(self._control.pid)
            self._end_control()
        found["load"] = os.getloadavg()[0]
        doing(f"{len(jobs)} jobs moved {sum(job['bytes'] for job in jobs) / 1e6:.1f} MB")
        return found

    def _begin_control(self, jobs):
        self._runs += 1
        text = f"[capacity]\nbytes_per_s = {self.capacity}\ncompute_s_per_s = 2\n"
        for name in TENANTS:
            digest = hashlib.sha256(token(name).encode()).hexdigest()
            text += f'[[tenant]]\nname = "{name}"\ntoken_sha256 = "{digest}"\n'
        for job in jobs:
            text += "[[job]]\n" + "".join(f"{name} = {toml(value)}\n" for name, value in job.items())
        (self._folder / f"run{self._runs}.toml").write_text(text)
        self._start_control()

    def _start_control(self):
        config = str(self._folder / f"run{self._runs}.toml")
        self._control = Inside(self._link.store, BOTH_CORES, "control", self._wanted, config=config)
        self._control.answer()

    def _end_control(self):
        os.kill(self._control.pid, signal.SIGKILL)
        self._control.__exit__()

    def _kill_between(self, kill_at, start_at):
        time.sleep(max(0.0, kill_at - time.time()))
        self._end_control()
        time.sleep(max(0.0, start_at - time.time()))
        self._start_control()

    def _job(self, framework):
        options = {"framework": framework, "path": fleet_job.paths(framework)}
        return Inside(self._link.trainer, BOTH_CORES, "job", self._wanted, **options)

    def close(self):
        for process in (*self._jobs, *self._nodes):
            process.__exit__()


def shares(jobs, weights, tenants, begin, end):
    """What each job moved a second against what its weight gives, and how fair that is by Jain's index."""
    moved = [moved_between(job["course"], begin, end) / (end - begin) for job in jobs]
    total = sum(moved)
    sums = {
        tenant: sum(weight for weight, of in zip(weights, tenants, strict=True) if of == tenant) for tenant in tenants
    }
    due = [weight / sums[tenant] / len(sums) for weight, tenant in zip(weights, tenants, strict=True)]
    if not total:
        return {"bytes_per_s": 0.0, "shares": None, "due": due, "worst_from_due": None, "jain": None}
    normalized = [rate / part for rate, part in zip(moved, due, strict=True)]
    return {
        "bytes_per_s": total,
        "shares": [rate / total for rate in moved],
        "due": due,
        "worst_from_due": max(abs(rate / total / part - 1) for rate, part in zip(moved, due, strict=True)),
        "jain": sum(normalized) ** 2 / (len(normalized) * sum(rate**2 for rate in normalized)),
    }


def moved_between(course, begin, end):
    """Bytes between two times of a course of times and bytes, which is straight between its points."""
    return at(course, end) - at(course, begin)


def at(course, when):
    before = [point for point in course if point[0] <= when] or [course[0]]
    after = [point for point in course if point[0] > when] or [course[-1]]
    (first, nbytes), (last, more) = before[-1], after[0]
    return nbytes if last <= first else nbytes + (more - nbytes) * (when - first) / (last - first)


def token(tenant):
    return f"fleet-{tenant}"


def toml(value):
    return value.isoformat() if isinstance(value, datetime) else json.dumps(value)


def table(found):
    rows = [
        [
            name.replace("_", " "),
            f"{run['worst_from_due']:.1%}" if run.get("worst_from_due") is not None else None,
            run.get("jain"),
            run["bytes_per_s"] / 1e6 if "bytes_per_s" in run else None,
            f"{run['watching_share']:.2%}",
        ]
        for name, run in found["runs"].items()
    ]
    head = [
        "run",
        "furthest from a share",
        "Jain's index",
        "MB a second of all",
        "statistics and control, of processor time",
    ]
    return markdown(head, rows)


def node_inside(wanted):
    """A node that reports to the control plane, until standard input ends."""
    from frostline.core.config import NodeSettings
    from frostline.node.process import start_node

    settings = NodeSettings(engines=(), compute_threads=1, decode_threads=1, allow_anonymous=True)
    roots = (str(Path(wanted.data).resolve()),)
    with start_node(roots, settings, host=ShapedLink.address, port=wanted.port, control=CONTROL) as node:
        print(json.dumps({"url": node.url}), flush=True)
        sys.stdin.read()


def control_inside(wanted):
    """Become the control plane, which can be killed then."""
    verb = str(Path(sys.executable).with_name("frostline"))
    listen = f"{ShapedLink.address}:{CONTROL_PORT}"
    os.execv(verb, [verb, "control", "--config", wanted.config, "--listen", listen, "--json"])


def job_inside(wanted):
    fleet_job.main(wanted.framework, wanted.data, NODES[: wanted.nodes])


INSIDE = {"node": node_inside, "control": control_inside, "job": job_inside}

if __name__ == "__main__":
    run(__doc__, measure, quick=QUICK, options=options, table=table, inside=INSIDE, needs=(namespaces,))
