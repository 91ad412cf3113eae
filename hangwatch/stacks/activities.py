"""What a thread is doing, told by its stack: what it waits for, and inside of what. Knows Python's
own modules and torch's alone.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, replace

from hangwatch.model.threads import Frame, ThreadStack

from .frames import is_torch_frame, is_user_frame, waits_for_work


class RequiredProgress(enum.Enum):
    """Of the threads and processes that a thread may be waiting for: which of them must work, for
    the wait to be no hang.
    """

    NONE = enum.auto()  # what they do tells nothing: it may wait for what nobody will do
    ANY = enum.auto()  # they share its work, and who has none is idle
    NEWEST = enum.auto()  # whoever starts one and waits, waits for that one
    ALL = enum.auto()  # it waits for one of them, and any of them may be that one


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityKind:
    """``phrase`` goes on from "it", ``advice`` says where to look.

    What it waits for may be up to a ``child`` process of its own, or to another ``thread``: one
    that is in a file like ``among``. If it is ``apart``, neither another thread of the process nor
    a call of another rank ends it. It may be up to another ``rank`` all the same: a file that is
    written, a key that is set, an answer. It may be ``long`` and yet all is well.
    """

    phrase: str
    advice: str = ""
    waits_for_child: bool = False
    waits_for_thread: bool = False
    is_external: bool = False
    may_take_long: bool = False
    waits_for_rank: bool = False
    file_pattern: str = ""
    required_progress: RequiredProgress = RequiredProgress.NONE

    def may_wait_for(self, other: ThreadStack) -> bool:
        """Another thread of its process, or a child's."""
        if not (self.waits_for_child if other.pid is not None else self.waits_for_thread):
            return False
        return not self.file_pattern or any(
            re.search(self.file_pattern, frame.file) for frame in other.frames
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What one thread does, as far as its stack tells."""

    waits: ActivityKind | None = None
    inside: ActivityKind | None = None

    def __bool__(self) -> bool:
        return self.waits is not None or self.inside is not None

    def __str__(self) -> str:
        if self.waits is None and self.inside is not None:
            does = self.inside.phrase.removeprefix("while it ")
            return does if does != self.inside.phrase else f"is {does}"
        return " ".join(doing.phrase for doing in (self.waits, self.inside) if doing is not None)

    @property
    def advice(self) -> str:
        """The place says more of what to do than what is waited for there."""
        return self._advice_source.advice if self._advice_source is not None else ""

    @property
    def may_take_long(self) -> bool:
        """Whether the advice is of what may rightly take long."""
        return self._advice_source is not None and self._advice_source.may_take_long

    @property
    def _advice_source(self) -> ActivityKind | None:
        return next((d for d in (self.inside, self.waits) if d is not None and d.advice), None)


# Where a process of it is that imports the program first, as it was not forked: what for is not
# known yet. Torch has a spawn.py, too.
_CHILD_STARTUP_FILES = r"(?<!/torch)/multiprocessing/(spawn|forkserver)\.py$|/loky/backend/(spawn|popen_loky_posix)\.py$"
_MULTIPROCESSING_FILES = rf"/multiprocessing/process\.py$|{_CHILD_STARTUP_FILES}"

_THREAD = ActivityKind(
    phrase="waits for another thread",
    advice=(
        "Look for the thread that holds the lock or should give the signal: the other threads'"
        " stacks are here."
    ),
    waits_for_thread=True,
    required_progress=RequiredProgress.ALL,
)
_LOCK = ActivityKind(
    phrase="waits for a lock",
    advice=(
        "Look for who holds it: another thread, this very one (a Lock cannot be taken twice), or,"
        " after a fork, nobody that runs."
    ),
    waits_for_thread=True,
    required_progress=RequiredProgress.ALL,
)
_JOIN = ActivityKind(
    phrase="waits for a thread to end",
    advice="Look at what that thread does: it does not come to its end.",
    waits_for_thread=True,
    required_progress=RequiredProgress.ALL,
)
_QUEUE_ITEM = ActivityKind(
    phrase="waits for an item of a queue",
    advice="Look for the thread that should fill the queue.",
    waits_for_thread=True,
    required_progress=RequiredProgress.ALL,
)
_QUEUE_ROOM = ActivityKind(
    phrase="waits for a queue to be emptied",
    advice="Look for the thread that should empty the queue.",
    waits_for_thread=True,
    required_progress=RequiredProgress.ALL,
)
_OTHER_PROCESS = ActivityKind(
    phrase="waits for another process",
    advice="Look at what that process does: it answers no more.",
    waits_for_child=True,
    file_pattern=_MULTIPROCESSING_FILES,
    required_progress=RequiredProgress.ANY,
    is_external=True,
    waits_for_rank=True,
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
)
_USER_INPUT = ActivityKind(
    phrase="waits for somebody's input",
    advice="Nobody will type anything there: take the prompt or the breakpoint out.",
    is_external=True,
)
_FILE = ActivityKind(
    phrase="waits for a file",
    advice=(
        "Look at the storage that it opens, reads or writes: a mount that hangs, a full pipe, a"
        " FIFO."
    ),
    is_external=True,
)
_FILE_LOCK = ActivityKind(
    phrase="waits for a lock file",
    advice="Look for who holds it: a process that was killed may have left it behind.",
    is_external=True,
    waits_for_rank=True,
)
_STORE_KEY = ActivityKind(
    phrase="waits for a key of a store",
    advice="Look for the rank that should set this key.",
    is_external=True,
    waits_for_rank=True,
)
_SLEEP = ActivityKind(
    phrase="sleeps",
    advice="If it polls, what it polls for has not come: look at that, and limit the loop.",
    is_external=True,
    waits_for_rank=True,
)
_RPC_REPLY = ActivityKind(
    phrase="waits for the reply of another rank",
    advice="Look at what the worker that it calls does, and give the call a timeout.",
    waits_for_rank=True,
)
_FUTURE = ActivityKind(
    phrase="waits for a Future or a Work of torch's",
    advice="If a remote call is to bring its value, look at what the worker that it calls does.",
    waits_for_rank=True,
)
_EVENT_LOOP = ActivityKind(
    phrase="waits in its event loop",
    advice="Look for the task that is not done.",
    waits_for_rank=True,
)
_DATALOADER_BATCH = ActivityKind(
    phrase="waits for a batch of its DataLoader",
    advice=(
        "Look at what the workers read and at their locks; DataLoader(timeout=...) makes an"
        " exception of such a wait."
    ),
    waits_for_child=True,
    is_external=True,
    file_pattern=rf"/torch/utils/data/_utils/worker\.py$|{_CHILD_STARTUP_FILES}",
    required_progress=RequiredProgress.ANY,
)
INTERPRETER_EXIT = ActivityKind(
    phrase="at interpreter exit",
    advice=(
        "Python joins its threads and pools before it ends: one of them does not come to its end."
    ),
)

# (file, function, what it is doing). Of the frames between the innermost and the user's code, the
# outermost that is here counts.
_STDLIB = r"(?:^|/)lib(?:64)?/python3[^/]*/"
_TORCH = r"(?:^|/)torch/"
_WAIT_TABLE = [
    (_TORCH + r"utils/data/dataloader\.py$", r"_?(try_get|get|next)_data|__next__", _DATALOADER_BATCH),
    (_TORCH + r"utils/file_baton\.py$", r"wait", _FILE_LOCK),
    (_TORCH + r"distributed/rpc/(api|functions|rref_proxy)\.py$", r".*", _RPC_REPLY),
    (_TORCH + r"(distributed/rendezvous|distributed/elastic/.*)\.py$", r".*", _STORE_KEY),
    (_STDLIB + r"subprocess\.py$", r".*", _CHILD_EXIT),
    (_STDLIB + r"multiprocessing/(process|popen_\w+)\.py$", r"join|wait|poll", _FORKED_CHILD_EXIT),
    (_STDLIB + r"multiprocessing/pool\.py$", r".*", _POOL),
    (_STDLIB + r"concurrent/futures/\w+\.py$", r"result|exception|wait|as_completed|result_iterator|shutdown|_python_exit|__exit__", _POOL),
    (_STDLIB + r"multiprocessing/(queues|connection|managers|synchronize|reduction)\.py$", r".*", _OTHER_PROCESS),
    (_STDLIB + r"multiprocessing/forkserver\.py$", r"read_signed", _OTHER_PROCESS),
    (_STDLIB + r"queue\.py$", r"get", _QUEUE_ITEM),
    (_STDLIB + r"queue\.py$", r"put|join", _QUEUE_ROOM),
    (_STDLIB + r"threading\.py$", r"_?join|_wait_for_tstate_lock|_shutdown", _JOIN),
    (_STDLIB + r"threading\.py$", r"wait|wait_for|acquire|__enter__", _THREAD),
    (_STDLIB + r"(bdb|pdb|cmd|code|getpass)\.py$", r".*", _USER_INPUT),
    (_STDLIB + r"(socket|ssl|socketserver|http/.*|urllib/.*|xmlrpc/.*|ftplib|smtplib|imaplib)\.py$", r".*", _NETWORK),
    (_STDLIB + r"asyncio/.*\.py$", r".*", _EVENT_LOOP),
    (_STDLIB + r"selectors\.py$", r"select", ActivityKind(phrase="waits for input or output", waits_for_rank=True)),
]  # fmt: skip

# What the innermost line itself says, where it waits inside an interpreter's or a library's C code.
_TEXT_TABLE = [
    (r"\b(input|breakpoint)\s*\(|\bstdin\b", _USER_INPUT),
    (r"\bos\.wait\w*\s*\(", _CHILD_EXIT),
    (r"\b(flock|lockf)\s*\(", _FILE_LOCK),
    (r"\.\s*(recv|recv_into|recvfrom|accept|connect|sendall)\s*\(|\burlopen\s*\(", _NETWORK),
    (
        r"\b\w*store\.(get|wait|multi_get)\s*\(|\.\s*wait\s*\(\s*\[",
        _STORE_KEY,
    ),  # a Work's takes no list
    (
        r"\bopen\s*\(|\bos\.(open|read|write|fsync|sync)\s*\(|\.\s*(read|readline|readinto|write|flush)\s*\(",
        _FILE,
    ),
    (
        r"\bprint\s*\(",
        ActivityKind(
            phrase="waits to print",
            advice="Look at who reads its output: a full pipe blocks whoever writes to it.",
        ),
    ),
    (r"\.\s*acquire\s*\(|\bwith\b.*(lock|mutex|sem)", _LOCK),
    (r"\bsleep\s*\(", _SLEEP),
    (r"\.\s*to_here\s*\(|\brpc_sync\s*\(", _RPC_REPLY),
    (r"\.\s*wait\s*\(\s*\)", _FUTURE),  # those of Python's own are in its modules
]

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
    advice="The others do not compile now: look for a shape or a branch that only this rank has.",
    may_take_long=True,
)
_LOGGING = ActivityKind(
    phrase="while it logs",
    advice=(
        "Look at where its log goes: a full pipe or a server that does not answer blocks whoever"
        " logs."
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
    advice="It has left the job's loop: look for what ended it there before the others.",
)
_INITIALIZING_GROUP = ActivityKind(
    phrase="in init_process_group",
    advice="Look at MASTER_ADDR, MASTER_PORT and WORLD_SIZE, and at who did not come.",
)
_REPORTING_EXCEPTION = ActivityKind(
    phrase="while it reports an exception", advice="Look at the exception first."
)
_COPYING_FILES = ActivityKind(
    phrase="while it copies or removes files", advice="Look at the storage of these files."
)

# The innermost frame of all that is here counts.
_INSIDE_TABLE = [
    (_TORCH + r"utils/data/_utils/fetch\.py$", r".*", _DATASET),
    (_TORCH + r"distributed/checkpoint/|(?:^|/)safetensors/", r".*(save|write|commit).*", _WRITING_CHECKPOINT),
    (_TORCH + r"serialization\.py$", r".*save.*|.*write.*|_open_file.*|__exit__", _WRITING_CHECKPOINT),
    (r"", r".*(save|write|dump).*(checkpoint|ckpt|snapshot).*|.*(checkpoint|ckpt|snapshot).*(save|write|dump).*", _WRITING_CHECKPOINT),
    (_TORCH + r"(serialization\.py$|distributed/checkpoint/)|(?:^|/)safetensors/", r".*load.*|.*read.*", _READING_CHECKPOINT),
    (_TORCH + r"(_dynamo/convert_frame|_inductor/(async_compile|codecache|compile_fx|graph|scheduler))\.py$|(?:^|/)triton/compiler/",
     r".*compil.*|_convert_frame.*|wait|load.*", _COMPILING),
    (_TORCH + r"utils/cpp_extension\.py$", r".*", _BUILDING_EXTENSION),
    (_TORCH + r"hub\.py$", r".*", _DOWNLOADING),
    (_TORCH + r"distributed/distributed_c10d\.py$", r"destroy_process_group|_abort_process_group|_shutdown_backend", _DESTROYING_GROUP),
    (_TORCH + r"distributed/distributed_c10d\.py$", r"init_process_group", _INITIALIZING_GROUP),
    (_STDLIB + r"(threading\.py$|concurrent/futures/\w+\.py$|multiprocessing/util\.py$)", r"_shutdown|_python_exit|_exit_function", INTERPRETER_EXIT),
    (_STDLIB + r"(traceback|linecache)\.py$", r".*", _REPORTING_EXCEPTION),
    (r"", r"\w*excepthook", _REPORTING_EXCEPTION),
    (_STDLIB + r"logging/\w+\.py$", r".*", _LOGGING),
    (_STDLIB + r"shutil\.py$", r".*", _COPYING_FILES),
]  # fmt: skip

_PatternRow = tuple[re.Pattern[str], re.Pattern[str], ActivityKind]


def _compile_rows(table: list[tuple[str, str, ActivityKind]]) -> list[_PatternRow]:
    return [(re.compile(file), re.compile(function), doing) for file, function, doing in table]


_WAIT_ROWS, _INSIDE_ROWS = _compile_rows(_WAIT_TABLE), _compile_rows(_INSIDE_TABLE)
_TEXT_ROWS = [(re.compile(pattern, re.IGNORECASE), doing) for pattern, doing in _TEXT_TABLE]


def classify_activity(stack: ThreadStack | None) -> Activity:
    """What a thread does. Empty where its stack says nothing that is known here."""
    if stack is None or not stack.frames:
        return Activity()
    frames = stack.frames
    library = frames[
        : next((i for i, frame in enumerate(frames) if is_user_frame(frame)), len(frames))
    ]
    waits = next(
        (
            doing
            for frame in reversed(library)
            if (doing := _match_rows(_WAIT_ROWS, frame)) is not None
        ),
        None,
    )
    if waits is None and not stack.active:
        waits = next(
            (doing for pattern, doing in _TEXT_ROWS if pattern.search(frames[0].text or "")), None
        )
    return Activity(
        waits=waits,
        inside=next(
            (doing for frame in frames if (doing := _match_inside(frame)) is not None), None
        ),
    )


def waits_for_external(stack: ThreadStack | None) -> bool:
    """Whether a thread certainly waits for something that comes neither from another thread of its
    process nor from another rank.
    """
    waits = classify_activity(stack).waits
    if (
        stack is None
        or waits is None
        or is_torch_frame(stack.frames[0])
        or stack.frames[0].polls is not None
    ):
        return False
    return waits.is_external and (waits is _STORE_KEY or not waits_for_work(stack))


def _match_inside(frame: Frame) -> ActivityKind | None:
    if frame.handler is not None:
        advice = "Look at the exception first, then at what its handler waits for."
        return ActivityKind(phrase=f"in an exception handler ({frame.handler})", advice=advice)
    return _match_rows(_INSIDE_ROWS, frame)


def _match_rows(rows: list[_PatternRow], frame: Frame) -> ActivityKind | None:
    name = frame.function.rpartition(".")[2]
    return next(
        (
            doing
            for file, function, doing in rows
            if function.fullmatch(name) and file.search(frame.file)
        ),
        None,
    )
