"""YAML of plain values, for people to read. Only written: importing a library for it takes a tenth of `orch submit`.

What could mean anything else to a reader of YAML 1.1 or 1.2 is in double quotes, as in JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import isinf, isnan

import msgspec

_PLAIN = re.compile(r"[A-Za-z/](?:(?:[A-Za-z0-9 _./,()+@=;-]|:(?! ))*[A-Za-z0-9_./)+@=-])?")
_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})  # in any case no text


def to_yaml(value: object) -> str:
    """Of dicts with text keys, lists, text, numbers, truth values and None; keys sorted. Ends with a line end."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: object) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key in sorted(value):
            item, name = value[key], _text(key)
            if isinstance(item, dict | list) and item:
                yield f"{name}:"
                yield from (line if isinstance(item, list) else f"  {line}" for line in _lines(item))
            else:
                yield f"{name}: {_scalar(item)}"
    elif isinstance(value, list) and value:
        for item in value:
            first, *rest = _lines(item)
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
    else:
        yield _scalar(value)


def _scalar(value: object) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float):
        return _float(value)
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool | int) else "{}" if isinstance(value, dict) else "[]"


def _float(value: float) -> str:
    if isnan(value) or isinf(value):
        return ".nan" if isnan(value) else f"{'-' if value < 0 else ''}.inf"
    text = repr(value)
    return text if "." in text else text.replace("e", ".0e")  # 1e-05 would be text in YAML 1.1


def _text(value: str) -> str:
    if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    if value.isprintable():
        return msgspec.json.encode(value).decode()
    return '"' + "".join(c if c.isalnum() else f"\\U{ord(c):08x}" for c in value) + '"'
