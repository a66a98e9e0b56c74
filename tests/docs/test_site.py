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
        found = dict(attrs)
        if found.get("id"):
            self.ids.add(found["id"])
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag == "img" and found.get("src"):
            self.links.append(found["src"])


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
    for word in ("tutori", "elast", "ssh_python"):
        assert word in index, word
    lost = []
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:", link):
                continue
            where, place = urldefrag(link)
            target = (path.parent / unquote(where)).resolve() if where else path
            if not target.exists() or (
                place and target in pages and unquote(place) not in pages[target].ids
            ):
                lost.append(f"{path.relative_to(site)}: {link}")
    assert lost == []
