"""Responses whose JSON is encoded from documents or plain dataclasses.

The route's ``response_model`` only describes them in ``/openapi.json``. The documents are not
validated again on each request: an incident may name 100,000 ranks. A test validates them instead.
"""

from __future__ import annotations

import msgspec
from fastapi.responses import Response


def make_json_response(document: object, status_code: int = 200) -> Response:
    return Response(
        msgspec.json.encode(document), media_type="application/json", status_code=status_code
    )
