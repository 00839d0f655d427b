"""Starts processes of this Python as forks of one that has imported PyTorch and Frostline, in a tenth of the time.

They are processes like others: children of who started them, with the arguments, descriptors, environment and folder
that were asked for, in one thread, and they run what they are told from its first line on. What a process reads only
when it starts (limits, cores, variables of Python, OpenMP and malloc) is that of the process they are forks of: there
is one for each such setting, from the second start under it on, or from that of a node, which starts others. Any other
first one is a plain start, as is each that asks for more than is known here. What is started so starts its own
processes so too, under its own setting, from a fork of itself at its beginning.

At its end such a process does not take apart what was imported, which takes ten times as long as to start it: what
Python does only then, such as to call finalizers of objects of modules, is not done.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import json
import multiprocessing.util
import os
import pkgutil
import resource
import signal
import site
import socket
import subprocess
import sys
import threading
import time
import types
from collections import Counter
from pathlib import Path

__all__ = ("PLAIN", "prepared_starts", "serve")

PLAIN = "FROSTLINE_TESTS_PLAIN_STARTS"
"""A variable under which nothing is prepared."""

_NETWORKS = Path("/var/run/netns")
_CLONE_NEWNET = 0x40000000

# What is read at a start, or when a library is loaded, and never again.
_PREFIXES = (
    *("ATEN", "GLIBC_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "ONEDNN_", "DNNL_", "OPENBLAS_"),
    *("PYTHON", "PYTORCH_", "TORCH", "LANG", "LC_", "TZ"),
)
_BY_PATH = "PYTHONPATH"
# What mallopt(3) sets too.
_MALLOPT = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_MAX_": -4, "MALLOC_ARENA_MAX": -8}
_LATER = {_BY_PATH, *_MALLOPT}
_PYTHON = sys.executable  # as it was before a test named another one
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
_NODE = "frostline.control"
_NOT_IMPORTED = ("frostline.ray", "frostline.testing", "frostline.demo")
_BOUNDED = (
    "frostline.datasets.listing_process",
    "frostline.datasets.formats.cells_apart",
)
"""Modules whose memory is measured or bounded where they run, so that they begin with none but their own."""

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
_LONGEST_COMMAND = 4096
_MOST = 4
"""Processes that are kept to be forked, of some 200 MB each."""

_HIGHEST = 1 << 10
_LOWEST_FREE = 100
"""Descriptors that came with a request stay above this until they have the numbers that were asked for."""


@contextlib.contextmanager
def prepared_starts(*more):
    """Have this process start others of this Python so; those that they are forks of end with the context.

    Args:
        more: further modules to import; with some, the first start is so too.
    """
    if os.environ.get(PLAIN) or sys.platform != "linux":
        yield
        return
    ways = _Ways(more=more)
    undo = _prepare(ways)
    try:
        yield
    finally:
        undo()
        ways.close()


def _prepare(ways):
    """Have starts of this process go these ways; returns what ends that."""
    popen, spawn = subprocess.Popen._execute_child, multiprocessing.util.spawnv_passfds  # noqa: SLF001

    def execute(process, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        _, _, _, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, _, *owner, is_session, group = rest
        if preexec_fn is None and close_fds and group == -1 and all(one in (-1, None) for one in owner):
            streams = [own if asked == -1 else asked for own, asked in enumerate((p2cread, c2pwrite, errwrite))]
            asked = _Asked(args, executable, os.environ if env is None else env, cwd, bool(is_session))
            process.pid = ways.start(asked, streams, pass_fds)
        if process.pid is None:
            popen(process, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
            return
        process._child_created = True  # noqa: SLF001
        process._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # noqa: SLF001

    def execute_spawned(path, args, passfds):
        is_light = not any("spawn_main" in os.fsdecode(word) for word in args)
        pid = None if is_light else ways.start(_Asked(args, path, os.environ, None, False), [0, 1, 2], passfds)
        return spawn(path, args, passfds) if pid is None else pid

    subprocess.Popen._execute_child = execute  # noqa: SLF001
    multiprocessing.util.spawnv_passfds = execute_spawned

    def undo():
        subprocess.Popen._execute_child = popen  # noqa: SLF001
        multiprocessing.util.spawnv_passfds = spawn

    return undo


class _Asked:
    """What is to be started.

    Args:
        arguments: the command.
        executable: program where it is not the command's first word.
        environment: its variables.
        folder: folder that it begins in; None for this process's own.
        is_session: whether it has a session of its own.
    """

    def __init__(self, arguments, executable, environment, folder, is_session):
        self.arguments = [os.fsdecode(word) for word in arguments] if isinstance(arguments, (list, tuple)) else []
        self.network = self.core = None
        if self.arguments[:3] == ["ip", "netns", "exec"]:
            self.network, self.arguments = self.arguments[3], self.arguments[4:]
        if self.arguments[:2] == ["taskset", "-c"]:
            self.core, self.arguments = self.arguments[2], self.arguments[3:]
        if self.arguments[:1] == [str(Path(_PYTHON).with_name("frostline"))]:
            self.arguments.insert(0, _PYTHON)
        self.executable = None if executable is None else os.fsdecode(executable)
        self.environment = {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}
        self.folder = os.fspath(folder or Path.cwd())
        self.is_session = is_session

    @property
    def is_understood(self):
        """Whether all of it is known here."""
        first, *words = self.arguments or [None]
        words = words[1:] if words[:1] == ["-P"] else words
        if first != _PYTHON or self.executable not in (None, _PYTHON) or not words:
            return False
        if words[0].startswith("-") and (words[0] not in ("-c", "-m") or len(words) < 2):
            return False
        if words[0] == "-m" and words[1] in _BOUNDED:
            return False
        # Other folders may bring modules that replace those that are imported already.
        known = {*sys.path, *os.environ.get(_BY_PATH, "").split(os.pathsep), ""}
        is_usual = known.issuperset(self.environment.get(_BY_PATH, "").split(os.pathsep))
        return is_usual and not {PLAIN} & {*os.environ, *self.environment} and Path(self.folder).is_dir()

    @property
    def read_at_a_start(self):
        """What a process that is forked cannot be given any more."""
        variables = sorted(
            (name, value)
            for name, value in self.environment.items()
            if name.startswith(_PREFIXES) and name not in _LATER
        )
        limits = tuple(resource.getrlimit(limit) for limit in _LIMITS)
        return tuple(variables), limits, tuple(sorted(os.sched_getaffinity(0))), os.nice(0)


class _Ways:
    """The process for each setting that more than one start had.

    Args:
        more: modules that they import beside the usual ones.
        ways: those that are there already, by setting, if there are to be no others: a process of many threads begins
            none.
    """

    def __init__(self, more=(), ways=None):
        self._lock = threading.Lock()
        self._more = more
        self._ways = ways or {}
        self._asked = Counter()
        self._is_closed = ways is not None

    def start(self, asked, streams, more):
        """The number of a new child of this process; None where the start is to be a plain one."""
        if not asked.is_understood or (way := self._way(asked)) is None:
            return None
        words = {
            "arguments": asked.arguments,
            "environment": asked.environment,
            "folder": asked.folder,
            "session": asked.is_session,
            "network": asked.network,
            "cores": _cores(asked.core),
            "numbers": [0, 1, 2, *more],
        }
        try:
            return way.start(words, [*streams, *more])
        except (EOFError, OSError):  # it has ended
            return None

    def _way(self, asked):
        key = asked.read_at_a_start
        with self._lock:
            self._asked[key] += 1
            if self._is_closed:
                return self._ways.get(key)
            if self._asked[key] == 1 and not self._more and _NODE not in asked.arguments:
                return None
            if key not in self._ways and len(self._ways) == _MOST:
                self._ways.pop(next(iter(self._ways))).close()
            if key not in self._ways or not self._ways[key].is_alive:
                self._ways[key] = _Way.begun(asked.environment, self._more)
            return self._ways[key]

    def close(self):
        """End them all; what they started goes on."""
        with self._lock:
            self._is_closed = True
            while self._ways:
                self._ways.popitem()[1].close()


def _cores(text):
    """Numbers of cores, as taskset(1) takes them."""
    ranges = [part.split("-") for part in text.split(",")] if text else []
    return [number for part in ranges for number in range(int(part[0]), int(part[-1]) + 1)]


class _Way:
    """A process that forks others, and what it is asked by."""

    def __init__(self, connection, process):
        self._socket, self._process = connection, process
        self._lock = threading.Lock()

    @classmethod
    def begun(cls, environment, more):
        """One that is a plain start in this environment, with modules beside the usual ones."""
        ours, theirs = socket.socketpair()
        tests, given = str(Path(__file__).parents[1]), (theirs.fileno(), *more)
        code = f"import sys; sys.path[:0] = [{tests!r}]; from support.prepared import serve; serve(*{given!r})"
        with theirs:
            process = subprocess.Popen(
                [_PYTHON, "-c", code, " " * _LONGEST_COMMAND],
                pass_fds=(theirs.fileno(),),
                # So that it is itself a plain start, with the C library's own settings.
                env={**{name: environment[name] for name in environment if name not in _MALLOPT}, PLAIN: "1"},
                stdin=subprocess.DEVNULL,
            )
        return cls(ours, process)

    @classmethod
    def forked(cls):
        """A fork of this process."""
        ours, theirs = socket.socketpair()
        if os.fork():
            theirs.close()
            highest = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _HIGHEST) - 1  # the lowest are the program's
            with ours:
                return cls(socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, highest)), None)
        nowhere = os.open(os.devnull, os.O_RDWR)
        _take([nowhere, nowhere, nowhere, theirs.detach()], [0, 1, 2, 3])
        return _answer(socket.socket(fileno=3))

    @property
    def is_alive(self):
        return self._process is None or self._process.poll() is None

    def start(self, asked, descriptors):
        """The number of a new child of this process."""
        words = json.dumps(asked).encode()
        with self._lock, _adopting():
            socket.send_fds(self._socket, [len(words).to_bytes(4)], descriptors)
            self._socket.sendall(words)
            return int.from_bytes(_exactly(self._socket, 4))

    def close(self):
        with self._lock:
            self._socket.close()
        if self._process is not None:
            self._process.wait()


@contextlib.contextmanager
def _adopting():
    """This process becomes the parent of those whose own parent ends meanwhile."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SUBREAPER, 0, 0, 0, 0)


