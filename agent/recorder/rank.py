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
from .annotations import UserAnnotations
from .checks.settings import CheckSettings, load_check_settings
from .fault_dumps import register_stack_dumps
from .native.library import choose_recorder
from .poller import Poller
from .recorder import Recorder
from .supervisor import AgentSupervisor
from .writer import RingWriter

if TYPE_CHECKING:
    from .checks.inspection import CallChecker

_current_rank: RankProcess | None = None


class RankProcess:
    """This process's ring and all that writes to it."""

    def __init__(self, launch: identity.LaunchInfo, rank: int, world_size: int) -> None:
        """Raises OSError where no ring can be had."""
        self.launch = launch
        self.rank, self.world_size = rank, world_size
        self.master_address = _get_master_address()
        pid = os.getpid()
        ticks = run_dir.read_start_ticks(pid)
        self.key = run_dir.format_process_key(pid, ticks)
        examined = load_check_settings(os.environ)
        self.folder, self.ring = _open_ring(
            self.key, pid, ticks, CHECK_STRUCT.size * CHECK_SLOTS if examined.any_enabled else 0
        )
        self._stack_dump_info = register_stack_dumps(
            self.folder / (self.key + run_dir.STACKS_SUFFIX)
        )
        native, self._python_reason = choose_recorder(os.environ)
        self.recorder = Recorder(self.ring, native, _make_checker(self.ring, examined))
        self.write_identity()
        self.set_lifecycle(Lifecycle.STARTING)
        self.setup_recorder = group_setup.SetupRecorder(self.recorder)
        self.poller = Poller(self.ring, self.recorder, AgentSupervisor(self.folder))
        faults.add_listener(self._write_faults)
        self._write_faults()

    def write_identity(self) -> None:
        """Tells who this is, again after anything of it has changed."""
        torch = sys.modules.get("torch")
        main = threading.main_thread()
        self.ring.write_identity(
            {
                "job": self.launch.job,
                "restart": self.launch.restart,
                "rank": self.rank,
                "world_size": self.world_size,
                "local_rank": self.launch.local_rank,
                "python": platform.python_version(),
                "torch": str(getattr(torch, "__version__", "")),
                "program": _get_program(),
                "main_thread": main.ident,
                "recorder": "python" if self.recorder.native is None else "native",
                "without": self._python_reason,
                "master": self.master_address,
                "on_hang": self.launch.on_hang,
                **self._stack_dump_info,
            }
        )

    def set_lifecycle(self, lifecycle: Lifecycle) -> None:
        self.lifecycle = lifecycle
        self.ring.set_word(LiveWord.LIFECYCLE, lifecycle)

    def _write_faults(self) -> None:
        self.ring.set_word(LiveWord.ERRORS, faults.count_faults())
        self.ring.write_faults(faults.format_lines())


def _make_checker(ring: RingWriter, settings: CheckSettings) -> CallChecker | None:
    """What examines the calls, where the environment asks for it."""
    for problem in settings.problems:
        faults.record_message(problem)
    if not settings.any_enabled:
        return None
    from .checks.inspection import CallChecker

    return CallChecker(ring, settings)


def _open_ring(key: str, pid: int, ticks: int, extra_bytes: int) -> tuple[Path, RingWriter]:
    """Tried twice: a node agent that leaves may take its empty folder away between finding it and
    using it, and a program that replaces itself by another (exec) leaves a ring under the same
    name.
    """
    for last in (False, True):
        folder = run_dir.ensure_run_dir(os.environ["HANGWATCH_URL"])
        path = folder / (key + run_dir.RING_SUFFIX)
        try:
            return folder, RingWriter(path, pid=pid, start_ticks=ticks, extra_bytes=extra_bytes)
        except FileNotFoundError:
            if last:
                raise
        except FileExistsError:  # this very process's, from before an exec
            if last or _read_lifecycle(path) > Lifecycle.STARTING:
                raise
            path.unlink()
    raise AssertionError("unreachable")


def _get_master_address() -> str:
    """Where the ranks are to meet."""
    return f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"


