"""A signature as 64-bit numbers that every process computes alike, and as JSON."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from .calls import Signature
from .operators import Agree

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


def encode_signature(signature: Signature) -> dict[str, Any]:
    """As it stands in a ring and in a heartbeat: absent means default."""
    told: dict[str, Any] = {"op": signature.op, "agree": signature.agree}
    if signature.shapes:
        told["shapes"] = [list(shape) for shape in signature.shapes]
    for name in ("dtype", "reduce_op", "root", "detail"):
        if (value := getattr(signature, name)) is not None:
            told[name] = value
    if signature.numel:
        told["numel"] = signature.numel
    if signature.splits is not None:
        told["splits"] = [list(signature.splits[0]), list(signature.splits[1])]
    return told


def decode_signature(told: dict[str, Any]) -> Signature:
    """The inverse of `encode_signature`. Raises KeyError, TypeError, ValueError or IndexError for anything else."""
    splits = told.get("splits")
    return Signature(
        op=str(told["op"]),
        shapes=tuple(tuple(int(n) for n in shape) for shape in told.get("shapes", ())),
        dtype=_text(told.get("dtype")),
        reduce_op=_text(told.get("reduce_op")),
        root=None if told.get("root") is None else int(told["root"]),
        splits=None if splits is None else (tuple(map(int, splits[0])), tuple(map(int, splits[1]))),
        detail=_text(told.get("detail")),
        numel=int(told.get("numel", 0)),
        agree=int(told.get("agree", 0)),
    )


def _text(value: object) -> str | None:
    return None if value is None else str(value)
