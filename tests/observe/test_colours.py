"""One meaning a colour, in pictures and in terminals, and colours that everybody can tell apart."""

from __future__ import annotations

import ast
import itertools
import re

import pytest

from orchestrator.observe import colours
from orchestrator.observe.colours import hex_of, ink_on
from tests.house.rooms import ROOT
from tests.reference.colour import VISION, difference, lab

REPLICAS = {
    f"replica {number}, {parity} stages": code
    for number, tints in enumerate(colours.REPLICA)
    for parity, code in zip(("even", "odd"), tints, strict=True)
}
TIMES = {
    "communication": colours.COMMUNICATION,
    "compute": colours.COMPUTE,
    "idle": colours.IDLE,
}
ACTIONS = {
    "forward": colours.FORWARD[0],
    "forward, odd chunks": colours.FORWARD[1],
    "backward": colours.BACKWARD[0],
    "backward, odd chunks": colours.BACKWARD[1],
}
WHOLE_ACTIONS = {name: ACTIONS[name] for name in ("forward", "backward")}
#: What can stand side by side: areas of one panel, bars of one page.
SIDE_BY_SIDE = {
    "placement": REPLICAS,
    "plan": {**colours.CATEGORY, **TIMES},
    "memory over time": {**colours.CATEGORY, **WHOLE_ACTIONS},
    "pipeline": ACTIONS,
    "goodput": colours.STATE,
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


def near(codes: dict[str, int], vision: str) -> dict[tuple[str, str], float]:
    """The pairs that differ by less than 10 for such eyes, and by how much."""
    seen = {name: lab(hex_of(code), vision) for name, code in codes.items()}
    pairs = {
        pair: difference(seen[pair[0]], seen[pair[1]]) for pair in itertools.combinations(seen, 2)
    }
    return {pair: apart for pair, apart in pairs.items() if apart < 10}


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("picture", SIDE_BY_SIDE)
def test_what_stands_side_by_side_differs_for_everybody(picture, vision):
    codes = SIDE_BY_SIDE[picture]
    assert near(codes, vision) == {}
    paper = lab("#ffffff", vision)
    faint = [
        name for name, code in codes.items() if difference(lab(hex_of(code), vision), paper) < 7
    ]
    assert faint == []


def test_any_two_meanings_of_the_table_differ():
    table = REPLICAS | colours.CATEGORY | TIMES | ACTIONS | colours.STATE
    assert near(table, "usual") == {}


def test_labels_on_areas_can_be_read():
    """Ink and ground have the contrast that WCAG 2.2 (1.4.3, level AA) asks for."""
    for code in (*REPLICAS.values(), *ACTIONS.values()):
        light, dark = sorted((luminance(code), luminance(ink_on(code))), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, code


def luminance(code: int) -> float:
    """The relative luminance of WCAG 2.2."""
    lightness, _, _ = lab(hex_of(code))
    root = (lightness + 16) / 116
    return root**3 if root > 6 / 29 else 3 * (6 / 29) ** 2 * (root - 4 / 29)


def test_no_other_colour_fills_an_area():
    """Pictures take their colours from the table; a hexadecimal one of their own is of lines, of text
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
    assert [hex_of(code) for code in (16, 231, 67, 196, 232, 255)] == [
        "#000000",
        "#ffffff",
        "#5f87af",
        "#ff0000",
        "#080808",
        "#eeeeee",
    ]