def get_current_rank() -> RankProcess | None:
    """This process's rank, if it is one."""
    return _current_rank


def install_recorder() -> None:
    """Prepares this process, and records from now on where its launcher already made it a rank."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    os.register_at_fork(after_in_child=_reset_after_fork)
    group_setup.wrap_function("init_process_group", _enter_init, _leave_init)
    group_setup.wrap_function("_new_group_with_tag", _enter_new_group, _leave_call)
    group_setup.wrap_function("destroy_process_group", _enter_destroy, _leave_destroy)
    _patch_spawn()
    launch = identity.parse_environ(os.environ)
    if launch.rank is not None and _find_ancestor_lifecycle() is None:
        _become_rank(launch, launch.rank, launch.world_size)


def _become_rank(launch: identity.LaunchInfo, rank: int, world_size: int) -> None:
    """Opens the ring. Where that fails the job goes on unwatched, and one line says so."""
    global _current_rank
    if _current_rank is not None:
        if (_current_rank.rank, _current_rank.world_size) != (rank, world_size):
            _current_rank.rank, _current_rank.world_size = rank, world_size
            _current_rank.write_identity()
        return
    if _find_ancestor_lifecycle() in (Lifecycle.INITIALISING, Lifecycle.INITIALISED):
        return  # a rank's child with a world of its own: the job's rank is its parent
    try:
        _current_rank = RankProcess(launch, rank, world_size)
    except OSError as error:
        faults.record_message(f"recording is off, the job is not watched: {error}")
        return
    kernels.set_recorder(_current_rank.recorder)
    hangwatch._watcher = UserAnnotations(_current_rank)
    _current_rank.poller.start_thread()
    atexit.register(_handle_exit)
    sys.excepthook = _Excepthook(sys.excepthook)


def _find_ancestor_lifecycle() -> Lifecycle | None:
    """How far the nearest ancestor that has a ring has come; None where none has.

    A DataLoader worker or a subprocess inherits RANK and is none: one of its ancestors has the
    ring.
    """
    try:
        folder = run_dir.ensure_run_dir(os.environ["HANGWATCH_URL"])
    except run_dir.RunDirError:  # told where the ring is opened, or nobody has one
        return None
    pid = os.getppid()
    while pid > 1:
        try:
            ring = folder / (
                run_dir.format_process_key(pid, run_dir.read_start_ticks(pid)) + run_dir.RING_SUFFIX
            )
            if ring.exists():
                return _read_lifecycle(ring)
            pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        except (OSError, ValueError):
            return None
    return None


def _read_lifecycle(ring: Path) -> Lifecycle:
    """What the process says that it belongs to. Raises OSError where it cannot be read."""
    with ring.open("rb") as f:
        f.seek(LIVE_OFFSET + 8 * LiveWord.LIFECYCLE)
        return Lifecycle(min(int.from_bytes(f.read(8), "little"), Lifecycle.EXITING))


def _reset_after_fork() -> None:
    """After fork, in the child: the ring is the parent's, and so is the thread that served it."""
    global _current_rank
    _current_rank = None
    kernels.set_recorder(None)
    hangwatch._watcher = None


