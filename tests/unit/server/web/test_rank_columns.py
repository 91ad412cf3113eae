"""The columns of /ranks: each has a key of its own, and its title toggles the order."""

from __future__ import annotations

import re

from hangwatch.server.web.rank_columns import RANK_COLUMNS, SORT_PATTERN, SORTABLE_COLUMNS


def test_keys_are_unique_and_the_first_column_is_the_rank() -> None:
    keys = [column.key for column in RANK_COLUMNS]
    assert len(set(keys)) == len(keys) and keys[0] == "rank"


def test_address_accepts_both_orders_of_sortable_columns_only() -> None:
    for column in RANK_COLUMNS:
        for sort in (column.key, f"-{column.key}"):
            assert bool(re.fullmatch(SORT_PATTERN, sort)) == (column.key in SORTABLE_COLUMNS)


def test_title_toggles_between_default_and_opposite_order() -> None:
    step = SORTABLE_COLUMNS["step"]
    assert step.toggle_sort("rank") == "-step", "the largest first"
    assert step.toggle_sort("-step") == "step" and step.toggle_sort("step") == "-step"
    assert step.describe_order("-step") == "descending" and step.describe_order("rank") == ""
