"""Threads in virtual time: one runs at a time, a seed says which is next, and the clock moves when none can run.

Real threads, locks, conditions, events, queues, pools and clocks of the standard library are what the program asks for;
inside ``Scheduler.run`` it gets those of this module instead, and everybody else in the process the real ones. So the
program under test is the real one, and each of its runs can be had again by the seed. A thread may be left for another
one where it takes a lock, puts, waits or sends, and nowhere between: races of plain attributes are not found here.
"""

import _thread
import concurrent.futures
import concurrent.futures.thread
import gc
import heapq
import logging
import os
import queue
import random
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import contextmanager
from itertools import count
from types import FunctionType
from typing import ClassVar

__all__ = (
    "Deadlock",
    "Endless",
    "Killed",
    "Process",
    "Scheduler",
    "Thread",
    "in_virtual_time",
    "on_one_core",
    "running",
)

_MAX_STEPS = 60_000
# Of the clock: a wait that is shorter than what a number of seconds can tell would never end.
_TICK_S = 1e-6


class Killed(BaseException):
    """What ends the threads of a process that was killed."""


class Deadlock(AssertionError):
    """Every thread waits for another one, and nothing is to come."""


class Endless(AssertionError):
    """Threads run without an end."""


class Process:
    """Threads that are killed together."""

    def __init__(self, name):
        self.name = name
        self.is_dead = False


class _Task:
    """A thread of the program; ``baton`` is released for it to run."""

    def __init__(self, worker, thread, process):
        self.baton = worker.baton
        self.worker = worker
        self.thread = thread
        self.process = process
        self.is_over = False
        self.queue = None  # of those that wait for the same
        self.alarm = None
        self.is_late = False
        self.joining = []


class _Worker:
    """A thread of the system, which runs one thread of a program after another."""

    idle: ClassVar = []

    def __init__(self):
        self.baton = _thread.allocate_lock()
        self.baton.acquire()
        self.task = None
        self.ident = _thread.start_new_thread(self._run, ())

    @classmethod
    def take(cls):
        return cls.idle.pop() if cls.idle else cls()

    def _run(self):
        while True:
            self.baton.acquire()
            task, self.task = self.task, None
            scheduler = _RUNNING[0]
            try:
                if not task.process.is_dead:
                    task.thread.run()
            except Killed:
                pass
            except BaseException as error:  # noqa: BLE001 (told where the run was asked for)
                scheduler.threw(task, error)
            del task.thread.run_with
            scheduler.ended(task, self)
            del task


_RUNNING = [None]


def running():
    """The scheduler whose thread this is; None in a thread of the system."""
    found = _RUNNING[0]
    return found if found is not None and found.ident == _thread.get_ident() else None


