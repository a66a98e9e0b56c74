"""Puts every configuration error into one line: where the value came from, what is wrong, what
would be legal."""

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
    """The override or file that each key's value came from."""

    def __init__(
        self,
        library: Library,
        overrides: list[Override],
        choices: dict[str, str],
    ):
        self.library = library
        self.overrides = overrides
        self.choices = choices

    def of(self, key: str) -> tuple[str, Exit]:
        """Returns the source of a dotted key, which begins the message, and the exit code."""
        override = self._override(key)
        if override:
            return override.show(), Exit.USAGE
        # An override of one field may break a rule between fields.
        narrower = [override for override in self.overrides if override.key.startswith(f"{key}.")]
        if narrower:
            return narrower[-1].show(), Exit.USAGE
        path = self._file(key)
        return self.library.show(path) if path else "configuration", Exit.CONFIG

    def _override(self, key: str) -> Override | None:
        """Returns the last override of the key, or of a part of the configuration that has it."""
        for override in self.overrides[::-1]:
            if not override.group and f"{key}.".startswith(f"{override.key}."):
                return override
        return None

    def _file(self, key: str) -> Path | None:
        """Returns the chosen file that names the key: the group's, else a nested group's
        (cluster/node)."""
        group = key.split(".")[0]
        leaf = key.split(".")[-1]
        nested = [name for name in self.choices if name.startswith(f"{group}/")]
        groups = [name for name in (group, *nested) if name in self.choices]
        choices = [self.library.path(name, self.choices[name]) for name in groups]
        paths = [path for path in choices if path]
        for path in paths:
            if _names(path, leaf):
                return path
        return paths[0] if paths else None

    def unset(self, key: str) -> OrchError:
        """Returns the error for a key without a value: the command line has to set it if a file
        says `???`, else it is missing in a file."""
        key = re.sub(r"\[(\d+)\]", r".\1", key)
        path = self._file(key)
        leaf = key.split(".")[-1]
        source = self.library.show(path) if path else "configuration"
        override = self._override(key)
        if override:
            subject = "it" if override.key == key else key
            return OrchError(f"{override.show()}: {subject} must be given a value", Exit.USAGE)
        if path and _names(path, leaf):
            return OrchError(f"{source}: {key} must be given: {key}=...", Exit.USAGE)
        return OrchError(f"{source}: {key}: is not set, and has no default", Exit.CONFIG)

    def error(self, key: str, problem: str, exit: Exit | None = None) -> OrchError:
        source, code = self.of(key)
        prefix = "" if source.startswith(f"'{key}=") else f"{key}: "
        return OrchError(f"{source}: {prefix}{problem}", exit or code)


def _names(path: Path, leaf: str) -> bool:
    document = path.read_text(encoding="utf-8", errors="replace")
    return bool(re.search(rf"\b{re.escape(leaf)}\s*:", document))


def annotation_at(path: list[str]) -> Any:
    """Returns the schema's type at a path, list items and dict values included. None if the path
    leaves the schema."""
    annotation: Any = Config
    for name in path:
        struct = struct_of(annotation)
        container = _container(annotation)
        if struct is not None and name in fields(struct):
            annotation = fields(struct)[name].type
        elif struct is None and container is not None:
            annotation = get_args(container)[-1]
        else:
            return None
    return annotation


def open_at(path: list[str]) -> bool:
    """Tells whether a path leads to or below a part whose keys are the user's own."""
    annotations = [annotation_at(path[:depth]) for depth in range(1, len(path) + 1)]
    return any(
        annotation is None or annotation is Any or is_open(annotation) for annotation in annotations
    )


def _container(annotation: Any) -> Any:
    """Returns the `list[...]` or `dict[...]` that an annotation is or may be, else None."""
    inner = get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation
    kinds = [inner, *get_args(inner)] if get_origin(inner) not in (list, dict) else [inner]
    return next(
        (kind for kind in map(bare, kinds) if get_origin(kind) in (list, dict)),
        None,
    )


def _rule(annotation: Any) -> str | None:
    """Returns the words of a `Meta(description=...)`, the field's own or a union member's."""
    for candidate in (annotation, *get_args(annotation)):
        for meta in getattr(candidate, "__metadata__", ()):
            if isinstance(meta, msgspec.Meta) and meta.description:
                return meta.description
    return None


def _value_at(tree: Any, path: list[str]) -> Any:
    for name in path:
        tree = tree[int(name)] if isinstance(tree, list) else tree[name]
    return tree


def _breaks(value: Any, annotation: Any) -> bool:
    try:
        msgspec.convert(value, annotation)
    except msgspec.ValidationError:
        return True
    return False


def _parts(location: str, tree: Any) -> list[str]:
    """Splits msgspec's `$.backend.env[...]` into names; where it hides a dict's key, takes the
    first one whose value is refused."""
    path: list[str] = []
    for name, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", location):
        if index == "...":
            kind = get_args(_container(annotation_at(path)))[1]
            container = _value_at(tree, path)
            refused = (key for key, value in container.items() if _breaks(value, kind))
            index = next(refused, next(iter(container)))
        path.append(name or index)
    return path


def from_msgspec(
    error: msgspec.ValidationError,
    tree: dict[str, Any],
    origin: Origin,
) -> OrchError:
    """Turns a schema violation of the composed tree into one line."""
    message, _, location = str(error).partition(" - at `")
    path = _parts(location, tree)
    key = ".".join(path)
    annotation = annotation_at(path)
    if unknown := re.search(r"unknown field `(.*)`", message):
        struct = struct_of(annotation)
        hint = did_you_mean(unknown[1], fields(struct)) if struct else ""
        return origin.error(f"{key}.{unknown[1]}" if key else unknown[1], f"unknown key; {hint}")
    if missing := re.search(r"missing required field `(.*)`", message):
        return origin.error(f"{key}.{missing[1]}", "is not set, and has no default")
    if not message.startswith(("Expected", "Invalid")):  # raised by the schema's own rules
        return origin.error(key, message)
    refused = _value_at(tree, path)
    if location.startswith("key`"):
        annotation = get_args(_container(annotation))[0]
        refused = next(name for name in refused if _breaks(name, annotation))
        key = f"{key}.{refused}"
    shown = show(refused) if isinstance(refused, str) else repr(refused)[:60]
    kind = bare(annotation)
    if get_origin(kind) is Literal:
        hint = did_you_mean(str(refused), map(str, get_args(kind)))
        return origin.error(key, f"{shown} is not legal; {hint}")
    rule = None
    if (isinstance(refused, str) and "regex" in message) or "length" in message:
        rule = _rule(annotation)
    return origin.error(key, f"must be {rule or _plain(message)}, not {shown}")


def _plain(message: str) -> str:
    """Puts msgspec's `Expected `int` >= 1, got `str`` into the words of a YAML file."""
    message = re.sub(r"^Expected ", "", message).split(", got")[0].replace("`", "")
    for type_name, plain_name in (
        ("array", "a list"),
        ("object", "keys and values"),
        ("str", "text"),
        ("int", "a whole number"),
    ):
        message = re.sub(rf"\b{type_name}\b", plain_name, message)
    message = re.sub(r"\bfloat\b", "a number", message)
    message = message.replace("bool", "true or false").replace(" | ", " or ")
    return message.replace(".0", "") if message.endswith(".0") else message
