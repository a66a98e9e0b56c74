"""One line for whatever is wrong with a configuration: where it came from, what it is, what would be legal."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.suggest import did_you_mean

from .groups import Library
from .overrides import Override, show
from .schema import GROUPS, Config
from .structured import bare, fields, struct_of


class Origin:
    """Which word or file a key's value came from."""

    def __init__(self, library: Library, given: list[Override], choices: dict[str, str]):
        self.library, self.given, self.choices = library, given, choices

    def of(self, key: str) -> tuple[str, Exit]:
        """(what to begin the line with, exit code) for a dotted key."""
        for override in reversed(self.given):
            if not override.group and f"{key}.".startswith(f"{override.key}."):
                return show(f"{override.key}={override.text}"), Exit.USAGE
        path = self._file(key)
        return (self.library.show(path), Exit.CONFIG) if path else ("configuration", Exit.CONFIG)

    def _file(self, key: str) -> Path | None:
        """The chosen file that names the key: the group's, else a nested group's (cluster/node)."""
        group, leaf = key.split(".")[0], key.split(".")[-1]
        chosen = [g for g in (group, *self.choices) if g == group or g.startswith(f"{group}/")]
        paths = [self.library.path(g, self.choices[g]) for g in dict.fromkeys(chosen) if g in self.choices]
        for path in filter(None, paths):
            if re.search(rf"\b{re.escape(leaf)}\s*:", path.read_text(encoding="utf-8", errors="replace")):
                return path
        return next(filter(None, paths), None)

    def error(self, key: str, problem: str, exit: Exit | None = None) -> OrchError:
        where, code = self.of(key)
        said = "" if where.startswith(f"'{key}=") else f"{key}: "
        return OrchError(f"{where}: {said}{problem}", exit or code)


def annotation_at(parts: list[str]) -> Any:
    """The schema's type at a path; list items and dict values included. None when the path leaves the schema."""
    annotation: Any = Config
    for part in parts:
        struct = struct_of(annotation)
        if struct is not None:
            if part not in fields(struct):
                return None
            annotation = fields(struct)[part].type
            continue
        kinds = [k for k in (bare(annotation), *map(bare, get_args(bare_union(annotation)))) if get_origin(k)]
        container = next((k for k in kinds if get_origin(k) in (list, dict)), None)
        if container is None:
            return None
        annotation = get_args(container)[-1]
    return annotation


def bare_union(annotation: Any) -> Any:
    """The union behind `Annotated`, for looking at its members."""
    return get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation


def _rule(annotation: Any) -> str | None:
    """The words of a `Meta(description=...)`, the field's own or a union member's."""
    for candidate in (annotation, *get_args(annotation)):
        for meta in getattr(candidate, "__metadata__", ()):
            if isinstance(meta, msgspec.Meta) and meta.description:
                return meta.description
    return None


def _words(annotation: Any) -> list[Any] | None:
    """The legal values of a Literal, alone or in a list."""
    kind = bare(annotation)
    return list(get_args(kind)) if get_origin(kind) is Literal else None


def _value_at(tree: Any, parts: list[str]) -> Any:
    for part in parts:
        tree = tree[int(part)] if isinstance(tree, list) else tree[part]
    return tree


def from_msgspec(error: msgspec.ValidationError, tree: dict[str, Any], origin: Origin) -> OrchError:
    """A schema violation of the composed tree as one line."""
    text, _, location = str(error).partition(" - at `")
    in_key = location.startswith("key")
    parts = re.findall(r"[^.\[\]`$]+", location.split("` in `")[-1] if in_key else location)
    parts = _descend(parts, tree, location)
    key, annotation = ".".join(parts), annotation_at(parts)
    if unknown := re.search(r"unknown field `(.*)`", text):
        legal = list(fields(struct_of(annotation))) if struct_of(annotation) else []
        return origin.error(
            f"{key}.{unknown[1]}" if key else unknown[1], f"unknown key; {did_you_mean(unknown[1], legal)}"
        )
    if missing := re.search(r"missing required field `(.*)`", text):
        return origin.error(f"{key}.{missing[1]}", "is not set, and has no default")
    if not text.startswith(("Expected", "Invalid")):  # a check of ours, raised while the struct was built
        return origin.error(key, text)
    got = _value_at(tree, parts) if not in_key else None
    seen = show(got) if isinstance(got, str) else repr(got)[:60]
    words = _words(get_args(bare(annotation))[0] if in_key and get_args(bare(annotation)) else annotation)
    if words and in_key:
        bad = next((k for k in _value_at(tree, parts) if k not in words), "")
        return origin.error(f"{key}.{bad}", f"unknown key; {did_you_mean(str(bad), map(str, words))}")
    if words:
        return origin.error(key, f"is {seen}; {did_you_mean(str(got), map(str, words))}")
    rule = _rule(annotation)
    wanted = rule if rule and isinstance(got, str) else _plain(text)
    return origin.error(key, f"must be {wanted}" + ("" if in_key else f", not {seen}"))


def _descend(parts: list[str], tree: Any, location: str) -> list[str]:
    """msgspec writes `[...]` for a dict's value: name the keys that are there."""
    if "..." not in location:
        return parts
    result: list[str] = []
    for part in parts:
        here = _value_at(tree, result)
        result.append(part if part not in ("...", "") else next(iter(here)))
    return result


def _plain(text: str) -> str:
    """msgspec's `Expected `int` >= 1, got `str`` in the words of a YAML file."""
    text = re.sub(r"^Expected ", "", text).split(", got")[0].replace("`", "")
    for theirs, ours in (
        ("array", "a list"),
        ("object", "keys and values"),
        ("str", "text"),
        ("int", "a whole number"),
    ):
        text = re.sub(rf"\b{theirs}\b", ours, text)
    return re.sub(r"\bfloat\b", "a number", text).replace("bool", "true or false").replace(" | ", " or ")


def legal_groups() -> str:
    return ", ".join(GROUPS)
