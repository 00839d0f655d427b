"""What every benchmark shares: arguments and a quick form, rounds by turns, a table, a raw file, and a shaped link.

A benchmark is a file in this folder that ends so, and `tests/benchmarks` runs its quick form:

    if __name__ == "__main__":
        run(__doc__, measure, quick={"samples": 16}, options=options, table=table)

``measure`` takes the arguments and returns its figures, or yields them each time that there are more, so that a run
that is cut short is not lost. ``table`` makes Markdown of them, ``draw`` a picture. What several benchmarks need is
here; what few need, and no one runs by itself, is in ``parts``.
"""

import argparse
import atexit
import contextlib
import importlib.util
import inspect
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Builders of servers, nodes and images, which the tests have too.
sys.path.insert(0, str(ROOT / "tests"))

PACKAGES = ("frostline", "torch", "torchvision", "timm", "transformers", "diffusers", "peft", "numpy", "pyarrow")
PACKAGES += ("onnxruntime", "openvino", "ray", "tensorflow-cpu")
# Those on which the speed of frozen layers depends.
FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm")
QUICK_SIZE, QUICK_PER_CLASS = (160, 120), 8


class Skipped(Exception):
    """The machine lacks what a benchmark needs; the message is a sentence."""


def run(
    doc,
    measure,
    *,
    quick,
    options=None,
    table=None,
    draw=None,
    inside=None,
    needs=(),
    data=True,
    pictures=QUICK_PER_CLASS,
):
    """Run a benchmark as its arguments say.

    Args:
        doc: docstring of the script.
        measure: takes the arguments, and returns figures or yields them as they grow.
        quick: values of arguments in the quick form, unless they are given.
        options: adds the script's own arguments to a parser.
        table: makes Markdown of the figures; None prints them as JSON.
        draw: draws the figures into an SVG file.
        inside: functions of the programs that ``Inside`` starts of this script, by name.
        needs: functions that raise ``Skipped`` where the machine lacks something.
        data: whether it takes a folder of photographs.
        pictures: made photographs of each of three classes in the quick form.
    """
    if sys.argv[1:2] == ["--inside"]:
        inside[sys.argv[2]](argparse.Namespace(**json.loads(sys.argv[3])))
        return
    wanted = arguments(doc, options, quick, data)
    try:
        for need in needs:
            need(wanted)
        with small_world(wanted, pictures):
            found = kept(wanted, measure(wanted), table, draw)
    except Skipped as why:
        print(f"skipped: {why}", flush=True)
        return
    print(table(found) if table else json.dumps(found, indent=1), flush=True)


def arguments(doc, options, quick, data):
    """The script's arguments beside those that all have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    is_quick = "--quick" in sys.argv
    if data:
        help_ = "folder of photographs, one folder a class; made on the spot in the quick form"
        parser.add_argument("--data", required=not is_quick, help=help_)
    parser.add_argument("--rounds", type=int, default=1, help="how often everything is measured, by turns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="the same at tiny sizes, to see that it works")
    parser.add_argument("--out", "--json", type=Path, metavar="FILE", help="raw figures; the table lies beside them")
    if options is not None:
        options(parser)
    if is_quick:
        parser.set_defaults(**{"rounds": 1, **quick})
    return parser.parse_args()


@contextlib.contextmanager
def small_world(wanted, pictures):
    """In the quick form: photographs where none are given, and a cache folder of its own."""
    if not wanted.quick:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        if getattr(wanted, "data", "") is None:
            wanted.data = str(photographs(Path(folder) / "photographs", pictures))
        yield


def photographs(folder, per_class, size=QUICK_SIZE):
    """Small made photographs of three classes."""
    from support.images import image_folder

    return image_folder(folder, per_class=per_class, size=size)


def kept(wanted, measured, table, draw):
    """The last figures; what there is by then is written each time."""
    found = None
    for found in measured if inspect.isgenerator(measured) else (measured,):
        if wanted.out is not None:
            raw = {**about(wanted), "figures": found}
            write(wanted.out.with_suffix(".json"), as_json(raw))
            if table is not None:
                write(wanted.out.with_suffix(".md"), table(found) + "\n")
            if draw is not None:
                draw(found, wanted.out.with_suffix(".svg"))
    return found


def as_json(raw):
    """Indented, but with each list of numbers on one line."""
    text = json.dumps(raw, indent=1, default=str) + "\n"
    return re.sub(r"\[[-+\d.eE,\s]+\]", lambda numbers: f"[{' '.join(numbers[0][1:-1].split())}]", text)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def about(wanted):
    """Where, when and how figures were taken."""
    commit, is_dirty = checkout()
    given = {name: named(value) for name, value in vars(wanted).items() if name != "out"}
    return {
        "benchmark": Path(sys.argv[0]).name,
        "command": [named(word) for word in sys.argv[1:]],
        "arguments": given,
        "commit": commit,
        "dirty": is_dirty,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
    }


def named(value):
    """A path without the folders before it, which are this machine's alone."""
    if isinstance(value, Path) or (isinstance(value, str) and value.startswith("/")):
        return Path(value).name
    return value


