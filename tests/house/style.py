"""`python -m tests.house.style`: how the code reads, in numbers, beside published projects that
train or launch models.

Everything is counted on tokens and syntax trees, so the width of a line and the formatter's choices
do not change it.
"""

from __future__ import annotations

import ast
import csv
import functools
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.house.rooms import MODULES, PACKAGES, room

LONGEST_LINE = 100
MOST_FUNCTION_TOKENS = 350
MOST_FILE_TOKENS = 3000
MOST_POSITIONAL = 5

#: Names that do not say what they hold: they have a meaning only beside the line that assigned
#: them.
PLACEHOLDERS = frozenset(
    """
    asked beside come each enough found given gone good got here how it its kept known left
    less like made matter mine more most much of one ones other others own part parts place
    places put said same so some such taken text thing things told two wanted way ways what
    whole whose why word words yet
    """.split()  # noqa: SIM905
)

#: tokens per code line, lines over 100 columns in %, parallel assignments and conditional
#: expressions per 1,000 code lines, literal packs, placeholder names in %. Measured with this
#: definition in 2026 by the review of architecture.
PEERS = {
    "picotron": (8.9, 8.4, 7.1, 22.2, 0, None),
    "nanochat": (8.2, 6.2, 5.1, 10.7, 0, None),
    "torchtitan": (5.8, 0.5, 0.7, 6.2, 1, 0.2),
    "submitit": (7.6, 2.5, 1.2, 5.8, 0, 0.1),
    "dstack": (5.9, 0.4, 0.2, 3.6, 3, 0.3),
    "OLMo-core": (5.9, 1.4, 0.6, 5.6, 0, 0.2),
    "torchft": (6.1, 0.5, 0.4, 5.3, 0, 0.1),
}

Function = ast.FunctionDef | ast.AsyncFunctionDef
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


class Style(NamedTuple):
    """Counts of one file, or sums of several."""

    code_lines: int = 0
    tokens: int = 0
    lines: int = 0
    long_lines: int = 0
    parallel_assignments: int = 0
    conditional_expressions: int = 0
    packs: int = 0
    names: int = 0
    placeholders: int = 0
    #: functions of more than 350 tokens, files of more than 3,000
    long_functions: int = 0
    long_files: int = 0
    #: statements with two conditional expressions or more
    nested_conditions: int = 0
    #: calls with more than five positional arguments
    positional_calls: int = 0
    #: docstrings whose beginning cannot stand alone
    hanging_docstrings: int = 0

    def __add__(self, other: Style) -> Style:  # type: ignore[override]
        return Style(*map(sum, zip(self, other, strict=True)))

    @property
    def tokens_per_line(self) -> float:
        return self.tokens / max(self.code_lines, 1)

    @property
    def placeholder_percent(self) -> float:
        return 100 * self.placeholders / max(self.names, 1)

    @property
    def parallel_per_1000(self) -> float:
        return 1000 * self.parallel_assignments / max(self.code_lines, 1)

    @property
    def conditional_per_1000(self) -> float:
        return 1000 * self.conditional_expressions / max(self.code_lines, 1)


