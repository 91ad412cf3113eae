"""What a thread is doing, by its stack: what it waits for, in what larger operation it is, and which
thread of a rank makes its calls.

The tables cover modules of Python and torch only: each row has a file, a function or a source line,
and what it shows.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hangwatch.model.ranks import Frame, ThreadStack

from .frames import (
    is_in_file,
    is_torch_frame,
    is_user_frame,
    remember_answer,
    runs_torch_code,
    runs_user_code,
    waits_for_work,
)


class RequiredProgress(enum.Enum):
    """Which of the awaited threads and processes must work, so that a wait is not a hang."""

    NONE = enum.auto()  # the thread may wait for something else, so work of others shows nothing
    ANY = enum.auto()  # all of them share the thread's work, and those without any are idle
    NEWEST = enum.auto()  # the thread waits for the one that was started last
    ALL = enum.auto()  # the thread waits for one of them, and it is not known for which


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityKind:
    """What a thread waits for, or in what place it is. Without a phrase, that is not known."""

    phrase: str = ""  # a predicate that follows the name of the rank
    advice: str = ""  # where to look
    waits_for_child: bool = False  # a child process may end the wait
    waits_for_thread: bool = False  # another thread of the process may end the wait
    # No other thread of the process and no call of another rank can end the wait. A rank may still
    # end it in another way, such as by writing a file or setting a key.
    is_external: bool = False
    may_take_long: bool = False  # a healthy job may take long, too
    waits_for_rank: bool = False  # another rank may end the wait
    needs_rank: bool = False  # nothing but another rank can end it, unless its timeout does
    # A healthy job may be in such a wait for any time, if all of its ranks are in the same one.
    may_be_idle: bool = False
    awaits_requests: bool = False  # a healthy server may be in such a wait for any time
    # The threads and processes that may end the wait have a frame in a file that matches this.
    file_pattern: str = ""
    required_progress: RequiredProgress = RequiredProgress.NONE
    may_transfer: bool = False  # it may be for data of a connection
    awaits_remote_call: bool = False  # another rank may be executing a function for it

    def __bool__(self) -> bool:
        return bool(self.phrase)

    def may_wait_for(self, other: ThreadStack) -> bool:
        """Whether ``other``, a thread of the same process or of a child, may end the wait."""
        is_child = other.pid is not None
        can_end_wait = self.waits_for_child if is_child else self.waits_for_thread
        if not can_end_wait or not self.file_pattern:
            return can_end_wait
        return is_in_file(other, self.file_pattern)


NOTHING_KNOWN = ActivityKind()


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What one thread does, as far as its stack shows."""

    waits: ActivityKind = NOTHING_KNOWN  # what it waits for
    inside: ActivityKind = NOTHING_KNOWN  # the larger operation in which it is

    def __bool__(self) -> bool:
        return bool(self.waits or self.inside)

    def __str__(self) -> str:
        phrase = self.inside.phrase
        if self.waits or not phrase:
            return f"{self.waits.phrase} {phrase}".strip()
        if phrase.startswith("while it "):
            return phrase.removeprefix("while it ")
        return f"is {phrase}"

    @property
    def advice(self) -> str:
        """Where to look; the advice on a place is more specific than that on a wait."""
        return self.inside.advice or self.waits.advice

    @property
    def may_take_long(self) -> bool:
        """Whether the advice is on something that may take long in a healthy job."""
        kind = self.inside if self.inside.advice else self.waits
        return kind.may_take_long


# Longer names are of no module that the tables know, and could take long to match.
_MATCHED_FUNCTION_CHARS, _MATCHED_FILE_CHARS = 80, 200
_PatternRow = tuple[re.Pattern[str], re.Pattern[str], ActivityKind]


def _compile_rows(*rows: tuple[str, str, ActivityKind]) -> list[_PatternRow]:
    """The rows of a table: the patterns of a file and of a function, and what they show. The pattern of a
    file is matched from its beginning: a search would try each character, ten times as slowly.
    """
    return [(re.compile(file), re.compile(function), kind) for file, function, kind in rows]


STDLIB = r"(?:.*/)?lib(?:64)?/python3[^/]*/"
TORCH = r"(?:.*/)?torch/"

# A child process that was not forked imports the program first: what it will do is not known yet.
# Torch also has a spawn.py.
_CHILD_STARTUP_FILES = r"(?<!/torch)/multiprocessing/(spawn|forkserver)\.py$|/loky/backend/(spawn|popen_loky_posix)\.py$"
_MULTIPROCESSING_FILES = rf"/multiprocessing/process\.py$|{_CHILD_STARTUP_FILES}"