def checkout():
    """The commit, and whether files differ from it; None where there is no repository."""

    def git(*words):
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD") if shutil.which("git") else None
    return commit, None if commit is None else bool(git("status", "--porcelain", "--untracked-files=no"))


def machine():
    """The processor, what of it may be used, and how busy it is."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return {
        "processor": fields.get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "flags": [flag for flag in FLAGS if flag in flags],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
    }


def versions():
    """Of Python and the packages on which figures depend; those that are not here are left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


# What a benchmark may need.


def two_cores(_):
    """One for each side of a link."""
    if len(os.sched_getaffinity(0)) < 2:
        raise Skipped("each side of the link takes a core of its own, and there is one")


def namespaces(wanted):
    """Root, and what lays out a link."""
    two_cores(wanted)
    if os.geteuid() != 0:
        raise Skipped("it lays out network namespaces, which takes root")
    for program in ("ip", "tc", "taskset", "unshare"):
        if shutil.which(program) is None:
            raise Skipped(f"it lays out network namespaces with {program}, which is not here")
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        raise Skipped("network namespaces may not be made here")


def wide_links(wanted):
    """Namespaces, and a device whose packets a program can delay."""
    namespaces(wanted)
    if not Path("/dev/net/tun").exists():
        raise Skipped("/dev/net/tun, by which packets are delayed, is not here")
    if "bbr" not in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split():
        raise Skipped("this kernel's TCP has no bbr, with which a link with losses is measured")


def modules(*names):
    """Packages that can be imported."""

    def need(_):
        for name in names:
            if importlib.util.find_spec(name) is None:
                raise Skipped(f"the package {name} is not installed")

    return need


# Rounds and figures.


def by_turns(rounds, runs, warm=0):
    """Call each function so many times, one of each after another, so that a machine that slows down slows all.

    Args:
        rounds: calls that count, of each.
        runs: functions, by name.
        warm: rounds before, which do not count.
    """
    found = {name: [] for name in runs}
    for number in range(warm + rounds):
        for name, call in runs.items():
            result = call()
            if number >= warm:
                found[name].append(result)
    return found


def median(rows, field):
    """The median of a field over some rows; None where no row has it."""
    values = [row[field] for row in rows if row.get(field) is not None]
    return statistics.median(values) if values else None


