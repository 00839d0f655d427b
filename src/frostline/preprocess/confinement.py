"""Takes from a process what decoding does not need, for good: files, connections, other processes and most calls."""

import ctypes
import os
import platform
import struct
import sys

__all__ = ("confine",)

# prctl(2), seccomp(2), landlock(7).
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_MODE_FILTER = 2
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050001, 0x80000000  # EPERM where it is refused
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
# Calls of the system that decoding needs, by their numbers on either architecture: nothing that opens, connects,
# starts or looks for anything. A socket and memory are there already.
_CALLS = (
    *((0, 63), (1, 64), (3, 57), (5, 80), (8, 62), (17, 67)),  # read write close fstat lseek pread64
    *((9, 222), (10, 226), (11, 215), (12, 214), (25, 216), (28, 233)),  # mmap mprotect munmap brk mremap madvise
    *((13, 134), (14, 135), (15, 139), (131, 132), (38, 103)),  # rt_sig* sigaltstack setitimer
    *((7, 73), (271, 73), (44, 206), (45, 207), (46, 211), (47, 212)),  # poll ppoll send* recv*
    *((24, 124), (35, 101), (230, 115), (219, 128), (202, 98), (273, 99)),  # waiting and futexes
    *((32, 23), (39, 172), (186, 178), (96, 169), (228, 113), (98, 165), (99, 179)),  # dup, ids, clocks, usage
    *((204, 123), (309, 168), (318, 278), (324, 283), (334, 293), (63, 160)),  # cores, getrandom, rseq, uname
    *((97, 163), (160, 164), (60, 93), (231, 94), (262, 79)),  # getrlimit setrlimit exit exit_group newfstatat
)
# Calls whose first argument may be this process alone (a number in place of it), or files that it has.
_PRLIMIT, _TGKILL, _FCNTL = (302, 261), (234, 131), (72, 25)
_DUPLICATE = (0, 1, 2, 3, 1030)  # fcntl(2): F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC
_LANDLOCK = (444, 446)
# What each version of Landlock knows more of files: all of it is refused.
_FILES_BY_VERSION = {1: 13, 2: 14, 3: 15, 4: 15}
_LATEST_FILES = 16


def confine() -> str:
    """Take from this process what decoding does not need, for good; in words, what is in force."""
    if sys.platform != "linux":
        return "limits alone"
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return "limits alone"
    found = [f"Landlock {version}"] if (version := _confine_by_landlock(library)) else []
    found += ["seccomp"] if _confine_by_seccomp(library) else []
    return " and ".join(found) or "limits alone"


def _confine_by_landlock(library: ctypes.CDLL) -> int:
    """Refuse every file, connection and signal that the kernel's version of Landlock knows; 0 where it has none."""
    create, restrict = _LANDLOCK
    version = int(library.syscall(create, None, ctypes.c_size_t(0), 1))
    if version < 1:
        return 0
    files = (1 << _FILES_BY_VERSION.get(version, _LATEST_FILES)) - 1
    rules = struct.pack("<QQQ", files, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    handle = library.syscall(create, rules, ctypes.c_size_t(len(rules)), 0)
    if handle < 0:
        return 0
    refused = library.syscall(restrict, handle, 0)
    os.close(handle)
    return version if refused == 0 else 0


def _confine_by_seccomp(library: ctypes.CDLL) -> bool:
    known = _ARCHITECTURES.get(platform.machine())
    if known is None:
        return False
    architecture, place = known
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    for number in sorted({call[place] for call in _CALLS}):
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    pid = os.getpid()
    for call, argument, values in ((_PRLIMIT, 0, (0, pid)), (_TGKILL, 0, (pid,)), (_FCNTL, 1, _DUPLICATE)):
        checks = [step for value in values for step in ((_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW))]
        rest = [(_LOAD, 0, 0, 16 + 8 * argument), *checks, (_RETURN, 0, 0, _REFUSE)]
        program += [(_EQUAL, 0, len(rest), call[place]), *rest]
    program.append((_RETURN, 0, 0, _REFUSE))
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in program))
    header = struct.pack("@HP", len(program), ctypes.addressof(code))
    return bool(library.prctl(_PR_SET_SECCOMP, _MODE_FILTER, header, 0, 0) == 0)
