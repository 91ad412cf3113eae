"""What of a call must be equal on every rank, as 64-bit numbers that every process computes alike."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from hangwatch.operators import Agree
from hangwatch.types import Signature

MASK = (1 << 64) - 1
BASE = 0x9E3779B97F4A7C15  # odd, and with bits all over: 2**64 / golden ratio


def with_agreement(signature: Signature, agree: Agree, numels: tuple[int, ...]) -> Signature:
    """`signature` with its hash set; ``numels`` are the element counts of its tensors.

    Element counts stand for shapes: backends move elements, and a view of another shape on one rank is legal.
    """
    parts = [signature.op]
    if agree & Agree.DTYPE:
        parts.append(f"dtype={signature.dtype}")
    if agree & Agree.SHAPE:
        parts.append(f"numels={numels}")
    if agree & Agree.REDUCE_OP:
        parts.append(f"reduce={signature.reduce_op}")
    if agree & Agree.ROOT:
        parts.append(f"root={signature.root}")
    if signature.detail is not None:
        parts.append(signature.detail)
    digest = hashlib.blake2b("|".join(parts).encode(), digest_size=8).digest()
    return replace(signature, agree=int.from_bytes(digest, "little") or 1)


def chain(previous: int, agree: int) -> int:
    """The running hash of a sequence: its value before a call and the call's own hash give the value after it.

    A polynomial in an odd base modulo 2**64 (Karp and Rabin, 1987): a single differing call never cancels out.
    """
    return (previous * BASE + agree) & MASK
