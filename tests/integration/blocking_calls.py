"""System calls that block for an hour, as native code makes them: none of them retries after EINTR."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

FUTEX = 202  # x86_64
HOUR_S = 3600
_IPC_RMID = 0
_SLEEP_WHILE_ALIVE = ["tail", f"--pid={os.getpid()}", "-f", "/dev/null"]


class Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def make_call(name: str, *, keeps_gil: bool) -> Callable[[], int]:
    """A function that makes the call, and returns when it ends."""
    library = (ctypes.PyDLL if keeps_gil else ctypes.CDLL)(None, use_errno=True)
    call: Callable[[], int] = CALLS[name](library)
    return call


def remove_queues(pid: int) -> None:
    """Removes the semaphores and the message queue that a process with these calls has left."""
    library = ctypes.CDLL(None)
    library.semctl(library.semget(pid, 1, 0o600), 0, _IPC_RMID)
    library.msgctl(library.msgget(pid, 0o600), _IPC_RMID, None)


def _limit_receive(made: socket.socket) -> int:
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", HOUR_S, 0))
    _keep(made)
    return made.fileno()


_kept: list[Any] = []  # as long as the process lives


def _keep(made: Any) -> Any:
    _kept.append(made)
    return made


def _buffer(content: bytes | int) -> Any:
    return _keep(ctypes.create_string_buffer(content))


def _hour() -> Any:
    return ctypes.byref(_keep(Timespec(HOUR_S, 0)))


def _in_an_hour() -> Any:
    return ctypes.byref(_keep(Timespec(int(time.time()) + HOUR_S, 0)))


def _pipe() -> int:
    read_end, _ = os.pipe()
    return read_end


def _poll_entry() -> Any:
    return _buffer(struct.pack("ihh", _pipe(), 1, 0))


def _descriptor_set() -> tuple[int, Any]:
    fd = _pipe()
    bits = bytearray(128)
    bits[fd // 8] = 1 << fd % 8
    return fd + 1, _buffer(bytes(bits))


def _epoll(library: Any) -> int:
    fd: int = library.epoll_create1(0)
    library.epoll_ctl(fd, 1, _pipe(), _buffer(struct.pack("=IQ", 1, 0)))
    return fd


def _listener() -> socket.socket:
    listener: socket.socket = _keep(socket.create_server(("127.0.0.1", 0), backlog=0))
    return listener


def _full_address() -> Any:
    """The address of a listener whose queue is full: another connection waits."""
    listener = _listener()
    for _ in range(3):
        other = _keep(socket.socket())
        other.setblocking(False)
        other.connect_ex(listener.getsockname())
    port = socket.htons(listener.getsockname()[1])
    return _buffer(struct.pack("=HH4s8x", socket.AF_INET, port, socket.inet_aton("127.0.0.1")))


def _semaphore(library: Any) -> Any:
    made = _buffer(64)
    library.sem_init(made, 0, 0)
    return made


def _signal_set(library: Any) -> Any:
    made = _buffer(128)
    library.sigemptyset(made)
    library.sigaddset(made, 10)
    return made


def _condition(library: Any) -> tuple[Any, Any]:
    mutex = _buffer(64)
    library.pthread_mutex_lock(mutex)
    return _buffer(64), mutex


def _locked_file() -> int:
    folder = tempfile.mkdtemp()
    held = os.open(f"{folder}/lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    return os.open(f"{folder}/lock", os.O_RDWR)


def _fifo() -> bytes:
    path = f"{tempfile.mkdtemp()}/fifo"
    os.mkfifo(path)
    return path.encode()


def _bind(function: Any, *arguments: Any) -> Callable[[], int]:
    return lambda: function(*arguments)


CALLS: dict[str, Callable[[Any], Callable[[], int]]] = {
    "sleep": lambda c: _bind(c.sleep, HOUR_S),
    "nanosleep": lambda c: _bind(c.nanosleep, _hour(), None),
    "clock_nanosleep until a time": lambda c: _bind(c.clock_nanosleep, 0, 1, _in_an_hour(), None),
    "poll": lambda c: _bind(c.poll, _poll_entry(), 1, -1),
    "poll with a limit": lambda c: _bind(c.poll, _poll_entry(), 1, HOUR_S * 1000),
    "ppoll": lambda c: _bind(c.ppoll, _poll_entry(), 1, _hour(), None),
    "select": lambda c: _bind(
        lambda count, bits: c.select(count, bits, None, None, _hour()), *_descriptor_set()
    ),
    "pselect": lambda c: _bind(
        lambda count, bits: c.pselect(count, bits, None, None, _hour(), None), *_descriptor_set()
    ),
    "epoll_wait": lambda c: _bind(c.epoll_wait, _epoll(c), _buffer(12), 1, -1),
    "read from a pipe": lambda c: _bind(c.read, _pipe(), _buffer(8), 8),
    "recv": lambda c: _bind(c.recv, _keep(socket.socketpair())[0].fileno(), _buffer(8), 8, 0),
    "recv with SO_RCVTIMEO": lambda c: _bind(
        c.recv, _limit_receive(_keep(socket.socketpair())[0]), _buffer(8), 8, 0
    ),
    "accept": lambda c: _bind(c.accept, _listener().fileno(), None, None),
    "accept with SO_RCVTIMEO": lambda c: _bind(c.accept, _limit_receive(_listener()), None, None),
    "connect": lambda c: _bind(c.connect, _keep(socket.socket()).fileno(), _full_address(), 16),
    "futex": lambda c: _bind(c.syscall, FUTEX, _buffer(4), 0, 0, None, None, 0),
    "futex with a limit": lambda c: _bind(c.syscall, FUTEX, _buffer(4), 0, 0, _hour(), None, 0),
    "sem_wait": lambda c: _bind(c.sem_wait, _semaphore(c)),
    "sem_timedwait": lambda c: _bind(c.sem_timedwait, _semaphore(c), _in_an_hour()),
    "pthread_cond_wait": lambda c: _bind(c.pthread_cond_wait, *_condition(c)),
    "semop": lambda c: _bind(
        c.semop, c.semget(os.getpid(), 1, 0o1600), _buffer(struct.pack("Hhh", 0, -1, 0)), 1
    ),
    "semtimedop": lambda c: _bind(
        c.semtimedop, c.semget(os.getpid(), 1, 0o1600), _buffer(struct.pack("Hhh", 0, -1, 0)), 1, _hour()
    ),
    "msgrcv": lambda c: _bind(c.msgrcv, c.msgget(os.getpid(), 0o1600), _buffer(64), 8, 0, 0),
    "pause": lambda c: _bind(c.pause),
    "sigtimedwait": lambda c: _bind(c.sigtimedwait, _signal_set(c), None, _hour()),
    "sigwaitinfo": lambda c: _bind(c.sigwaitinfo, _signal_set(c), None),
    "read from inotify": lambda c: _bind(c.read, c.inotify_init1(0), _buffer(32), 32),
    "waitpid": lambda c: _bind(
        c.waitpid, _keep(subprocess.Popen(_SLEEP_WHILE_ALIVE)).pid, None, 0
    ),
    "flock": lambda c: _bind(c.flock, _locked_file(), fcntl.LOCK_EX),
    "open of a FIFO": lambda c: _bind(c.open, _fifo(), os.O_RDONLY),
}  # fmt: skip
