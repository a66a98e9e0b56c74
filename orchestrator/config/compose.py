"""From command-line words and YAML files to one typed, frozen `Config`.

Hydra's Compose API puts the files together; this module decides where they are looked for, keeps code and secrets out
of configuration, resolves `${...}` once, and turns every failure into one line with an exit code.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.suggest import did_you_mean

from . import grammar
from .explain import Origin, from_msgspec
from .groups import PRIMARY, Library, folders
from .overrides import Override, quote, read, show
from .schema import Config
from .structured import register
from .validate import validate

#: Resolvers that configuration may use. `oc.env` is not one: a resolved value is written into the run folder.
RESOLVERS = frozenset({"oc.select"})


def load(overrides: list[str], config_dir: str | Path | None = None) -> Config:
    """Compose, resolve and check. Raises OrchError: 64 for the command line, 65 for a file, 78 for code or secrets.

    `config_dir` is searched before the shipped files; without it `./conf` is, when it exists. Not for use from several
    threads at once: Hydra keeps its state in the process.
    """
    library = Library(folders(config_dir))
    given = read(list(overrides), library)
    tree, choices = _compose(library, given)
    return _typed(tree, Origin(library, given, choices))


# ------------------------------------------------------------------------------------------- Hydra


def _compose(library: Library, given: list[Override]) -> tuple[Any, dict[str, str]]:
    """(OmegaConf tree with interpolations, chosen file or word of every group)."""
    register()
    for override in given:
        if override.group and override.key == "parallel" and not library.path("parallel", override.text):
            _register_word(override.text)
    words = [override.hydra for override in given]
    primary = PRIMARY
    if len(library.folders) > 1:
        if not (library.folders[0] / f"{PRIMARY}.yaml").is_file():
            primary = _lend_primary(library)
        words.append(f"hydra.searchpath=[{','.join(quote(f'file://{f}') for f in library.folders[1:])}]")
    try:
        return _call_hydra(library, primary, words)
    except _WordNeeded as need:  # a file of the user's chose a parallel word; known only now
        _register_word(need.word)
        return _call_hydra(library, primary, words)


class _WordNeeded(Exception):
    def __init__(self, word: str):
        self.word = word


def _register_word(word: str) -> None:
    """Make a parallel word a choice of its group, as a file of that name would be."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(group="parallel", name=word, node=grammar.parse(word), provider="word")


