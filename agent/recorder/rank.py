"""A training process as a rank: when it becomes one, how far it has come, and how it ends."""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import platform
import sys
import threading
import traceback
from pathlib import Path
from time import monotonic_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any

import hangwatch
from hangwatch.model.ranks import Lifecycle
from hangwatch.ring.layout import CHECK_SLOTS, CHECK_STRUCT, LIVE_OFFSET, LiveWord

from ..environment import identity, run_dir
from . import backend_threads, faults, group_setup, kernels
from .annotations import Told
from .checks.settings import Asked, asked
from .fault_dumps import register_stack_dumps
from .native.library import choose
from .poller import Poller
from .supervisor import Beside
from .writer import RingWriter

if TYPE_CHECKING:
    from .checks.inspection import Look

_rank: Rank | None = None


class Rank:
    """This process's ring and all that writes to it."""

    def __init__(self, launch: identity.Launch, rank: int, world_size: int) -> None:
        """Raises OSError where no ring can be had."""
        self.launch = launch
        self.number, self.world_size = rank, world_size
        self.master = _environ_master()
        pid = os.getpid()
        ticks = run_dir.start_ticks(pid)
        self.key = run_dir.process_key(pid, ticks)
        examined = asked(os.environ)
        self.folder, self.ring = _open_ring(
            self.key, pid, ticks, CHECK_STRUCT.size * CHECK_SLOTS if examined.anything else 0
        )
        self._stacks = register_stack_dumps(self.folder / (self.key + run_dir.STACKS))
        native, self._without = choose(os.environ)
        self.recorder = kernels.Recorder(self.ring, native, _look(self.ring, examined))
        self.identify()
        self.stage(Lifecycle.STARTING)
        self.setup = group_setup.SetUp(self.recorder)
        self.poller = Poller(self.ring, self.recorder, Beside(self.folder))
        faults.listen(self._tell_faults)
        self._tell_faults()

    def identify(self) -> None:
        """Tells who this is, again after anything of it has changed."""
        torch = sys.modules.get("torch")
        main = threading.main_thread()
        self.ring.identity(
            {
                "job": self.launch.job,
                "restart": self.launch.restart,
                "rank": self.number,
                "world_size": self.world_size,
                "local_rank": self.launch.local_rank,
                "python": platform.python_version(),
                "torch": str(getattr(torch, "__version__", "")),
                "program": _program(),
                "main_thread": main.ident,
                "recorder": "python" if self.recorder.native is None else "native",
                "without": self._without,
                "master": self.master,
                "on_hang": self.launch.on_hang,
                **self._stacks,
            }
        )

    def stage(self, lifecycle: Lifecycle) -> None:
        self.lifecycle = lifecycle
        self.ring.set(LiveWord.LIFECYCLE, lifecycle)

    def _tell_faults(self) -> None:
        self.ring.set(LiveWord.ERRORS, faults.count())
        self.ring.faults(faults.lines())


def _look(ring: RingWriter, examined: Asked) -> Look | None:
    """What examines the calls, where the environment asks for it."""
    for problem in examined.problems:
        faults.note(problem)
    if not examined.anything:
        return None
    from .checks.inspection import Look

    return Look(ring, examined)


def _open_ring(key: str, pid: int, ticks: int, behind: int) -> tuple[Path, RingWriter]:
    """Tried twice: a node agent that leaves may take its empty folder away between finding it and
    using it, and a program that replaces itself by another (exec) leaves a ring under the same
    name.
    """
    for last in (False, True):
        folder = run_dir.run_dir(os.environ["HANGWATCH_URL"])
        path = folder / (key + run_dir.RING)
        try:
            return folder, RingWriter(path, pid=pid, start_ticks=ticks, behind=behind)
        except FileNotFoundError:
            if last:
                raise
        except FileExistsError:  # this very process's, from before an exec
            if last or _stage_of(path) > Lifecycle.STARTING:
                raise
            path.unlink()
    raise AssertionError("unreachable")


def _environ_master() -> str:
    """Where the ranks are to meet."""
    return f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"


def current() -> Rank | None:
    """This process's rank, if it is one."""
    return _rank


def install() -> None:
    """Prepares this process, and records from now on where its launcher already made it a rank."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    os.register_at_fork(after_in_child=_forget)
    group_setup.wrap("init_process_group", _init_entered, _init_left)
    group_setup.wrap("_new_group_with_tag", _new_group_entered, _left)
    group_setup.wrap("destroy_process_group", _destroy_entered, _destroy_left)
    _watch_spawned()
    launch = identity.from_environ(os.environ)
    if launch.rank is not None and _ancestor() is None:
        _become(launch, launch.rank, launch.world_size)


def _become(launch: identity.Launch, rank: int, world_size: int) -> None:
    """Opens the ring. Where that fails the job goes on unwatched, and one line says so."""
    global _rank
    if _rank is not None:
        if (_rank.number, _rank.world_size) != (rank, world_size):
            _rank.number, _rank.world_size = rank, world_size
            _rank.identify()
        return
    if _ancestor() in (Lifecycle.INITIALISING, Lifecycle.INITIALISED):
        return  # a rank's child with a world of its own: the job's rank is its parent
    try:
        _rank = Rank(launch, rank, world_size)
    except OSError as error:
        faults.note(f"recording is off, the job is not watched: {error}")
        return
    kernels.use(_rank.recorder)
    hangwatch._watcher = Told(_rank)
    _rank.poller.start()
    atexit.register(_exiting)
    sys.excepthook = _Excepthook(sys.excepthook)


def _ancestor() -> Lifecycle | None:
    """How far the nearest ancestor that has a ring has come; None where none has.

    A DataLoader worker or a subprocess inherits RANK and is none: one of its ancestors has the
    ring.
    """
    try:
        folder = run_dir.run_dir(os.environ["HANGWATCH_URL"])
    except run_dir.RunDirError:  # told where the ring is opened, or nobody has one
        return None
    pid = os.getppid()
    while pid > 1:
        try:
            ring = folder / (run_dir.process_key(pid, run_dir.start_ticks(pid)) + run_dir.RING)
            if ring.exists():
                return _stage_of(ring)
            pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        except (OSError, ValueError):
            return None
    return None


def _stage_of(ring: Path) -> Lifecycle:
    """What the process says that it belongs to. Raises OSError where it cannot be read."""
    with ring.open("rb") as f:
        f.seek(LIVE_OFFSET + 8 * LiveWord.LIFECYCLE)
        return Lifecycle(min(int.from_bytes(f.read(8), "little"), Lifecycle.EXITING))


def _forget() -> None:
    """After fork, in the child: the ring is the parent's, and so is the thread that served it."""
    global _rank
    _rank = None
    kernels.use(None)
    hangwatch._watcher = None


