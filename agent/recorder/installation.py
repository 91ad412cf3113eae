"""Installs the recorder: it wraps the functions of torch.distributed that create and destroy
process groups, and makes this process a rank once its rank is known.
"""

from __future__ import annotations

import atexit
import inspect
import os
import threading
from typing import Any

import hangwatch
from hangwatch.model.losses import LossReason
from hangwatch.model.ranks import Lifecycle

from ..environment import identity
from . import backend_threads, dynamo, exceptions, faults, group_setup, kernels, recorder_hooks
from .annotations import UserAnnotations
from .group_origins import get_origin_tracker, track_creations
from .rank import RankProcess, get_current_rank, set_current_rank
from .worlds import choose_launch, find_rendezvous, get_master_address, is_started_as_rank

_NEW_GROUP_PARAMETERS = (
    "ranks",
    "timeout",
    "backend",
    "backend_options",
    "pg_tag",
    "use_local_synchronization",
)
_MAX_START_WAIT_S = 10.0

_start_lock = threading.Lock()


# Why calls may have been made before recording began; None: none were.
_lost_before: LossReason | None = None


def install_recorder() -> None:
    """Prepares this process, and starts recording if its launcher already made it a rank."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    os.register_at_fork(after_in_child=_reset_after_fork)
    wrap_function = group_setup.wrap_function
    wrap_function("init_process_group", _enter_init, _leave_init, _record_lost_world)
    wrap_function("_new_group_with_tag", _enter_new_group, _leave_new_group, _record_lost_group)
    wrap_function("split_group", _enter_split_group, _leave_new_group, _record_lost_group)
    wrap_function("destroy_process_group", _enter_destroy, _leave_destroy, _record_lost_world)
    wrap_function("shrink_group", _enter_destroy, _leave_new_group, _record_lost_group)
    with faults.swallow_errors("watching the creation of process groups"):
        track_creations()
    with faults.swallow_errors("counting the Flight Recorder's hooks"):
        recorder_hooks.count_attached_hooks()
    exceptions.patch_spawn()
    launch = identity.parse_environ(os.environ)
    if launch.rank is not None and is_started_as_rank(launch):
        _start_recording(launch, launch.rank, launch.world_size)


def _become_rank(
    launch: identity.LaunchInfo, rank: int, world_size: int, rendezvous: str = ""
) -> None:
    """Starts recording, or updates the rank of a process that is recorded already."""
    current = get_current_rank()
    if current is not None:
        if (current.rank, current.world_size) != (rank, world_size):
            current.rank, current.world_size = rank, world_size
            current.write_identity()
        return
    chosen = choose_launch(launch, rank, world_size, rendezvous)
    if chosen is not None:
        _start_recording(chosen, rank, world_size)


def _start_recording(launch: identity.LaunchInfo, rank: int, world_size: int) -> None:
    """If it fails, the job runs unwatched, and a message on stderr says so.

    Of several threads that become ranks at the same time, one starts, and the others wait for it.
    """
    if not _start_lock.acquire(timeout=_MAX_START_WAIT_S):
        return
    try:
        if get_current_rank() is None:
            _start_recording_once(launch, rank, world_size)
    finally:
        _start_lock.release()


def _start_recording_once(launch: identity.LaunchInfo, rank: int, world_size: int) -> None:
    global _lost_before
    try:
        current = RankProcess(launch, rank, world_size)
    except OSError as error:
        faults.record_message(f"recording is off, the job is not watched: {error}")
        _lost_before = LossReason.LATE
        return
    set_current_rank(current)
    if _lost_before is not None:
        current.recorder.groups.mark_incomplete(_lost_before)
    kernels.set_recorder(current.recorder)
    setup = current.setup_recorder
    get_origin_tracker().set_listeners(setup.announce_foreign_group, setup.complete_foreign_group)
    hangwatch._is_compiled = dynamo.get_compilation_test()
    hangwatch._watcher = UserAnnotations(current)
    current.poller.start_thread()
    atexit.register(_handle_exit)
    exceptions.hook_exceptions()
    with faults.swallow_errors("exempting hangwatch from compilation"):
        dynamo.exempt_own_code()


def _record_lost_world() -> None:
    """The groups of a world are told apart by its number, so that all streams are concerned."""
    global _lost_before
    current = get_current_rank()
    if current is None:
        _lost_before = LossReason.FAULT
    else:
        current.recorder.groups.mark_incomplete(LossReason.FAULT)


def _record_lost_group() -> None:
    current = get_current_rank()
    if current is not None:
        current.setup_recorder.mark_incomplete(LossReason.FAULT)


def _reset_after_fork() -> None:
    """Stops recording in a forked child: the ring is the parent's, and no thread serves it here."""
    global _lost_before, _start_lock
    _lost_before = None
    _start_lock = threading.Lock()  # a thread that the child does not have may hold the other one
    set_current_rank(None)
    kernels.set_recorder(None)
    get_origin_tracker().clear_listeners()
    hangwatch._watcher = None


