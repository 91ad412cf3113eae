"""The API does what its description says; `python -m tests.benchmarks.openapi` asks ten times as
much.
"""

from __future__ import annotations

from pathlib import Path

from tests.benchmarks import openapi


def test_the_api_is_what_its_description_says(tmp_path: Path) -> None:
    with_token, without = openapi.both(tmp_path, examples=3)
    assert openapi.wrong(with_token, without) == []
    assert with_token.answers[200] > 20
    assert with_token.answers.total() > 1000
    assert set(without.answers) <= {200, 401, 405}