def documentation_lines(tree: ast.Module) -> set[int]:
    """Lines of strings that stand alone: docstrings, and those after a field."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def bound_names(tree: ast.Module) -> Iterator[str]:
    """Every name that is assigned, and every parameter."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def is_parallel_assignment(node: ast.AST) -> bool:
    """`a, b = x, y`; a swap, which has no other way of being written, is none."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple):
        return False
    targets = {ast.unparse(element) for element in target.elts}
    values = {ast.unparse(element) for element in node.value.elts}
    return targets != values


def packs(node: ast.AST) -> int:
    """`*(a, b)` and `**{"a": 1}` in a call or a display."""
    if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List):
        return 1
    if isinstance(node, ast.keyword) and node.arg is None and isinstance(node.value, ast.Dict):
        return 1
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return sum(key is None and isinstance(value, ast.Dict) for key, value in pairs)
    return 0


def own_expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement without those of the statements inside it."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        yield node
        children = ast.iter_child_nodes(node)
        waiting.extend(child for child in children if not isinstance(child, ast.stmt))


def positional(call: ast.Call) -> int:
    return sum(not isinstance(argument, ast.Starred) for argument in call.args)


#: Beginnings of a docstring that lean on the function's name instead of saying something.
HANGING = frozenset(
    """
    Of As In By From With On To At None Where Those Which That For Into Per Than But And
    """.split()  # noqa: SIM905
)


def hangs(text: str) -> bool:
    words = text.split(maxsplit=1)
    return bool(words) and words[0].rstrip(",:") in HANGING


@functools.cache
def file_style(path: Path) -> Style:
    text = path.read_text()
    tree = ast.parse(text)
    documentation = documentation_lines(tree)
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in LAYOUT and token.start[0] not in documentation
    ]
    tokens_by_line = Counter(token.start[0] for token in tokens)
    code_lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    nodes = list(ast.walk(tree))
    names = list(bound_names(tree))

    def function_tokens(node: Function) -> int:
        return sum(tokens_by_line[line] for line in range(node.lineno, (node.end_lineno or 0) + 1))

    statements = [node for node in nodes if isinstance(node, ast.stmt)]
    conditions = [
        sum(isinstance(node, ast.IfExp) for node in own_expressions(statement))
        for statement in statements
    ]
    documented = [node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | Function)]
    docstrings = [ast.get_docstring(node) or "" for node in documented]
    lines = text.splitlines()
    return Style(
        code_lines=len(code_lines),
        tokens=len(tokens),
        lines=len(lines),
        long_lines=sum(len(line) > LONGEST_LINE for line in lines),
        parallel_assignments=sum(map(is_parallel_assignment, nodes)),
        conditional_expressions=sum(isinstance(node, ast.IfExp) for node in nodes),
        packs=sum(map(packs, nodes)),
        names=len(names),
        placeholders=sum(name in PLACEHOLDERS for name in names),
        long_functions=sum(
            function_tokens(node) > MOST_FUNCTION_TOKENS
            for node in nodes
            if isinstance(node, Function)
        ),
        long_files=int(len(tokens) > MOST_FILE_TOKENS),
        nested_conditions=sum(count > 1 for count in conditions),
        positional_calls=sum(
            positional(node) > MOST_POSITIONAL for node in nodes if isinstance(node, ast.Call)
        ),
        hanging_docstrings=sum(map(hangs, docstrings)),
    )


def rooms_style() -> dict[str, Style]:
    """Room -> its sums."""
    styles: dict[str, Style] = {}
    for module, path in MODULES.items():
        if module not in PACKAGES:
            styles[room(module)] = styles.get(room(module), Style()) + file_style(path)
    return styles


def row(name: str, style: Style) -> str:
    long_percent = 100 * style.long_lines / max(style.lines, 1)
    return (
        f"{name:<26}{style.lines:>7}{style.tokens_per_line:>7.1f}{long_percent:>7.1f}"
        f"{style.parallel_per_1000:>7.1f}{style.conditional_per_1000:>7.1f}{style.packs:>6}"
        f"{style.placeholder_percent:>7.1f}{style.long_functions:>6}{style.long_files:>6}"
        f"{style.nested_conditions:>6}{style.positional_calls:>6}{style.hanging_docstrings:>6}"
    )


#: Limits of each room that only fall: `python -m tests.house.style --lower` writes what was
#: reached.
LIMITS_FILE = Path(__file__).with_name("style_limits.csv")
MEASURES = (
    "tokens_per_line",
    "long_lines",
    "parallel_assignments",
    "packs",
    "placeholder_percent",
    "long_functions",
    "long_files",
    "nested_conditions",
    "positional_calls",
    "hanging_docstrings",
)


def measures(style: Style) -> dict[str, float]:
    return {name: round(float(getattr(style, name)), 1) for name in MEASURES}


def read_limits() -> dict[str, dict[str, float]]:
    """Room -> measure -> the most that it may be."""
    with LIMITS_FILE.open(newline="") as file:
        return {
            line["room"]: {name: float(line[name]) for name in MEASURES}
            for line in csv.DictReader(file)
        }


def lower_limits() -> None:
    """Writes the limits anew: what was reached, where that is less; rooms that are new as they
    are."""
    limits = read_limits() if LIMITS_FILE.exists() else {}
    with LIMITS_FILE.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["room", *MEASURES], lineterminator="\n")
        writer.writeheader()
        for name, style in sorted(rooms_style().items()):
            reached = measures(style)
            known = limits.get(name, reached)
            writer.writerow(
                {"room": name} | {key: min(known[key], reached[key]) for key in MEASURES}
            )


def main() -> None:
    if "--lower" in sys.argv:
        lower_limits()
    print(
        f"{'':<26}{'lines':>7}{'tok/l':>7}{'>100%':>7}{'par':>7}{'cond':>7}{'packs':>6}{'plc%':>7}"
        f"{'fn':>6}{'file':>6}{'cond2':>6}{'pos':>6}{'doc':>6}"
    )
    styles = rooms_style()
    for name in sorted(styles):
        print(row(name, styles[name]))
    total = functools.reduce(Style.__add__, styles.values())
    print(row("all", total))
    for name, (tokens, wide, parallel, conditional, packed, placeholder) in PEERS.items():
        share = "" if placeholder is None else f"{placeholder:.1f}"
        numbers = f"{tokens:>7.1f}{wide:>7.1f}{parallel:>7.1f}{conditional:>7.1f}"
        print(f"{name:<26}{'':>7}{numbers}{packed:>6}{share:>7}")


if __name__ == "__main__":
    main()
