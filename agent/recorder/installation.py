"""A training process as a rank, from `import torch` to its exit.

The recorder wraps the functions of torch.distributed that create and destroy process groups, and
makes this process a rank once its rank is known. The exception that ends the process is recorded,
too. Two hooks see it: ``sys.excepthook``, and a wrapper of the functions that torch.multiprocessing
spawns, whose exceptions do not reach the former.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import platform
import sys
import threading
from pathlib import Path
from time import monotonic, monotonic_ns, sleep
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import hangwatch
from hangwatch.model.calls import LossReason
from hangwatch.model.groups import (
    WORKER_THREAD_NAMES,
    Group,
    format_group_address,
    is_group_address,
)
from hangwatch.model.ranks import Lifecycle
from hangwatch.ring.layout import EXCEPTION, FAULTS, LiveWord

from ..environment import identity, run_dir
from . import core_dumps, device, dynamo, faults, graphs, kernels, nccl, ring_file
from .annotations import UserAnnotations
from .checks.settings import load_check_settings
from .exceptions import describe_exception
from .faults import Arguments, KeywordArguments
from .group_origins import origin_tracker, track_creations
from .group_setup import SetupRecorder, wrap_function
from .native.library import choose_recorder
from .poller import Poller
from .recorder import Recorder
from .stack_dumps import StackDumper

_MAX_START_WAIT_S = 10.0
_MAX_PROGRAM_CHARS = 300
_TASK_DIR = Path("/proc/self/task")
_ACTIVITY_FIELDS = ("State:", "voluntary_ctxt_switches:")

current_rank: RankProcess | None = None  # the rank that this process is, if it is recorded
_start_lock = threading.Lock()
# The reason why calls may have been made before recording began; None if none were.
_lost_before: LossReason | None = None


def install_recorder() -> None:
    """Prepares this process, and starts recording if its launcher already made it a rank."""
    os.register_at_fork(after_in_child=_reset_after_fork)
    wrap_function("init_process_group", _enter_init, _leave_init, _record_lost_world)
    wrap_function("_new_group_with_tag", _enter_new_group, _leave_new_group, _record_lost_group)
    wrap_function("split_group", _enter_split_group, _leave_new_group, _record_lost_group)
    # No rank waits for another to destroy its groups, and a rank may also exit without doing so.
    wrap_function("destroy_process_group", None, _leave_destroy, _record_lost_world)
    wrap_function("shrink_group", None, _leave_new_group, _record_lost_group)
    faults.run_guarded("watching the creation of process groups", track_creations)
    faults.run_guarded("watching batches of messages", kernels.track_batches)
    faults.run_guarded("watching new operators", kernels.track_definitions)
    faults.run_guarded("counting the Flight Recorder's hooks", device.count_attached_hooks)
    faults.run_guarded("watching CUDA graphs", graphs.track_graphs, torch.cuda.CUDAGraph)
    faults.run_guarded("enabling core dumps of GPUs", core_dumps.enable_gpu_core_dumps)
    patch_spawn()
    origin_tracker.join_callback = _join_foreign_group
    launch = identity.parse_environ(os.environ)
    if launch.rank is not None and ring_file.is_started_as_rank(launch):
        _start_recording(launch, launch.rank, launch.world_size)


def _become_rank(
    launch: identity.LaunchInfo, rank: int, world_size: int, rendezvous: str = ""
) -> None:
    """Starts recording, or updates the rank of a process that is recorded already."""
    current = current_rank
    if current is not None:
        joins_world = current.is_group_member
        if joins_world:  # the world's job may have another name
            current.launch = ring_file.choose_launch(launch, rank, world_size, rendezvous) or launch
            current.master_address = rendezvous or ring_file.get_master_address()
        if joins_world or (current.rank, current.world_size) != (rank, world_size):
            current.rank, current.world_size = rank, world_size
            current.write_identity()
        return
    chosen = ring_file.choose_launch(launch, rank, world_size, rendezvous)
    if chosen is not None:
        _start_recording(chosen, rank, world_size)


def _join_foreign_group(group: Group) -> None:
    """Starts recording a process without a rank, as the member of the first foreign group that it joins:
    engines that serve put groups together by hand. A world that it joins later makes it a rank of that.
    """
    launch = ring_file.choose_member_launch(group)
    if launch is not None:
        _start_recording(launch, group.number, len(group.ranks), format_group_address(group))


def _start_recording(
    launch: identity.LaunchInfo, rank: int, world_size: int, group_address: str = ""
) -> None:
    """Starts recording, or waits for another thread that does. If recording cannot start, the job
    runs unwatched, and a message on stderr says so. ``group_address`` is that of the foreign group
    that alone makes this process a rank.
    """
    global current_rank, _lost_before
    if not _start_lock.acquire(timeout=_MAX_START_WAIT_S):
        return
    try:
        if current_rank is not None:
            return
        try:
            current = RankProcess(launch, rank, world_size, group_address)
        except OSError as error:
            faults.record_message(f"recording is off, the job is not watched: {error}")
            _lost_before = LossReason.LATE
            return
        current_rank = current
        if _lost_before is not None:
            current.recorder.groups.mark_incomplete(_lost_before)
        kernels.set_recorder(current.recorder)
        setup = current.setup_recorder
        origin_tracker.set_listeners(setup.enter_creation, setup.leave_creation)
        # The function returns False; Dynamo sees a constant True in its place.
        hangwatch._is_compiled = torch.compiler.is_dynamo_compiling
        hangwatch._watcher = UserAnnotations(current)
        current.poller.start_thread()
        atexit.register(_handle_exit)
        _record_uncaught_exceptions()
        faults.run_guarded("exempting hangwatch from compilation", dynamo.exempt_own_code)
    finally:
        _start_lock.release()


class RankProcess:
    """The ring of this process and everything that writes to it."""

    def __init__(
        self, launch: identity.LaunchInfo, rank: int, world_size: int, group_address: str = ""
    ) -> None:
        """Raises OSError if the ring cannot be created."""
        self.launch = launch
        self.rank, self.world_size = rank, world_size
        self.master_address = group_address or ring_file.get_master_address()
        pid = os.getpid()
        start_ticks = run_dir.read_start_ticks(pid)
        check_settings = load_check_settings(os.environ)
        plugin, self._no_plugin_reason = nccl.load_plugin_guarded()
        folder, self.ring = ring_file.create_ring(
            pid,
            start_ticks,
            has_checks=check_settings.any_enabled,
            has_communicators=plugin is not None,
        )
        self._stack_dumper = StackDumper(self.ring)
        native, self._python_reason = choose_recorder(
            os.environ, has_checks=check_settings.any_enabled
        )
        for problem in check_settings.problems:
            faults.record_message(problem)
        checker = None
        if check_settings.any_enabled:
            # Most jobs enable no checks, and need not load them.
            from .checks.inspection import CallChecker

            checker = CallChecker(self.ring, check_settings)
        if plugin is not None:
            plugin.attach_ring(self.ring)
            if native is not None:
                native.set_call_marker(plugin.mark_address)
        self.recorder = Recorder(self.ring, native, checker, plugin)
        # A foreign group exists by now. Node agents report a ring once it has an identity.
        self.set_lifecycle(Lifecycle.INITIALISED if group_address else Lifecycle.STARTING)
        self.write_identity()
        self.setup_recorder = SetupRecorder(self.recorder)
        self.poller = Poller(self.recorder, folder, self._stack_dumper)
        faults.set_listener(self._write_faults)
        self._write_faults()

    @property
    def is_group_member(self) -> bool:
        """Whether it is a rank only as a member of a foreign group."""
        return is_group_address(self.master_address)

    def write_identity(self) -> None:
        """Writes who this process is, again whenever any of it has changed."""
        command_line: list[str] = getattr(sys, "argv", None) or []
        self.ring.write_identity(
            {
                "job": self.launch.job,
                "restart": self.launch.restart,
                "rank": self.rank,
                "world_size": self.world_size,
                "local_rank": self.launch.local_rank,
                "python": platform.python_version(),
                "torch": str(torch.__version__),
                "program": " ".join(command_line)[:_MAX_PROGRAM_CHARS],
                "main_thread": threading.main_thread().ident,
                "recorder": "python" if self.recorder.native is None else "native",
                "without": self._python_reason,
                "without_plugin": self._no_plugin_reason,
                "master": self.master_address,
                "on_hang": self.launch.on_hang,
                "gpu_stacks": self.launch.gpu_stacks,
                **self._stack_dumper.registration,
            }
        )

    def set_lifecycle(self, lifecycle: Lifecycle) -> None:
        self.lifecycle = lifecycle
        self.ring.set_word(LiveWord.LIFECYCLE, lifecycle)

    def _write_faults(self) -> None:
        self.ring.set_word(LiveWord.ERRORS, sum(faults.fault_counts.values()))
        lines = []
        for message, count in faults.fault_counts.items():
            line = message if count == 1 else f"{message} ({count} times)"
            lines.append(line[:200])
        self.ring.write_note(FAULTS, {"lines": lines})


def _record_lost_world() -> None:
    """Marks all streams as incomplete, since groups are identified by the number of their world."""
    global _lost_before
    if current_rank is None:
        _lost_before = LossReason.FAULT
    else:
        current_rank.recorder.groups.mark_incomplete(LossReason.FAULT)


def _record_lost_group() -> None:
    if current_rank is not None:
        current_rank.setup_recorder.mark_incomplete()


def _reset_after_fork() -> None:
    """Stops recording in a forked child: the ring is the parent's, and no thread serves it here."""
    global current_rank, _lost_before, _start_lock
    _lost_before = None
    _start_lock = threading.Lock()  # a thread that the child does not have may hold the other one
    current_rank = None
    kernels.set_recorder(None)
    origin_tracker.clear_listeners()
    hangwatch._watcher = None
    faults.set_listener(None)


