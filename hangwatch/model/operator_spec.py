"""The type of an operator's entry in `hangwatch.model.operators`."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class MustMatch(enum.Flag):
    """The arguments that must be equal on all members. The operator itself always must be."""

    NOTHING = 0
    DTYPE = enum.auto()
    SHAPE = enum.auto()
    REDUCE_OP = enum.auto()
    ROOT = enum.auto()


class P2pRole(enum.Enum):
    """The end of a point-to-point channel on which the operator is called."""

    SEND = "send"
    RECV = "recv"


class BusFactor(enum.Enum):
    """The ratio of bus bandwidth to algorithm bandwidth, for n ranks.

    Source: github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md, and the ``…GetBw`` functions in
    ``src/*.cu``.
    """

    ONE = "1"
    OTHERS_SHARE = "(n-1)/n"
    TWICE_OTHERS_SHARE = "2(n-1)/n"

    def for_ranks(self, rank_count: int) -> float:
        """The ratio for a group of ``rank_count`` members."""
        if self is BusFactor.ONE:
            return 1.0
        others = rank_count - 1
        if self is BusFactor.TWICE_OTHERS_SHARE:
            others *= 2
        return others / rank_count


class ListSide(enum.Enum):
    """The side on which a call takes one tensor per member instead of a single tensor."""

    INPUTS = "inputs"
    OUTPUTS = "outputs"


class OutputScale(enum.Enum):
    """The number of elements in the output, compared with the input of the same rank."""

    SAME = "same"
    TIMES_MEMBERS = "times the number of members"
    PER_MEMBER = "divided by the number of members"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSpec:
    """All that hangwatch knows about one operator. A field whose default applies is absent from its
    entry; ``None`` and ``""`` mean that the operator has no such argument.

    Arguments are named, not numbered, because their positions depend on the version of torch.
    """

    op: str  # what users call it: the name in torch.distributed
    tensors_arg: str  # the argument whose shapes are shown and, with MustMatch.SHAPE, compared
    must_match: MustMatch
    reduce_op_arg: str | None = None
    root_arg: str | None = None  # group rank
    root_is_source: bool = False  # the result is the root's data, and no other member gives any
    split_args: tuple[str, str] | None = None  # (sent, received) sizes per member
    p2p_role: P2pRole | None = None
    peer_arg: str | None = None  # group rank; absent from a receive from any source
    # The recorder.
    returns_work: bool = True  # False: the call itself blocks until it is complete
    # Backends whose Work never reports completion, not even after wait().
    silent_backends: tuple[str, ...] = ()
    # The function of this name in torch.distributed passes exactly one tensor.
    passes_one_tensor: bool = False
    is_generic: bool = False  # derived from the schema of an operator that has no entry here
    # The checks of HANGWATCH_CHECKS.
    input_arg: str = ""  # what this rank contributes
    replicated_arg: str = ""  # what must be equal on all members afterwards
    # Performance.
    size_is_per_rank: bool = False  # ``tensors_arg`` holds one rank's part of the whole array
    bus_factor: BusFactor | None = None  # None: it moves no data
    # PyTorch's Flight Recorder.
    flight_names: tuple[str, ...] = ()  # its names there, apart from ``op``
    analyzer_name: str = ""  # its name in PyTorch's own analyzer, which fails on unknown names
    list_side: ListSide | None = None
    output_scale: OutputScale | None = None  # None: it does not follow from the input

    @property
    def is_p2p(self) -> bool:
        return self.p2p_role is not None

    @property
    def is_rooted(self) -> bool:
        return self.root_arg is not None

    @property
    def is_mutual_wait(self) -> bool:
        """Whether each member waits for all others. A late rank may delay nobody in a broadcast or a
        reduce.
        """
        return not self.is_rooted and not self.is_p2p

    @property
    def compares_shapes(self) -> bool:
        return MustMatch.SHAPE in self.must_match
