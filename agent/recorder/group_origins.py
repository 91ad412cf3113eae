"""The origins of process groups: the functions of torch.distributed, which number members by the
ranks of the world, or other code, which numbers them by itself.

A group of the second kind is called foreign. It is identified by its store, the prefixes of its
keys there, and its size, which are the same for all of its members. Some members may belong to
another program: an inference engine that takes the weights of a trainer, for example.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch._C._distributed_c10d import PrefixStore, ProcessGroup
from torch.distributed import distributed_c10d as c10d

from hangwatch.model.groups import Group, RankTuple

from .faults import Arguments, KeywordArguments, extend_method

_MAX_COUNTED = 1 << 16  # identities; a process that creates more counts again from 1
_MAX_UNANNOUNCED = 256
_LOCAL_HOSTS = ("localhost", "0.0.0.0", "::", "::1", "")
_UNKNOWN_PREFIX = "?"

# The server or the file of a store, and the prefixes of its keys, the outermost last.
StorePath = tuple[str, ...]


@dataclass(slots=True, eq=False)
class GroupOrigin:
    """How a process group was created."""

    # A foreign group's name is a text for people, and its ranks are its own numbers.
    foreign: Group | None = None
    has_address: bool = False  # other processes can be members of it, by its store
    creation: Any = None  # the call that creates the group, while that lasts
    group_ref: weakref.ref[Any] | None = None


Value = TypeVar("Value")


class WeakTable(Generic[Value]):
    """Values by objects that it does not keep alive.

    Unlike `weakref.WeakKeyDictionary` it calls no ``__hash__`` or ``__eq__`` of the job's classes,
    and runs no function of another module when an object is deleted: Dynamo would compile that.
    """

    def __init__(self) -> None:
        # The keys are ids, which may be reused: hence the weak references.
        self._entries: dict[int, tuple[weakref.ref[Any], Value]] = {}

    def get(self, key: Any) -> Value | None:
        entry = self._entries.get(id(key))
        return entry[1] if entry is not None and entry[0]() is key else None

    def __setitem__(self, key: Any, value: Value) -> None:
        number = id(key)

        def remove(ref: weakref.ref[Any]) -> None:
            entry = self._entries.get(number)
            if entry is not None and entry[0] is ref:
                self._entries.pop(number, None)

        self._entries[number] = weakref.ref(key, remove), value


class RankedCreation(threading.local):
    """Counts the functions that this thread is in and that number members by the ranks of the world.
    Dynamo would see a context manager.
    """

    depth = 0


class OriginTracker:
    """The origins of all process groups of this process."""

    def __init__(self) -> None:
        self.ranked_creation = RankedCreation()
        self._origins: WeakTable[GroupOrigin] = WeakTable()
        self._store_paths: WeakTable[StorePath] = WeakTable()
        self._creation_counts: dict[str, int] = {}
        # Foreign groups that were created before this process was recorded.
        self._unannounced: deque[GroupOrigin] = deque(maxlen=_MAX_UNANNOUNCED)
        # The functions that record the creation of a group, while this process is recorded.
        self._enter_creation: Callable[[str, Group], Any] | None = None
        self._leave_creation: Callable[[Any, bool], None] | None = None
        # Called with a foreign group of several processes that this process has joined, while it is
        # not recorded.
        self.join_callback: Callable[[Group], None] | None = None

    def set_listeners(
        self,
        enter_creation: Callable[[str, Group], Any],
        leave_creation: Callable[[Any, bool], None],
    ) -> None:
        """``enter_creation(operation, group)`` is called before a foreign group is created, since others
        may wait for it; ``leave_creation`` with the result when the group has been created (True) or was
        given up (False).
        """
        self._enter_creation, self._leave_creation = enter_creation, leave_creation
        while self._unannounced:
            origin = self._unannounced.popleft()
            if origin.group_ref is not None and origin.group_ref() is not None:
                self._begin_creation(origin)
                self._complete_creation(origin, True)

    def clear_listeners(self) -> None:
        self._enter_creation = self._leave_creation = None

    def find_origin(self, pg: Any) -> GroupOrigin:
        """The origin of a group. The creation of a group by C++ is not seen: such a group counts as
        foreign unless torch has registered it with ranks of the world.
        """
        origin = self._origins.get(pg)
        if origin is not None:
            return origin
        # torch has registered it if it knows the ranks of the members, and this process's fits.
        is_registered = False
        with contextlib.suppress(AttributeError, RuntimeError, ValueError):
            numbers = c10d._world.pg_group_ranks.get(pg)
            if numbers is not None and c10d.is_initialized():
                is_registered = numbers.get(c10d.get_rank(), -1) == pg.rank()
        if is_registered:
            origin = GroupOrigin()
        else:
            store = None
            with contextlib.suppress(AttributeError, RuntimeError):  # not every torch shows it
                store = pg.get_group_store()
            origin = self._make_foreign_origin(store, pg.rank(), pg.size())
        self._remember(pg, origin)
        return origin

    def record_prefix(self, prefix_store: Any, args: Arguments, kwargs: KeywordArguments) -> None:
        """Records a `PrefixStore` that was just created."""
        prefix, store = _bind(args, kwargs, ("prefix", "store"))
        if isinstance(prefix, str):
            self._store_paths[prefix_store] = (*self._find_store_path(store), prefix.strip("/"))

    def record_group(self, pg: Any, args: Arguments, kwargs: KeywordArguments) -> None:
        """Records a `ProcessGroup` that was just created; it has no backend yet."""
        if len(args) + len(kwargs) < 3:
            return  # a group whose class is in Python makes its calls by itself
        store, rank, size = _bind(args, kwargs, ("store", "rank", "size"))
        if not isinstance(rank, int) or not isinstance(size, int):
            return
        if self.ranked_creation.depth:
            self._remember(pg, GroupOrigin())
            return
        origin = self._make_foreign_origin(store, rank, size)
        self._remember(pg, origin)
        self._begin_creation(origin)

    def record_backend(self, pg: Any, args: Arguments, kwargs: KeywordArguments) -> None:
        """Records that a group has its backend now, which may have had to wait for other members."""
        origin = self._origins.get(pg)
        if origin is None:
            return
        group = origin.foreign
        if self._enter_creation is None and self.join_callback is not None and group is not None:
            is_member = 0 <= group.number < len(group.ranks)
            if origin.has_address and is_member and len(group.ranks) > 1:
                self.join_callback(group)
        self._complete_creation(origin, True)

    def _begin_creation(self, origin: GroupOrigin) -> None:
        if self._enter_creation is None:
            self._unannounced.append(origin)
        elif origin.foreign is not None:
            origin.creation = self._enter_creation("new_process_group", origin.foreign)

    def _complete_creation(self, origin: GroupOrigin, has_backend: bool) -> None:
        if origin.creation is not None and self._leave_creation is not None:
            creation, origin.creation = origin.creation, None
            self._leave_creation(creation, has_backend)

    def _remember(self, pg: Any, origin: GroupOrigin) -> None:
        # A group that is deleted before it has its backend was given up.
        origin.group_ref = weakref.ref(pg, lambda _: self._complete_creation(origin, False))
        self._origins[pg] = origin

    def _make_foreign_origin(self, store: Any, rank: int, size: int) -> GroupOrigin:
        path = self._find_store_path(store)
        name = "/".join(filter(None, path[1:]))
        if not name:
            innermost = store
            while (inner := getattr(innermost, "underlying_store", None)) is not None:
                innermost = inner
            port = getattr(innermost, "port", None)
            has_port = isinstance(port, int)
            name = f"store at port {port}" if has_port else type(innermost).__name__
        text = "\0".join((*path, str(size)))
        counts = self._creation_counts
        if len(counts) >= _MAX_COUNTED:
            counts.clear()
        # A group that is created again in the same store is another one, whose calls count from 1.
        counts[text] = counts.get(text, 0) + 1
        digest = hashlib.blake2b(f"{text}\0{counts[text]}".encode(), digest_size=8)
        group = Group(
            name=name,
            desc="undefined",
            ranks=RankTuple(range(size)),
            generation=0,
            foreign=digest.hexdigest(),
            number=rank,
        )
        return GroupOrigin(group, has_address="://" in path[0])

    def _find_store_path(self, store: Any) -> StorePath:
        if store is not None and (path := self._store_paths.get(store)) is not None:
            return path
        inner = getattr(store, "underlying_store", None)
        if inner is not None:
            return (*self._find_store_path(inner), _UNKNOWN_PREFIX)
        port = getattr(store, "port", None)
        host = getattr(store, "host", None)
        if isinstance(port, int) and isinstance(host, str):
            if host in _LOCAL_HOSTS or host.startswith("127."):
                host = _describe_this_host()
            return (f"tcp://{host}:{port}",)
        path = getattr(store, "path", None)
        if isinstance(path, str):
            return (f"file://{path}",)
        # A store without an address is local.
        return (f"{type(store).__name__} {_describe_this_host()} {os.getpid()} {id(store)}",)


origin_tracker = OriginTracker()


def track_creations() -> None:
    """Records each process group and each prefix of a store that Python creates from now on.

    The methods are replaced in the classes, since code may have imported these by name.
    """
    where = "recording the creation of a process group"
    extend_method(PrefixStore, "__init__", origin_tracker.record_prefix, where)
    extend_method(ProcessGroup, "__init__", origin_tracker.record_group, where)
    extend_method(ProcessGroup, "_register_backend", origin_tracker.record_backend, where)


def _bind(args: Arguments, kwargs: KeywordArguments, names: tuple[str, ...]) -> Arguments:
    arguments = dict(zip(names, args, strict=False)) | kwargs
    return tuple(arguments.get(name) for name in names)


@functools.cache
def _describe_this_host() -> str:
    """Identifies the network to which loopback addresses belong."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot_id = file.read().strip()
        return f"{boot_id} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()
