"""What Hydra, OmegaConf and YAML raise while files are put together, each as one line naming the file or the word."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.suggest import did_you_mean

from . import grammar
from .groups import PRIMARY, Library
from .overrides import show

UNREAD = "an interpolation that cannot be read; ${a.key} is what there is"


class WordNeeded(Exception):
    """A file's defaults list chose a parallel word, which has to be made known to Hydra first."""

    def __init__(self, word: str):
        super().__init__(word)
        self.word = word


def refuse(error: Exception, library: Library, words: list[str]) -> Exception:
    """The OrchError to raise for a failure of `hydra.compose`, or `WordNeeded`."""
    import yaml
    from hydra.errors import MissingConfigException

    if isinstance(error, MissingConfigException):
        return _missing_file(error, library)
    if isinstance(error, yaml.YAMLError):
        return OrchError(_yaml_line(error, library), Exit.CONFIG)
    if isinstance(error, UnicodeDecodeError):
        where = _file_with(library, lambda raw: not _is_utf8(raw))
        return OrchError(f"{where}: not UTF-8: {error.reason}", Exit.CONFIG)
    return _composition(error, library, words)


def _missing_file(error: Any, library: Library) -> Exception:
    """A defaults list asks for a file that is not there, or for a parallel word."""
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    by = re.match(r"In '([^']+)'", str(error))
    where = _file(by[1], library) if by else "configuration"
    if by and by[1].endswith(PRIMARY):  # Hydra blames the primary file for what another file overrode
        where = _file_with(library, lambda raw: re.search(rb"\b%s\b" % re.escape(name.encode()), raw) is not None)
    if group == "parallel" and grammar.looks_like_word(name):
        try:
            grammar.parse(name)
        except OrchError as refused:
            return OrchError(f"{where}: {refused.message}", Exit.CONFIG)
        return WordNeeded(name)
    hint = did_you_mean(name, library.files(group))
    return OrchError(f"{where}: there is no {group or 'file'} {show(name)}; {hint}", Exit.CONFIG)


def _file(config: str, library: Library) -> str:
    group, _, name = config.rpartition("/")
    path = library.path(group, name)
    return library.show(path) if path else config


def _file_with(library: Library, wanted: Callable[[bytes], bool]) -> str:
    """The first file that holds what Hydra or Python refused without saying where."""
    for folder in library.folders:
        for path in sorted(folder.rglob("*.yaml")):
            if wanted(path.read_bytes()):
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
    where = f"{library.show(Path(mark.name))}:{mark.line + 1}" if mark and Path(mark.name).is_file() else "a file"
    return f"{where}: not YAML: {getattr(error, 'problem', None) or error}"


def _composition(error: BaseException, library: Library, words: list[str]) -> OrchError:
    """What Hydra or OmegaConf refused, as one line: the file or word, the key, the reason."""
    from omegaconf.errors import GrammarParseError, OmegaConfBaseException

    by = re.match(r"In '([^']+)'", str(error))
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, OmegaConfBaseException):
        inner = inner.__cause__ or inner.__context__
    key = re.sub(r"\[(\d+)\]", r".\1", str(getattr(inner, "full_key", None) or ""))
    reason = " ".join(str(getattr(inner, "msg", None) or inner or error).split("\n")[0].split())
    if "_target_" in key or "_target_" in reason:
        where = _file(by[1], library) if by else "configuration"
        return OrchError(f"{where}: _target_ would run code from configuration; orch never does", Exit.SECURITY)
    if by is None and key:
        told = next((w for w in words if re.match(rf"\+*{re.escape(key)}[.=]", w)), None)
        if told:
            unread = isinstance(inner, GrammarParseError)
            return OrchError(f"{show(told.lstrip('+'))}: {UNREAD if unread else _said(reason)}", Exit.USAGE)
    if isinstance(inner, GrammarParseError):
        seen = re.search(r"'(\$\{[^']*)'", reason)
        where = _file_with(library, lambda raw: seen is not None and seen[1].encode() in raw)
        return OrchError(f"{where}: {key}: {UNREAD}", Exit.CONFIG)
    if (isinstance(error, AssertionError) or "NoneType" in reason) and (nothing := _into_nothing(words)):
        return nothing
    unknown = re.match(r"Key '([^']*)' (?:is )?not in", reason)
    if unknown and isinstance(inner, OmegaConfBaseException):
        legal = [name for name in getattr(inner.object_type, "__annotations__", ()) if name != "choices"]
        reason = f"unknown key; {did_you_mean(unknown[1], legal)}" if legal else "unknown key"
    where = _file(by[1], library) if by else "configuration"
    return OrchError(f"{where}: {f'{key}: ' if key else ''}{_said(reason)}", Exit.CONFIG)


def _said(reason: str) -> str:
    """OmegaConf's reasons without its class names."""
    match = re.match(r"Value '(.*)' of type '\w+' could not be converted to (\w+)", reason)
    if match:
        kinds = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}
        return f"must be {kinds.get(match[2], match[2])}, not {show(match[1])}"
    if reason.startswith("Invalid type assigned: dict"):
        return "there is no such item in the list"
    if "is not a ListConfig" in reason:
        return "must be a list"
    if re.search(r"is not a subclass of \w+Spec", reason):
        return "must hold keys and values"
    if reason.endswith("is not Optional") or reason.startswith("Incompatible value 'None'"):
        return "cannot be null"
    return reason


def _into_nothing(words: list[str]) -> OrchError | None:
    """A key set inside a part that is null, like model.moe.experts of a dense model."""
    for word in words:
        key = word.lstrip("+").split("=")[0]
        if key.startswith(("model.moe.", "model.mla.")):
            parent = key.rpartition(".")[0]
            return OrchError(
                f"{show(word)}: {parent} is null in this model; set it whole: {parent}={{...}}", Exit.USAGE
            )
    return None
