"""The origins of process groups: the functions of torch.distributed, which number members by the
ranks of the world, or other code, which numbers them by itself.

A group of the second kind is called foreign. It is identified by its store, the prefixes of its
keys there, and its size, which are the same for all of its members. Some members may belong to
another program: an inference engine that takes the weights of a trainer, for example.
"""

from __future__ import annotations

import functools
import hashlib
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch._C._distributed_c10d import PrefixStore, ProcessGroup
from torch.distributed import distributed_c10d as c10d

from .faults import extend_method

_MAX_COUNTED = 1 << 16  # identities; a process that creates more counts again from 1
_MAX_UNANNOUNCED = 256
_LOCAL_HOSTS = ("localhost", "0.0.0.0", "::", "::1", "")
_UNKNOWN_PREFIX = "?"


@dataclass(slots=True, eq=False)
class GroupOrigin:
    """How a process group was created."""

    is_foreign: bool
    identity: str = ""  # the same for all members of a foreign group, and for no other group
    number: int = -1  # the number of this process in the group
    size: int = 0
    label: str = ""  # a name for people, if the group has no other
    creation: Any = None  # the call that creates the group, while that lasts


class OriginTracker:
    """The origins of all process groups of this process."""

    def __init__(self) -> None:
        self._thread_state = threading.local()
        # What is known of objects by their ids, which may be reused: hence the weak references.
        self._origins: dict[int, tuple[weakref.ref[Any], GroupOrigin]] = {}
        self._store_paths: dict[int, tuple[weakref.ref[Any], tuple[str, ...]]] = {}
        self._creation_counts: dict[str, int] = {}
        # Foreign groups that were created before this process was recorded.
        self._unannounced: deque[tuple[weakref.ref[Any], GroupOrigin]] = deque(
            maxlen=_MAX_UNANNOUNCED
        )
        self._announce: Callable[[GroupOrigin], None] | None = None
        self._complete: Callable[[GroupOrigin, bool], None] | None = None

    def enter_ranked_creation(self) -> int:
        """Declares that this thread is in a function that numbers members by ranks, until
        `leave_ranked_creation` is called with the result. A context manager would be seen by
        Dynamo.
        """
        depth: int = getattr(self._thread_state, "depth", 0)
        self._thread_state.depth = depth + 1
        return depth

    def leave_ranked_creation(self, depth: int) -> None:
        self._thread_state.depth = depth

    def set_listeners(
        self,
        announce: Callable[[GroupOrigin], None],
        complete: Callable[[GroupOrigin, bool], None],
    ) -> None:
        """``announce`` is called when a foreign group begins to be created, ``complete`` when it
        has been created (True) or was given up (False).
        """
        self._announce, self._complete = announce, complete
        while self._unannounced:
            ref, origin = self._unannounced.popleft()
            if ref() is not None:
                announce(origin)
                complete(origin, True)

    def clear_listeners(self) -> None:
        self._announce = self._complete = None

    def find_origin(self, pg: Any) -> GroupOrigin:
        """The origin of a group. The creation of a group by C++ is not seen: such a group counts as
        foreign unless torch has registered it with ranks of the world.
        """
        entry = self._origins.get(id(pg))
        if entry is not None and entry[0]() is pg:
            return entry[1]
        is_foreign = not _is_registered_with_ranks(pg)
        origin = GroupOrigin(is_foreign=is_foreign)
        if is_foreign:
            self._identify(origin, _read_store(pg), pg.rank(), pg.size())
        self._remember(pg, origin)
        return origin

    def record_prefix(self, prefix_store: Any, prefix: str, store: Any) -> None:
        path = (*self._find_store_path(store), prefix.strip("/"))
        self._keep(self._store_paths, prefix_store, path)

    def record_group(self, pg: Any, store: Any, rank: int, size: int) -> None:
        """Records a group that was just created in Python, without its backend yet."""
        origin = GroupOrigin(is_foreign=not getattr(self._thread_state, "depth", 0))
        if origin.is_foreign:
            self._identify(origin, store, rank, size)
        self._remember(pg, origin)
        if not origin.is_foreign:
            return
        if self._announce is not None:
            self._announce(origin)
        else:
            self._unannounced.append((weakref.ref(pg), origin))

    def record_backend(self, pg: Any) -> None:
        """Records that a group has its backend now, which may have had to wait for other members."""
        entry = self._origins.get(id(pg))
        if entry is not None and entry[0]() is pg:
            self._complete_creation(entry[1], True)

    def _complete_creation(self, origin: GroupOrigin, has_backend: bool) -> None:
        if origin.creation is not None and self._complete is not None:
            self._complete(origin, has_backend)

    def _remember(self, pg: Any, origin: GroupOrigin) -> None:
        def forget(_: Any) -> None:
            self._complete_creation(origin, False)

        self._keep(self._origins, pg, origin, forget)

    @staticmethod
    def _keep(
        table: dict[int, tuple[weakref.ref[Any], Any]],
        key: Any,
        value: Any,
        on_deleted: Callable[[Any], None] | None = None,
    ) -> None:
        number = id(key)

        def remove(ref: weakref.ref[Any]) -> None:
            entry = table.get(number)
            if entry is not None and entry[0] is ref:
                table.pop(number, None)
            if on_deleted is not None:
                on_deleted(ref)

        table[number] = weakref.ref(key, remove), value

    def _identify(self, origin: GroupOrigin, store: Any, rank: int, size: int) -> None:
        path = self._find_store_path(store)
        text = "\0".join((*path, str(size)))
        counts = self._creation_counts
        if len(counts) >= _MAX_COUNTED:
            counts.clear()
        # A group that is created again in the same store is another one, whose calls count from 1.
        counts[text] = counts.get(text, 0) + 1
        digest = hashlib.blake2b(f"{text}\0{counts[text]}".encode(), digest_size=8)
        origin.identity, origin.number, origin.size = digest.hexdigest(), rank, size
        origin.label = "/".join(part for part in path[1:] if part) or _get_scheme(store)

    def _find_store_path(self, store: Any) -> tuple[str, ...]:
        """The server or the file of a store, and the prefixes of its keys, the outermost last."""
        known = self._store_paths.get(id(store))
        if known is not None and known[0]() is store:
            return known[1]
        inner = getattr(store, "underlying_store", None)
        if inner is not None:
            return (*self._find_store_path(inner), _UNKNOWN_PREFIX)
        return (_describe_server(store),)


