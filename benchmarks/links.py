"""Two network namespaces with a shaped link between them, for benchmarks that need a thin network. Needs root."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

STORE, TRAINER = "frostline-store", "frostline-trainer"
STORE_ADDRESS, TRAINER_ADDRESS = "10.77.0.1", "10.77.0.2"
# A small bucket: a larger one would let whole feature batches pass unshaped.
BURST = "16kb"
LATENCY = "50ms"


def run(*words):
    subprocess.run(words, check=True, capture_output=True)


class ShapedLink:
    """The store's and the trainer's namespaces. A context manager, which removes what it made.

    ``rate`` shapes both directions with a token bucket (tc-tbf(8)); there is no added delay.

    Args:
        name: added to the names of the namespaces, for a benchmark that may run beside another one.
    """

    def __init__(self, name=""):
        self.store, self.trainer = STORE + name, TRAINER + name
        self._devices = ((self.store, f"fl-s{name}", STORE_ADDRESS), (self.trainer, f"fl-t{name}", TRAINER_ADDRESS))

    def __enter__(self):
        if os.geteuid() != 0:
            sys.exit("this benchmark makes network namespaces, which takes root")
        self.__exit__()
        for name, _, _ in self._devices:
            run("ip", "netns", "add", name)
        (_, here, _), (_, there, _) = self._devices
        run("ip", "link", "add", here, "type", "veth", "peer", "name", there)
        for name, device, address in self._devices:
            run("ip", "link", "set", device, "netns", name)
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", device)
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", device, "up")
        return self

    def rate(self, mbit):
        """Bits a second in either direction, in millions."""
        for name, device, _ in self._devices:
            shape = ["rate", f"{mbit}mbit", "burst", BURST if mbit < 500 else "256kb", "latency", LATENCY]
            run("tc", "-n", name, "qdisc", "replace", "dev", device, "root", "tbf", *shape)

    def __exit__(self, *_):
        for name, _, _ in self._devices:
            with contextlib.suppress(subprocess.CalledProcessError):
                run("ip", "netns", "del", name)


class Inside:
    """A Python program in a namespace, pinned to one core, which is asked and answers in lines of JSON."""

    def __init__(self, namespace, core, script, *arguments, environment=None, path=()):
        command = ["ip", "netns", "exec", namespace, "taskset", "-c", str(core), sys.executable, script, *arguments]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ, **(environment or {}), "PYTHONPATH": _path(path)},
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


def _path(more):
    """Where a torchvision that was built for CUDA is made to import under a torch without it."""
    shim = os.environ.get("SHIM") or (Path(__file__).parents[1] / "tests" / "support" / "torchvision_cpu")
    return os.pathsep.join(filter(None, (str(shim), os.environ.get("PYTHONPATH"), *more)))


def received_bytes(device="fl-t"):
    """Bytes that came in over the link, counted at the interface; to be called inside the namespace."""
    return int(Path(f"/sys/class/net/{device}/statistics/rx_bytes").read_text())