def _enter_init(args: Arguments, kwargs: KeywordArguments) -> Any:
    if c10d.is_initialized():  # the call will raise, and the world stays as it is
        return None
    signature = inspect.signature(inspect.unwrap(c10d.init_process_group))
    arguments = signature.bind(*args, **kwargs).arguments
    rendezvous = ring_file.find_rendezvous(arguments)
    launch = identity.parse_environ(os.environ, rendezvous)
    rank = arguments.get("rank", -1)
    if rank < 0:
        rank = launch.rank
    world_size = arguments.get("world_size", -1)
    if world_size < 0:
        world_size = launch.world_size
    if rank is not None and world_size > 0:
        _become_rank(launch, rank, world_size, rendezvous)
    current = current_rank
    if current is None or current.is_group_member:
        return None
    kernels.register_operators()
    current.master_address = rendezvous or ring_file.get_master_address()
    current.write_identity()
    current.setup_recorder.begin_world(world_size if world_size > 0 else current.world_size)
    current.set_lifecycle(Lifecycle.INITIALISING)
    return current.setup_recorder.enter_call("init_process_group")


def _leave_init(token: Any, returned: bool) -> None:
    if returned and dist.is_initialized():
        launch = identity.parse_environ(os.environ)
        _become_rank(launch, dist.get_rank(), dist.get_world_size())
    current = current_rank
    if current is None or current.is_group_member:
        return
    current.setup_recorder.leave_call(token, returned)
    if returned:
        current.setup_recorder.complete_world(current.world_size)
        current.set_lifecycle(Lifecycle.INITIALISED)
    elif not dist.is_initialized():
        current.set_lifecycle(Lifecycle.STARTING)


