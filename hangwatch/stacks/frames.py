"""Whose code a frame is, by its path alone: the user's, torch's, a library's or Python's own."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from hangwatch.model.calls import Site
from hangwatch.model.ranks import Frame, Place, ThreadStack

F = TypeVar("F", bound=Callable[..., Any])

# Paths are matched from their beginnings: a search would try each character, ten times as slowly.
_TORCH_PATH = re.compile(r"(.*/)?torch/")
_LIBRARY_PATH = re.compile(
    r".*/((site|dist)-packages|lib(64)?/python3[^/]*)/|<frozen |<(?!string>|stdin>)|python3"
)
_PYTHON_FILE = re.compile(r"\.py[cw]?$")  # the end of a name: folders may be .pyenv
# All modules of the recorder, relative to its folder. They are recognized by name where the recorder
# runs from its source tree: stacks come from other hosts, and users may have a folder
# agent/recorder of their own. Installed, the recorder is a library like any other.
RECORDER_MODULES = (
    "annotations", "callers", "calls", "checks/inspection", "checks/settings", "checks/tensors",
    "core_dumps", "device", "dynamo", "exceptions", "faults", "graphs", "group_origins", "group_setup",
    "groups", "installation", "kernels", "nccl", "native/build", "native/cache", "native/check",
    "native/library", "poller", "python_kernel", "recorder", "ring_file", "stack_dumps", "streams",
    "writer",
)  # fmt: skip
_RECORDER_PATH = re.compile(rf"(.*/)?agent/recorder/({'|'.join(RECORDER_MODULES)})\.py$")
# A line of the user's that itself waits for communication or for the device, as in `work.wait()`.
_WAITING_TEXT = re.compile(
    r"\.\s*(wait|wait_tensor|synchronize|item|tolist|cpu|backward|result|block_current_stream)\s*\("
)
_WORK_WAIT_TEXT = re.compile(r"\.\s*wait\s*\(")
# Torch's own lines that wait for something else: files, other processes, a compiler.
_TORCH_OTHER_WAIT_PATH = re.compile(
    r"(.*/)?torch/(serialization|storage|hub|multiprocessing/|package/|utils/(data/|file_baton|cpp_extension))"
)


def remember_answer(find: F) -> F:
    """Keeps what a function finds in a stack with that stack, which never changes. Each diagnosis asks
    the same of it, several times, and the search takes milliseconds if the stack is deep.
    """

    @functools.wraps(find)
    def find_once(stack: ThreadStack | None, *details: Any) -> Any:
        if stack is None:
            return find(stack, *details)
        # The name starts with an underscore, so that no encoder takes it for a field.
        answers = vars(stack).setdefault("_answers", {})
        question = (find.__name__, *details)
        if question not in answers:
            answers[question] = find(stack, *details)
        return answers[question]

    return cast(F, find_once)


def is_torch_frame(frame: Frame) -> bool:
    return bool(_TORCH_PATH.match(frame.file))


def is_library(file: str) -> bool:
    """Whether it is not the user's: installed, native, or of Python, torch or hangwatch."""
    patterns = (_TORCH_PATH, _LIBRARY_PATH, _RECORDER_PATH)
    return _is_native(file) or any(pattern.match(file) for pattern in patterns)


def _is_native(file: str) -> bool:
    is_python = _PYTHON_FILE.search(file) or file.startswith("<") or "/ipykernel" in file
    return not is_python


def is_user_frame(frame: Frame) -> bool:
    """Whether a frame is outside torch, site-packages, the standard library and the recorder."""
    return not is_library(frame.file)


@remember_answer
def runs_user_code(stack: ThreadStack) -> bool:
    """Whether any of a thread's frames is the user's."""
    return any(map(is_user_frame, stack.frames))


@remember_answer
def runs_torch_code(stack: ThreadStack) -> bool:
    """Whether any of a thread's frames is torch's."""
    return any(map(is_torch_frame, stack.frames))


@remember_answer
def is_in_file(stack: ThreadStack, pattern: str) -> bool:
    """Whether the file of any of a thread's frames matches."""
    return any(re.search(pattern, frame.file) for frame in stack.frames)


def _find_caller_frame(stack: ThreadStack | None) -> Frame | None:
    """The innermost frame that is neither native nor the recorder's: a thread in the recorder's kernel
    is in the call that it records.
    """
    for frame in stack.frames if stack is not None else ():
        if not _is_native(frame.file) and not _RECORDER_PATH.match(frame.file):
            return frame
    return None


def find_user_frame(frames: Sequence[Frame]) -> Frame | None:
    """The user's innermost frame. A frame without a file counts only if no other frame is the user's, as in
    ``python -c``: libraries create functions with ``exec``.
    """
    user_frames = [frame for frame in frames if is_user_frame(frame)]
    in_files = (frame for frame in user_frames if not frame.file.startswith("<"))
    return next(in_files, None) or next(iter(user_frames), None)


def find_innermost_user_frame(frames: Sequence[Frame]) -> Frame | None:
    """The user's innermost frame, else that of a library other than Python and torch."""
    return find_user_frame(frames) or next(filter(is_installed_frame, frames), None)


def find_lines(stack: ThreadStack | None) -> tuple[Place, ...]:
    """The places of a thread's Python frames."""
    frames = () if stack is None else stack.frames
    return tuple(frame.place for frame in frames if not _is_native(frame.file))


def is_installed_frame(frame: Frame) -> bool:
    """Whether it is in an installed library other than torch."""
    return "-packages/" in frame.file and not is_torch_frame(frame)


@remember_answer
def find_user_site(stack: ThreadStack | None) -> Site | None:
    """The user's own line in a stack."""
    frame = find_innermost_user_frame(stack.frames if stack is not None else ())
    if frame is None:
        return None
    return Site(file=frame.file, line=frame.line, function=frame.function)


@remember_answer
def waits_for_work(stack: ThreadStack | None) -> bool:
    """Whether a thread certainly waits for torch.distributed, instead of computing."""
    frame = _find_caller_frame(stack)
    if frame is None:
        return False
    return "/torch/distributed/" in frame.file or (
        is_user_frame(frame) and bool(_WORK_WAIT_TEXT.search(frame.text or ""))
    )


@remember_answer
def waits_for_communication(stack: ThreadStack | None) -> bool | None:
    """Whether a thread is in torch, in a line that waits, or in a loop that polls a Work; None if
    the stack does not show it.
    """
    frame = _find_caller_frame(stack)
    if frame is None:
        return None
    if is_torch_frame(frame):
        return not _TORCH_OTHER_WAIT_PATH.match(frame.file)
    if not is_user_frame(frame) and not is_installed_frame(frame):
        return False
    if frame.polls is not None:
        return True
    return None if frame.text is None else bool(_WAITING_TEXT.search(frame.text))