_THREAD = ActivityKind(
    phrase="waits for another thread",
    advice=(
        "Look for the thread that holds the lock or should send the signal: the stacks of the"
        " other threads are shown here."
    ),
    waits_for_thread=True,
    required_progress=RequiredProgress.ALL,
)
LOCK = replace(
    _THREAD,
    phrase="waits for a lock",
    advice=(
        "Look for its holder: another thread, the same thread (a Lock is not reentrant), or, after"
        " a fork, a thread that does not exist here."
    ),
)
_JOIN = replace(
    _THREAD,
    phrase="waits for a thread to end",
    advice="Look at what that thread does: it does not end.",
)
_QUEUE_ITEM = replace(
    _THREAD,
    phrase="waits for an item of a queue",
    advice="Look for the thread that should fill the queue.",
    may_be_idle=True,
)
_QUEUE_ROOM = replace(
    _THREAD,
    phrase="waits for a queue to be emptied",
    advice="Look for the thread that should empty the queue.",
)
_OTHER_PROCESS = ActivityKind(
    phrase="waits for another process",
    advice="Look at what that process does: it does not answer.",
    waits_for_child=True,
    file_pattern=_MULTIPROCESSING_FILES,
    required_progress=RequiredProgress.ANY,
    is_external=True,
    waits_for_rank=True,
    may_be_idle=True,
)
_POOL = ActivityKind(
    phrase="waits for the result of a pool",
    advice="Look at what the pool's workers do, and give the wait a timeout.",
    waits_for_child=True,
    waits_for_thread=True,
    file_pattern=rf"/(concurrent/futures/\w+|multiprocessing/pool|loky/process_executor)\.py$|{_CHILD_STARTUP_FILES}",
    required_progress=RequiredProgress.ANY,
)
_CHILD_EXIT = ActivityKind(
    phrase="waits for a child process to end",
    advice="Look at what that process does, and give the wait a timeout.",
    waits_for_child=True,
    required_progress=RequiredProgress.NEWEST,
    is_external=True,
)
_FORKED_CHILD_EXIT = replace(_CHILD_EXIT, file_pattern=_MULTIPROCESSING_FILES)
_NETWORK = ActivityKind(
    phrase="waits for an answer over the network",
    advice="Look at the other end, and give the connection a timeout.",
    is_external=True,
    waits_for_rank=True,
    may_transfer=True,
    may_be_idle=True,
)
_CONNECTION = ActivityKind(
    phrase="waits for a connection",
    advice="Look at what should connect to it.",
    is_external=True,
    waits_for_rank=True,
    may_be_idle=True,
    awaits_requests=True,
)
_USER_INPUT = ActivityKind(
    phrase="waits for user input",
    advice="There is no one to type anything: remove the prompt or the breakpoint.",
    is_external=True,
)
_FILE = ActivityKind(
    phrase="waits for a file",
    advice=(
        "Look at the storage that it opens, reads or writes: a mount that hangs, a full pipe, a"
        " FIFO."
    ),
    is_external=True,
    may_transfer=True,
)
_PRINTING = ActivityKind(
    phrase="waits to print",
    advice="Look at what reads its output: a full pipe blocks its writer.",
)
_FILE_LOCK = ActivityKind(
    phrase="waits for a lock file",
    advice="Look for its holder: a process that was killed may have left the file behind.",
    is_external=True,
    waits_for_rank=True,
)
STORE_KEY = ActivityKind(
    phrase="waits for a key of a store",
    advice="Look for the rank that should set this key.",
    is_external=True,
    waits_for_rank=True,
    needs_rank=True,
)
_RENDEZVOUS = replace(
    STORE_KEY,
    phrase="waits for other ranks in a rendezvous",
    advice="Look for the ranks that have not come to it.",
)
_BARRIER = replace(_RENDEZVOUS, phrase="waits at a barrier")
SLEEP = ActivityKind(
    phrase="sleeps",
    advice="If it polls for something, that has not happened: check it, and limit the loop.",
    is_external=True,
    waits_for_rank=True,
)
DEVICE = ActivityKind(
    phrase="waits for its device",
    advice=(
        "Look at what it launched before this line: a kernel that does not end, or a stream that waits"
        " for an event; and at the GPU itself (nvidia-smi, dmesg)."
    ),
)
_FUTURE = ActivityKind(
    phrase="waits for a Future or Work object of torch",
    advice="If a remote call is to set its value, look at what the called worker does.",
    waits_for_rank=True,
    awaits_remote_call=True,
)
_RPC_REPLY = replace(
    _FUTURE,
    phrase="waits for the reply of another rank",
    advice="Look at what the worker that it calls does, and give the call a timeout.",
    needs_rank=True,
)
_INPUT_OUTPUT = ActivityKind(
    phrase="waits for input or output",
    waits_for_rank=True,
    may_transfer=True,
    may_be_idle=True,
    awaits_requests=True,
)
_EVENT_LOOP = replace(
    _INPUT_OUTPUT,
    phrase="waits in its event loop",
    advice="Look for the task that does not finish.",
)
_DATALOADER_BATCH = ActivityKind(
    phrase="waits for a batch of its DataLoader",
    advice=(
        "Look at what the workers read and at their locks; DataLoader(timeout=...) turns such a"
        " wait into an exception."
    ),
    waits_for_child=True,
    is_external=True,
    file_pattern=rf"/torch/utils/data/_utils/worker\.py$|{_CHILD_STARTUP_FILES}",
    required_progress=RequiredProgress.ANY,
)
# Among the frames from the innermost to the user's code, the outermost one
# that matches decides.
_WAIT_TABLE = _compile_rows(
    (TORCH + r"utils/data/dataloader\.py$", r"_?(try_get|get|next)_data|__next__", _DATALOADER_BATCH),
    (TORCH + r"utils/file_baton\.py$", r"wait", _FILE_LOCK),
    (TORCH + r"distributed/rpc/(api|functions|rref_proxy)\.py$", r".*", _RPC_REPLY),
    (TORCH + r"(distributed/rendezvous|distributed/elastic/.*)\.py$", r".*", STORE_KEY),
    (TORCH + r"distributed/(rpc/(__init__|backend_registry)|distributed_c10d)\.py$",
     r"init_rpc|_store_based_barrier|_new_process_group_helper", _RENDEZVOUS),
    (TORCH + r"distributed/_symmetric_memory/.*\.py$", r"rendezvous|get_symm_mem_workspace", _RENDEZVOUS),
    (r".*-packages/(?!torch/)", r"(\w+_)?barrier|sync_global_devices|wait_for_everyone", _BARRIER),
    (STDLIB + r"subprocess\.py$", r".*", _CHILD_EXIT),
    (STDLIB + r"multiprocessing/(process|popen_\w+)\.py$", r"join|wait|poll", _FORKED_CHILD_EXIT),
    (STDLIB + r"multiprocessing/pool\.py$", r".*", _POOL),
    (STDLIB + r"concurrent/futures/\w+\.py$", r"result|exception|wait|as_completed|result_iterator|shutdown|_python_exit|__exit__", _POOL),
    (STDLIB + r"multiprocessing/(queues|connection|managers|synchronize|reduction)\.py$", r".*", _OTHER_PROCESS),
    (STDLIB + r"multiprocessing/forkserver\.py$", r"read_signed", _OTHER_PROCESS),
    (STDLIB + r"queue\.py$", r"get", _QUEUE_ITEM),
    (STDLIB + r"queue\.py$", r"put|join", _QUEUE_ROOM),
    (STDLIB + r"threading\.py$", r"_?join|_wait_for_tstate_lock|_shutdown", _JOIN),
    (STDLIB + r"threading\.py$", r"wait|wait_for|acquire|__enter__", _THREAD),
    (STDLIB + r"(bdb|pdb|cmd|code|getpass)\.py$", r".*", _USER_INPUT),
    (STDLIB + r"(socketserver|http/server|xmlrpc/server|wsgiref/.*)\.py$|.*/grpc/_server\.py$", r".*", _CONNECTION),
    (STDLIB + r"socket\.py$", r"accept", _CONNECTION),
    (STDLIB + r"(socket|ssl|http/.*|urllib/.*|xmlrpc/.*|ftplib|smtplib|imaplib)\.py$", r".*", _NETWORK),
    (STDLIB + r"asyncio/.*\.py$|.*/ray/_private/worker\.py$", r".*", _EVENT_LOOP),
    (STDLIB + r"selectors\.py$|.*/zmq/sugar/(poll|socket)\.py$", r"select|poll|recv\w*", _INPUT_OUTPUT),
)  # fmt: skip