class Scheduler:
    """Runs a program of threads from one seed.

    Args:
        seed: decides which thread is next, each time there are several.
        leaves: share of the places where a thread may be left for another one, at which it is.

    Attributes:
        now: virtual seconds.
        steps: places so far where a thread could have been left.
        threw: called with a thread and what it did not catch.
    """

    def __init__(self, seed, *, leaves=0.1, max_steps=_MAX_STEPS):
        self._random = random.Random(seed)
        self._leaves = leaves
        self._max_steps = max_steps
        self._ready = []
        self._alarms = []
        self._order = count()
        self._tasks = {}  # in the order in which they began
        self._current = None
        self._in_alarm = False
        self._host = _thread.allocate_lock()
        self._host.acquire()
        self._failure = None
        self._main = None
        self.numbers = count(1)  # of what would be told apart by its address
        self.ident = None
        self.now = 1000.0
        self.steps = 0
        self.threw = self._failed_in

    # --- for who runs a program ---

    def run(self, main, process):
        """Run a function as the first thread, and all that it starts, until it has ended. What is left then is killed.

        Raises:
            Deadlock: nothing can go on.
            Endless: it takes too many steps.
        """
        assert _RUNNING[0] is None, "one program at a time"
        _RUNNING[0] = self
        was_collecting = gc.isenabled()
        gc.disable()  # what it finds it closes, and it would find it at another place each time
        try:
            self._main = self.start(main, process, "main")
            self._dispatch(self._next())
            self._host.acquire()
            for task in list(self._tasks):
                task.process.is_dead = True
            while self._tasks:
                task = next(iter(self._tasks))
                self._forget_waiting(task)
                self._ready.clear()
                self._dispatch(task)
                self._host.acquire()
        finally:
            _RUNNING[0] = None
            if was_collecting:
                gc.enable()
        if self._failure is not None:
            raise self._failure

    def start(self, run, process, name):
        """Start a thread of a process; its first turn comes later."""
        thread = Thread(target=run, name=name)
        self.begin(thread, process)
        return thread

    def kill(self, process):
        """Have every thread of a process end where it stands."""
        process.is_dead = True
        for task in list(self._tasks):
            if task.process is process and self._forget_waiting(task):
                self._ready.append(task)

    def alive(self, process):
        """Names of the threads of a process that have not ended."""
        return sorted(task.thread.name for task in self._tasks if task.process is process)

    def at(self, when, call):
        """Have a function called at a time, in no thread; it must not wait. Returns what ``cancel`` takes."""
        alarm = [when, next(self._order), call]
        heapq.heappush(self._alarms, alarm)
        return alarm

    @staticmethod
    def cancel(alarm):
        alarm[2] = None

    def until(self, timeout):
        """When a time is over; None where it never is."""
        return None if timeout is None else self.now + (max(timeout, _TICK_S) if timeout > 0 else timeout)

    def sleep(self, seconds):
        self.wait(deque(), max(0.0, seconds))

    # --- for the parts below ---

    @property
    def thread(self):
        return self._current.thread

    @property
    def is_killed(self):
        return self._current.process.is_dead and not self._in_alarm

    def begin(self, thread, process=None):
        worker = _Worker.take()
        task = _Task(worker, thread, process or self._current.process)
        worker.task, thread.task = task, task
        self._tasks[task] = None
        self._ready.append(task)

    def leave(self):
        """A place where another thread may go on."""
        if self._in_alarm or self._current.process.is_dead:
            return
        self.steps += 1
        if self.steps > self._max_steps:
            self._fail(Endless(f"still at it after {self.steps} steps, at {self.now:.3f} s\n{self._stacks()}"))
        if self._ready and self._random.random() < self._leaves:
            self._ready.append(self._current)
            self._switch()

    def wait(self, waiting, timeout):
        """Wait until ``wake`` takes this thread out of a queue; False where the time was over before."""
        task = self._current
        assert not self._in_alarm, "an alarm must not wait"
        if task.process.is_dead:
            raise Killed
        waiting.append(task)
        task.queue, task.is_late = waiting, False
        if timeout is not None:
            task.alarm = self.at(self.until(timeout), lambda: self._late(task))
        self._switch()
        return not task.is_late

    def wake(self, waiting):
        """Let one of those that wait go on, whichever."""
        if waiting:
            index = self._random.randrange(len(waiting)) if len(waiting) > 1 else 0
            task = waiting[index]
            self._forget_waiting(task)
            self._ready.append(task)

    def ended(self, task, worker):
        task.is_over = True
        self._tasks.pop(task, None)
        while task.joining:
            self.wake(task.joining)
        _Worker.idle.append(worker)
        if task.thread is self._main or self._failure is not None or _is_torn_down(self._main):
            self._host.release()
            return
        self._dispatch(self._next())

    def _failed_in(self, task, error):
        told = "".join(traceback.format_exception(error))
        self._failure = self._failure or AssertionError(f"thread {task.thread.name} ended with {error!r}\n{told}")

    def _late(self, task):
        self._forget_waiting(task)
        task.is_late = True
        self._ready.append(task)

    def _forget_waiting(self, task):
        """Have a thread wait for nothing any more; False where it did not."""
        waiting, task.queue = task.queue, None
        alarm, task.alarm = task.alarm, None
        if alarm is not None:
            self.cancel(alarm)
        if waiting is not None:
            waiting.remove(task)
        return waiting is not None

    def _switch(self):
        task = self._current
        following = self._next()
        if following is not task:
            self._dispatch(following)
            task.baton.acquire()
        if task.process.is_dead:
            raise Killed

    def _dispatch(self, task):
        if task is None:  # the run has failed
            self._host.release()
            return
        self._current = task
        self.ident = task.worker.ident
        task.baton.release()

    def _next(self):
        while self._failure is None:
            ready = self._ready
            if ready:
                index = self._random.randrange(len(ready)) if len(ready) > 1 else 0
                ready[index], ready[-1] = ready[-1], ready[index]
                return ready.pop()
            if not self._alarms:
                self._failure = Deadlock(f"nothing can go on at {self.now:.3f} s\n{self._stacks()}")
                return None
            self._ring()
        return None

    def _ring(self):
        when, _, call = heapq.heappop(self._alarms)
        if call is None:
            return
        self.now = max(self.now, when)
        self._in_alarm = True
        try:
            call()
        except BaseException as error:  # noqa: BLE001 (told where the run was asked for)
            self._failure = self._failure or error
        finally:
            self._in_alarm = False

    def _fail(self, error):
        self._failure = self._failure or error
        self._switch()

    def _stacks(self):
        frames = sys._current_frames()  # noqa: SLF001
        told = []
        for task in self._tasks:
            frame = frames.get(task.worker.ident)
            lines = traceback.format_stack(frame)[-8:] if frame is not None else []
            told.append(f"{task.process.name}/{task.thread.name}:\n{''.join(lines)}")
        return "\n".join(sorted(told))


