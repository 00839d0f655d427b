"""Training jobs that share two nodes, a store and a thin link, with and without a control plane.

    python benchmarks/fleet.py --data DIR [--mbit 20] [--seconds 40] [--out FILE]

Two nodes read photographs from DIR in one network namespace, up to five jobs train in another, and tc shapes the link
between both. Jobs are processes that read encoded photographs, decode them and train a small network; every second one
is of TensorFlow where scripts/frameworks.sh has installed that, the others of PyTorch. ``frostline control`` runs
beside the nodes, which report to it too. Bytes are counted by each job as its batches arrive. Needs root.

What is divided is ``--part`` of the link's rate: what its headers leave of it, and some 4 % less. Of each run the first
``--settle`` seconds do not count. Processor time of statistics and control is that of their calls in the job's threads,
the outermost ones.
"""

import argparse
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

import fleet_job
from links import STORE_ADDRESS, Inside, ShapedLink

ROOT = Path(__file__).parents[1]
CONTROL = f"http://{STORE_ADDRESS}:7075"
NODES = [f"http://{STORE_ADDRESS}:{port}" for port in (7070, 7071)]
TENANTS = ("lab", "greedy", "modest", "nodes")
JOBS = 5
BOTH_CORES = "0,1"
CONTROL_STARTS_S = 15


def main():
    wanted = arguments()
    if wanted.inside:
        fleet_job.main(wanted.inside, wanted.data, NODES)
        return
    with tempfile.TemporaryDirectory() as folder, ShapedLink("-fleet") as link:
        link.rate(wanted.mbit)
        fleet = Fleet(wanted, link, Path(folder))
        try:
            found = {"command": sys.argv[1:], **measured(wanted, fleet)}
        finally:
            fleet.close()
    text = json.dumps(found, indent=1)
    print(text)
    if wanted.out:
        wanted.out.write_text(text + "\n", encoding="utf-8")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--mbit", type=float, default=20)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--settle", type=float, default=12)
    parser.add_argument("--part", type=float, default=0.92)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", choices=("pytorch", "tensorflow"), help=argparse.SUPPRESS)
    return parser.parse_args()


def measured(wanted, fleet):
    """All runs, one after another."""
    two, five = [3, 1], [4, 2, 2, 1, 1]
    fleet.run(five, control=False)  # what is imported and listed first does not count
    fleet.capacity = wanted.part * wanted.mbit * 1e6 / 8
    found = {
        "machine": {"cores": os.cpu_count(), "load_at_begin": os.getloadavg()},
        "link_mbit": wanted.mbit,
        "capacity_bytes_per_s": fleet.capacity,
        "frameworks": fleet.frameworks,
        "two_without_control": fleet.run(two, control=False),
        "two": fleet.run(two),
        "five_without_control": fleet.run(five, control=False),
        "five": fleet.run(five),
        "killed": fleet.run(five, times=3, kill=True),
        "greedy_without_control": fleet.run([1] * 4, control=False, tenants=["modest"] + ["greedy"] * 3),
        "greedy": fleet.run([1] * 4, tenants=["modest"] + ["greedy"] * 3),
        "deadlines": fleet.deadlines(),
    }
    fleet.widen()
    found |= {
        "wide_without_control": fleet.run([1], control=False, per_request=32),
        "wide": fleet.run([1], per_request=32),
    }
    runs = [run["jobs"] for run in found.values() if isinstance(run, dict) and "jobs" in run]
    orders = {job["order"] for jobs in runs for job in jobs if job["order"]}
    return {**found, "different_orders": len(orders)}


class Fleet:
    """The processes: nodes, jobs, and at times a control plane."""

    def __init__(self, wanted, link, folder):
        self._wanted, self._link, self._folder = wanted, link, folder
        self._runs = 0
        self._control = None
        self.capacity = 0.0
        self._nodes = [self._served("serve", *self._serve(url), token="nodes") for url in NODES]
        for node in self._nodes:
            node.answer()
        has_tensorflow = (ROOT / "build" / "frameworks" / "installed.txt").is_file()
        self.frameworks = ["tensorflow" if has_tensorflow and number % 2 else "pytorch" for number in range(JOBS)]
        self._jobs = [self._job(framework) for framework in self.frameworks]
        for job in self._jobs:
            job.answer()

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
        found = {"jobs": jobs, **shares(jobs, weights, tenants, settled, end - 1)}
        if kill:
            spans = {
                "before": (settled, killed[0]),
                "without": (killed[0] + 1, killed[1]),
                "after": (killed[1] + 1, end - 1),
            }
            found["spans"] = {name: shares(jobs, weights, tenants, *span) for name, span in spans.items()}
        return self._ended(found, control)

    def deadlines(self):
        """One job that can be in time, one that cannot, and two that take their time."""
        seconds, begin = self._wanted.seconds, time.time() + CONTROL_STARTS_S
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
            found["control_processor_s"] = processor_s(self._control.pid)
            self._end_control()
        found["load"] = os.getloadavg()[0]
        print(json.dumps(found), file=sys.stderr, flush=True)
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
        config = self._folder / f"run{self._runs}.toml"
        options = ("--config", str(config), "--listen", f"{STORE_ADDRESS}:7075", "--json")
        self._control = self._served("control", *options)
        self._control.answer()

    def _end_control(self):
        os.kill(self._control.pid, signal.SIGKILL)
        self._control.__exit__()

    def _kill_between(self, kill_at, start_at):
        time.sleep(max(0.0, kill_at - time.time()))
        self._end_control()
        time.sleep(max(0.0, start_at - time.time()))
        self._start_control()

    def _serve(self, url):
        listen = url.removeprefix("http://")
        return (
            "--data-root",
            self._wanted.data,
            "--listen",
            listen,
            "--open",
            "--engines",
            "",
            "--threads",
            "1",
            "--control",
            CONTROL,
            "--json",
        )

    def _served(self, *arguments, token=None):
        environment = {"FROSTLINE_TOKEN": globals()["token"](token)} if token else {}
        script = str(ROOT / "benchmarks" / "fleet_job.py")
        return Inside(self._link.store, BOTH_CORES, script, *arguments, environment=environment)

    def _job(self, framework):
        options = ("--data", self._wanted.data, "--inside", framework)
        return Inside(self._link.trainer, BOTH_CORES, __file__, *options, path=fleet_job.paths(framework))

    def close(self):
        for node in self._nodes:
            os.kill(node.pid, signal.SIGINT)
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


def processor_s(pid):
    """Seconds of a process on processors; ``ip netns exec`` and ``taskset`` have become it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
