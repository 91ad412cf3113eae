"""Which thread of a rank makes its calls, and so stands for the rank: not always the main thread."""

from __future__ import annotations

from collections.abc import Sequence

from hangwatch.model.threads import ThreadStack

from .activities import classify_activity
from .frames import is_torch_frame, runs_user_code
from .place_kinds import INTERPRETER_EXIT


def find_calling_thread(threads: Sequence[ThreadStack], uid: int = 0) -> ThreadStack | None:
    """The thread that makes the calls of the stream ``uid``, or of all streams; None without any
    thread.

    A thread in the user's code is preferred: the last one that made a call may be an idle thread of
    a pool or, in an actor, the main thread that only made the group, and the next call comes from
    another one. Without such a thread, or while Python exits, it is the last one that made a call.
    """
    own_threads = [thread for thread in threads if thread.pid is None]
    if not own_threads:
        return threads[0] if threads else None
    main = next((thread for thread in own_threads if thread.main), own_threads[0])
    callers = [thread for thread in own_threads if thread.call_recency is not None]
    callers.sort(key=lambda thread: thread.call_recency or 0)
    if not callers or (len(callers) == 1 and callers[0] is main and runs_user_code(main)):
        return main  # the case of nearly all ranks
    for thread in callers:
        # Code of torch's makes calls as well, such as that of asynchronous checkpoints.
        if uid in thread.called_uids and (runs_user_code(thread) or _runs_torch(thread)):
            return thread
    candidates = [*callers, main]
    if classify_activity(main).inside is not INTERPRETER_EXIT:
        candidates += own_threads
    return next(filter(runs_user_code, candidates), callers[0])


def find_thread_without_calls(threads: Sequence[ThreadStack]) -> ThreadStack | None:
    """The only thread in the user's code that made no call that is known; None if there are several.

    If the thread of the newest call goes on, the call that is missing is up to another one.
    """
    candidates = [
        thread
        for thread in threads
        if thread.pid is None
        and not thread.main
        and not thread.called_uids
        and runs_user_code(thread)
    ]
    return candidates[0] if len(candidates) == 1 else None


def _runs_torch(thread: ThreadStack) -> bool:
    return any(map(is_torch_frame, thread.frames))
