"""Parses and checks the overrides on the command line before Hydra gets them.

Hydra's override grammar has traps for the people who type it: add against override (`+x=` or
`x=`), unquoted text that is a syntax error or changes its type, commas that mean a sweep. Each
override is parsed here against the schema, so that unknown keys get a did-you-mean, `+x=` equals
`x=`, and text reaches the configuration byte-exact. This module returns choices of files, which
Hydra takes, and values, which are put into what Hydra has composed.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, get_args

from orchestrator.errors import OrchError, did_you_mean
from orchestrator.plan.exits import Exit

from . import grammar
from .groups import GROUPS, Library
from .node_range import COUNT
from .schema import Config
from .structured import bare, fields, is_open, is_text, optional, struct_of

#: Pairs of keys of which nobody means both: a later one replaces an earlier other one.
EXCLUSIVE = (("train.global_batch_samples", "train.global_batch_tokens"),)
_WORD = re.compile(r"(~|\+{0,2})([^=]*?)(?:=(.*))?", re.DOTALL)


class Override(NamedTuple):
    """One `key=value` of the command line."""

    key: str  # "train.steps", or a group: "cluster", "cluster/node"
    text: str  # as typed, after the first "="
    #: true: the choice of a file, which Hydra takes; false: a value for the composed tree
    group: bool
    value: Any = None

    def show(self) -> str:
        return show(f"{self.key}={self.text}")


def read(arguments: list[str], library: Library) -> list[Override]:
    """Parses overrides in the order typed; of several choices for one group the last counts.
    Raises OrchError (64, or 78)."""
    overrides = [_read_one(argument, library) for argument in arguments]
    last = {override.key: index for index, override in enumerate(overrides)}
    overrides = [
        override
        for index, override in enumerate(overrides)
        if not override.group or last[override.key] == index
    ]
    keys = [override.key for override in overrides]
    for pair in EXCLUSIVE:
        for key, exclusive in (pair, pair[::-1]):
            if key in keys and exclusive not in keys:
                overrides.append(Override(exclusive, "null", False, None))
    return overrides


def _read_one(argument: str, library: Library) -> Override:
    shown = show(argument)
    if not argument.isprintable():
        character = next(c for c in argument if not c.isprintable())
        problem = f"the unprintable character {character!a}"
        if "\ud800" <= character <= "\udfff":
            problem = "bytes that are not UTF-8"
        rule = "configuration text is printable and on one line"
        raise OrchError(f"{shown} holds {problem}: {rule}", Exit.USAGE)
    if "_target_" in argument:
        raise OrchError(
            f"{shown}: _target_ would run code from configuration; orch never does", Exit.SECURITY
        )
    match = _WORD.fullmatch(argument)
    assert match, "the pattern matches any printable line"
    prefix = match[1]
    key = match[2].strip()
    value = match[3]
    if prefix == "~":
        advice = "set it to null where that is legal"
        raise OrchError(f"{shown}: keys cannot be deleted, every one is needed; {advice}")
    if value is None or not key:
        raise OrchError(f"{shown} is not key=value")
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        raise OrchError(
            f"{shown}: Hydra's own settings are not used; --config-dir adds a folder of group files"
        )
    if "@" in key or ":" in key:
        group = key.split("@")[0].split(":")[0]
        raise OrchError(f"{shown}: groups have fixed places, write {group}=<file>")
    key = key.removeprefix("/")
    if key.split("/")[0] in GROUPS and "." not in key:
        return _choice(key, value.strip(), library)
    return _value(key, value, shown)


# ------------------------------------------------------------------------------------------- groups


def _choice(group: str, choice: str, library: Library) -> Override:
    if group not in library.groups():
        raise OrchError(f"unknown group {group!r}; {did_you_mean(group, library.groups())}")
    name = choice
    if len(choice) > 1 and choice[0] == choice[-1] and choice[0] in "'\"":
        name = choice[1:-1]
    files = library.files(group)
    if name in files:
        return Override(group, name, True)
    if name.startswith("{"):
        advice = f"keys are set one by one, as {group}.KEY=VALUE"
        raise OrchError(f"{group}={show(name)}: it names a file; {advice}")
    if "," in name or name.startswith("["):
        advice = f"a sweep is orch submit --multirun {group}=a,b"
        raise OrchError(f"{group}={show(name)}: one at a time; {advice}")
    if group == "parallel" and grammar.looks_like_spec(name):
        grammar.parse(name)  # refuses a malformed spec
        return Override(group, name, True)
    problem = f"there is no {group} {show(name)}" if name else f"{group}= needs the name of a file"
    spec_rule = f"; or a spec: {grammar.RULE}" if group == "parallel" else ""
    raise OrchError(
        f"{problem}; {did_you_mean(name, files)}{spec_rule}{library.unread(group, name)}"
    )


# ------------------------------------------------------------------------------------------- values


def _value(key: str, typed: str, shown: str) -> Override:
    annotation = find(key, shown)
    raw = typed.strip()
    if key == "nodes" and COUNT.fullmatch(raw):  # one number is the size of the cluster
        return Override("cluster.nodes", raw, False, int(raw))
    if raw == "null" and annotation is not Any:
        if not optional(annotation):
            raise OrchError(f"{shown}: {key} cannot be null")
        return Override(key, typed, False, None)
    if struct_of(annotation) is not None and not raw.startswith("{"):
        example = next(iter(fields(struct_of(annotation))))
        raise OrchError(f"{shown}: {key} holds keys of its own; set one, like {key}.{example}=...")
    if is_text(annotation):
        if len(raw) > 1 and raw[0] == raw[-1] and raw[0] in "'\"":
            raise OrchError(f"{shown}: text is taken as it is, without quotes around it")
        return Override(key, typed, False, typed)
    return Override(key, typed, False, _parse(key, raw, shown, annotation))


def find(key: str, typed: str) -> Any:
    """Returns the type of the value at a dotted key; `Any` below a part whose keys are the
    user's. Raises OrchError."""
    struct: Any = Config
    annotation: Any = None
    path = key.split(".")
    for index, name in enumerate(path):
        if struct is not None:
            legal = {field_name: field.type for field_name, field in fields(struct).items()}
            if index == 0:
                legal.pop("choices", None)
            if name not in legal:
                parent = ".".join(path[:index])
                unknown = f"key {name!r} in {parent}" if parent else f"group or key {name!r}"
                raise OrchError(f"{typed}: unknown {unknown}; {did_you_mean(name, legal)}")
            annotation = legal[name]
        elif is_open(annotation):
            annotation = get_args(bare(annotation))[1]
            if index < len(path) - 1:
                return Any
        elif annotation is Any:
            return Any
        elif name.isdigit() and _list_item(annotation) is not None:
            annotation = _list_item(annotation)
        else:
            parent = ".".join(path[:index])
            raise OrchError(f"{typed}: {parent} is a single value, it has no key {name!r}")
        struct = struct_of(annotation)
    return annotation


