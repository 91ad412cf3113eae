"""``python docs/site/render_diagrams.py mermaid.min.js``: docs/diagrams/*.mmd become SVG.

The pictures are committed, so that the site is built without Mermaid and readers need no
network. ``npm pack mermaid@11`` fetches the script (package/dist/mermaid.min.js); Chromium
runs it. Each picture holds the hash of its source, which a test compares.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from pathlib import Path

DIAGRAMS_DIR = Path(__file__).resolve().parents[1] / "diagrams"
RENDER = """
const [source, done] = arguments;
mermaid.initialize({startOnLoad: false, theme: "neutral", htmlLabels: false,
                    flowchart: {htmlLabels: false}, fontFamily: "sans-serif"});
mermaid.render("diagram", source).then(({svg}) => done(svg), error => done("error: " + error));
"""


def hash_source(source: str) -> str:
    """The mark of a diagram's source, as its picture holds it."""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def main() -> int:
    from tests.harness.browser import open_browser

    script = Path(sys.argv[1]).resolve().as_uri()
    with tempfile.TemporaryDirectory() as profile, open_browser(Path(profile)) as browser:
        page = Path(profile) / "page.html"
        page.write_text(f'<body><script src="{script}"></script></body>', encoding="utf-8")
        browser.get(page.as_uri())
        for path in sorted(DIAGRAMS_DIR.glob("*.mmd")):
            source = path.read_text(encoding="utf-8")
            svg = browser.execute_async_script(RENDER, source)
            if svg.startswith("error"):
                print(f"{path.name}: {svg}", file=sys.stderr)
                return 1
            svg = svg.replace('style="max-width', 'style="background-color: white; max-width', 1)
            marked = f"<!-- source: {hash_source(source)} -->\n{svg}\n"
            path.with_suffix(".svg").write_text(marked, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(DIAGRAMS_DIR.parents[1]))
    sys.exit(main())