def _enter_new_group(args: Arguments, kwargs: KeywordArguments) -> Any:
    """Records the call. With use_local_synchronization only the new group's members make it: other ranks
    return immediately, and need not call it.
    """
    parameters = inspect.signature(c10d._new_group_with_tag).parameters
    arguments = dict(zip(parameters, args, strict=False)) | kwargs
    current = current_rank
    if current is None:
        return None
    ranks = arguments.get("ranks")
    members = list(range(current.world_size)) if ranks is None else sorted(ranks)
    setup = current.setup_recorder
    if not arguments.get("use_local_synchronization"):
        return setup.enter_call("new_group", ranks=tuple(members)), _count_named_groups()
    if current.rank not in members:
        return None
    ordered = members if arguments.get("sort_ranks", True) else list(ranks or members)
    name = c10d._process_group_name(ordered, use_hashed_name=True)
    return setup.enter_local_call("new_group", tuple(members), name), None


def _enter_split_group(args: Arguments, kwargs: KeywordArguments) -> Any:
    """Records the call if it splits the world, in which all ranks then take part. A split of
    another group is made by its members alone.

    The lists of ranks are not compared: a rank may leave out those that it is not in.
    """
    parent = args[0] if args else kwargs.get("parent_pg")
    splits_world = parent is None or parent is dist.group.WORLD
    current = current_rank
    if current is None or not splits_world:
        return None
    return current.setup_recorder.enter_call("split_group"), _count_named_groups()