def _list_item(annotation: Any) -> Any:
    kind = bare(annotation)
    return get_args(kind)[0] if getattr(kind, "__origin__", None) is list else None


def _parse(key: str, raw: str, shown: str, annotation: Any) -> Any:
    """Parses a number, truth value, list or mapping in Hydra's override grammar. Sweeps are
    refused."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    is_list = _list_item(annotation) is not None
    try:
        parsed = OverridesParser.create().parse_override(f"{key}={raw}")
    except HydraException:
        example = f"{key}=['first','second']" if is_list else f"{key}='some text'"
        raise OrchError(f'{shown} cannot be read; put text in quotes, like "{example}"') from None
    if is_list and not raw.startswith(("[", "$")):
        raise OrchError(f"{shown}: {key} is a list, write {key}=[{raw}]")
    if parsed.is_sweep_override():
        raise OrchError(
            f"{shown}: one value at a time; a list is [a,b], and a sweep is orch submit --multirun"
        )
    return _plain(parsed.value())


def _plain(value: Any) -> Any:
    """Returns Hydra's quoted strings as text, inside lists and mappings too."""
    from hydra.core.override_parser.types import QuotedString

    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {_plain(name): _plain(item) for name, item in value.items()}
    return value


def quote(string: str) -> str:
    """Returns text as a quoted string of Hydra's grammar: backslashes count only before a quote,
    where they are doubled."""
    escaped = re.sub(r"(\\*)'", lambda m: m[1] * 2 + "\\'", string)
    tail = len(escaped) - len(escaped.rstrip("\\"))
    return f"'{escaped}{chr(92) * tail}'"


def show(string: str, limit: int = 80) -> str:
    """Formats text so that it can be printed on one line."""
    shown = ascii(string) if not string.isprintable() else f"'{string}'"
    return shown if len(shown) <= limit else f"{shown[: limit - 4]}...'"
