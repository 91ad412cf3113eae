"""The API does what its description says; `python -m tests.benchmarks.openapi` asks for more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks import openapi


@pytest.mark.timeout(600)
def test_api_matches_openapi_document(tmp_path: Path) -> None:
    # Without the token, one request to each operation shows that it is refused.
    with_token, without = openapi.run_with_and_without_token(
        tmp_path, examples=1, phases_without_token="examples,fuzzing"
    )
    assert openapi.list_problems(with_token, without) == []
    assert with_token.answers_by_status[200] > 20
    assert with_token.answers_by_status.total() > 1000
    assert without.answers_by_status[401] > 20
    assert set(without.answers_by_status) <= {200, 401, 405}
