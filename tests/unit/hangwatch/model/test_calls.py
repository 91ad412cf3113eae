"""What a ring holds of a call is read back unchanged, and malformed data is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from hangwatch.model.calls import Signature, Site, decode_fields, encode_signature

SIGNATURE = Signature(
    op="gather",
    shapes=((2, 3), ()),
    dtype="float32",
    reduce_op="sum",
    root=1,
    splits=((6,), (4, 2)),
    detail="ranks 0-3",
    numel=6,
    agree=(1 << 64) - 1,
)


def test_all_fields_of_a_signature_are_read_back() -> None:
    defaults = dataclasses.asdict(Signature(op=""))
    assert not dataclasses.asdict(SIGNATURE).items() & defaults.items(), "a default shows nothing"
    data = json.loads(json.dumps(encode_signature(SIGNATURE)))
    assert Signature(**decode_fields(Signature, data)) == SIGNATURE
    data = encode_signature(Signature(op="barrier"))
    assert data == {"op": "barrier"}
    assert Signature(**decode_fields(Signature, data)) == Signature(op="barrier")


def test_members_that_are_no_fields_are_left_out() -> None:
    data = {"file": "train.py", "line": "3", "function": "step", "type": "ValueError"}
    assert Site(**decode_fields(Site, data)) == Site(file="train.py", line=3, function="step")


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"op": "gather", "shapes": 4},
        {"op": "gather", "shapes": [["x"]]},
        {"op": "gather", "splits": [[6]]},
        {"op": "gather", "splits": {"sent": [6]}},
        {"op": "gather", "root": "first"},
        {"op": "gather", "numel": None},
        {"op": "gather", "numel": float("nan")},
        {"op": "gather", "agree": float("inf")},
        {"op": "gather", "root": str(10**400)},
    ],
)
def test_malformed_signature_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises((IndexError, KeyError, TypeError, ValueError)):
        Signature(**decode_fields(Signature, data))
