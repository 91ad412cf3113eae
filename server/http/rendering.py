"""Templates and their filters, and the responses of all routes with their headers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2
import msgspec
from fastapi import Request
from fastapi.responses import HTMLResponse, Response

from hangwatch import __version__
from hangwatch.model.ranks import format_ranks
from hangwatch.report import text
from hangwatch.report.performance import format_bandwidth, format_duration, format_size
from hangwatch.stacks.frames import is_library
from hangwatch.stacks.trees import ProfileBar

from ..monitor.views import format_verdict

WEB_DIR = Path(__file__).parents[1] / "web"
STATIC_DIR = WEB_DIR / "static"
STYLESHEET_PATH = STATIC_DIR / "hangwatch.css"
FLAME_GRAPH_WIDTH_PX = 1200  # the whole image
INTERNAL_ERROR_DETAIL = "hangwatch-server failed on this request; see its stderr"
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none';"
        " object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
# Template blocks with this prefix are kept up to date; the name after it is the id of their element.
PART_PREFIX = "part_"
# A shape for each state, in a box of 16 by 16; the map's script reads them from the page.
STATE_SHAPES = {
    "running": "M8 3.5a4.5 4.5 0 1 1 0 9a4.5 4.5 0 0 1 0-9z",
    "exited": "M8 2a6 6 0 1 1 0 12a6 6 0 0 1 0-12zM8 4.5a3.5 3.5 0 1 0 0 7a3.5 3.5 0 0 0 0-7z",
    "starting": "M2 6.5h3v3h-3zM6.5 6.5h3v3h-3zM11 6.5h3v3h-3z",
    "waiting": "M3 2.5h3.6v11h-3.6zM9.4 2.5h3.6v11h-3.6z",
    "slow": "M8 2l6.5 12h-13z",
    "missing": "M2 2h12v12h-12zM4.5 4.5v7h7v-7z",
    "lost": "M11.5 1.5l3 3l-10 10l-3-3z",
    "frozen": "M8 1l7 7l-7 7l-7-7z",
    "stalled": "M2 2h12v12h-12z",
    "dead": (
        "M3.5 1l4.5 4.5l4.5-4.5l2.5 2.5l-4.5 4.5l4.5 4.5l-2.5 2.5l-4.5-4.5l-4.5"
        " 4.5l-2.5-2.5l4.5-4.5l-4.5-4.5z"
    ),
}


def format_shapes(value: list[list[int]]) -> str:
    """Shapes as torch prints them; ``–`` if there are none."""
    return ", ".join(str(list(shape)) for shape in value) or "–"


_FILTERS = {
    "seconds": text.format_coarse_age,
    "moment": lambda at: at.strftime("%Y-%m-%d %H:%M:%S UTC"),
    "shapes": format_shapes,
    "ranges": format_ranks,
    "name_ranks": text.name_ranks,
    "short": text.truncate_end,
    "tail": text.truncate_start,
    "clean": text.clean_text,
    "is_library": is_library,
    "sentence": format_verdict,
    "group_name": text.group_name,
    "member": text.resolve_root_rank,
    "duration": format_duration,
    "size_text": format_size,
    "speed_text": format_bandwidth,
}


class PageRenderer:
    """Renders the templates. ``path_prefix`` is that of the links in all pages."""

    def __init__(self, path_prefix: str) -> None:
        self.environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(WEB_DIR / "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self.environment.filters.update(_FILTERS)
        values = self.environment.globals
        values.update(
            version=__version__, state_shapes=STATE_SHAPES, signed_out=False, root=path_prefix
        )
        # `render_parts` renders blocks without their template's imports.
        values["ui"] = self.environment.get_template("_ui.html").make_module()

    def render_page(
        self, template: str, *, status_code: int = 200, **values: object
    ) -> HTMLResponse:
        return HTMLResponse(self.render_text(template, **values), status_code)

    def render_parts(self, template: str, **values: object) -> dict[str, str]:
        """The parts of a page that are kept up to date, by the ids of their elements."""
        page = self.environment.get_template(template)
        context = page.new_context(values)
        return {
            name.removeprefix(PART_PREFIX): "".join(block(context))
            for name, block in page.blocks.items()
            if name.startswith(PART_PREFIX)
        }

    def render_text(self, template: str, **values: object) -> str:
        """The text of a page, an image or a file."""
        return self.environment.get_template(template).render(**values)

    def render_flame_graph(self, title: str, bars: Sequence[tuple[ProfileBar, str, str]]) -> str:
        """An SVG with a bar, its text and its tooltip for each frame, below that of its caller."""
        rows = 1 + max((bar.depth for bar, _, _ in bars), default=0)
        return self.render_text(
            "flamegraph.svg", title=title, bars=bars, rows=rows, width=FLAME_GRAPH_WIDTH_PX
        )


def make_json_response(document: object) -> Response:
    """The JSON of documents or plain dataclasses. A route's ``response_model`` only describes it: an
    incident may name 100,000 ranks, so a test validates the documents, not each request.
    """
    return Response(msgspec.json.encode(document), media_type="application/json")


def make_attachment(name: str, content: str | bytes, media_type: str) -> Response:
    """A file download."""
    return Response(
        content,
        media_type=media_type,
        headers={"Content-Disposition": f'attachment; filename="{name}"'},
    )


def wants_json(request: Request) -> bool:
    """Whether the request accepts JSON and not HTML: browsers and plain curl get the page."""
    accepted = request.headers.get("accept", "")
    return "application/json" in accepted and "text/html" not in accepted