# Patterns of source lines, for a thread that waits in C code of the interpreter or of a library.
_TEXT_TABLE = [
    (r"\b(input|breakpoint)\s*\(|\bstdin\b", _USER_INPUT),
    (r"\bos\.wait\w*\s*\(", _CHILD_EXIT),
    (r"\b(flock|lockf)\s*\(", _FILE_LOCK),
    (r"\.\s*accept\s*\(", _CONNECTION),
    (r"\.\s*(recv|recv_into|recvfrom|connect|sendall)\s*\(|\burlopen\s*\(", _NETWORK),
    # `Work.wait` takes no list. A loop may poll a key or a counter of a store.
    (r"\b\w*store\.(get|wait|multi_get|add|check)\s*\(|\.\s*wait\s*\(\s*\[", STORE_KEY),
    (r"(?<!dist)(?<!distributed)\.\s*barrier\s*\(", _BARRIER),
    (r"\bopen\s*\(|\bos\.(open|read|write|fsync|sync)\s*\(", _FILE),
    (r"\.\s*(read|readline|readinto|write|flush)\s*\(", _FILE),
    (r"\bprint\s*\(", _PRINTING),
    (r"\.\s*acquire\s*\(|\bwith\b.*(lock|mutex|sem)", LOCK),
    (r"\bsleep\s*\(", SLEEP),
    (r"\.\s*to_here\s*\(|\brpc_sync\s*\(", _RPC_REPLY),
    (r"\.\s*wait\s*\(\s*\)", _FUTURE),  # Python's own waits are in `_WAIT_TABLE`.
]


