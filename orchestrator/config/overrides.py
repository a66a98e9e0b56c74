"""Parses and checks command-line words before Hydra gets them.

Hydra's override grammar has traps for the people who type it: add against override (`+x=` or `x=`),
unquoted text that is a syntax error or changes its type, commas that mean a sweep. Each word is
parsed here against the schema, so that unknown keys get a did-you-mean, `+x=` equals `x=`, and text
reaches the configuration byte-exact. What leaves this module are choices of files, which Hydra
takes, and values, which are put into what Hydra has composed.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, get_args

from orchestrator.errors import OrchError, did_you_mean
from orchestrator.plan.exits import Exit

from . import grammar
from .groups import GROUPS, Library
from .schema import Config
from .structured import bare, fields, is_open, is_text, optional, struct_of

#: A later one of these replaces an earlier other one: nobody means both.
EXCLUSIVE = (("train.global_batch_samples", "train.global_batch_tokens"),)
_WORD = re.compile(r"(~|\+{0,2})([^=]*?)(?:=(.*))?", re.DOTALL)


class Override(NamedTuple):
    key: str  # "train.steps", or a group: "cluster", "cluster/node"
    text: str  # as typed, after the first "="
    # a choice of a file, which is Hydra's; else a value, which is put into what Hydra composed
    group: bool
    value: Any = None

    def show(self) -> str:
        return show(f"{self.key}={self.text}")


def read(words: list[str], library: Library) -> list[Override]:
    """Overrides in the order typed; of several choices for one group the last. Raises OrchError
    (64, or 78)."""
    found = [_read_one(word, library) for word in words]
    last = {override.key: index for index, override in enumerate(found)}
    found = [o for index, o in enumerate(found) if not o.group or last[o.key] == index]
    keys = [override.key for override in found]
    for pair in EXCLUSIVE:
        for given, other in (pair, pair[::-1]):
            if given in keys and other not in keys:
                found.append(Override(other, "null", False, None))
    return found


def _read_one(word: str, library: Library) -> Override:
    shown = show(word)
    if not word.isprintable():
        bad = next(c for c in word if not c.isprintable())
        what = (
            "bytes that are not UTF-8"
            if "\ud800" <= bad <= "\udfff"
            else f"the unprintable character {bad!a}"
        )
        raise OrchError(
            f"{shown} holds {what}: configuration text is printable and on one line", Exit.USAGE
        )
    if "_target_" in word:
        raise OrchError(
            f"{shown}: _target_ would run code from configuration; orch never does", Exit.SECURITY
        )
    match = _WORD.fullmatch(word)
    assert match, "it matches any printable line"
    prefix = match[1]
    key = match[2].strip()
    text = match[3]
    if prefix == "~":
        raise OrchError(
            f"{shown}: keys cannot be deleted, every one is needed; set it to null where that is"
            " legal"
        )
    if text is None or not key:
        raise OrchError(f"{shown} is not key=value")
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        raise OrchError(
            f"{shown}: Hydra's own settings are not used; --config-dir adds a folder of group files"
        )
    if "@" in key or ":" in key:
        raise OrchError(
            f"{shown}: groups have fixed places, write {key.split('@')[0].split(':')[0]}=<file>"
        )
    key = key.removeprefix("/")
    if key.split("/")[0] in GROUPS and "." not in key:
        return _choice(key, text.strip(), library)
    return _value(key, text, shown)


# ------------------------------------------------------------------------------------------- groups


def _choice(group: str, text: str, library: Library) -> Override:
    if group not in library.groups():
        raise OrchError(f"unknown group {group!r}; {did_you_mean(group, library.groups())}")
    name = text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
    files = library.files(group)
    if name in files:
        return Override(group, name, True)
    if name.startswith("{"):
        raise OrchError(
            f"{group}={show(name)}: it names a file; keys are set one by one, as {group}.KEY=VALUE"
        )
    if "," in name or name.startswith("["):
        raise OrchError(
            f"{group}={show(name)}: one at a time; a sweep is orch submit --multirun {group}=a,b"
        )
    if group == "parallel" and grammar.looks_like_spec(name):
        grammar.parse(name)  # refuses what is not a word
        return Override(group, name, True)
    what = f"there is no {group} {show(name)}" if name else f"{group}= needs the name of a file"
    tail = f"; or a spec: {grammar.RULE}" if group == "parallel" else ""
    raise OrchError(f"{what}; {did_you_mean(name, files)}{tail}{library.unread(group, name)}")


# ------------------------------------------------------------------------------------------- values


def _value(key: str, text: str, shown: str) -> Override:
    annotation = find(key, shown)
    raw = text.strip()
    if raw == "null" and annotation is not Any:
        if not optional(annotation):
            raise OrchError(f"{shown}: {key} cannot be null")
        return Override(key, text, False, None)
    if struct_of(annotation) is not None and not raw.startswith("{"):
        example = next(iter(fields(struct_of(annotation))))
        raise OrchError(f"{shown}: {key} holds keys of its own; set one, like {key}.{example}=...")
    if is_text(annotation):
        if len(raw) > 1 and raw[0] == raw[-1] and raw[0] in "'\"":
            raise OrchError(f"{shown}: text is taken as it is, without quotes around it")
        return Override(key, text, False, text)
    return Override(key, text, False, _parse(key, raw, shown, annotation))


def find(key: str, shown: str) -> Any:
    """The type of the value at a dotted key; `Any` below a part whose keys are the user's. Raises
    OrchError."""
    struct: Any = Config
    annotation: Any = None
    parts = key.split(".")
    for index, part in enumerate(parts):
        if struct is not None:
            legal = {
                name: field.type
                for name, field in fields(struct).items()
                if not (index == 0 and name == "choices")
            }
            if part not in legal:
                where = ".".join(parts[:index])
                raise OrchError(
                    f"{shown}: unknown {'key' if where else 'group or key'} {part!r}"
                    f"{f' in {where}' if where else ''}; {did_you_mean(part, legal)}"
                )
            annotation = legal[part]
        elif is_open(annotation):
            annotation = get_args(bare(annotation))[1]
            if index < len(parts) - 1:
                return Any
        elif annotation is Any:
            return Any
        elif part.isdigit() and _list_item(annotation) is not None:
            annotation = _list_item(annotation)
        else:
            where = ".".join(parts[:index])
            raise OrchError(f"{shown}: {where} is a single value, it has no key {part!r}")
        struct = struct_of(annotation)
    return annotation


def _list_item(annotation: Any) -> Any:
    kind = bare(annotation)
    return get_args(kind)[0] if getattr(kind, "__origin__", None) is list else None


def _parse(key: str, raw: str, shown: str, annotation: Any) -> Any:
    """A number, truth value, list or mapping in Hydra's override grammar. Sweeps are refused."""
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
    """Hydra's quoted strings as text, inside lists and mappings too."""
    from hydra.core.override_parser.types import QuotedString

    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {_plain(name): _plain(item) for name, item in value.items()}
    return value


def quote(text: str) -> str:
    """Text as a quoted string of Hydra's grammar: backslashes count only before a quote, where they
    are doubled."""
    escaped = re.sub(r"(\\*)'", lambda m: m[1] * 2 + "\\'", text)
    tail = len(escaped) - len(escaped.rstrip("\\"))
    return f"'{escaped}{chr(92) * tail}'"


def show(word: str, limit: int = 80) -> str:
    """A word as it can be printed on one line."""
    text = ascii(word) if not word.isprintable() else f"'{word}'"
    return text if len(text) <= limit else f"{text[: limit - 4]}...'"
