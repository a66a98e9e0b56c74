"""`orch config`: shows the configuration of a command line, or the choices of the groups."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import OrchError, did_you_mean
from orchestrator.plan.exits import Exit

if TYPE_CHECKING:
    from orchestrator.config.groups import Library

ALL = "all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    choices_help = "list the files of a group, or of all groups"
    parser.add_argument(
        "--choices",
        metavar="GROUP",
        nargs="?",
        const=ALL,
        help=choices_help,
    )


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    if args.choices:
        return _choices(args, overrides)
    from orchestrator.config.compose import load
    from orchestrator.run.request import config_tree

    tree = config_tree(load(overrides, args.config_dir))
    if args.json:
        print(json.dumps(tree))
    else:
        import yaml

        print(
            yaml.safe_dump(
                tree,
                sort_keys=False,
                allow_unicode=True,
                width=1000,
            ),
            end="",
        )
    return Exit.DONE


def _choices(args: argparse.Namespace, overrides: list[str]) -> int:
    if overrides:
        raise OrchError(f"{overrides[0]!r}: --choices takes no overrides")
    from orchestrator.cli.terminal import style
    from orchestrator.config.grammar import RULE
    from orchestrator.config.groups import Library, folders
    from orchestrator.style import fold

    library = Library(folders(args.config_dir))
    groups = library.groups()
    if args.choices not in (ALL, *groups):
        raise OrchError(f"unknown group {args.choices!r}; {did_you_mean(args.choices, groups)}")
    groups = groups if args.choices == ALL else [args.choices]
    descriptions = {
        group: {name: _about(library, group, name) for name in library.files(group)}
        for group in groups
    }
    if args.json:
        print(json.dumps({"groups": descriptions, "parallel_words": RULE}))
        return Exit.DONE
    for group, files in descriptions.items():
        print(f"{group}:")
        name_width = max(map(len, files))
        for name, description in files.items():
            print(
                *fold(
                    f"  {name:<{name_width}}  {description}".rstrip(),
                    style().width,
                    name_width + 4,
                ),
                sep="\n",
            )
        if group == "parallel":
            print(*fold(f"  {RULE}", style().width, 4), sep="\n")
    return Exit.DONE


def _about(library: Library, group: str, name: str) -> str:
    """Returns the first sentence of a file's opening comment, or else the source that the file
    names."""
    path = library.path(group, name)
    lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines() if path else []
    comment_lines = []
    for line in lines:
        if line.startswith("# @package"):
            continue
        if not line.startswith("#"):
            break
        comment_lines.append(line.lstrip("# "))
    description = " ".join(comment_lines)
    if not description:
        source = next((line for line in lines if line.startswith("source:")), "")
        description = source.removeprefix("source:").strip().strip('"').split(";")[0]
    return description.split(". ")[0].removesuffix(".")