def _exactly(connection, count):
    found = b""
    while len(found) < count:
        more = connection.recv(count - len(found))
        if not more:
            raise EOFError("the process that prepares others has ended")
        found += more
    return found


def serve(number, *more):
    """Fork what is asked for until nobody can ask any more; never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for those in the terminal's foreground that do something
    connection = socket.socket(fileno=number)
    _import(more)
    gc.collect()
    gc.freeze()
    _answer(connection)


def _answer(connection):
    while True:
        begun, descriptors, *_ = socket.recv_fds(connection, 4, 64)
        if not begun:
            os._exit(0)
        begun += _exactly(connection, 4 - len(begun))
        asked = json.loads(_exactly(connection, int.from_bytes(begun)))
        if (pid := _forked(asked)) is None:
            connection.detach()  # it is closed with all others
            _run(asked, descriptors)
        connection.sendall(pid.to_bytes(4))
        for descriptor in descriptors:
            os.close(descriptor)


def _forked(asked):
    """None in a process whose parent is that of this one, and its number here, once it can be seen and told to end."""
    numbers, theirs = os.pipe()
    between = os.fork()
    if between:
        os.close(theirs)
        os.waitpid(between, 0)
        with os.fdopen(numbers, "rb") as pipe:
            return int.from_bytes(pipe.read())
    os.close(numbers)
    between = os.getpid()
    pid = os.fork()
    if pid:
        os.write(theirs, pid.to_bytes(4))
        os._exit(0)
    while os.getppid() == between:
        time.sleep(0.0002)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if asked["session"]:
        os.setsid()
    _be_called(asked["arguments"])
    os.close(theirs)
    return None


def _import(more):
    for name in ("numpy", "torch", "torch.export", "torch._dynamo", "PIL.Image", "pyarrow.parquet", "frostline"):
        importlib.import_module(name)
    for name in more:
        importlib.import_module(name)
    for found in pkgutil.walk_packages(sys.modules["frostline"].__path__, "frostline.", onerror=lambda _: None):
        if found.name.rpartition(".")[2] != "__main__" and not found.name.startswith(_NOT_IMPORTED):
            with contextlib.suppress(ImportError):
                importlib.import_module(found.name)


def _be_called(arguments):
    """Have the system show this command line, where the one of the start stands."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    words = "\0".join([*arguments, ""]).encode()[: end - begin - 1]
    ctypes.memmove(begin, words.ljust(end - begin, b"\0"), end - begin)


