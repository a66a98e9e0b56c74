"""Keeping secrets out of what is written down."""

from __future__ import annotations

import re

import msgspec

_SECRET = re.compile(
    r"(^|[_.-])(secret|token|passwd|password|passphrase|credentials?|private|apikey|key|auth)s?($|[_.-])", re.I
)
#: Words that match the pattern and are none: the token is one of text, the key a field.
_HARMLESS = re.compile(r"(tokens?_(per|id|ids)|(global|max|micro|num)_(batch_)?tokens?|tokens?izer)", re.I)
HIDDEN = "(redacted)"


def is_secret_name(name: str) -> bool:
    """Whether a variable or key of that name usually holds a secret: HF_TOKEN, AWS_SECRET_ACCESS_KEY, api-key ..."""
    return bool(_SECRET.search(name)) and not _HARMLESS.search(name)


def redacted(value: object, name: str = "") -> object:
    """`value` (dicts, lists, scalars) with every text or number under a secret-looking key replaced."""
    if isinstance(value, dict):
        return {key: redacted(item, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [redacted(item, name) for item in value]
    if value in (None, "") or isinstance(value, bool) or not is_secret_name(name):
        return value
    return HIDDEN


def frozen_config(config: msgspec.Struct) -> bytes:
    """The resolved configuration as YAML, redacted: what config.yaml of a run holds."""
    return msgspec.yaml.encode(redacted(msgspec.to_builtins(config)), order="deterministic")