def _is_torn_down(main):
    return main is not None and main.task.is_over


class _Lock:
    """As ``threading.Lock``."""

    def __init__(self, scheduler):
        self._scheduler = scheduler
        self._is_held = False
        self._waiting = deque()

    def acquire(self, blocking=True, timeout=-1):
        scheduler = self._scheduler
        scheduler.leave()
        if self._is_held and blocking:
            until = scheduler.until(None if timeout is None or timeout < 0 else timeout)
            while self._is_held:
                left = None if until is None else until - scheduler.now
                if (left is not None and left <= 0) or not scheduler.wait(self._waiting, left):
                    break
        if self._is_held:
            return False
        self._is_held = True
        return True

    def release(self):
        if not self._is_held:
            if self._scheduler.is_killed:
                return
            raise RuntimeError("release unlocked lock")
        self._is_held = False
        self._scheduler.wake(self._waiting)

    def locked(self):
        return self._is_held

    def __enter__(self):
        self.acquire()
        return True

    def __exit__(self, *_):
        self.release()


class _RLock:
    """As ``threading.RLock``, with what ``threading.Condition`` asks of it."""

    def __init__(self, scheduler):
        self._scheduler = scheduler
        self._lock = _Lock(scheduler)
        self._owner = None
        self._depth = 0

    def acquire(self, blocking=True, timeout=-1):
        own = self._scheduler.thread
        if self._owner is not own:
            if not self._lock.acquire(blocking, timeout):
                return False
            self._owner = own
        self._depth += 1
        return True

    def release(self):
        if self._owner is not self._scheduler.thread:
            if self._scheduler.is_killed:
                return
            raise RuntimeError("cannot release un-acquired lock")
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._lock.release()

    __enter__ = acquire

    def __exit__(self, *_):
        self.release()

    def _release_save(self):
        depth, self._depth, self._owner = self._depth, 0, None
        self._lock.release()
        return depth

    def _acquire_restore(self, depth):
        if self._scheduler.is_killed and self._lock.locked():
            return
        self._lock.acquire()
        self._depth, self._owner = depth, self._scheduler.thread

    def _is_owned(self):
        return self._owner is self._scheduler.thread