def _enter_init(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from torch.distributed import distributed_c10d as c10d

    if c10d.is_initialized():  # it raises at once, and the world stays
        return None
    given = (
        inspect.signature(inspect.unwrap(c10d.init_process_group)).bind(*args, **kwargs).arguments
    )
    launch = identity.parse_environ(os.environ)
    rank = given.get("rank", -1)
    world_size = given.get("world_size", -1)
    rank = launch.rank if rank < 0 else rank
    world_size = launch.world_size if world_size < 0 else world_size
    if rank is not None and world_size > 0:
        _become_rank(launch, rank, world_size)
    if _current_rank is None:
        return None
    kernels.register_operators()
    method = str(given.get("init_method") or "env://")
    if "init_method" in given or "store" not in given:
        _current_rank.master_address = (
            _get_master_address() if method.startswith("env://") else method
        )
    _current_rank.write_identity()
    _current_rank.setup_recorder.begin_world(
        world_size if world_size > 0 else _current_rank.world_size
    )
    _current_rank.set_lifecycle(Lifecycle.INITIALISING)
    return _current_rank.setup_recorder.enter_call("init_process_group")


def _leave_init(token: Any, returned: bool) -> None:
    import torch.distributed as dist

    if returned and dist.is_initialized():
        _become_rank(identity.parse_environ(os.environ), dist.get_rank(), dist.get_world_size())
    if _current_rank is not None:
        _current_rank.setup_recorder.leave_call(token, returned)
        if returned:
            _current_rank.setup_recorder.complete_world(_current_rank.world_size)
            _current_rank.set_lifecycle(Lifecycle.INITIALISED)
        elif not dist.is_initialized():
            _current_rank.set_lifecycle(Lifecycle.STARTING)


def _enter_new_group(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
    if _current_rank is None or given.get("use_local_synchronization"):
        return None
    ranks = given.get("ranks")
    return _current_rank.setup_recorder.enter_call(
        "new_group",
        ranks=tuple(range(_current_rank.world_size)) if ranks is None else tuple(sorted(ranks)),
    )


def _leave_call(token: Any, returned: bool) -> None:
    group_setup.SetupRecorder.leave_call(token, returned)


def _enter_destroy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Nobody is held up by a rank that destroys later, or never: the end of the process does as
    well.
    """
    return None


def _leave_destroy(token: Any, returned: bool) -> None:
    import torch.distributed as dist

    if _current_rank is not None and returned and not dist.is_initialized():
        _current_rank.set_lifecycle(Lifecycle.DESTROYED)


def _handle_exit() -> None:
    if _current_rank is not None:
        _current_rank.set_lifecycle(Lifecycle.EXITING)
        # a daemon thread that outlives the interpreter can take the process down with it
        _current_rank.poller.stop_thread()
        with faults.swallow_errors("waiting for the backend's threads"):
            backend_threads.wait_until_idle()


def _patch_spawn() -> None:
    """torch.multiprocessing catches what a spawned function raises, passes it to the parent, and
    exits: no hook of Python's sees it.
    """
    spawn: Any = sys.modules[
        "torch.multiprocessing.spawn"
    ]  # the module: torch.multiprocessing.spawn is its function
    original = spawn._wrap

    @functools.wraps(original)
    def wrap_spawned(fn: Any, *args: Any) -> Any:
        @functools.wraps(fn)
        def run_recorded(*given: Any) -> Any:
            try:
                return fn(*given)
            except Exception as error:
                _record_exception(type(error), error, error.__traceback__)
                raise

        return original(run_recorded, *args)

    spawn._wrap = wrap_spawned


def _record_exception(
    kind: type[BaseException], value: BaseException, trace: TracebackType | None
) -> None:
    try:
        if _current_rank is not None:
            _current_rank.ring.write_exception(
                _describe_exception(_current_rank, kind, value, trace)
            )
    except Exception as error:  # ours: the user's exception is shown all the same
        faults.record_fault("recording an exception", error)


class _Excepthook:
    """Leaves the exception that ends Python in the ring, then does what was there before."""

    def __init__(self, previous_hook: Any) -> None:
        self._previous_hook = previous_hook

    def __call__(
        self, kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        _record_exception(kind, value, trace)
        self._previous_hook(kind, value, trace)


def _describe_exception(
    rank: RankProcess, kind: type[BaseException], value: BaseException, trace: TracebackType | None
) -> dict[str, Any]:
    """The exception, and the innermost line of the user's that it passed."""
    told: dict[str, Any] = {
        "type": kind.__qualname__,
        "message": str(value)[:800],
        "at_ns": monotonic_ns(),
    }
    for frame, line in reversed(list(traceback.walk_tb(trace))):
        if rank.recorder.sites.is_user_code(frame.f_code):
            return told | {
                "file": frame.f_code.co_filename,
                "line": line,
                "function": frame.f_code.co_name,
            }
    return told


def _get_program() -> str:
    return " ".join(sys.argv)[:300] if getattr(sys, "argv", None) else ""
