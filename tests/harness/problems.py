"""Checks that a reply is a problem document (RFC 9457)."""

from __future__ import annotations

import httpx


def check_problem(response: httpx.Response, status: int) -> str:
    """Returns the detail of a problem document with that status. Raises AssertionError."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["status"] == status
    assert {"type", "title", "detail"} <= set(problem)
    return str(problem["detail"])
