"""`python docs/make_reference.py` writes docs/reference: configuration, options, verbs and the API,
from the code.

tests/docs/test_reference.py fails when a page is not what this writes.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import msgspec

os.environ["COLUMNS"] = "80"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
HERE = ROOT / "docs" / "reference"
NOTE = "<!-- written by docs/make_reference.py -->\n"


def pages() -> dict[str, str]:
    """File name -> text."""
    return {
        "configuration.md": configuration(),
        "options.md": options(),
        "verbs.md": verbs(),
        "python.md": python(),
        "codes.md": codes(),
    }


# ------------------------------------------------------------------------------------------------
#     structs


class Field:
    """One field of a struct: its type as it is written, its default, and the comments beside and
    above it."""

    def __init__(self, node: ast.AnnAssign, lines: list[str], head: str):
        self.name = ast.unparse(node.target)
        self.type = " ".join(ast.unparse(node.annotation).split())
        self.default = " ".join(ast.unparse(node.value).split()) if node.value else None
        self.about = "; ".join(filter(None, (head, *_comments(node, lines))))


def _comments(node: ast.AnnAssign, lines: list[str]) -> Iterator[str]:
    above = []
    at = node.lineno - 2
    while at >= 0 and lines[at].strip().startswith("#:"):
        above.insert(0, lines[at].strip().removeprefix("#:").strip())
        at -= 1
    yield " ".join(above)
    end = lines[(node.end_lineno or node.lineno) - 1][node.end_col_offset :]
    said = end.partition("#")[2].strip()
    yield "" if said.startswith("type: ignore") else said


def fields(module: str, name: str) -> tuple[str, list[Field]]:
    """The docstring of a class, and its fields."""
    source = (ROOT / (module.replace(".", "/") + ".py")).read_text()
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            found = [
                Field(part, lines, "") for part in node.body if isinstance(part, ast.AnnAssign)
            ]
            for field in found:
                if (field.default or "").startswith("field(default_factory"):
                    field.default = _made_default(module, name, field.name)
            return ast.get_docstring(node) or "", found
    raise KeyError(f"{module}.{name}")


def _made_default(module: str, name: str, field: str) -> str:
    """The default of a field that makes a new one for each struct."""
    struct = getattr(importlib.import_module(module), name)
    (info,) = [info for info in msgspec.structs.fields(struct) if info.name == field]
    return str(info.default_factory())


def table(found: list[Field], prefix: str) -> list[str]:
    rows = ["| key | type | default | |", "|---|---|---|---|"]
    for field in found:
        if field.name.startswith("_"):
            continue
        default = "must be set" if field.default is None else f"`{_cell(field.default)}`"
        rows.append(
            f"| `{prefix}{field.name}` | `{_cell(field.type)}` | {default} | {_text(field.about)} |"
        )
    return [*rows, ""]


def _cell(text: str) -> str:
    """Code in a table: `|` would end its cell."""
    return text.replace("|", "\\|")


def _text(text: str) -> str:
    """Words in a table; what looks like markup is no markup."""
    return re.sub(r"([|<*_\[\]])", r"\\\1", text)


# ------------------------------------------------------------------------------------------------
#     pages


def configuration() -> str:
    """Every key of the configuration, group by group, and the structs that they hold."""
    from orchestrator.config import schema

    module = "orchestrator.config.schema"
    parts = [NOTE, "# Configuration", "", _configuration_head()]
    _, top = fields(module, "Config")
    parts += ["## Groups", "", *table(top, "")]
    names = [field.name for field in top]
    for name, kind in vars(schema).items():
        of_ours = (
            isinstance(kind, type)
            and issubclass(kind, msgspec.Struct)
            and kind.__module__ == module
        )
        if not of_ours or name == "Config":
            continue
        about, found = fields(module, name)
        owner = next((field.name for field in top if field.type.split(" ")[0] == name), "")
        prefix = f"{owner}." if owner in names and owner else ""
        title = f"`{owner}`" if prefix else f"`{name}`"
        parts += [f"## {title}", "", *([about, ""] if about else []), *table(found, prefix)]
    return "\n".join(parts).rstrip() + "\n"


def _configuration_head() -> str:
    text = """
    Every key with its type, default and meaning, from `orchestrator/config/schema.py`. On the command line a key is
    `group.key=value`; `orch config` shows all of them as they are for a command line, `orch config --choices` the
    files of each group. `None` means that the value is derived: the comment says from what. Types are Python's;
    `Count`, `Positive` and the like are numbers in a range.
    """
    return textwrap.dedent(text).strip() + "\n"


def options() -> str:
    """`backend.options` of each backend."""
    kinds = {
        "local": [("orchestrator.backends.local.backend", "LocalOptions")],
        "slurm": [
            ("orchestrator.backends.slurm.options", name) for name in ("SlurmOptions", "Container")
        ],
        "kubernetes": [
            ("orchestrator.backends.kubernetes.options", name)
            for name in ("KubernetesOptions", "Toleration", "Volume", "Owner")
        ],
    }
    parts = [
        NOTE,
        "# Options of backends",
        "",
        "`backend.options.NAME=VALUE`; an unknown one is refused with the nearest.\n",
    ]
    parts += [
        "Any backend takes two more: `ssh`, a host on which the job is planned and submitted, and"
        " `ssh_python`,"
    ]
    parts += ["the interpreter there ([Slurm](../slurm.md#from-a-laptop)).", ""]
    for backend, structs in kinds.items():
        parts += [f"## {backend}", ""]
        for module, name in structs:
            about, found = fields(module, name)
            main = name.endswith("Options")
            parts += [*([] if main else [f"### `{name}`", ""]), *([about, ""] if about else [])]
            parts += table(found, "")
    return "\n".join(parts).rstrip() + "\n"


def verbs() -> str:
    """Every verb with its arguments. Not `--help`, which says the same in words that differ between
    Pythons."""
    from importlib import import_module

    from orchestrator.cli.examples import epilog
    from orchestrator.cli.main import help_text
    from orchestrator.cli.parser import make_parser
    from orchestrator.cli.verbs import VERBS

    parts = [NOTE, "# Verbs", "", "```text", help_text(), "```", ""]
    for name, verb in VERBS.items():
        parser = make_parser(name, verb)
        import_module(f"orchestrator.cli.verbs.{name}").add_arguments(parser)
        words = [
            action.metavar or action.dest
            for action in parser._actions
            if not action.option_strings and not verb.rest
        ]
        line = " ".join(["orch", name, *map(_shown, words)]) + parser.tail
        parts += [
            f"## orch {name}",
            "",
            verb.help + ".",
            "",
            f"`{line}`",
            "",
            "```text",
            epilog(name),
            "```",
            "",
            "| argument | |",
            "|---|---|",
        ]
        for action in parser._actions:
            if action.help == argparse.SUPPRESS or "--help" in action.option_strings:
                continue
            value = "" if action.nargs == 0 else f" {_shown(action.metavar or action.dest.upper())}"
            given = (
                ", ".join(action.option_strings) + value
                if action.option_strings
                else action.metavar or action.dest
            )
            about = (action.help or "").replace("%(default)s", str(action.default))
            if action.choices:
                about = "; ".join(
                    filter(None, (about, f"one of {', '.join(map(str, action.choices))}"))
                )
            parts.append(f"| `{_cell(str(given))}` | {_text(about)} |")
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _shown(metavar: object) -> str:
    return " ".join(metavar) if isinstance(metavar, tuple) else str(metavar)


def python() -> str:
    """The Python API and `orch_report`, from their signatures and descriptions."""
    import orch_report
    from orchestrator import api
    from orchestrator.errors import OrchError

    parts = [NOTE, "# Python", "", "## orchestrator.api", "", _described(inspect.getdoc(api) or "")]
    parts += [""]
    for name in ("plan", "submit"):
        parts += _function(f"orch.{name}", getattr(api, name), "###")
    parts += ["### `orch.Run`", "", _described(inspect.getdoc(api.Run) or ""), ""]
    for name, value in vars(api.Run).items():
        if name.startswith("_"):
            continue
        if isinstance(value, property):
            parts += [f"#### `Run.{name}`", "", _described(inspect.getdoc(value) or ""), ""]
        else:
            function = value.__func__ if isinstance(value, classmethod) else value
            parts += _function(f"Run.{name}", function, "####")
    for name in ("StateUpdate", "StepUpdate", "FaultUpdate", "EndUpdate"):
        about, attributes = fields("orchestrator.observe.updates", name)
        parts += [f"### `orch.{name}`", "", about, "", "| attribute | type | |", "|---|---|---|"]
        for field in attributes:
            parts.append(f"| `{field.name}` | `{_cell(field.type)}` | {_text(field.about)} |")
        parts.append("")
    parts += ["### `orch.OrchError`", "", _described(inspect.getdoc(OrchError) or ""), ""]
    parts += ["## orch_report", "", _described(inspect.getdoc(orch_report) or ""), ""]
    for name, value in vars(orch_report).items():
        if (
            inspect.isfunction(value)
            and not name.startswith("_")
            and value.__module__ == "orch_report"
        ):
            parts += _function(f"orch_report.{name}", value, "###")
    return "\n".join(parts).rstrip() + "\n"


def _function(name: str, value: object, level: str) -> list[str]:
    signature = str(inspect.signature(value))  # type: ignore[arg-type]
    signature = re.sub(r"\((self|cls)(, )?", "(", signature).replace("'", "")
    return [
        f"{level} `{name}`",
        "",
        "```python",
        f"{name}{signature}",
        "```",
        "",
        _described(inspect.getdoc(value) or ""),
        "",
    ]


def _described(text: str) -> str:
    """A description as Markdown: indented parts are code, and what looks like HTML is text."""
    out: list[str] = []
    code = False
    for line in text.splitlines():
        indented = line.startswith("    ")
        if indented and not code:
            out.append("```python")
        if code and line and not indented:
            out += ["```", ""]
        code = indented or (code and not line)
        out.append(line.removeprefix("    ") if code else re.sub(r"<(?=\w)", r"\\<", line))
    while out and not out[-1]:
        out.pop()
    out = [line for line, after in zip(out, [*out[1:], ""], strict=False) if line or after != "```"]
    return "\n".join([*out, "```"] if code else out)


def codes() -> str:
    """Exit codes, states and causes of a run, and the names of the formats."""
    from typing import get_args

    from orchestrator.cli.verbs.version import formats
    from orchestrator.plan.exits import MEANING
    from orchestrator.run.state import CAUSES, FINAL, Phase

    parts = [NOTE, "# Codes, states, formats", "", "## Exit codes", "", "| code | |", "|---|---|"]
    parts += [f"| {int(code)} | {text} |" for code, text in MEANING.items()]
    parts += ["", "## States of a run", "", "| state | |", "|---|---|"]
    parts += [
        f"| `{name}` | {'final' if name in FINAL else 'under way'} |" for name in get_args(Phase)
    ]
    parts += ["", "## Causes of a fault", "", "| cause | |", "|---|---|"]
    parts += [f"| `{name}` | {text} |" for name, text in CAUSES.items()]
    parts += [
        "",
        "## Formats",
        "",
        "What `orch version` says this version writes and reads.",
        "",
        "| | format |",
        "|---|---|",
    ]
    parts += [f"| {name} | `{text}` |" for name, text in formats().items()]
    return "\n".join(parts).rstrip() + "\n"


def main() -> None:
    HERE.mkdir(exist_ok=True)
    for name, text in pages().items():
        (HERE / name).write_text(text)


if __name__ == "__main__":
    main()
