"""Finds where a source file can be made wrong, and how: one small change of its syntax tree each.
Pure.

Operators, comparisons, constants, names of groups, orders of arguments and of lists, removed
statements, negated conditions. Left alone is what no run can see: annotations, messages of errors,
docstrings, and what only type checkers and compilers read.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from typing import NamedTuple

GROUPS = ("tp", "cp", "dp", "pp", "grad", "model", "shard", "replica", "embedding", "kv")
OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
ORDERS = ("sorted", "reversed")
COMMUTE = ("min", "max", "lcm", "gcd", "add", "mul", "logaddexp", "promote_types", "equal")


class Site(NamedTuple):
    path: str
    number: int  # of the file's sites
    line: int
    what: str
    first: int  # line of the statement that the site is in
    last: int  # of a statement that holds others: the last line before them

    @property
    def key(self) -> str:
        """Stays when other lines of the file move."""
        return f"{self.path}: {self.what}"


def sites(path: str, source: str) -> list[Site]:
    """All sites of a file, in its order."""
    file_sites = []
    lines = source.splitlines()
    tree = ast.parse(source)
    statements = _statements(tree)
    for number, (node, change, _) in enumerate(_changes(tree)):
        statement = lines[node.lineno - 1].strip()
        first, last = statements.get(node.lineno, (node.lineno, node.lineno))
        file_sites.append(
            Site(path, number, node.lineno, f"{change} in `{statement}`", first, last)
        )
    return file_sites


def _statements(tree: ast.Module) -> dict[int, tuple[int, int]]:
    """The first and the last line, by line, of the innermost statement there, without statements
    inside it."""
    spans = {}
    for node in ast.walk(tree):  # those inside come later
        if not isinstance(node, ast.stmt):
            continue
        inside = [
            child.lineno for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)
        ]
        last = max(node.lineno, min(inside) - 1) if inside else node.end_lineno or node.lineno
        for line in range(node.lineno, last + 1):
            spans[line] = (node.lineno, last)
    return spans


def mutated(source: str, number: int) -> ast.Module:
    """The tree with the change of one site made."""
    tree = ast.parse(source)
    for at, (_, _, change) in enumerate(_changes(tree)):
        if at == number:
            change()
            return ast.fix_missing_locations(tree)
    raise IndexError(number)


Change = tuple[ast.expr | ast.stmt, str, Callable[[], None]]


def _changes(tree: ast.Module) -> Iterator[Change]:
    for node in _seen(tree):
        if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in OPERATORS:
            yield (
                node,
                f"operator {type(node.op).__name__}",
                _setter(node, "op", OPERATORS[type(node.op)]()),
            )
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            name = type(node.ops[0]).__name__
            yield node, f"comparison {name}", _setter(node, "ops", [OPERATORS[type(node.ops[0])]()])
        elif isinstance(node, ast.Constant):
            yield from _constant(node)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            yield node, "sign", _setter(node, "op", ast.UAdd())
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            negated = ast.UnaryOp(ast.Not(), copy.deepcopy(node.test))
            yield node, "condition negated", _setter(node, "test", negated)
        elif isinstance(node, ast.Call):
            yield from _call(node)
        if (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)) or isinstance(
            node, ast.AugAssign
        ):
            nothing = ast.Expr(ast.Constant(None)) if isinstance(node, ast.Expr) else None
            yield node, "statement removed", _remover(node, nothing)


def _constant(node: ast.Constant) -> Iterator[Change]:
    value = node.value
    if isinstance(value, bool):
        yield node, f"{value}", _setter(node, "value", not value)
    elif isinstance(value, int):
        yield node, f"constant {value}", _setter(node, "value", {0: 1, 1: 0}.get(value, value + 1))
    elif isinstance(value, float) and value == value and value:
        yield node, f"constant {value}", _setter(node, "value", value * 2)
    elif value in GROUPS:
        next_group = GROUPS[(GROUPS.index(value) + 1) % len(GROUPS)]
        yield node, f"group {value!r}", _setter(node, "value", next_group)


def _call(node: ast.Call) -> Iterator[Change]:
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    plain = name not in COMMUTE and not any(isinstance(arg, ast.Starred) for arg in node.args)
    if isinstance(node.func, ast.Name) and node.func.id in ORDERS and len(node.args) == 1:
        yield node, f"{node.func.id} left out", _setter(node, "func", ast.Name("list", ast.Load()))
    elif plain and len(node.args) >= 2 and ast.dump(node.args[0]) != ast.dump(node.args[1]):
        swapped = [node.args[1], node.args[0], *node.args[2:]]
        yield node, "first two arguments swapped", _setter(node, "args", swapped)


def _setter(node: ast.AST, field: str, value: object) -> Callable[[], None]:
    return lambda: setattr(node, field, value)


def _remover(node: ast.stmt, nothing: ast.Expr | None) -> Callable[[], None]:
    def remove() -> None:
        if isinstance(node, ast.Expr) and nothing is not None:
            node.value = nothing.value
        elif isinstance(node, ast.AugAssign):  # x += y becomes x += y only where it never happens
            node.value = ast.IfExp(ast.Constant(True), _neutral(node.op), node.value)

    return remove


def _neutral(op: ast.operator) -> ast.expr:
    return ast.Constant(1) if isinstance(op, ast.Mult | ast.Div | ast.FloorDiv) else ast.Constant(0)


def _seen(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes, parents first, without what is left alone."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "type_params", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(
                child, ast.Raise | ast.JoinedStr | ast.Assert
            ):
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue  # a docstring
            if isinstance(child, ast.If | ast.IfExp) and _elsewhere(child.test):
                continue
            yield child
            yield from _seen(child)


def _elsewhere(test: ast.expr) -> bool:
    condition = ast.unparse(test)
    return any(marker in condition for marker in ("TYPE_CHECKING", "is_compiling"))