# `_run_function` of this module calls each Python function that another rank requested.
_RPC_INTERNALS = re.compile(TORCH + r"distributed/rpc/internal\.py$")

INTERPRETER_EXIT = ActivityKind(
    phrase="at interpreter exit",
    advice="Python joins its threads and pools before it exits: one of them does not end.",
)

_WRITING_CHECKPOINT = ActivityKind(
    phrase="while it writes a checkpoint",
    advice="Look at the storage that it writes to.",
    may_take_long=True,
)
_READING_CHECKPOINT = ActivityKind(
    phrase="while it reads a checkpoint",
    advice="Look at the storage that it reads from.",
    may_take_long=True,
)
_COMPILING = ActivityKind(
    phrase="while it compiles",
    advice="The others are not compiling: look for a shape or a branch that only this rank has.",
    may_take_long=True,
)
_LOGGING = ActivityKind(
    phrase="while it logs",
    advice=(
        "Look at where its log goes: a full pipe, or a server that does not answer, blocks logging."
    ),
)
_DATASET = ActivityKind(
    phrase="in the dataset of its DataLoader",
    advice="Look at what the dataset reads or waits for there.",
)
_BUILDING_EXTENSION = ActivityKind(
    phrase="while it builds an extension",
    advice="Look at the compiler's output, and for a lock file left in the build folder.",
)
_DOWNLOADING = ActivityKind(
    phrase="while it downloads", advice="Look at the network of its host.", may_take_long=True
)
_DESTROYING_GROUP = ActivityKind(
    phrase="in destroy_process_group",
    advice="It has left the training loop: look for the reason why it left before the others.",
)
_INITIALIZING_GROUP = ActivityKind(
    phrase="in init_process_group",
    advice="Check MASTER_ADDR, MASTER_PORT and WORLD_SIZE, and which ranks are absent.",
)
_REPORTING_EXCEPTION = ActivityKind(
    phrase="while it reports an exception", advice="Look at the exception first."
)
_COPYING_FILES = ActivityKind(
    phrase="while it copies or removes files", advice="Look at the storage of these files."
)