def _init_entered(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from torch.distributed import distributed_c10d as c10d

    if c10d.is_initialized():  # it raises at once, and the world stays
        return None
    given = (
        inspect.signature(inspect.unwrap(c10d.init_process_group)).bind(*args, **kwargs).arguments
    )
    launch = identity.from_environ(os.environ)
    rank = given.get("rank", -1)
    world_size = given.get("world_size", -1)
    rank = launch.rank if rank < 0 else rank
    world_size = launch.world_size if world_size < 0 else world_size
    if rank is not None and world_size > 0:
        _become(launch, rank, world_size)
    if _rank is None:
        return None
    method = str(given.get("init_method") or "env://")
    if "init_method" in given or "store" not in given:
        _rank.master = _environ_master() if method.startswith("env://") else method
    _rank.identify()
    _rank.setup.begin(world_size if world_size > 0 else _rank.world_size)
    _rank.stage(Lifecycle.INITIALISING)
    return _rank.setup.enter("init_process_group")


def _init_left(token: Any, returned: bool) -> None:
    import torch.distributed as dist

    if returned and dist.is_initialized():
        _become(identity.from_environ(os.environ), dist.get_rank(), dist.get_world_size())
    if _rank is not None:
        _rank.setup.leave(token, returned)
        if returned:
            _rank.setup.met(_rank.world_size)
            _rank.stage(Lifecycle.INITIALISED)
        elif not dist.is_initialized():
            _rank.stage(Lifecycle.STARTING)


def _new_group_entered(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """With use_local_synchronization only the members call, so their order says nothing about other
    ranks.
    """
    given = dict(
        zip(
            (
                "ranks",
                "timeout",
                "backend",
                "backend_options",
                "pg_tag",
                "use_local_synchronization",
            ),
            args,
            strict=False,
        )
    )
    given.update(kwargs)
    if _rank is None or given.get("use_local_synchronization"):
        return None
    ranks = given.get("ranks")
    return _rank.setup.enter(
        "new_group", ranks=tuple(range(_rank.world_size)) if ranks is None else tuple(sorted(ranks))
    )


def _left(token: Any, returned: bool) -> None:
    group_setup.SetUp.leave(token, returned)


def _destroy_entered(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Nobody is held up by a rank that destroys later, or never: the end of the process does as
    well.
    """
    return None


def _destroy_left(token: Any, returned: bool) -> None:
    import torch.distributed as dist

    if _rank is not None and returned and not dist.is_initialized():
        _rank.stage(Lifecycle.DESTROYED)


def _exiting() -> None:
    if _rank is not None:
        _rank.stage(Lifecycle.EXITING)
        # a daemon thread that outlives the interpreter can take the process down with it
        _rank.poller.stop()
        with faults.ours("waiting for the backend's threads"):
            backend_threads.let_finish()


def _watch_spawned() -> None:
    """torch.multiprocessing catches what a spawned function raises, passes it to the parent, and
    exits: no hook of Python's sees it.
    """
    spawn: Any = sys.modules[
        "torch.multiprocessing.spawn"
    ]  # the module: torch.multiprocessing.spawn is its function
    original = spawn._wrap

    @functools.wraps(original)
    def wrapper(fn: Any, *args: Any) -> Any:
        @functools.wraps(fn)
        def noting(*given: Any) -> Any:
            try:
                return fn(*given)
            except Exception as error:
                _note_last_words(type(error), error, error.__traceback__)
                raise

        return original(noting, *args)

    spawn._wrap = wrapper


def _note_last_words(
    kind: type[BaseException], value: BaseException, trace: TracebackType | None
) -> None:
    try:
        if _rank is not None:
            _rank.ring.last_words(_last_words(_rank, kind, value, trace))
    except Exception as error:  # ours: the user's exception is shown all the same
        faults.fault("recording an exception", error)


class _Excepthook:
    """Leaves the exception that ends Python in the ring, then does what was there before."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(
        self, kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        _note_last_words(kind, value, trace)
        self._before(kind, value, trace)


def _last_words(
    rank: Rank, kind: type[BaseException], value: BaseException, trace: TracebackType | None
) -> dict[str, Any]:
    """The exception, and the innermost line of the user's that it passed."""
    told: dict[str, Any] = {
        "type": kind.__qualname__,
        "message": str(value)[:800],
        "at_ns": monotonic_ns(),
    }
    for frame, line in reversed(list(traceback.walk_tb(trace))):
        if rank.recorder.sites.is_user(frame.f_code):
            return told | {
                "file": frame.f_code.co_filename,
                "line": line,
                "function": frame.f_code.co_name,
            }
    return told


def _program() -> str:
    return " ".join(sys.argv)[:300] if getattr(sys, "argv", None) else ""