def _enter_init(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from torch.distributed import distributed_c10d as c10d

    if c10d.is_initialized():  # the call will raise, and the world stays as it is
        return None
    signature = inspect.signature(inspect.unwrap(c10d.init_process_group))
    arguments = signature.bind(*args, **kwargs).arguments
    rendezvous = find_rendezvous(arguments)
    launch = identity.parse_environ(os.environ, rendezvous)
    rank = arguments.get("rank", -1)
    world_size = arguments.get("world_size", -1)
    rank = launch.rank if rank < 0 else rank
    world_size = launch.world_size if world_size < 0 else world_size
    if rank is not None and world_size > 0:
        _become_rank(launch, rank, world_size, rendezvous)
    current = get_current_rank()
    if current is None:
        return None
    kernels.register_operators()
    current.master_address = rendezvous or get_master_address()
    current.write_identity()
    current.setup_recorder.begin_world(world_size if world_size > 0 else current.world_size)
    current.set_lifecycle(Lifecycle.INITIALISING)
    return current.setup_recorder.enter_call("init_process_group")


def _leave_init(token: Any, returned: bool) -> None:
    import torch.distributed as dist

    if returned and dist.is_initialized():
        launch = identity.parse_environ(os.environ)
        _become_rank(launch, dist.get_rank(), dist.get_world_size())
    current = get_current_rank()
    if current is None:
        return
    current.setup_recorder.leave_call(token, returned)
    if returned:
        current.setup_recorder.complete_world(current.world_size)
        current.set_lifecycle(Lifecycle.INITIALISED)
    elif not dist.is_initialized():
        current.set_lifecycle(Lifecycle.STARTING)


def _enter_new_group(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Records the call, except with use_local_synchronization: then only the members call, so the
    order of their calls proves nothing about other ranks.
    """
    arguments = dict(zip(_NEW_GROUP_PARAMETERS, args, strict=False)) | kwargs
    current = get_current_rank()
    if current is None or arguments.get("use_local_synchronization"):
        return None
    ranks = arguments.get("ranks")
    members = range(current.world_size) if ranks is None else sorted(ranks)
    call = current.setup_recorder.enter_call("new_group", ranks=tuple(members))
    return call, _count_named_groups()


def _enter_split_group(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Records the call if it splits the world, in which all ranks then take part. The members of another group call alone.

    The lists of ranks are not compared: what counts is the list that a rank is in, and it may leave out the others.
    """
    import torch.distributed as dist

    parent = args[0] if args else kwargs.get("parent_pg")
    current = get_current_rank()
    if current is None or not (parent is None or parent is dist.group.WORLD):
        return None
    return current.setup_recorder.enter_call("split_group"), _count_named_groups()


def _leave_new_group(token: Any, returned: bool) -> None:
    if token is None:
        return
    call, named_before = token
    if not returned and _count_named_groups() == named_before:
        # A wrong argument: the next group gets the name of this one, as if it had not been called.
        group_setup.SetupRecorder.retract_call(call)
    else:
        group_setup.SetupRecorder.leave_call(call, returned)


def _count_named_groups() -> int:
    """The number of groups that torch has given a name to, all of them on all ranks."""
    from torch.distributed import distributed_c10d as c10d

    return int(c10d._world.group_count)


def _enter_destroy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Records no call: no rank waits for another to destroy its groups, and a rank may also exit
    without doing so.
    """
    return None


def _leave_destroy(token: Any, returned: bool) -> None:
    import torch.distributed as dist

    current = get_current_rank()
    if current is not None and returned and not dist.is_initialized():
        current.set_lifecycle(Lifecycle.DESTROYED)


def _handle_exit() -> None:
    current = get_current_rank()
    if current is not None:
        current.set_lifecycle(Lifecycle.EXITING)
        # A daemon thread that outlives the interpreter can crash the process.
        current.poller.stop_thread()
        with faults.swallow_errors("waiting for the backend's threads"):
            backend_threads.wait_until_idle()
