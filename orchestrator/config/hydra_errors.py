"""Turns what Hydra, OmegaConf and YAML raise while files are composed into one line that names
the file or the override."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.errors import OrchError, did_you_mean
from orchestrator.plan.exits import Exit

from . import grammar
from .bounded_yaml import is_deep
from .groups import PRIMARY, Library
from .overrides import show

#: A message of OmegaConf -> what it means to the author of the file.
PLAIN = {
    r"^Invalid type assigned: dict": "there is no such item in the list",
    r"is not a ListConfig": "must be a list",
    r"is not a subclass of \w+": "must hold keys and values",
    r"is not Optional$|^Incompatible value 'None'": "cannot be null",
}


class SpecNeeded(Exception):
    """The defaults list of a file chose a parallelism spec, which has to be registered with
    Hydra first."""

    def __init__(self, spec: str):
        super().__init__(spec)
        self.spec = spec


def refuse(error: Exception, library: Library, hydra_overrides: list[str]) -> Exception:
    """Returns the OrchError to raise for a failure of `hydra.compose`, or `SpecNeeded`."""
    import yaml
    from hydra.errors import MissingConfigException

    if isinstance(error, MissingConfigException):
        return _missing_file(error, library)
    if isinstance(error, yaml.YAMLError):
        return OrchError(_yaml_line(error, library), Exit.CONFIG)
    if isinstance(error, RecursionError):
        file = _file_with(library, lambda raw: is_deep(raw))
        return OrchError(f"{file}: it is nested too deeply", Exit.CONFIG)
    if isinstance(error, UnicodeDecodeError):
        file = _file_with(library, lambda raw: not _is_utf8(raw))
        return OrchError(f"{file}: not UTF-8: {error.reason}", Exit.CONFIG)
    return _composition(error, library, hydra_overrides)


def _missing_file(error: Any, library: Library) -> Exception:
    """Returns the error for a defaults list that asks for a file that does not exist, or for a
    spec."""
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    include = re.match(r"In '([^']+)'", str(error))
    file = _file(include[1], library) if include else "configuration"
    # Hydra names the primary file even if another file has overridden the choice.
    if include and include[1].endswith(PRIMARY):
        file = _file_with(
            library,
            lambda raw: re.search(rb"\b%s\b" % re.escape(name.encode()), raw) is not None,
        )
    if group == "parallel" and grammar.looks_like_spec(name):
        try:
            grammar.parse(name)
        except OrchError as refused:
            return OrchError(f"{file}: {refused.message}", Exit.CONFIG)
        return SpecNeeded(name)
    hint = did_you_mean(name, library.files(group)) + library.unread(group, name)
    return OrchError(f"{file}: there is no {group or 'file'} {show(name)}; {hint}", Exit.CONFIG)


def _file(config: str, library: Library) -> str:
    group, _, name = config.rpartition("/")
    path = library.path(group, name)
    return library.show(path) if path else config


def _file_with(library: Library, matches: Callable[[bytes], bool]) -> str:
    """Returns the first file with the content that Hydra or Python refused without naming the
    file."""
    for folder in library.folders:
        for path in sorted(folder.rglob("*.yaml")):
            if matches(path.read_bytes()):
                return library.show(path)
    return "configuration"


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _yaml_line(error: Any, library: Library) -> str:
    mark = getattr(error, "problem_mark", None)
    where = (
        f"{library.show(Path(mark.name))}:{mark.line + 1}"
        if mark and Path(mark.name).is_file()
        else "a file"
    )
    return f"{where}: not YAML: {getattr(error, 'problem', None) or error}"


def _composition(
    error: Exception,
    library: Library,
    hydra_overrides: list[str],
) -> OrchError:
    """Returns the error for what Hydra or OmegaConf refused in a file: the file, the key, the
    reason."""
    from omegaconf.errors import GrammarParseError

    unused = re.search(r"Could not override '([^']+)'", str(error))
    if unused and any(override.startswith(f"{unused[1]}=") for override in hydra_overrides):
        parent = unused[1].rpartition("/")[0]
        return OrchError(
            f"{unused[1]}=...: the chosen {parent or 'configuration'} has no such choice",
            Exit.USAGE,
        )
    inner = _innermost(error)
    key = re.sub(
        r"\[(\d+)\]",
        r".\1",
        str(getattr(inner, "full_key", None) or ""),
    )
    include = re.match(r"In '([^']+)'", str(error))
    file = _file(include[1], library) if include else "configuration"
    if isinstance(inner, GrammarParseError) and (seen := re.search(r"'(\$\{[^']*)'", str(inner))):
        file = _file_with(library, lambda raw: seen[1].encode() in raw)
    if "_target_" in key or "_target_" in str(inner):
        return OrchError(
            f"{file}: _target_ would run code from configuration; orch never does", Exit.SECURITY
        )
    return OrchError(f"{file}: {f'{key}: ' if key else ''}{reason(error)}", Exit.CONFIG)


def _innermost(error: BaseException) -> BaseException:
    """Returns the OmegaConf error that caused a Hydra error, else the error itself."""
    from omegaconf.errors import OmegaConfBaseException

    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, OmegaConfBaseException):
        inner = inner.__cause__ or inner.__context__
    return inner or error


def reason(error: BaseException) -> str:
    """Returns why OmegaConf refused a value, without its class names; unknown keys get a
    did-you-mean."""
    from omegaconf.errors import GrammarParseError

    inner = _innermost(error)
    message = " ".join(str(getattr(inner, "msg", None) or inner).split("\n")[0].split())
    if isinstance(inner, GrammarParseError):
        return "an interpolation that cannot be read; ${a.key} is what there is"
    if match := re.match(r"Value '(.*)' of type '\w+' could not be converted to (\w+)", message):
        kinds = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}
        return f"must be {kinds.get(match[2], match[2])}, not {show(match[1])}"
    if match := re.match(r"Key '([^']*)' (?:is )?not in", message):
        annotations = getattr(getattr(inner, "object_type", None), "__annotations__", ())
        legal = [name for name in annotations if name != "choices"]
        return f"unknown key; {did_you_mean(match[1], legal)}" if legal else "unknown key"
    for pattern, plain in PLAIN.items():
        if re.search(pattern, message):
            return plain
    return message