class _Queue:
    """As ``queue.SimpleQueue``."""

    def __init__(self, scheduler):
        self._scheduler = scheduler
        self._items = deque()
        self._waiting = deque()

    def put(self, item, block=True, timeout=None):
        self._items.append(item)
        self._scheduler.wake(self._waiting)
        self._scheduler.leave()

    put_nowait = put

    def get(self, block=True, timeout=None):
        scheduler = self._scheduler
        scheduler.leave()
        until = scheduler.until(timeout)
        while not self._items:
            left = None if until is None else until - scheduler.now
            if not block or (left is not None and left <= 0) or not scheduler.wait(self._waiting, left):
                break
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def get_nowait(self):
        return self.get(block=False)

    def empty(self):
        return not self._items

    def qsize(self):
        return len(self._items)


class Thread:
    """As ``threading.Thread``."""

    def __hash__(self):
        return self._number

    def __init__(self, group=None, target=None, name=None, args=(), kwargs=None, *, daemon=None):
        self._number = next(_RUNNING[0].numbers)  # the program's own: an executor joins its threads in a set's order
        self.name = name or f"Thread-{self._number}"
        self.daemon = bool(daemon)
        self.run_with = target, args, kwargs or {}
        self.task = None

    def run(self):
        target, args, kwargs = self.run_with
        if target is not None:
            target(*args, **kwargs)

    def start(self):
        scheduler = running()
        scheduler.begin(self)
        scheduler.leave()

    def join(self, timeout=None):
        scheduler, task = running(), self.task
        if scheduler is None:  # at the end of Python
            return
        until = scheduler.until(timeout)
        while not task.is_over:
            left = None if until is None else until - scheduler.now
            if (left is not None and left <= 0) or not scheduler.wait(task.joining, left):
                return

    def is_alive(self):
        return self.task is not None and not self.task.is_over

    @property
    def ident(self):
        return None if self.task is None else self._number


class _Timer(Thread):
    """As ``threading.Timer``."""

    def __init__(self, interval, function, args=(), kwargs=None):
        super().__init__(target=self._wait)
        self._interval = interval
        self._call = function, args, kwargs or {}
        self._ended = threading.Event()

    def cancel(self):
        self._ended.set()

    def _wait(self):
        if not self._ended.wait(self._interval):
            function, args, kwargs = self._call
            function(*args, **kwargs)


class _NoLock:
    """A lock of the whole process: one thread of the program runs at a time, and never waits while it has it."""

    def __init__(self, real):
        self._real = real

    def __enter__(self):
        if running() is None:
            self._real.acquire()

    def __exit__(self, *_):
        if running() is None:
            self._real.release()


def _either(real, virtual):
    """What makes a virtual one in a thread of a program, and a real one in every other."""

    def make(*args, **kwargs):
        scheduler = running()
        return real(*args, **kwargs) if scheduler is None else virtual(scheduler, *args, **kwargs)

    return make


class _EitherQueue(_Queue):
    """``queue.SimpleQueue``, which is made as one of what it holds too."""

    def __new__(cls):
        scheduler = running()
        if scheduler is None:
            return _SIMPLE_QUEUE()
        made = object.__new__(_Queue)
        made.__init__(scheduler)
        return made

    def __class_getitem__(cls, _):
        return cls


def _number(thing):
    """In place of an address, by which sets would be in another order each time."""
    scheduler = running()
    if scheduler is None:
        return object.__hash__(thing)
    found = vars(thing).get("_number")
    if found is None:
        found = thing._number = next(scheduler.numbers)  # noqa: SLF001
    return found


_SIMPLE_QUEUE = queue.SimpleQueue
_EPOCH_S = 1_700_000_000.0


