"""What threads wait for: the kinds of waits, and the frames and lines that show them.

Only modules of Python and torch are covered.
"""

from __future__ import annotations

from dataclasses import replace

from .activity_kinds import ActivityKind, RequiredProgress

STDLIB = r"(?:^|/)lib(?:64)?/python3[^/]*/"
TORCH = r"(?:^|/)torch/"

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
LOCK = ActivityKind(
    phrase="waits for a lock",
    advice=(
        "Look for its holder: another thread, the same thread (a Lock is not reentrant), or, after"
        " a fork, a thread that does not exist here."
    ),
    waits_for_thread=True,
    required_progress=RequiredProgress.ALL,
)
_JOIN = ActivityKind(
    phrase="waits for a thread to end",
    advice="Look at what that thread does: it does not end.",
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
    advice="Look at what that process does: it does not answer.",
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
)
_SLEEP = ActivityKind(
    phrase="sleeps",
    advice="If it polls for something, that has not happened: check it, and limit the loop.",
    is_external=True,
    waits_for_rank=True,
)
_RPC_REPLY = ActivityKind(
    phrase="waits for the reply of another rank",
    advice="Look at what the worker that it calls does, and give the call a timeout.",
    waits_for_rank=True,
)
_FUTURE = ActivityKind(
    phrase="waits for a Future or Work object of torch",
    advice="If a remote call is to set its value, look at what the called worker does.",
    waits_for_rank=True,
)
_EVENT_LOOP = ActivityKind(
    phrase="waits in its event loop",
    advice="Look for the task that does not finish.",
    waits_for_rank=True,
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
# (file, function, wait). Of the frames from the innermost to the user's code, the outermost one that
# matches decides.
WAIT_TABLE = [
    (TORCH + r"utils/data/dataloader\.py$", r"_?(try_get|get|next)_data|__next__", _DATALOADER_BATCH),
    (TORCH + r"utils/file_baton\.py$", r"wait", _FILE_LOCK),
    (TORCH + r"distributed/rpc/(api|functions|rref_proxy)\.py$", r".*", _RPC_REPLY),
    (TORCH + r"(distributed/rendezvous|distributed/elastic/.*)\.py$", r".*", STORE_KEY),
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
    (STDLIB + r"(socket|ssl|socketserver|http/.*|urllib/.*|xmlrpc/.*|ftplib|smtplib|imaplib)\.py$", r".*", _NETWORK),
    (STDLIB + r"asyncio/.*\.py$", r".*", _EVENT_LOOP),
    (STDLIB + r"selectors\.py$", r"select", ActivityKind(phrase="waits for input or output", waits_for_rank=True)),
]  # fmt: skip

# (source line, wait): of a thread that waits in C code of the interpreter or a library.
TEXT_TABLE = [
    (r"\b(input|breakpoint)\s*\(|\bstdin\b", _USER_INPUT),
    (r"\bos\.wait\w*\s*\(", _CHILD_EXIT),
    (r"\b(flock|lockf)\s*\(", _FILE_LOCK),
    (r"\.\s*(recv|recv_into|recvfrom|accept|connect|sendall)\s*\(|\burlopen\s*\(", _NETWORK),
    (
        r"\b\w*store\.(get|wait|multi_get)\s*\(|\.\s*wait\s*\(\s*\[",
        STORE_KEY,
    ),  # a Work's takes no list
    (
        r"\bopen\s*\(|\bos\.(open|read|write|fsync|sync)\s*\(|\.\s*(read|readline|readinto|write|flush)\s*\(",
        _FILE,
    ),
    (
        r"\bprint\s*\(",
        ActivityKind(
            phrase="waits to print",
            advice="Look at what reads its output: a full pipe blocks its writer.",
        ),
    ),
    (r"\.\s*acquire\s*\(|\bwith\b.*(lock|mutex|sem)", LOCK),
    (r"\bsleep\s*\(", _SLEEP),
    (r"\.\s*to_here\s*\(|\brpc_sync\s*\(", _RPC_REPLY),
    (r"\.\s*wait\s*\(\s*\)", _FUTURE),  # those of Python's own are in its modules
]