def spread(values, digits=1):
    """The median, and the smallest and the largest where there are several: ``1.2 (1.1 to 1.4)``."""
    values = [value for value in values if value is not None]
    if not values:
        return "-"
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def markdown(head, rows):
    """A table; columns of figures stand to the right."""
    assert all(len(row) == len(head) for row in rows), f"a row has not the {len(head)} columns of its table"
    rows = [[_cell(value) for value in row] for row in rows]
    is_text = [not all(_is_figure(row[place]) for row in rows) for place in range(len(head))]
    lines = [f"| {' | '.join(map(str, head))} |", f"| {' | '.join('---' if text else '---:' for text in is_text)} |"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _cell(value):
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _is_figure(text):
    return not text or text[0].isdigit() or text[0] == "-"


def pyplot():
    """matplotlib for SVG files that are the same each time."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "frostline"
    from matplotlib import pyplot as plt

    return plt


def processor_s():
    """Processor seconds of this process and of its children that ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def processor_s_of(pid):
    """Of another process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def doing(text):
    """Say on stderr what is under way."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def torchvision_path():
    """Where a torchvision that was built for CUDA is made to import under a torch without it."""
    return str(ROOT / "tests" / "support" / "torchvision_cpu")


# Two network namespaces with a link between them.

STORE, TRAINER = "frostline-store", "frostline-trainer"
# A small bucket: a larger one would let whole feature batches pass unshaped.
BURST, LATENCY = "16kb", "50ms"


def command(*words):
    subprocess.run(words, check=True, capture_output=True)


class Namespaces:
    """The store's and the trainer's network namespaces, named for this process. A context manager."""

    def __init__(self):
        self.store, self.trainer = (f"{name}-{os.getpid()}" for name in (STORE, TRAINER))

    def __enter__(self):
        for name in (self.store, self.trainer):
            command("ip", "netns", "add", name)
            command("ip", "-n", name, "link", "set", "lo", "up")
        atexit.register(self.__exit__)
        return self

    def __exit__(self, *_):
        atexit.unregister(self.__exit__)
        for name in (self.store, self.trainer):
            with contextlib.suppress(subprocess.CalledProcessError):
                command("ip", "netns", "del", name)


class ShapedLink(Namespaces):
    """Both namespaces, joined by a link that tc-tbf(8) holds to a rate in either direction, without a delay."""

    address = "10.77.0.1"
    trainer_address = "10.77.0.2"

    def __init__(self, mbit):
        super().__init__()
        self._mbit = mbit
        ends = ((self.store, "s", self.address), (self.trainer, "t", self.trainer_address))
        self._ends = [(name, f"fl{end}{os.getpid()}", address) for name, end, address in ends]

    def __enter__(self):
        super().__enter__()
        (_, here, _), (_, there, _) = self._ends
        command("ip", "link", "add", here, "type", "veth", "peer", "name", there)
        for name, device, address in self._ends:
            command("ip", "link", "set", device, "netns", name)
            command("ip", "-n", name, "addr", "add", f"{address}/24", "dev", device)
            command("ip", "-n", name, "link", "set", device, "up")
        self.rate(self._mbit)
        return self

    def rate(self, mbit):
        """Millions of bits a second in either direction."""
        for name, device, _ in self._ends:
            shape = ["rate", f"{mbit}mbit", "burst", BURST if mbit < 500 else "256kb", "latency", LATENCY]
            command("tc", "-n", name, "qdisc", "replace", "dev", device, "root", "tbf", *shape)


def received_bytes():
    """Bytes that came in over the link, counted at the interface of the namespace in which this runs."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[0]) for line in lines if line.split(":")[0].strip() != "lo")


class Inside:
    """A part of this script in a namespace and on some cores, which is asked and answers in lines of JSON.

    Args:
        namespace: its name.
        cores: as taskset(1) takes them.
        role: name of the part, as ``run`` is told it.
        wanted: arguments that it is given.
        environment: variables beside those of this process.
        path: folders beside those that Python looks into.
        given: further arguments.
    """

    def __init__(self, namespace, cores, role, wanted, environment=None, path=(), **given):
        script = sys.modules["__main__"].__file__
        asked = json.dumps({**vars(wanted), **given}, default=str)
        words = [sys.executable, script, "--inside", role, asked]
        found = (torchvision_path(), os.environ.get("PYTHONPATH"), *path)
        more = {**(environment or {}), "PYTHONPATH": os.pathsep.join(filter(None, found))}
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, "taskset", "-c", str(cores), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ, **more},
        )

    @property
    def pid(self):
        return self._process.pid

    def ask(self, **question):
        self.send(**question)
        return self.answer()

    def send(self, **question):
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()

    def answer(self):
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the program inside ended with {self._process.wait()}")
        return json.loads(line)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def answer_questions(does):
    """Inside: answer each line of standard input, until it ends, by the function that it names."""
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(does[question.pop("do")](**question)), flush=True)


def serve_node(wanted, settings, beside=None):
    """Inside: serve ``wanted.data`` by a node at ``wanted.address`` until standard input ends."""
    from frostline.node.process import start_node

    roots = (str(Path(wanted.data).resolve()) if "://" not in wanted.data else wanted.data,)
    with start_node(roots, settings, host=wanted.address) as node:
        print(json.dumps({"url": node.url, **(beside or {})}), flush=True)
        sys.stdin.read()