def _leave_new_group(token: Any, returned: bool) -> None:
    call, named_before = token or (None, 0)
    if named_before is None and current_rank is not None:
        current_rank.setup_recorder.leave_creation(call, returned)
    elif call is not None and not returned and _count_named_groups() == named_before:
        # An argument was wrong: the next group gets the name that this one would have had.
        call[0].retract_call(call)
    else:
        SetupRecorder.leave_call(call, returned)


def _count_named_groups() -> int:
    """The number of groups to which torch has given a name. All ranks give names to all groups."""
    return int(c10d._world.group_count)


def _leave_destroy(token: Any, returned: bool) -> None:
    current = current_rank
    if current is None or current.is_group_member:
        return
    if returned and not dist.is_initialized():
        current.set_lifecycle(Lifecycle.DESTROYED)


def _handle_exit() -> None:
    if current_rank is not None:
        current_rank.set_lifecycle(Lifecycle.EXITING)
        # A daemon thread that outlives the interpreter can crash the process.
        current_rank.poller.stop_thread()
        faults.run_guarded("waiting for the backend's threads", wait_until_idle)


def wait_until_idle(timeout_s: float = 0.2) -> None:
    """Waits until torch's own threads, which execute collectives, are idle, at most ``timeout_s``
    seconds. Called before the interpreter exits.

    A worker drops its last references to tensors only after it has reported the call as complete,
    and needs the GIL for tensors that have a Python object. If the interpreter is exiting by then,
    torch ends the process with SIGABRT ("terminate called without an active exception":
    https://github.com/pytorch/pytorch/issues/190489). DDP's own tensors have a Python object only
    because of our kernels, so hangwatch would cause this race.
    """
    # The state and the voluntary context switches of each busy thread, as in /proc.
    activities: dict[Path, list[str]] = {}
    for task in _TASK_DIR.iterdir():
        if _read_text(task / "comm").strip() in WORKER_THREAD_NAMES:
            activities[task] = []
    end = monotonic() + timeout_s
    while activities and monotonic() < end:
        sleep(0.001)  # releases the GIL for a thread that waits for it
        for task, former in list(activities.items()):
            status = _read_text(task / "status")
            activity = [line for line in status.splitlines() if line.startswith(_ACTIVITY_FIELDS)]
            # A thread is busy if it runs or, by its context switches, has ended a wait, such as for
            # the GIL.
            if activity != former or "State:\tR" in status:
                activities[task] = activity
            else:
                del activities[task]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # the thread has exited
        return ""


def _record_uncaught_exceptions() -> None:
    """Records the exception that ends the main thread, before the hook that was set runs."""
    previous_hook = sys.excepthook

    def record_and_pass_on(
        kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        _record_exception(kind, value, trace)
        previous_hook(kind, value, trace)

    sys.excepthook = record_and_pass_on


def patch_spawn() -> None:
    """Records exceptions of functions that torch.multiprocessing spawns: torch catches these, passes
    them to the parent and exits, so that no hook of Python sees them.
    """
    # The attribute torch.multiprocessing.spawn is the function of that name, not the module.
    spawn: Any = sys.modules["torch.multiprocessing.spawn"]
    original = spawn._wrap

    @functools.wraps(original)
    def wrap_spawned(fn: Any, *args: Any) -> Any:
        @functools.wraps(fn)
        def run_recorded(*fn_args: Any) -> Any:
            try:
                return fn(*fn_args)
            except Exception as error:
                _record_exception(type(error), error, error.__traceback__)
                raise

        return original(run_recorded, *args)

    spawn._wrap = wrap_spawned


def _record_exception(
    kind: type[BaseException], value: BaseException, trace: TracebackType | None
) -> None:
    """Records the exception, with the innermost line of the user's code in its traceback."""
    rank = current_rank
    if rank is None:
        return
    try:
        note = describe_exception(value, str(value), trace, rank.recorder.sites)
        rank.poller.handled_exceptions = None
        rank.ring.write_note(EXCEPTION, {**note, "at_ns": monotonic_ns()})
    except Exception as error:  # our error: the user's exception is shown all the same
        faults.record_fault("recording an exception", error)
