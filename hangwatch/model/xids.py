"""NVIDIA's Xid errors: the meaning of each, and the immediate action of NVIDIA's catalogue.

Source: https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, Ampere and later, as of
2026-11-28. Codes of engines that training does not use, such as video decoders, are left out.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class XidAction(enum.Enum):
    """The immediate action after an Xid."""

    CHECK_PROGRAM = "check_program"  # the program caused it
    RESTART_JOB = "restart_job"  # the GPU itself can be used again
    RESET_GPU = "reset_gpu"
    RESTART_NODE = "restart_node"
    CHECK_NVLINK = "check_nvlink"
    NONE = "none"  # the error was corrected, or follows from another Xid


@dataclass(frozen=True, slots=True)
class Xid:
    meaning: str
    action: XidAction


_COPY_ENGINE = Xid("copy engine error", XidAction.RESTART_JOB)
_NVLINK = Xid("NVLink error", XidAction.CHECK_NVLINK)
XIDS: Mapping[int, Xid] = {
    8: Xid("the GPU stopped processing", XidAction.RESTART_JOB),
    11: Xid("invalid command for the GPU", XidAction.CHECK_PROGRAM),
    13: Xid("exception in a kernel, often the program's", XidAction.CHECK_PROGRAM),
    25: Xid("invalid command for the GPU", XidAction.CHECK_PROGRAM),
    31: Xid("memory page fault, often the program's", XidAction.CHECK_PROGRAM),
    32: Xid("corrupted commands for the GPU", XidAction.CHECK_PROGRAM),
    **dict.fromkeys((39, 40, 41, 70, 71, 72, 75, 76, 77, 85), _COPY_ENGINE),
    43: Xid("the GPU stopped a program's work after an error of it", XidAction.NONE),
    45: Xid("the GPU's work was cancelled after another error or an exit", XidAction.NONE),
    46: Xid("the GPU stopped processing", XidAction.RESET_GPU),
    48: Xid("double-bit memory error", XidAction.RESET_GPU),
    62: Xid("the GPU's power controller halted", XidAction.RESET_GPU),
    63: Xid("row remapping recorded", XidAction.NONE),
    64: Xid("row remapping failed", XidAction.RESET_GPU),
    69: Xid("invalid command for the GPU", XidAction.CHECK_PROGRAM),
    74: _NVLINK,
    79: Xid("the GPU has fallen off the bus", XidAction.RESTART_NODE),
    80: Xid("corrupted commands for the GPU", XidAction.CHECK_PROGRAM),
    92: Xid("many corrected memory errors", XidAction.NONE),
    94: Xid("contained memory error", XidAction.RESTART_JOB),
    95: Xid("uncontained memory error", XidAction.RESET_GPU),
    109: Xid("the GPU did not switch contexts in time", XidAction.RESET_GPU),
    110: Xid("security fault", XidAction.RESET_GPU),
    119: Xid("the GPU's system processor does not answer", XidAction.RESET_GPU),
    120: Xid("error of the GPU's system processor", XidAction.RESET_GPU),
    136: Xid("NVLink training failed", XidAction.RESET_GPU),
    140: Xid("unrecovered memory error", XidAction.RESET_GPU),
    143: Xid("the GPU cannot be initialised", XidAction.RESET_GPU),
    **dict.fromkeys(range(144, 151), _NVLINK),
}


def find_xid(now: object) -> Xid | None:
    """The Xid of an observation's value, which begins with its code; None if it is not in the table."""
    code = str(now).split(" ", 1)[0]
    return XIDS.get(int(code)) if code.isdigit() else None
