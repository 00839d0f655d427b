"""Makes nothing of how the tests were started: in the background, by a job system, with settings of somebody's own."""

import os
import signal

__all__ = ("forget_how_it_was_started",)

# What a shell has its background jobs ignore, or a supervisor its services; children would ignore it too. Not SIGHUP:
# who started the run with nohup wants it to outlive the terminal.
_SIGNALS = ("SIGALRM", "SIGCHLD", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2")

# What Frostline, its stores, torch's ranks and what writes to terminals would take from the environment.
_PREFIXES = ("AWS_", "AZURE_", "FROSTLINE_", "GOOGLE_", "LC_", "RAY_", "SLURM_")
_NAMES = (
    "all_proxy", "ftp_proxy", "http_proxy", "https_proxy", "no_proxy",
    "local_rank", "local_world_size", "master_addr", "master_port", "rank", "world_size",
    "columns", "force_color", "language", "lines", "no_color",
    "pythonoptimize", "pythonwarnings",
)  # fmt: skip
_OF_THE_TESTS = (
    "FROSTLINE_AXE", "FROSTLINE_BROWSER", "FROSTLINE_FRAMEWORK", "FROSTLINE_PHOTOGRAPHS", "FROSTLINE_TESTS_COMPLETE",
    "FROSTLINE_TESTS_PLAIN_STARTS",
)  # fmt: skip


def forget_how_it_was_started():
    """Give this process, and so its children, the signals, descriptors, file mode and environment of a plain start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (getattr(signal, name) for name in _SIGNALS):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number, which is this one
    os.umask(0o022)
    for name in set(os.environ).difference(_OF_THE_TESTS):
        if name.startswith(_PREFIXES) or name.lower() in _NAMES:
            del os.environ[name]
    os.environ["LANG"] = "C.UTF-8"
