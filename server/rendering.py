"""Templates, their filters, and the headers that every answer carries."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import jinja2
from fastapi import Request
from fastapi.responses import HTMLResponse, Response

from hangwatch import __version__
from hangwatch.types import ranges

HERE = Path(__file__).parent
CSS = HERE / "static" / "hangwatch.css"
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def seconds(value: float | None) -> str:
    """An age as people say it: ``0.4 s``, ``12 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if value is None:
        return "–"
    if value < 10:
        return f"{value:.1f} s"
    whole = int(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def moment(value: datetime | None) -> str:
    return "–" if value is None else value.strftime("%Y-%m-%d %H:%M:%S UTC")


def shapes(value: list[list[int]]) -> str:
    """Shapes as torch prints them, the cut end of a long list as dots."""
    return ", ".join("[" + ", ".join(map(str, shape)) + "]" for shape in value) if value else "–"


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(HERE / "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters.update(seconds=seconds, moment=moment, shapes=shapes, ranges=ranges)
_ENVIRONMENT.globals.update(version=__version__, root="")


def serve_under(prefix: str) -> None:
    """Lets every page's links begin with a path prefix."""
    _ENVIRONMENT.globals["root"] = prefix


def page(template: str, *, answer: int = 200, **values: object) -> HTMLResponse:
    return HTMLResponse(_ENVIRONMENT.get_template(template).render(**{"signed_out": False, **values}), status_code=answer)


def stylesheet() -> Response:
    return Response(CSS.read_bytes(), media_type="text/css")


def wants_json(request: Request) -> bool:
    """JSON only for those who ask for it; a browser and plain curl get the page."""
    accepted = request.headers.get("accept", "")
    return "application/json" in accepted and "text/html" not in accepted