# The innermost frame that matches decides.
_INSIDE_TABLE = _compile_rows(
    (TORCH + r"utils/data/_utils/fetch\.py$", r".*", _DATASET),
    (TORCH + r"distributed/checkpoint/|(?:.*/)?safetensors/", r".*(save|write|commit).*", _WRITING_CHECKPOINT),
    (TORCH + r"serialization\.py$", r".*save.*|.*write.*|_open_file.*|__exit__", _WRITING_CHECKPOINT),
    (r"", r"(?=.*(save|write|dump)).*(checkpoint|ckpt|snapshot).*", _WRITING_CHECKPOINT),
    (TORCH + r"(serialization\.py$|distributed/checkpoint/)|(?:.*/)?safetensors/", r".*load.*|.*read.*", _READING_CHECKPOINT),
    (TORCH + r"(_dynamo/convert_frame|_inductor/(async_compile|codecache|compile_fx|graph|scheduler))\.py$|(?:.*/)?triton/compiler/",
     r".*compil.*|_convert_frame.*|wait|load.*", _COMPILING),
    (TORCH + r"utils/cpp_extension\.py$", r".*", _BUILDING_EXTENSION),
    (TORCH + r"hub\.py$", r".*", _DOWNLOADING),
    (TORCH + r"distributed/distributed_c10d\.py$", r"destroy_process_group|_abort_process_group|_shutdown_backend", _DESTROYING_GROUP),
    (TORCH + r"distributed/distributed_c10d\.py$", r"init_process_group", _INITIALIZING_GROUP),
    (STDLIB + r"(threading\.py$|concurrent/futures/\w+\.py$|multiprocessing/util\.py$)", r"_shutdown|_python_exit|_exit_function", INTERPRETER_EXIT),
    (STDLIB + r"(traceback|linecache)\.py$", r".*", _REPORTING_EXCEPTION),
    (r"", r"\w*excepthook", _REPORTING_EXCEPTION),
    (STDLIB + r"logging/\w+\.py$", r".*", _LOGGING),
    (STDLIB + r"shutil\.py$", r".*", _COPYING_FILES),
)  # fmt: skip


@remember_answer
def classify_activity(stack: ThreadStack | None) -> Activity:
    """What a thread does; an empty `Activity` if its stack shows nothing that is known here."""
    if stack is None or not stack.frames:
        return Activity()
    waits = NOTHING_KNOWN
    for frame in stack.frames:
        if is_user_frame(frame):
            break
        outer = _match_rows(_WAIT_TABLE, frame)
        if outer is _THREAD and waits in (_OTHER_PROCESS, _BARRIER):
            # The barrier of multiprocessing is that of threading with a condition of its own.
            outer = _BARRIER
        waits = outer or waits
    if not waits and not stack.active:
        text = stack.frames[0].text or ""
        for pattern, kind in _TEXT_TABLE:
            if re.search(pattern, text, re.IGNORECASE):
                waits = kind
                break
    inside = NOTHING_KNOWN
    for frame in stack.frames:
        inside = _match_rows(_INSIDE_TABLE, frame)
        if frame.handler is not None:
            inside = ActivityKind(
                phrase=f"in an exception handler ({frame.handler})",
                advice="Look at the exception first, then at what its handler waits for.",
            )
        if inside:
            break
    return Activity(waits=waits, inside=inside)


def _match_rows(rows: list[_PatternRow], frame: Frame) -> ActivityKind:
    name = frame.function.rpartition(".")[2][:_MATCHED_FUNCTION_CHARS]
    path = frame.file[-_MATCHED_FILE_CHARS:]
    for file, function, kind in rows:
        if function.fullmatch(name) and file.match(path):
            return kind
    return NOTHING_KNOWN


def list_remote_executions(threads: Sequence[ThreadStack]) -> list[ThreadStack]:
    """The threads of a rank in the user's code of a function that another rank called through
    torch.distributed.rpc. Whose call it is, no stack shows.
    """
    return [thread for thread in threads if thread.pid is None and _executes_remote_call(thread)]


@remember_answer
def _executes_remote_call(stack: ThreadStack) -> bool:
    is_in_user_code = False
    for frame in stack.frames:
        if frame.function == "_run_function" and _RPC_INTERNALS.match(frame.file):
            return is_in_user_code
        is_in_user_code |= is_user_frame(frame)
    return False


def waits_for_external(stack: ThreadStack | None) -> bool:
    """Whether a thread certainly waits for something that neither another thread of its process nor
    a call of another rank provides.
    """
    waits = classify_activity(stack).waits
    if stack is None or not waits.is_external:
        return False
    innermost = stack.frames[0]
    if is_torch_frame(innermost) or innermost.polls is not None:
        return False
    return waits is STORE_KEY or not waits_for_work(stack)


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
        if uid in thread.called_uids and (runs_torch_code(thread) or runs_user_code(thread)):
            return thread
    candidates = [*callers, main]
    if classify_activity(main).inside is not INTERPRETER_EXIT:
        candidates += own_threads
    return next(filter(runs_user_code, candidates), callers[0])


def find_thread_without_calls(threads: Sequence[ThreadStack]) -> ThreadStack | None:
    """The only thread in the user's code that made no call that is known; None if there are several.

    If the thread of the newest call continues, another one is to make the missing call.
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
