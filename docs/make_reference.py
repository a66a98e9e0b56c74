"""`python docs/make_reference.py` writes docs/reference from the code: configuration, options, verbs,
the API, codes, metrics, events and the files of a run; and docs/techniques.md (`make_techniques.py`).

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
        "metrics.md": metrics(),
        "events.md": events(),
        "files.md": files(),
        "refusals.md": refusals(),
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
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
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
    """Words in a table; what looks like markup is no markup, except code."""
    shown = []
    for number, span in enumerate(text.split("`")):
        shown.append(_cell(span) if number % 2 else re.sub(r"([|<*_\[\]])", r"\\\1", span))
    return "`".join(shown)


# ------------------------------------------------------------------------------------------------
#     pages


def configuration() -> str:
    """Every key of the configuration, group by group, and the structs that they hold."""
    from orchestrator.config import schema

    module = "orchestrator.config.schema"
    parts = [NOTE, "# Configuration", "", _configuration_head()]
    _, top = fields(module, "Config")
    parts += ["## Groups", "", *table(top, "")]
    kinds = [name for name, kind in vars(schema).items() if _is_struct_of(kind, module)]
    prefixes = _prefixes(module, kinds)
    for name in kinds:
        if name == "Config":
            continue
        about, found = fields(module, name)
        if name == "MoeSpec":  # the plan's, of which it changes some fields
            about, found = _with_changes(found)
        parts += _section(prefixes[name], about, found)
    for name in ("Mla", "Yarn", "Mtp"):
        parts += _section(prefixes[name], *fields("orchestrator.plan.model", name))
    return "\n".join(parts).rstrip() + "\n"


def refusals() -> str:
    """Every rule that a layout or a model may break, and why it is there."""
    from orchestrator.plan.supported import LAYOUT
    from orchestrator.plan.trained import TRAINER

    parts = [NOTE, "# Refusals", "", _REFUSALS, ""]
    kinds = {"Of every program's layout": LAYOUT, "Of the bundled trainer": TRAINER}
    for title, rules in kinds.items():
        parts += [f"## {title}", "", "| rule | meaning |", "|---|---|"]
        for name, rule in rules.items():
            about = " ".join((inspect.getdoc(rule) or "").split())
            parts.append(f"| `{name}` | {_text(about)} |")
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


_REFUSALS = textwrap.fill(
    "What `orch` refuses has one line with the numbers, the rule that they break, and the nearest"
    " legal layout. These are all rules and their reasons. A program of your own (`orch submit ..."
    " -- python train.py`) has to keep the first table's only.",
    120,
)


def _with_changes(changed: list[Field]) -> tuple[str, list[Field]]:
    """The plan's description of experts, of which the configuration changes some types."""
    about, inherited = fields("orchestrator.plan.model", "Moe")
    changes = {field.name: field for field in changed}
    found = []
    for field in inherited:
        change = changes.get(field.name, field)
        change.about = field.about
        found.append(change)
    return about, found


def _is_struct_of(kind: object, module: str) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module


def _section(prefix: str, about: str, found: list[Field]) -> list[str]:
    title = prefix.rstrip(".")
    return [f"## `{title}`", "", *([about, ""] if about else []), *table(found, prefix)]


def _prefixes(module: str, kinds: list[str]) -> dict[str, str]:
    """Name of a struct -> how its keys begin, such as `cluster.gpu.`."""
    prefixes = {"Config": ""}
    waiting = ["Config"]
    while waiting:
        owner = waiting.pop()
        if owner not in kinds:
            continue
        for field in fields(module, owner)[1]:
            for word in re.findall(r"\w+", field.type):
                if word in (*kinds, "Mla", "Yarn", "Mtp") and word not in prefixes:
                    in_list = "N." if field.type.startswith("list") else ""
                    prefixes[word] = f"{prefixes[owner]}{field.name}.{in_list}"
                    waiting.append(word)
    return prefixes


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
            for name in ("KubernetesOptions", "Toleration", "Volume", "Egress", "Owner")
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
            "| argument | meaning |",
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
    from orchestrator.cli.verbs.version import formats
    from orchestrator.plan.exits import MEANING, REACTIONS
    from orchestrator.run.state import CAUSES, FINAL, PHASES

    parts = [NOTE, "# Codes, states, formats", "", "## Exit codes", "", _codes_head()]
    parts += ["| code | meaning | the run, after a worker | Slurm, after a job |"]
    parts[-1] += " Kubernetes, after a pod |"
    parts += ["|---|---|---|---|---|"]
    for code, text in MEANING.items():
        parts.append(f"| {int(code)} | {text} | {' | '.join(REACTIONS[code])} |")
    parts += ["", "## States of a run", "", "| state | meaning | |", "|---|---|---|"]
    for name, text in PHASES.items():
        parts.append(f"| `{name}` | {text} | {'final' if name in FINAL else 'under way'} |")
    parts += ["", "## Causes of a fault", "", "| cause | meaning |", "|---|---|"]
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


