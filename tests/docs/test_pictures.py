"""The picture of README.md shows what its command draws today."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.docs.scripts import script
from tests.house.rooms import ROOT

pytest.importorskip("matplotlib")

PICTURE = ROOT / "docs" / "plan.svg"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def texts(path: Path) -> list[str]:
    """What is written in a picture. matplotlib puts it into comments, and draws its outlines."""
    return re.findall(r"<!-- (.*?) -->", path.read_text())


def shapes(path: Path) -> tuple[list[str], list[float]]:
    """Every attribute of a picture without its numbers, and the numbers."""
    attributes = []
    numbers = []
    for element in ElementTree.parse(path).iter():
        for name, value in element.attrib.items():
            attributes.append(f"{element.tag} {name} {_NUMBER.sub('#', value)}")
            numbers += map(float, _NUMBER.findall(value))
    return attributes, numbers


@pytest.mark.process
def test_the_picture_of_the_readme_is_current(tmp_path):
    pictures = script("make_pictures")
    pictures.draw(tmp_path / "new.svg")
    redraw = "python docs/make_pictures.py"
    assert texts(PICTURE) == texts(tmp_path / "new.svg"), redraw
    old_attributes, old_numbers = shapes(PICTURE)
    attributes, numbers = shapes(tmp_path / "new.svg")
    assert old_attributes == attributes, redraw
    assert old_numbers == pytest.approx(numbers, abs=0.01), redraw
    assert " ".join(pictures.COMMAND[:3]) in (ROOT / "README.md").read_text()
