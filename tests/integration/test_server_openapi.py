"""The API does what its description says; `python -m tests.benchmarks.openapi` asks for more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks import openapi


@pytest.mark.timeout(600)
def test_api_matches_openapi_document(tmp_path: Path) -> None:
    # Without the server's token, one request to each operation shows that it is refused.
    runs = openapi.run_with_each_token(tmp_path, examples=1, phases_of_others="examples,fuzzing")
    assert openapi.list_problems(runs) == []
    of_server, of_job, of_nobody = runs.values()
    assert of_server.answers_by_status[200] > 20
    assert of_server.answers_by_status.total() > 1000
    assert of_nobody.answers_by_status[401] > 20
    assert set(of_nobody.answers_by_status) <= {200, 401, 405}
    assert of_job.answers_by_status[401] > 20
    assert of_job.answers_by_status[422] > 0, "its signatures were not accepted"