def _replacements():
    """What stands in for what, by the real one."""
    clocks = {clock: _either(clock, lambda scheduler: scheduler.now) for clock in (time.monotonic, time.perf_counter)}
    return {
        **clocks,
        time.time: _either(time.time, lambda scheduler: _EPOCH_S + scheduler.now),
        time.sleep: _either(time.sleep, lambda scheduler, seconds: scheduler.sleep(seconds)),
        threading.Lock: _either(threading.Lock, _Lock),
        threading.RLock: _either(threading.RLock, _RLock),
        threading.Thread: _either(threading.Thread, lambda _, *args, **kwargs: Thread(*args, **kwargs)),
        threading.Timer: _either(threading.Timer, lambda _, *args, **kwargs: _Timer(*args, **kwargs)),
        threading.current_thread: _either(threading.current_thread, lambda scheduler: scheduler.thread),
        queue.SimpleQueue: _EitherQueue,
        concurrent.futures.thread._global_shutdown_lock: _NoLock(  # noqa: SLF001
            concurrent.futures.thread._global_shutdown_lock  # noqa: SLF001
        ),
    }


@contextmanager
def on_one_core():
    """Have threads that begin meanwhile stay on one core: only one runs at a time, and to wake another core is slow."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(before)[os.getpid() % len(before)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def in_virtual_time(package, more=(), numbered=()):
    """Have a package, and what it uses of the standard library, ask this module for threads and clocks.

    Args:
        package: its name; its modules must have been imported.
        more: further pairs of what a module has and what stands in for it.
        numbered: classes whose objects the package puts into sets.
    """
    found = _replacements() | dict(more)
    undo = []

    def put(owner, name, value):
        undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    base = concurrent.futures._base  # noqa: SLF001
    base.id = id
    put(base, "id", lambda future: hash(future) if running() else id(future))  # to wait takes their locks in its order
    standard = (threading, queue, time, concurrent.futures.thread)
    ours = [module for name, module in sys.modules.items() if name == package or name.startswith(f"{package}.")]
    for module in (*standard, *ours):
        for name, value in list(vars(module).items()):
            if (other := _other(found, value)) is not None:
                put(module, name, other)
    for function in _functions(ours):
        _put_within(function, found, put)
    for kind in (concurrent.futures.Future, *numbered):
        put(kind, "__hash__", _number)
    quiet = logging.getLogger("concurrent.futures")
    put(quiet, "disabled", True)  # it tells of threads that were killed
    unraisable = sys.unraisablehook  # so does the interpreter, of what they leave behind
    put(sys, "unraisablehook", lambda told: None if issubclass(told.exc_type, Killed) else unraisable(told))
    try:
        yield
    finally:
        for owner, name, before in reversed(undo):
            setattr(owner, name, before)
        del base.id


def _other(found, value):
    try:
        return found.get(value)
    except TypeError:  # it has no hash
        return None


def _contents(cell):
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _put_within(function, found, put):
    """What a function kept when it was defined."""
    for name in ("__defaults__", "__kwdefaults__"):
        _put_defaults(function, name, found, put)
    for cell in function.__closure__ or ():
        if (other := _other(found, _contents(cell))) is not None:
            put(cell, "cell_contents", other)


def _put_defaults(function, name, found, put):
    defaults = getattr(function, name)
    if not defaults:
        return
    values = defaults.values() if isinstance(defaults, dict) else defaults
    if not any(_other(found, value) for value in values):
        return
    if isinstance(defaults, dict):
        put(function, name, {key: _other(found, value) or value for key, value in defaults.items()})
    else:
        put(function, name, tuple(_other(found, value) or value for value in defaults))


def _functions(modules):
    seen = set()
    for module in modules:
        for value in list(vars(module).values()):
            members = list(vars(value).values()) if isinstance(value, type) else [value]
            for member in members:
                function = getattr(member, "__func__", member)
                is_ours = isinstance(function, FunctionType) and function.__globals__ is vars(module)
                if is_ours and function not in seen:
                    seen.add(function)
                    yield function
