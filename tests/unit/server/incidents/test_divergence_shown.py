"""Aligned calls as they are shown: in the API's document, as text and on the page."""

from __future__ import annotations

from hangwatch.model.calls import Call, Site
from hangwatch.model.groups import Group
from hangwatch.model.verdicts import AlignedPair, Divergence, Side
from hangwatch.report import terminal
from hangwatch.report.documents import build_document, build_optional_document
from hangwatch.report.text import TERMINAL_COLUMNS, strip_style
from hangwatch.server.http import rendering
from tests.simulation.scripted_job import make_signature


def make_call(seq: int, op: str, line: int, raised: bool = False) -> Call:
    site = Site(file="/home/me/train.py", line=line, function="step")
    return Call(seq=seq, signature=make_signature(op), site=site, raised=raised)


DIVERGENCE = Divergence(
    group=Group(name="0", desc="default_pg", ranks=(0, 1, 2)),
    sides=(Side(ranks=(0, 2)), Side(ranks=(1,))),
    rows=(
        AlignedPair(
            calls=(make_call(5, "all_reduce", 41), make_call(5, "all_reduce", 41)), omitted=3
        ),
        AlignedPair(calls=(make_call(6, "broadcast", 44), None)),
        AlignedPair(
            calls=(make_call(7, "all_reduce", 41), make_call(6, "all_reduce", 41, raised=True))
        ),
    ),
    since_seq=6,
    note="rank 1 left out <call 6>",
)


def test_divergence_document() -> None:
    document = build_document(DIVERGENCE)
    assert document is not None
    assert [row["seq"] for row in document["rows"]] == [[5, 5], [6, None], [7, 6]]
    assert [side["ranks"] for side in document["sides"]] == [[0, 2], [1]]
    assert document["rows"][1]["calls"][1] is None
    assert document["rows"][1]["calls"][0]["site"]["line"] == 44
    assert (document["since_seq"], document["rows"][0]["omitted"], document["group"]["desc"]) == (
        6,
        3,
        "default_pg",
    )
    assert build_optional_document(None) is None


def test_divergence_text() -> None:
    lines = terminal.format_divergence({"divergence": build_document(DIVERGENCE)})
    text = list(map(strip_style, lines))
    assert text[0] == "Calls of group default_pg, aligned"
    assert text[1].split() == ["ranks", "0,", "2", "rank", "1"]
    assert text[2].strip() == "… 3 more that agree"
    assert [line[0] for line in text[3:]] == [" ", "≠", "≠"]
    assert text[4].split() == ["≠", "6", "broadcast", "train.py:44", "[64]", "-"]
    assert "6 all_reduce raised train.py:41" in text[5]
    assert max(map(len, text)) <= TERMINAL_COLUMNS
    assert list(terminal.format_divergence({"divergence": None})) == []


def test_divergence_page() -> None:
    environment = rendering.PageRenderer("").environment
    part, ui = (
        environment.get_template("_divergence.html"),
        environment.get_template("_ui.html").module,
    )
    page = part.render(divergence=build_document(DIVERGENCE), ui=ui)
    assert "rank 1 left out &lt;call 6&gt;" in page
    assert page.count('class="differs"') == 2
    assert page.count("train.py:41") >= 3
    assert part.render(divergence=None, ui=ui).strip() == ""
