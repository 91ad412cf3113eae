"""What a thread is doing, told by its stack: what it waits for, and inside of what. Knows Python's own modules and torch's alone."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, replace

from hangwatch.model.threads import Frame, ThreadStack

from .frames import is_torch, is_user, waits_for_work


class Works(enum.Enum):
    """Of the threads and processes that a thread may be waiting for: which of them must work, for the wait to be no hang."""

    NONE = enum.auto()  # what they do tells nothing: it may wait for what nobody will do
    ANY = enum.auto()  # they share its work, and who has none is idle
    NEWEST = enum.auto()  # whoever starts one and waits, waits for that one
    ALL = enum.auto()  # it waits for one of them, and any of them may be that one


@dataclass(frozen=True, slots=True, kw_only=True)
class Doing:
    """``phrase`` goes on from "it", ``advice`` says where to look.

    What it waits for may be up to a ``child`` process of its own, or to another ``thread``: one that is in a file like ``among``. If it
    is ``apart``, neither another thread of the process nor a call of another rank ends it. It may be up to another ``rank`` all the
    same: a file that is written, a key that is set, an answer. It may be ``long`` and yet all is well.
    """

    phrase: str
    advice: str = ""
    child: bool = False
    thread: bool = False
    apart: bool = False
    long: bool = False
    rank: bool = False
    among: str = ""
    works: Works = Works.NONE

    def may_wait_for(self, other: ThreadStack) -> bool:
        """Another thread of its process, or a child's."""
        if not (self.child if other.pid is not None else self.thread):
            return False
        return not self.among or any(re.search(self.among, frame.file) for frame in other.frames)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What one thread does, as far as its stack tells."""

    waits: Doing | None = None
    inside: Doing | None = None

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
        return self._advises.advice if self._advises is not None else ""

    @property
    def long(self) -> bool:
        """Whether the advice is of what may rightly take long."""
        return self._advises is not None and self._advises.long

    @property
    def _advises(self) -> Doing | None:
        return next((d for d in (self.inside, self.waits) if d is not None and d.advice), None)


# Where a process of it is that imports the program first, as it was not forked: what for is not known yet. Torch has a spawn.py, too.
_BEGINS = r"(?<!/torch)/multiprocessing/(spawn|forkserver)\.py$|/loky/backend/(spawn|popen_loky_posix)\.py$"
_MULTIPROCESSING = rf"/multiprocessing/process\.py$|{_BEGINS}"

_THREAD = Doing(
    phrase="waits for another thread",
    advice="Look for the thread that holds the lock or should give the signal: the other threads' stacks are here.",
    thread=True,
    works=Works.ALL,
)
_LOCK = Doing(
    phrase="waits for a lock",
    advice="Look for who holds it: another thread, this very one (a Lock cannot be taken twice), or, after a fork, nobody that runs.",
    thread=True,
    works=Works.ALL,
)
_JOIN = Doing(
    phrase="waits for a thread to end",
    advice="Look at what that thread does: it does not come to its end.",
    thread=True,
    works=Works.ALL,
)
_ITEM = Doing(
    phrase="waits for an item of a queue",
    advice="Look for the thread that should fill the queue.",
    thread=True,
    works=Works.ALL,
)
_ROOM = Doing(
    phrase="waits for a queue to be emptied",
    advice="Look for the thread that should empty the queue.",
    thread=True,
    works=Works.ALL,
)
_PROCESS = Doing(
    phrase="waits for another process",
    advice="Look at what that process does: it answers no more.",
    child=True,
    among=_MULTIPROCESSING,
    works=Works.ANY,
    apart=True,
    rank=True,
)
_POOL = Doing(
    phrase="waits for the result of a pool",
    advice="Look at what the pool's workers do, and give the wait a timeout.",
    child=True,
    thread=True,
    among=rf"/(concurrent/futures/\w+|multiprocessing/pool|loky/process_executor)\.py$|{_BEGINS}",
    works=Works.ANY,
)
_CHILD = Doing(
    phrase="waits for a child process to end",
    advice="Look at what that process does, and give the wait a timeout.",
    child=True,
    works=Works.NEWEST,
    apart=True,
)
_FORKED = replace(_CHILD, among=_MULTIPROCESSING)
_NETWORK = Doing(
    phrase="waits for an answer over the network",
    advice="Look at the other end, and give the connection a timeout.",
    apart=True,
    rank=True,
)
_INPUT = Doing(
    phrase="waits for somebody's input",
    advice="Nobody will type anything there: take the prompt or the breakpoint out.",
    apart=True,
)
_FILE = Doing(
    phrase="waits for a file",
    advice="Look at the storage that it opens, reads or writes: a mount that hangs, a full pipe, a FIFO.",
    apart=True,
)
_FILE_LOCK = Doing(
    phrase="waits for a lock file",
    advice="Look for who holds it: a process that was killed may have left it behind.",
    apart=True,
    rank=True,
)
_STORE = Doing(phrase="waits for a key of a store", advice="Look for the rank that should set this key.", apart=True, rank=True)
_SLEEP = Doing(
    phrase="sleeps",
    advice="If it polls, what it polls for has not come: look at that, and limit the loop.",
    apart=True,
    rank=True,
)
_REPLY = Doing(
    phrase="waits for the reply of another rank",
    advice="Look at what the worker that it calls does, and give the call a timeout.",
    rank=True,
)
_FUTURE = Doing(
    phrase="waits for a Future or a Work of torch's",
    advice="If a remote call is to bring its value, look at what the worker that it calls does.",
    rank=True,
)
_EVENTS = Doing(phrase="waits in its event loop", advice="Look for the task that is not done.", rank=True)
_BATCH = Doing(
    phrase="waits for a batch of its DataLoader",
    advice="Look at what the workers read and at their locks; DataLoader(timeout=...) makes an exception of such a wait.",
    child=True,
    apart=True,
    among=rf"/torch/utils/data/_utils/worker\.py$|{_BEGINS}",
    works=Works.ANY,
)
EXIT = Doing(
    phrase="at interpreter exit",
    advice="Python joins its threads and pools before it ends: one of them does not come to its end.",
)

# (file, function, what it is doing). Of the frames between the innermost and the user's code, the outermost that is here counts.
_PYTHON = r"(?:^|/)lib(?:64)?/python3[^/]*/"
_TORCH = r"(?:^|/)torch/"
_WAITS = [
    (_TORCH + r"utils/data/dataloader\.py$", r"_?(try_get|get|next)_data|__next__", _BATCH),
    (_TORCH + r"utils/file_baton\.py$", r"wait", _FILE_LOCK),
    (_TORCH + r"distributed/rpc/(api|functions|rref_proxy)\.py$", r".*", _REPLY),
    (_TORCH + r"(distributed/rendezvous|distributed/elastic/.*)\.py$", r".*", _STORE),
    (_PYTHON + r"subprocess\.py$", r".*", _CHILD),
    (_PYTHON + r"multiprocessing/(process|popen_\w+)\.py$", r"join|wait|poll", _FORKED),
    (_PYTHON + r"multiprocessing/pool\.py$", r".*", _POOL),
    (_PYTHON + r"concurrent/futures/\w+\.py$", r"result|exception|wait|as_completed|result_iterator|shutdown|_python_exit|__exit__", _POOL),
    (_PYTHON + r"multiprocessing/(queues|connection|managers|synchronize|reduction)\.py$", r".*", _PROCESS),
    (_PYTHON + r"multiprocessing/forkserver\.py$", r"read_signed", _PROCESS),
    (_PYTHON + r"queue\.py$", r"get", _ITEM),
    (_PYTHON + r"queue\.py$", r"put|join", _ROOM),
    (_PYTHON + r"threading\.py$", r"_?join|_wait_for_tstate_lock|_shutdown", _JOIN),
    (_PYTHON + r"threading\.py$", r"wait|wait_for|acquire|__enter__", _THREAD),
    (_PYTHON + r"(bdb|pdb|cmd|code|getpass)\.py$", r".*", _INPUT),
    (_PYTHON + r"(socket|ssl|socketserver|http/.*|urllib/.*|xmlrpc/.*|ftplib|smtplib|imaplib)\.py$", r".*", _NETWORK),
    (_PYTHON + r"asyncio/.*\.py$", r".*", _EVENTS),
    (_PYTHON + r"selectors\.py$", r"select", Doing(phrase="waits for input or output", rank=True)),
]  # fmt: skip

# What the innermost line itself says, where it waits inside an interpreter's or a library's C code.
_TEXTS = [
    (r"\b(input|breakpoint)\s*\(|\bstdin\b", _INPUT),
    (r"\bos\.wait\w*\s*\(", _CHILD),
    (r"\b(flock|lockf)\s*\(", _FILE_LOCK),
    (r"\.\s*(recv|recv_into|recvfrom|accept|connect|sendall)\s*\(|\burlopen\s*\(", _NETWORK),
    (r"\b\w*store\.(get|wait|multi_get)\s*\(|\.\s*wait\s*\(\s*\[", _STORE),  # a Work's takes no list
    (r"\bopen\s*\(|\bos\.(open|read|write|fsync|sync)\s*\(|\.\s*(read|readline|readinto|write|flush)\s*\(", _FILE),
    (r"\bprint\s*\(", Doing(phrase="waits to print", advice="Look at who reads its output: a full pipe blocks whoever writes to it.")),
    (r"\.\s*acquire\s*\(|\bwith\b.*(lock|mutex|sem)", _LOCK),
    (r"\bsleep\s*\(", _SLEEP),
    (r"\.\s*to_here\s*\(|\brpc_sync\s*\(", _REPLY),
    (r"\.\s*wait\s*\(\s*\)", _FUTURE),  # those of Python's own are in its modules
]

_WRITES = Doing(phrase="while it writes a checkpoint", advice="Look at the storage that it writes to.", long=True)
_READS = Doing(phrase="while it reads a checkpoint", advice="Look at the storage that it reads from.", long=True)
_COMPILES = Doing(
    phrase="while it compiles",
    advice="The others do not compile now: look for a shape or a branch that only this rank has.",
    long=True,
)
_LOGS = Doing(
    phrase="while it logs",
    advice="Look at where its log goes: a full pipe or a server that does not answer blocks whoever logs.",
)
_DATASET = Doing(phrase="in the dataset of its DataLoader", advice="Look at what the dataset reads or waits for there.")
_BUILDS = Doing(
    phrase="while it builds an extension",
    advice="Look at the compiler's output, and for a lock file left in the build folder.",
)
_DOWNLOADS = Doing(phrase="while it downloads", advice="Look at the network of its host.", long=True)
_DESTROYS = Doing(
    phrase="in destroy_process_group",
    advice="It has left the job's loop: look for what ended it there before the others.",
)
_INITIALISES = Doing(
    phrase="in init_process_group",
    advice="Look at MASTER_ADDR, MASTER_PORT and WORLD_SIZE, and at who did not come.",
)
_REPORTS = Doing(phrase="while it reports an exception", advice="Look at the exception first.")
_COPIES = Doing(phrase="while it copies or removes files", advice="Look at the storage of these files.")

# The innermost frame of all that is here counts.
_INSIDE = [
    (_TORCH + r"utils/data/_utils/fetch\.py$", r".*", _DATASET),
    (_TORCH + r"distributed/checkpoint/|(?:^|/)safetensors/", r".*(save|write|commit).*", _WRITES),
    (_TORCH + r"serialization\.py$", r".*save.*|.*write.*|_open_file.*|__exit__", _WRITES),
    (r"", r".*(save|write|dump).*(checkpoint|ckpt|snapshot).*|.*(checkpoint|ckpt|snapshot).*(save|write|dump).*", _WRITES),
    (_TORCH + r"(serialization\.py$|distributed/checkpoint/)|(?:^|/)safetensors/", r".*load.*|.*read.*", _READS),
    (_TORCH + r"(_dynamo/convert_frame|_inductor/(async_compile|codecache|compile_fx|graph|scheduler))\.py$|(?:^|/)triton/compiler/",
     r".*compil.*|_convert_frame.*|wait|load.*", _COMPILES),
    (_TORCH + r"utils/cpp_extension\.py$", r".*", _BUILDS),
    (_TORCH + r"hub\.py$", r".*", _DOWNLOADS),
    (_TORCH + r"distributed/distributed_c10d\.py$", r"destroy_process_group|_abort_process_group|_shutdown_backend", _DESTROYS),
    (_TORCH + r"distributed/distributed_c10d\.py$", r"init_process_group", _INITIALISES),
    (_PYTHON + r"(threading\.py$|concurrent/futures/\w+\.py$|multiprocessing/util\.py$)", r"_shutdown|_python_exit|_exit_function", EXIT),
    (_PYTHON + r"(traceback|linecache)\.py$", r".*", _REPORTS),
    (r"", r"\w*excepthook", _REPORTS),
    (_PYTHON + r"logging/\w+\.py$", r".*", _LOGS),
    (_PYTHON + r"shutil\.py$", r".*", _COPIES),
]  # fmt: skip

_Row = tuple[re.Pattern[str], re.Pattern[str], Doing]


def _compiled(table: list[tuple[str, str, Doing]]) -> list[_Row]:
    return [(re.compile(file), re.compile(function), doing) for file, function, doing in table]


_WAIT_ROWS, _INSIDE_ROWS = _compiled(_WAITS), _compiled(_INSIDE)
_TEXT_ROWS = [(re.compile(pattern, re.IGNORECASE), doing) for pattern, doing in _TEXTS]


def activity(stack: ThreadStack | None) -> Activity:
    """What a thread does. Empty where its stack says nothing that is known here."""
    if stack is None or not stack.frames:
        return Activity()
    frames = stack.frames
    library = frames[: next((i for i, frame in enumerate(frames) if is_user(frame)), len(frames))]
    waits = next((doing for frame in reversed(library) if (doing := _find(_WAIT_ROWS, frame)) is not None), None)
    if waits is None and not stack.active:
        waits = next((doing for pattern, doing in _TEXT_ROWS if pattern.search(frames[0].text or "")), None)
    return Activity(waits=waits, inside=next((doing for frame in frames if (doing := _inside(frame)) is not None), None))


def waits_apart(stack: ThreadStack | None) -> bool:
    """Whether a thread certainly waits for something that comes neither from another thread of its process nor from another rank."""
    waits = activity(stack).waits
    if stack is None or waits is None or is_torch(stack.frames[0]) or stack.frames[0].polls is not None:
        return False
    return waits.apart and (waits is _STORE or not waits_for_work(stack))


def _inside(frame: Frame) -> Doing | None:
    if frame.handler is not None:
        advice = "Look at the exception first, then at what its handler waits for."
        return Doing(phrase=f"in an exception handler ({frame.handler})", advice=advice)
    return _find(_INSIDE_ROWS, frame)


def _find(rows: list[_Row], frame: Frame) -> Doing | None:
    name = frame.function.rpartition(".")[2]
    return next((doing for file, function, doing in rows if function.fullmatch(name) and file.search(frame.file)), None)