def _take(descriptors, numbers):
    """Give descriptors these numbers, and close all others."""
    above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, max(_LOWEST_FREE, *numbers) + 1) for descriptor in descriptors]
    os.closerange(3, max(_LOWEST_FREE, *numbers) + 1)
    for descriptor, number in zip(above, numbers, strict=True):
        os.dup2(descriptor, number)
    last = max(numbers)
    for number in set(range(3, last)) - set(numbers):
        with contextlib.suppress(OSError):
            os.close(number)
    os.closerange(last + 1, max(above) + 1)


def _streams():
    """Standard streams as at a start."""
    unbuffered = sys.stdout.write_through
    for number, mode, errors in ((0, "r", "strict"), (1, "w", "strict"), (2, "w", "backslashreplace")):
        buffering = 1 if number == 2 or os.isatty(number) else -1
        stream = open(number, mode, buffering, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        if mode == "w":
            stream.reconfigure(write_through=unbuffered)
        yield stream


def _paths_of_a_start():
    """Where modules are found beside the variable and the first place."""
    there = [path for path in sys.path if path.startswith(sys.base_prefix) and "site-packages" not in path]
    before, sys.path = sys.path, there
    try:
        site.addsitepackages(set())
        return sys.path
    finally:
        sys.path = before


def _module(name):
    """What ``-m`` runs: where it comes from, and its code."""
    spec = importlib.util.find_spec(name)
    if spec.submodule_search_locations is not None:
        return _module(f"{name}.__main__")
    return spec, spec.loader.get_code(spec.name)


def _run(asked, descriptors):
    """Become what was asked for, run it, and end as any other process ends; never returns."""
    _become(asked, descriptors)
    _prepare(_Ways(ways={_Asked((), None, os.environ, None, False).read_at_a_start: _Way.forked()}))
    for name in _MALLOPT.keys() & os.environ.keys():
        ctypes.CDLL(None).mallopt(_MALLOPT[name], int(os.environ[name]))
    code, main = _main(asked["arguments"])
    sys.modules["__main__"] = main
    status, interrupted = 0, False
    try:
        exec(code, main.__dict__)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if status == 1 and error.code != 1:
            print(error.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 (whatever it is, it ends this process)
        sys.excepthook(type(error), error, error.__traceback__.tb_next)
        status, interrupted = 1, isinstance(error, KeyboardInterrupt)
    threading._shutdown()  # noqa: SLF001 (waits for threads)
    atexit._run_exitfuncs()  # noqa: SLF001
    with contextlib.suppress(AttributeError, ValueError):  # there is none, or it is closed
        sys.stdout.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # as Python ends that nothing catches it
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


def _become(asked, descriptors):
    """Have descriptors, place, environment, streams and random numbers as at a start."""
    _take(descriptors, asked["numbers"])
    if asked["network"]:
        with (_NETWORKS / asked["network"]).open("rb") as network:
            assert ctypes.CDLL(None).setns(network.fileno(), _CLONE_NEWNET) == 0
    if asked["cores"]:
        os.sched_setaffinity(0, asked["cores"])
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.orig_argv = asked["arguments"]
    own = asked["environment"].get(_BY_PATH, "").split(os.pathsep)
    sys.path[:] = dict.fromkeys([*filter(None, own), *_paths_of_a_start()])
    sys.stdin, sys.stdout, sys.stderr = _streams()
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    sys.modules["numpy"].random.seed()


def _main(arguments):
    """The code to run and the module that it runs in, with what it finds in ``sys``."""
    is_safe = arguments[1] == "-P"
    kind, *rest = arguments[1 + is_safe :]
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    if not is_safe:
        first = {"-c": "", "-m": str(Path.cwd())}
        sys.path.insert(0, first[kind] if kind in first else str(Path(kind).resolve().parent))
    importlib.invalidate_caches()
    if kind == "-c":
        code, sys.argv = compile(rest[0], "<string>", "exec"), ["-c", *rest[1:]]
    elif kind == "-m":
        main.__spec__, code = _module(rest[0])
        main.__file__, main.__package__ = main.__spec__.origin, main.__spec__.parent
        sys.argv = [main.__file__, *rest[1:]]
    else:
        main.__file__ = kind
        code, sys.argv = compile(Path(kind).read_bytes(), kind, "exec"), [kind, *rest]
    return code, main