origin_tracker = OriginTracker()


def track_creations() -> None:
    """Records each process group and each prefix of a store that Python creates from now on.

    The methods are replaced in the classes, since code may have imported these by name.
    """

    def after_prefix(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        prefix, store = _bind(args, kwargs, ("prefix", "store"))
        if isinstance(prefix, str):
            origin_tracker.record_prefix(self, prefix, store)

    def after_group(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) + len(kwargs) < 3:
            return  # a group whose class is in Python makes its calls by itself
        store, rank, size = _bind(args, kwargs, ("store", "rank", "size"))
        if isinstance(rank, int) and isinstance(size, int):
            origin_tracker.record_group(self, store, rank, size)

    where = "recording the creation of a process group"
    extend_method(PrefixStore, "__init__", after_prefix, where)
    extend_method(ProcessGroup, "__init__", after_group, where)
    extend_method(
        ProcessGroup, "_register_backend", lambda pg, *_: origin_tracker.record_backend(pg), where
    )


def _bind(args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    arguments = dict(zip(names, args, strict=False)) | kwargs
    return tuple(arguments.get(name) for name in names)


def _is_registered_with_ranks(pg: Any) -> bool:
    """Whether torch knows the ranks of the members, and this process's number fits its rank."""
    try:
        numbers = c10d._world.pg_group_ranks.get(pg)
        if numbers is None or not c10d.is_initialized():
            return False
        return bool(numbers.get(c10d.get_rank(), -1) == pg.rank())
    except (AttributeError, RuntimeError, ValueError):
        return False


def _read_store(pg: Any) -> Any:
    """The store of a group; None if this torch does not show it."""
    try:
        return pg.get_group_store()
    except (AttributeError, RuntimeError):
        return None


def _get_scheme(store: Any) -> str:
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    port = getattr(store, "port", None)
    return f"store at port {port}" if isinstance(port, int) else type(store).__name__


def _describe_server(store: Any) -> str:
    """Text that is the same for all processes that use the same store. A store without an address
    belongs to this process alone.
    """
    port, host = getattr(store, "port", None), getattr(store, "host", None)
    if isinstance(port, int) and isinstance(host, str):
        is_local = host in _LOCAL_HOSTS or host.startswith("127.")
        return f"tcp://{_describe_this_host() if is_local else host}:{port}"
    path = getattr(store, "path", None)
    if isinstance(path, str):
        return f"file://{path}"
    return f"{type(store).__name__} {_describe_this_host()} {os.getpid()} {id(store)}"


@functools.cache
def _describe_this_host() -> str:
    """Identifies the network to which loopback addresses belong."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot_id = file.read().strip()
        return f"{boot_id} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()
