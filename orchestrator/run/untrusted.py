"""Bytes from elsewhere."""

from __future__ import annotations

import msgspec

#: Everything that decoding hostile JSON may raise: besides msgspec's own errors, invalid UTF-8 in a key
#: (UnicodeDecodeError, a ValueError) and nesting without end (RecursionError).
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
