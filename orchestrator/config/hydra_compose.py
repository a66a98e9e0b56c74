"""Hydra's part: from words and the files of groups to a checked `Config`.

Hydra's Compose API puts the files together; this module resolves `${...}` once and makes the result
a value. `overrides` reads the words before Hydra, `content` keeps code and secrets out;
`hydra_errors` and `config_errors` turn every failure into one line with an exit code.
"""

from __future__ import annotations

from typing import Any

import msgspec

from orchestrator.errors import OrchError

from . import bounded_yaml, grammar
from .config_errors import Origin, annotation_at, from_msgspec, open_at
from .content import check_interpolations, check_leaves
from .groups import GROUPS, OPTIONAL, PRIMARY, Library
from .hydra_errors import SpecNeeded, reason, refuse
from .overrides import Override, quote, read
from .schema import Config
from .structured import config_dataclass, optional, register, struct_of
from .validate import validate

_MOST_VALUES = 20_000  # of a file that repeats parts of itself by aliases
#: Parts of Hydra's own configuration that nothing here reads: files that need not be composed.
_PARTS = (
    "job_logging",
    "hydra_logging",
    "help",
    "hydra_help",
    "output",
    "launcher",
    "sweeper",
    "env",
)
_UNUSED = [f"~hydra/{part}" for part in _PARTS]


def compose(overrides: list[str], library: Library) -> Config:
    """Raises OrchError: 64 for the command line, 65 for a file, 78 for code or secrets."""
    _check_aliases(library)
    given = read(list(overrides), library)
    tree, choices = _compose(library, given)
    return _typed(tree, Origin(library, given, choices))


def _check_aliases(library: Library) -> None:
    """OrchError (65) for a group file of the user's whose aliases would take OmegaConf minutes, or
    for ever."""
    for folder in library.folders[:-1]:
        for path in [
            *folder.glob(f"{PRIMARY}.yaml"),
            *(p for group in GROUPS for p in (folder / group).rglob("*.yaml")),
        ]:
            try:
                bounded_yaml.check(path.read_text(encoding="utf-8", errors="replace"), _MOST_VALUES)
            except OrchError as error:
                raise OrchError(f"{library.show(path)}: {error.message}", error.exit) from None


def _compose(library: Library, given: list[Override]) -> tuple[Any, dict[str, str]]:
    """(OmegaConf tree with interpolations, chosen file or word of every group)."""
    register()
    for override in given:
        if (
            override.group
            and override.key == "parallel"
            and not library.path("parallel", override.text)
        ):
            _register_spec(override.text)
    words = [
        f"{'+' if override.key == OPTIONAL else ''}{override.key}={override.text}"
        for override in given
        if override.group
    ]
    words += _UNUSED
    primary = PRIMARY
    if len(library.folders) > 1:
        if not (library.folders[0] / f"{PRIMARY}.yaml").is_file():
            primary = _lend_primary(library)
        words.append(
            f"hydra.searchpath=[{','.join(quote(f'file://{f}') for f in library.folders[1:])}]"
        )
    try:
        tree, choices = _call_hydra(library, primary, words)
    except SpecNeeded as need:  # a file of the user's chose a parallelism spec; known only now
        _register_spec(need.word)
        tree, choices = _call_hydra(library, primary, words)
    for override in given:
        if not override.group:
            _put(tree, override)
    return tree, choices


def _put(tree: Any, override: Override) -> None:
    """Set one key of the composed tree, as Hydra would: mappings are merged, everything else is
    replaced."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    parts = override.key.split(".")
    for depth in range(1, len(parts)):  # OmegaConf would make a hole here, or fail obscurely
        above = ".".join(parts[:depth])
        if optional(annotation_at(parts[:depth])) and OmegaConf.select(tree, above) is None:
            raise OrchError(
                f"{override.show()}: {above} is null in this model; set it whole: {above}={{...}}"
            )
    try:
        whole = struct_of(annotation_at(parts))
        if (
            whole
            and isinstance(override.value, dict)
            and OmegaConf.select(tree, override.key) is None
        ):
            OmegaConf.update(
                tree, override.key, OmegaConf.structured(config_dataclass(whole)), merge=False
            )
        OmegaConf.update(tree, override.key, override.value, force_add=open_at(parts))
    except (OmegaConfBaseException, ValueError, TypeError, AssertionError) as error:
        raise OrchError(f"{override.show()}: {reason(error)}") from None


def _register_spec(word: str) -> None:
    """Make a parallelism spec a choice of its group, as a file of that name would be."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(
        group="parallel", name=word, node=grammar.parse(word), provider="word"
    )


def _lend_primary(library: Library) -> str:
    """Hydra looks for the primary file before it reads the search path, but always in its store:
    put it there."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    name = f"shipped_{PRIMARY}"
    ConfigStore.instance().store(
        name=name, node=OmegaConf.load(library.folders[-1] / f"{PRIMARY}.yaml")
    )
    return name


def _call_hydra(library: Library, primary: str, words: list[str]) -> tuple[Any, dict[str, str]]:
    import yaml
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import open_dict
    from omegaconf.errors import OmegaConfBaseException

    # what is raised by Hydra for files that are not what they should be: assertions and built-in
    # errors among them
    wrong = (
        HydraException,
        OmegaConfBaseException,
        yaml.YAMLError,
        AssertionError,
        ValueError,
        TypeError,
        RecursionError,
    )
    try:
        with initialize_config_dir(str(library.folders[0]), version_base="1.3"):
            tree = compose(primary, overrides=words, return_hydra_config=True)
    except wrong as error:
        raise refuse(error, library, words) from None
    chosen = {
        group: str(name)
        for group, name in tree.hydra.runtime.choices.items()
        if not group.startswith("hydra/")
    }
    with open_dict(tree):
        del tree["hydra"]
    return tree, chosen


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
        key = str(error.full_key or "configuration")
        reason = str(error).split("\n")[0]
        raise origin.error(key, reason) from None
    check_leaves(plain, origin)
    plain["choices"] = origin.choices
    if plain["cluster"]["topology_nodes"] is None:
        del plain["cluster"][
            "topology_nodes"
        ]  # unset, so that it is written down only where it says something
    try:
        config = msgspec.convert(plain, Config)
    except msgspec.ValidationError as error:
        raise from_msgspec(error, plain, origin) from None
    return validate(config, origin)