def _lend_primary(library: Library) -> str:
    """Hydra looks for the primary file before it reads the search path, but always in its store: put it there."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    name = f"shipped_{PRIMARY}"
    ConfigStore.instance().store(name=name, node=OmegaConf.load(library.folders[-1] / f"{PRIMARY}.yaml"))
    return name


def _call_hydra(library: Library, primary: str, words: list[str]) -> tuple[Any, dict[str, str]]:
    import yaml
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf import open_dict
    from omegaconf.errors import OmegaConfBaseException

    try:
        with initialize_config_dir(str(library.folders[0]), version_base="1.3"):
            tree = compose(primary, overrides=words, return_hydra_config=True)
    except MissingConfigException as error:
        raise _missing_file(error, library) from None
    except yaml.YAMLError as error:
        raise OrchError(_yaml_line(error, library), Exit.CONFIG) from None
    except UnicodeDecodeError as error:
        where = _file_with(library, lambda raw: not _is_utf8(raw))
        raise OrchError(f"{where}: not UTF-8: {error.reason}", Exit.CONFIG) from None
    except (HydraException, OmegaConfBaseException, AssertionError, ValueError, TypeError) as error:
        raise _refusal(error, library, words) from None
    chosen = {group: str(name) for group, name in tree.hydra.runtime.choices.items() if not group.startswith("hydra/")}
    with open_dict(tree):
        del tree["hydra"]
    return tree, chosen


def _missing_file(error: Any, library: Library) -> Exception:
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    by = re.match(r"In '([^']+)'", str(error))
    where = _file(by[1], library) if by else "configuration"
    if group == "parallel" and grammar.looks_like_word(name):
        try:
            grammar.parse(name)
        except OrchError as refused:
            where = _file_with(library, lambda raw: name.encode() in raw)
            return OrchError(f"{where}: {refused.message}", Exit.CONFIG)
        return _WordNeeded(name)
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


def _refusal(error: BaseException, library: Library, words: list[str]) -> OrchError:
    """What Hydra or OmegaConf refused, as one line: the file or word, the key, the reason."""
    from omegaconf.errors import OmegaConfBaseException

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
            return OrchError(f"{show(told.lstrip('+'))}: {_said(reason)}", Exit.USAGE)
    if isinstance(error, AssertionError) or "NoneType" in reason:
        return _into_nothing(words)
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
    if "no viable alternative" in reason or "mismatched input" in reason:
        return "an interpolation that cannot be read; ${a.key} is what there is"
    if reason.endswith("is not Optional") or reason.startswith("Incompatible value 'None'"):
        return "cannot be null"
    return reason


def _into_nothing(words: list[str]) -> OrchError:
    """A key set inside a part that is null, like model.moe.experts of a dense model."""
    for word in words:
        key = word.lstrip("+").split("=")[0]
        if key.startswith(("model.moe.", "model.mla.")):
            parent = key.rpartition(".")[0]
            return OrchError(
                f"{show(word)}: {parent} is null in this model; set it whole: {parent}={{...}}", Exit.USAGE
            )
    return OrchError("configuration: a part that is null cannot hold keys", Exit.CONFIG)


# ------------------------------------------------------------------------------------------- typed


def _typed(tree: Any, origin: Origin) -> Config:
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    check_interpolations(OmegaConf.to_container(tree, resolve=False), origin)
    try:
        plain: Any = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        key = str(error.full_key)
        raise origin.unset(key) from None
    except OmegaConfBaseException as error:
        key, reason = str(error.full_key or "configuration"), str(error).split("\n")[0]
        raise origin.error(key, reason) from None
    check_leaves(plain, origin)
    plain["choices"] = origin.choices
    try:
        config = msgspec.convert(plain, Config)
    except msgspec.ValidationError as error:
        raise from_msgspec(error, plain, origin) from None
    return validate(config, origin)


def check_interpolations(tree: Any, origin: Origin, key: str = "") -> None:
    """Refuse resolvers outside `RESOLVERS`, nested and built-up names included."""
    if isinstance(tree, dict | list):
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for name, value in pairs:
            check_interpolations(value, origin, f"{key}.{name}" if key else str(name))
        return
    text = tree if isinstance(tree, str) else ""
    while match := re.search(r"\$\{([^${}]*)\}", text):
        name, colon, _ = match[1].partition(":")
        if colon and name.strip() not in RESOLVERS:
            why = "what it finds would be frozen into the run folder; ${a.key} is what there is"
            raise origin.error(key, f"the resolver {name.strip()!r} is not allowed: {why}", Exit.SECURITY)
        text = f"{text[: match.start()]}x{text[match.end() :]}"
    if "${" in text:
        raise origin.error(key, "an interpolation that cannot be read; ${a.key} is what there is")


def check_leaves(tree: Any, origin: Origin, key: str = "") -> None:
    """Every text printable, every number finite and exact in JSON, no `_target_`, nothing but JSON's kinds."""
    if isinstance(tree, dict | list):
        pairs = list(tree.items() if isinstance(tree, dict) else enumerate(tree))
        for name, value in pairs:
            at = f"{key}.{name}" if key else str(name)
            if name == "_target_":
                raise origin.error(key, "_target_ would run code from configuration; orch never does", Exit.SECURITY)
            if isinstance(tree, dict) and not (isinstance(name, str) and name.isprintable()):
                raise origin.error(key, f"the key {name!a} is not printable text")
            check_leaves(value, origin, at)
    elif isinstance(tree, str):
        if not tree.isprintable():
            bad = next(c for c in tree if not c.isprintable())
            raise origin.error(key, f"holds the unprintable character {bad!a}: text is printable and on one line")
    elif isinstance(tree, float):
        if tree != tree or tree in (float("inf"), float("-inf")):
            raise origin.error(key, f"must be a finite number, not {tree}")
    elif isinstance(tree, int):
        if abs(tree) > 2**53:
            raise origin.error(key, f"{tree} is larger than 2**53")
    elif tree is not None:
        raise origin.error(key, f"must be text, a number, true, false, null, a list or keys, not {type(tree).__name__}")