def _codes_head() -> str:
    text = """
    From `orchestrator/plan/exits.py`. A worker, an agent, a job, a pod and the command that follows a run use the same
    codes; each layer reacts to the code of the layer below. What to do about each:
    [When it fails](../guides/failures.md#by-exit-code).
    """
    return textwrap.dedent(text).strip() + "\n"


def metrics() -> str:
    """Every metric of agents and of the controller on Kubernetes."""
    from orchestrator.agent.node.metrics import families
    from orchestrator.backends.kubernetes.controller.series import OF_CONTROLLER, OF_RUNS

    head = "| name | type | labels | meaning |"
    parts = [
        NOTE,
        "# Metrics",
        "",
        _metrics_head(),
        "## Of each node",
        "",
        head,
        "|---|---|---|---|",
    ]
    for family in families():
        parts.append(_metric(*family))
    parts += ["", "## Of each run, by the controller on Kubernetes", "", head, "|---|---|---|---|"]
    for name, (family_class, meaning, labels) in OF_RUNS.items():
        kind = family_class.__name__.removesuffix("MetricFamily").lower()
        shown = f"{name}_total" if kind == "counter" else name
        parts.append(_metric(shown, kind, ["namespace", "job", *labels], meaning))
    parts += ["", "## Of the controller itself", "", head, "|---|---|---|---|"]
    for name, meaning in OF_CONTROLLER.items():
        kind = "histogram" if name.endswith("_seconds") else "gauge"
        parts.append(_metric(name, kind, [], meaning))
    return "\n".join(parts).rstrip() + "\n"


def _metrics_head() -> str:
    text = """
    From `orchestrator/agent/node/metrics.py` and `orchestrator/backends/kubernetes/controller/series.py`. `job` is the
    run's id. There is no label for ranks: a series is the sum or the maximum over the ranks of its node. How to scrape
    them: [Operate](../guides/operate.md#metrics-and-alerts).
    """
    return textwrap.dedent(text).strip() + "\n"


def _metric(name: str, kind: str, labels: list[str], meaning: str) -> str:
    shown = ", ".join(f"`{label}`" for label in labels)
    return f"| `{name}` | {kind} | {shown} | {_text(meaning)} |"


def events() -> str:
    """Every event of a run."""
    from orchestrator.observe.events import EVENTS

    parts = [NOTE, "# Events", "", _events_head()]
    for writer in ("coordinator", "agent", "worker"):
        parts += [f"## Of the {writer}", "", "| event | meaning | fields |", "|---|---|---|"]
        for name, event in EVENTS.items():
            if event.writer == writer:
                shown = ", ".join(f"`{field}`" for field in event.fields.split())
                parts.append(f"| `{name}` | {_text(event.meaning)} | {shown} |")
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _events_head() -> str:
    text = """
    The lines of `events/<node>.jsonl`, from `orchestrator/observe/events.py`. Every line has `at` (Unix seconds),
    `kind`, `name` and `epoch`; lines of agents and of the coordinator (`kind` is `agent`) have `node`, the node that
    writes, and often `on`, the node that the event is about. Lines of workers (`kind` is `event`) have `rank` and
    `step`, and the fields below are inside `fields`. A program of your own writes `checkpoint_saved` by
    `orch_report.saved`.
    """
    return textwrap.dedent(text).strip() + "\n"


def files() -> str:
    """Every file of a run folder."""
    from orchestrator.run.files import RUN_FILES

    parts = [NOTE, "# Files of a run", "", _files_head()]
    parts += ["| file | written by | format | meaning |", "|---|---|---|---|"]
    for file in RUN_FILES:
        meaning = file.meaning if "](" in file.meaning else _text(file.meaning)
        parts.append(f"| `{file.name}` | {file.writer} | {file.form} | {meaning} |")
    return "\n".join(parts).rstrip() + "\n"


def _files_head() -> str:
    text = """
    A run's folder is `<home>/runs/<run>` (`orch paths RUN`), from `orchestrator/run/files.py`. Folders have mode 0700
    and files 0600. A file is replaced as a whole or grows by lines, so that a reader sees no half-written document. Who
    may write when: [Protocol](../protocol.md#the-run-folder).
    """
    return textwrap.dedent(text).strip() + "\n"


def main() -> None:
    import make_techniques

    HERE.mkdir(exist_ok=True)
    for name, text in pages().items():
        (HERE / name).write_text(text)
    make_techniques.main()


if __name__ == "__main__":
    main()
