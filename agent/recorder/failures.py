"""Decides whether a call that raised an exception had communicated before.

A call that raised earlier is no call to the peers: the script may catch the exception and make the
call again. gloo and NCCL check the arguments of a call before they queue it, and report what fails
afterwards when its Work is waited for, or by an exception of its own type.
"""

from __future__ import annotations

import enum
import functools

from hangwatch.model.operator_spec import OperatorSpec

from .groups import GroupTrack

_CHECKING_BACKENDS = frozenset({"gloo", "nccl"})
# What torch raises for wrong arguments, whichever backend is used.
_ARGUMENT_ERRORS = (TypeError, ValueError, IndexError, NotImplementedError)
# In messages of RuntimeErrors that are no check of an argument: gloo's own errors, which name the
# line that raised them, and errors of a device, which an earlier kernel may have caused.
_OTHER_MESSAGES = ("/gloo/", "CUDA error")


class FailureRule(enum.IntEnum):
    """Which exceptions of a call show that it did not communicate. The numbers are part of the plans
    that the native recorder gets.
    """

    NONE = 0
    ARGUMENT_ERRORS = 1  # those that torch raises for wrong arguments
    CHECKS = 2  # those, and failed checks, which are plain RuntimeErrors


class FailureOutcome(enum.IntEnum):
    UNKNOWN = 0
    COMMUNICATED = 1
    NOT_MADE = 2


def choose_rule(spec: OperatorSpec, track: GroupTrack) -> FailureRule:
    """The rule for an operator's calls in a group."""
    # With its debug level DETAIL, torch compares the calls of all members first, and raises an
    # exception on all of them. An operator without a Work communicates itself.
    if _compares_calls() or not spec.returns_work:
        return FailureRule.NONE
    parts = str(track.description["backend"]).split(",")
    backends = {part.rpartition(":")[2] for part in parts}
    return FailureRule.CHECKS if backends <= _CHECKING_BACKENDS else FailureRule.ARGUMENT_ERRORS


def judge_failure(error: BaseException, rule: FailureRule) -> FailureOutcome:
    """What an exception that left the operator shows; native/failures.h does the same in C++. The
    first entry of its traceback is the kernel's.
    """
    if rule is FailureRule.NONE or not isinstance(error, Exception):
        return FailureOutcome.COMMUNICATED
    if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
        # Code in Python raised it: a backend's, or a signal handler that ran after the operator.
        is_handler = rule is FailureRule.CHECKS
        return FailureOutcome.COMMUNICATED if is_handler else FailureOutcome.UNKNOWN
    if isinstance(error, _ARGUMENT_ERRORS):
        return FailureOutcome.NOT_MADE
    if isinstance(error, _get_communication_error()):
        return FailureOutcome.COMMUNICATED
    if type(error) is RuntimeError and rule is FailureRule.CHECKS:
        message = str(error)
        if not any(part in message for part in _OTHER_MESSAGES):
            return FailureOutcome.NOT_MADE
        if _OTHER_MESSAGES[0] in message:
            return FailureOutcome.COMMUNICATED
    return FailureOutcome.UNKNOWN


@functools.cache
def _get_communication_error() -> type[Exception]:
    from torch.distributed import DistError

    error_type: type[Exception] = DistError
    return error_type


def _compares_calls() -> bool:
    from torch._C._distributed_c10d import DebugLevel, get_debug_level

    return bool(get_debug_level() == DebugLevel.DETAIL)
