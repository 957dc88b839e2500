"""A seccomp filter against system calls that no tested program needs.

Namespaces do not cover everything:

- memory that no limit counts: memfd, System V segments, anonymous shared memory (kept by one mapped
  page), large buffers of socket pairs and data passed or spliced through them, huge pages, large
  pages in a pipe, access lists of files, memory policies, Landlock rules, futex hash tables,
  buffers of /proc as long as the path of nested folders;
- what the kernel counts per machine or per user: asynchronous I/O, keys, inotify, file locks;
- socket families without a namespace (vsock);
- user namespaces inside the sandbox, which open the kernel's mount code;
- limits and priority of process 1, which has the same user, and CPU time of children that are
  never waited for.

The filter denies these; it is not a list of what is allowed. It leaves connected pairs of stream
sockets, which asyncio and multiprocessing need: without an address they reach nothing outside, and
`serve` counts them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""AUDIT_ARCH and the column of `DENIED` and `DENIED_IN_PART`."""

DENIED = {
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "setsockopt": (54, 208),  # larger buffers
    "sendmsg": (46, 211),  # descriptors on their way, which no process has open
    "sendmmsg": (307, 269),
    "sendfile": (40, 71),  # a page of a file for each byte in a socket, which then holds it
    "splice": (275, 76),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "mbind": (237, 235),
    "set_mempolicy_home_node": (450, 450),
    "mkdir": (83, 34),  # is mkdirat where it has no number of its own
    "mkdirat": (258, 34),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "landlock_create_ruleset": (444, 444),
    "landlock_restrict_self": (446, 446),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_setup": (206, 0),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "fanotify_init": (300, 262),
    "inotify_init": (253, 26),  # is inotify_init1 where it has no number of its own
    "inotify_init1": (294, 26),
    "flock": (73, 32),
    "vmsplice": (278, 75),
    "sync": (162, 81),  # waits for what everybody has written
    "syncfs": (306, 267),
    "seccomp": (317, 277),
    "personality": (135, 92),
    "syslog": (103, 116),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
}
CLONE3 = 435

_LOAD, _JUMP_EQUAL, _JUMP_ANY_BIT, _JUMP_FROM, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_AND = 0x54
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_X32 = 0x40000000  # a second table of numbers on x86_64
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2  # prctl(2)
_PR_SCHED_CORE, _PR_FUTEX_HASH = 62, 78

_Instruction = tuple[int, int, int, int]
_REFUSED: _Instruction = (_RETURN, 0, 0, _REFUSE | errno.EPERM)
_ALLOWED: _Instruction = (_RETURN, 0, 0, _ALLOW)


def _argument(number: int, *, is_upper_half: bool = False) -> _Instruction:
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * number + 4 * is_upper_half)


def _refuse_values(number: int, *values: int) -> list[_Instruction]:
    tests = [((_JUMP_EQUAL, 0, 1, value), _REFUSED) for value in values]
    return [_argument(number), *(part for test in tests for part in test), _ALLOWED]


def _refuse_bits(number: int, bits: int) -> list[_Instruction]:
    return [_argument(number), (_JUMP_ANY_BIT, 0, 1, bits), _REFUSED, _ALLOWED]


DENIED_IN_PART: dict[str, tuple[tuple[int, int], list[_Instruction]]] = {
    # Only AF_UNIX with SOCK_STREAM is allowed, with any flag.
    "socketpair": (
        (53, 199),
        [
            *(_argument(0), (_JUMP_EQUAL, 1, 0, 1), _REFUSED),
            *(_argument(1), (_AND, 0, 0, 0xF), (_JUMP_EQUAL, 1, 0, 1), _REFUSED, _ALLOWED),
        ],
    ),
    # No CLONE_NEW* flag.
    "clone": ((56, 220), _refuse_bits(0, 0x7E020000)),
    # A process may lower only its own limits: a CPU limit on process 1 would end the sandbox.
    "prlimit64": ((302, 261), [_argument(0), (_JUMP_EQUAL, 1, 0, 0), _REFUSED, _ALLOWED]),
    # SIGCHLD may be queried, not set: the CPU time of a child counts when the parent waits for it,
    # and would count nowhere if the parent ignored SIGCHLD.
    "rt_sigaction": (
        (13, 134),
        [
            *(_argument(0), (_JUMP_EQUAL, 1, 0, signal.SIGCHLD), _ALLOWED),
            *(_argument(1), (_JUMP_EQUAL, 1, 0, 0), _REFUSED),
            *(_argument(1, is_upper_half=True), (_JUMP_EQUAL, 1, 0, 0), _REFUSED, _ALLOWED),
        ],
    ),
    # Not with MAP_HUGETLB, nor with both MAP_SHARED and MAP_ANONYMOUS.
    "mmap": (
        (9, 222),
        [
            *(_argument(3), (_JUMP_ANY_BIT, 0, 1, 0x40000), _REFUSED),
            *((_AND, 0, 0, 0x21), (_JUMP_EQUAL, 0, 1, 0x21), _REFUSED, _ALLOWED),
        ],
    ),
    # Not F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW, F_SETLEASE, F_NOTIFY.
    "fcntl": ((72, 25), _refuse_values(1, 6, 7, 37, 38, 1024, 1026)),
    # Further filters and futex hash tables take kernel memory; core scheduling takes a second core.
    "prctl": ((157, 167), _refuse_values(0, _PR_SET_SECCOMP, _PR_SCHED_CORE, _PR_FUTEX_HASH)),
}
"""System call -> its numbers, and the instructions that decide by its arguments."""


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def install_filter() -> None:
    """Install the filter for this process and all its children, irrevocably.

    Raises:
        OSError: the kernel refuses it.
    """
    code = compile_filter(os.uname().machine)
    program = _Program(len(code) // 8, code)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0
    ):
        number = ctypes.get_errno()
        raise OSError(number, f"the filter of system calls: {os.strerror(number)}")


def compile_filter(machine: str) -> bytes:
    """Return the filter of an architecture: an array of struct sock_filter.

    Raises:
        KeyError: unknown architecture.
    """
    audit, column = _ARCHITECTURES[machine]
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_FROM, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
        # A filter cannot read the flags of clone3 in memory; libc falls back to clone.
        (_JUMP_EQUAL, 0, 1, CLONE3),
        (_RETURN, 0, 0, _REFUSE | errno.ENOSYS),
    ]
    for numbers in DENIED.values():
        program += [(_JUMP_EQUAL, 0, 1, numbers[column]), _REFUSED]
    for numbers, decision in DENIED_IN_PART.values():
        program += [(_JUMP_EQUAL, 0, len(decision), numbers[column]), *decision]
    program.append(_ALLOWED)
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
