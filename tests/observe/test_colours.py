"""One meaning a colour, in pictures and in terminals, and colours that everybody can tell apart."""

from __future__ import annotations

import ast
import itertools
import re

import pytest

from orchestrator import style
from tests.house.rooms import ROOT
from tests.reference.colour import VISION, difference, lab

MEANINGS = {
    **{f"replica {number}": code for number, code in enumerate(style.REPLICA)},
    **style.CATEGORY_COLOUR,
    "communication": style.COMMUNICATION,
    "compute": style.COMPUTE,
    "idle": style.IDLE,
    "forward": style.FORWARD,
    "backward": style.BACKWARD,
}


@pytest.mark.parametrize(
    ("first", "second", "apart"),
    [  # of the paper's own table of tests
        ((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485), 2.0425),
        ((50.0, -1.0, 2.0), (50.0, 0.0, 0.0), 2.3669),
        ((50.0, 2.5, 0.0), (61.0, -5.0, 29.0), 22.8977),
        ((22.7233, 20.0904, -46.6940), (23.0331, 14.9730, -42.5619), 2.0373),
        ((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514), 0.9082),
    ],
)
def test_the_difference_is_the_paper_s(first, second, apart):
    assert difference(first, second) == pytest.approx(apart, abs=5e-5)
    assert difference(second, first) == pytest.approx(apart, abs=5e-5)


@pytest.mark.parametrize("vision", VISION)
def test_any_two_meanings_differ_for_everybody(vision):
    seen = {name: lab(style.hex_of(code), vision) for name, code in MEANINGS.items()}
    near = {
        pair: difference(seen[pair[0]], seen[pair[1]])
        for pair in itertools.combinations(seen, 2)
        if difference(seen[pair[0]], seen[pair[1]]) < 10
    }
    assert near == {}
    paper = lab("#ffffff", vision)
    assert {name for name, colour in seen.items() if difference(colour, paper) < 7} == set()


def test_no_other_colour_fills_an_area():
    """Pictures take their colours from `style`; a hexadecimal one of their own is of lines, of text
    or of paper."""
    neutral = set()
    for path in sorted((ROOT / "orchestrator" / "observe" / "plots").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                neutral |= {hex_colour for hex_colour in re.findall(r"#[0-9a-f]{6}\b", node.value)}
    for colour in neutral:
        _, a, b = lab(colour)
        assert abs(a) < 6 and abs(b) < 16, f"{colour} is no grey"


def test_hex_of_the_codes():
    assert [style.hex_of(code) for code in (16, 231, 67, 196, 232, 255)] == [
        "#000000",
        "#ffffff",
        "#5f87af",
        "#ff0000",
        "#080808",
        "#eeeeee",
    ]
