"""The site: it builds without a warning, every link in it leads to a page and a place there, and it
has a search."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from tests.house.rooms import ROOT

pytest.importorskip("sphinx")
pytest.importorskip("myst_parser")


class Page(HTMLParser):
    def __init__(self, path: Path):
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if attributes.get("id"):
            self.ids.add(attributes["id"])
        if tag == "a" and attributes.get("href"):
            self.links.append(attributes["href"])
        if tag == "img" and attributes.get("src"):
            self.links.append(attributes["src"])


@pytest.mark.process
@pytest.mark.slow
def test_the_site_builds_and_every_link_in_it_leads_somewhere(tmp_path):
    site = tmp_path / "site"
    argv = [
        sys.executable,
        "-m",
        "sphinx",
        "--fail-on-warning",
        "--keep-going",
        "-q",
        str(ROOT / "docs"),
        str(site),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    pages = {path: Page(path) for path in site.rglob("*.html")}
    assert len(pages) > 30 and (site / "search.html").exists()
    index = (site / "searchindex.js").read_text()
    for term in ("tutori", "elast", "ssh_python"):
        assert term in index, term
    lost = []
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:", link):
                continue
            where, anchor = urldefrag(link)
            target = (path.parent / unquote(where)).resolve() if where else path
            if not target.exists() or (
                anchor and target in pages and unquote(anchor) not in pages[target].ids
            ):
                lost.append(f"{path.relative_to(site)}: {link}")
    assert lost == []
