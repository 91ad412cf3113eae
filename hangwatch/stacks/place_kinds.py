"""The larger operations that a thread can be in, and the frames that show them.

Only modules of Python and torch are covered.
"""

from __future__ import annotations

from .activity_kinds import ActivityKind
from .wait_kinds import STDLIB, TORCH

INTERPRETER_EXIT = ActivityKind(
    phrase="at interpreter exit",
    advice=("Python joins its threads and pools before it exits: one of them does not end."),
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

# (file, function, place). The innermost frame that matches decides.
INSIDE_TABLE = [
    (TORCH + r"utils/data/_utils/fetch\.py$", r".*", _DATASET),
    (TORCH + r"distributed/checkpoint/|(?:^|/)safetensors/", r".*(save|write|commit).*", _WRITING_CHECKPOINT),
    (TORCH + r"serialization\.py$", r".*save.*|.*write.*|_open_file.*|__exit__", _WRITING_CHECKPOINT),
    (r"", r".*(save|write|dump).*(checkpoint|ckpt|snapshot).*|.*(checkpoint|ckpt|snapshot).*(save|write|dump).*", _WRITING_CHECKPOINT),
    (TORCH + r"(serialization\.py$|distributed/checkpoint/)|(?:^|/)safetensors/", r".*load.*|.*read.*", _READING_CHECKPOINT),
    (TORCH + r"(_dynamo/convert_frame|_inductor/(async_compile|codecache|compile_fx|graph|scheduler))\.py$|(?:^|/)triton/compiler/",
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
]  # fmt: skip
