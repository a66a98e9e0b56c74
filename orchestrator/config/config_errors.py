"""One line for every configuration error: where the value came from, what is wrong, what would be
legal."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from orchestrator.errors import OrchError, did_you_mean
from orchestrator.plan.exits import Exit

from .groups import Library
from .overrides import Override, show
from .schema import Config
from .structured import bare, fields, is_open, struct_of


class Origin:
    """Which word or file a key's value came from."""

    def __init__(self, library: Library, given: list[Override], choices: dict[str, str]):
        self.library = library
        self.given = given
        self.choices = choices

    def of(self, key: str) -> tuple[str, Exit]:
        """(what to begin the line with, exit code) for a dotted key."""
        for override in reversed(self.given):
            if not override.group and f"{key}.".startswith(f"{override.key}."):
                return override.show(), Exit.USAGE
        below = [
            o for o in self.given if o.key.startswith(f"{key}.")
        ]  # a rule between fields, broken by a word
        if below:
            return below[-1].show(), Exit.USAGE
        path = self._file(key)
        return (self.library.show(path), Exit.CONFIG) if path else ("configuration", Exit.CONFIG)

    def _file(self, key: str) -> Path | None:
        """The chosen file that names the key: the group's, else a nested group's (cluster/node)."""
        group = key.split(".")[0]
        leaf = key.split(".")[-1]
        chosen = [g for g in (group, *self.choices) if g == group or g.startswith(f"{group}/")]
        paths = [
            self.library.path(g, self.choices[g])
            for g in dict.fromkeys(chosen)
            if g in self.choices
        ]
        for path in filter(None, paths):
            if _names(path, leaf):
                return path
        return next(filter(None, paths), None)

    def unset(self, key: str) -> OrchError:
        """A key without a value: asked of the command line where a file says `???`, else a hole in
        a file."""
        key = re.sub(r"\[(\d+)\]", r".\1", key)
        path = self._file(key)
        leaf = key.split(".")[-1]
        where = self.library.show(path) if path else "configuration"
        word = next(
            (o for o in reversed(self.given) if f"{key}.".startswith(f"{o.key}.") and not o.group),
            None,
        )
        if word:
            return OrchError(
                f"{word.show()}: {'it' if word.key == key else key} must be given a value",
                Exit.USAGE,
            )
        if path and _names(path, leaf):
            return OrchError(f"{where}: {key} must be given: {key}=...", Exit.USAGE)
        return OrchError(f"{where}: {key}: is not set, and has no default", Exit.CONFIG)

    def error(self, key: str, problem: str, exit: Exit | None = None) -> OrchError:
        where, code = self.of(key)
        said = "" if where.startswith(f"'{key}=") else f"{key}: "
        return OrchError(f"{where}: {said}{problem}", exit or code)


def _names(path: Path, leaf: str) -> bool:
    return bool(
        re.search(rf"\b{re.escape(leaf)}\s*:", path.read_text(encoding="utf-8", errors="replace"))
    )


def annotation_at(parts: list[str]) -> Any:
    """The schema's type at a path, list items and dict values included. None when the path leaves
    the schema."""
    annotation: Any = Config
    for part in parts:
        struct = struct_of(annotation)
        container = _container(annotation)
        if struct is not None and part in fields(struct):
            annotation = fields(struct)[part].type
        elif struct is None and container is not None:
            annotation = get_args(container)[-1]
        else:
            return None
    return annotation


def open_at(parts: list[str]) -> bool:
    """Whether a path leads to or below a part whose keys are the user's own."""
    above = [annotation_at(parts[:depth]) for depth in range(1, len(parts) + 1)]
    return any(kind is None or kind is Any or is_open(kind) for kind in above)


def _container(annotation: Any) -> Any:
    """The `list[...]` or `dict[...]` that an annotation is or may be, else None."""
    inner = get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation
    kinds = [inner, *get_args(inner)] if get_origin(inner) not in (list, dict) else [inner]
    return next((kind for kind in map(bare, kinds) if get_origin(kind) in (list, dict)), None)


def _rule(annotation: Any) -> str | None:
    """The words of a `Meta(description=...)`, the field's own or a union member's."""
    for candidate in (annotation, *get_args(annotation)):
        for meta in getattr(candidate, "__metadata__", ()):
            if isinstance(meta, msgspec.Meta) and meta.description:
                return meta.description
    return None


def _value_at(tree: Any, parts: list[str]) -> Any:
    for part in parts:
        tree = tree[int(part)] if isinstance(tree, list) else tree[part]
    return tree


def _breaks(value: Any, annotation: Any) -> bool:
    try:
        msgspec.convert(value, annotation)
    except msgspec.ValidationError:
        return True
    return False


def _parts(location: str, tree: Any) -> list[str]:
    """msgspec's `$.backend.env[...]` as names; where it hides a dict's key, the first one whose
    value is refused."""
    result: list[str] = []
    for name, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", location):
        if index == "...":
            kind = get_args(_container(annotation_at(result)))[1]
            here = _value_at(tree, result)
            index = next(
                (key for key, value in here.items() if _breaks(value, kind)), next(iter(here))
            )
        result.append(name or index)
    return result


def from_msgspec(error: msgspec.ValidationError, tree: dict[str, Any], origin: Origin) -> OrchError:
    """A schema violation of the composed tree as one line."""
    text, _, location = str(error).partition(" - at `")
    parts = _parts(location, tree)
    key = ".".join(parts)
    annotation = annotation_at(parts)
    if unknown := re.search(r"unknown field `(.*)`", text):
        struct = struct_of(annotation)
        hint = did_you_mean(unknown[1], fields(struct)) if struct else ""
        return origin.error(f"{key}.{unknown[1]}" if key else unknown[1], f"unknown key; {hint}")
    if missing := re.search(r"missing required field `(.*)`", text):
        return origin.error(f"{key}.{missing[1]}", "is not set, and has no default")
    if not text.startswith(
        ("Expected", "Invalid")
    ):  # a rule of ours, broken while the struct was built
        return origin.error(key, text)
    got = _value_at(tree, parts)
    if location.startswith("key`"):
        annotation = get_args(_container(annotation))[0]
        got = next(name for name in got if _breaks(name, annotation))
        key = f"{key}.{got}"
    seen = show(got) if isinstance(got, str) else repr(got)[:60]
    kind = bare(annotation)
    if get_origin(kind) is Literal:
        return origin.error(
            key, f"{seen} is not legal; {did_you_mean(str(got), map(str, get_args(kind)))}"
        )
    rule = (
        _rule(annotation)
        if (isinstance(got, str) and "regex" in text) or "length" in text
        else None
    )
    return origin.error(key, f"must be {rule or _plain(text)}, not {seen}")


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
    text = (
        re.sub(r"\bfloat\b", "a number", text)
        .replace("bool", "true or false")
        .replace(" | ", " or ")
    )
    return text.replace(".0", "") if text.endswith(".0") else text
