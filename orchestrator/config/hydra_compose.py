"""Composes a checked `Config` from words and group files with Hydra.

Hydra's Compose API merges the files; this module resolves `${...}` once and makes the outcome a
value. `overrides` reads the words before Hydra, `content` keeps code and secrets out;
`hydra_errors` and `config_errors` turn every failure into one line with an exit code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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

_MAX_VALUES = 20_000  # values of a file that repeats parts of itself by aliases
#: Groups of Hydra's own configuration that nothing here reads, so they need not be composed.
_UNUSED_GROUPS = (
    "job_logging",
    "hydra_logging",
    "help",
    "hydra_help",
    "output",
    "launcher",
    "sweeper",
    "env",
)
_REMOVALS = [f"~hydra/{group}" for group in _UNUSED_GROUPS]


def compose(overrides: list[str], library: Library) -> Config:
    """Composes, resolves and checks a configuration. OrchError: 64 for the command line, 65 for
    a file, 78 for code or secrets."""
    _check_aliases(library)
    parsed = read(list(overrides), library)
    tree, choices = _compose(library, parsed)
    return _typed(tree, Origin(library, parsed, choices))


def _check_aliases(library: Library) -> None:
    """Raises OrchError (65) for one of the user's group files whose aliases would occupy
    OmegaConf for minutes, or forever."""
    for folder in library.folders[:-1]:
        for path in [
            *folder.glob(f"{PRIMARY}.yaml"),
            *(p for group in GROUPS for p in (folder / group).rglob("*.yaml")),
        ]:
            try:
                bounded_yaml.check(path.read_text(encoding="utf-8", errors="replace"), _MAX_VALUES)
            except OrchError as error:
                raise OrchError(f"{library.show(path)}: {error.message}", error.exit) from None


def _compose(library: Library, parsed: list[Override]) -> tuple[Any, dict[str, str]]:
    """Returns the OmegaConf tree with interpolations, and the chosen file or spec of every
    group."""
    register()
    for override in parsed:
        if (
            override.group
            and override.key == "parallel"
            and not library.path("parallel", override.text)
        ):
            _register_spec(override.text)
    hydra_overrides = [
        f"{'+' if override.key == OPTIONAL else ''}{override.key}={override.text}"
        for override in parsed
        if override.group
    ]
    hydra_overrides += _REMOVALS
    primary = PRIMARY
    if len(library.folders) > 1:
        if not (library.folders[0] / f"{PRIMARY}.yaml").is_file():
            primary = _lend_primary(library)
        hydra_overrides.append(
            f"hydra.searchpath=[{','.join(quote(f'file://{f}') for f in library.folders[1:])}]"
        )
    try:
        tree, choices = _call_hydra(library, primary, hydra_overrides)
    except SpecNeeded as need:  # Hydra has found that a file of the user's chose a spec
        _register_spec(need.spec)
        tree, choices = _call_hydra(library, primary, hydra_overrides)
    for override in parsed:
        if not override.group:
            _put(tree, override)
    return tree, choices


def _put(tree: Any, override: Override) -> None:
    """Sets one key of the composed tree as Hydra would: mappings are merged, everything else is
    replaced."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    path = override.key.split(".")
    for depth in range(1, len(path)):  # OmegaConf would leave keys unset here, or fail obscurely
        above = ".".join(path[:depth])
        if optional(annotation_at(path[:depth])) and OmegaConf.select(tree, above) is None:
            raise OrchError(
                f"{override.show()}: {above} is null in this model; set it whole: {above}={{...}}"
            )
    try:
        struct = struct_of(annotation_at(path))
        if (
            struct
            and isinstance(override.value, dict)
            and OmegaConf.select(tree, override.key) is None
        ):
            OmegaConf.update(
                tree,
                override.key,
                OmegaConf.structured(config_dataclass(struct)),
                merge=False,
            )
        OmegaConf.update(
            tree,
            override.key,
            override.value,
            force_add=open_at(path),
        )
    except (OmegaConfBaseException, ValueError, TypeError, AssertionError) as error:
        raise OrchError(f"{override.show()}: {reason(error)}") from None


def _register_spec(spec: str) -> None:
    """Makes a parallelism spec a choice of its group, like a file of that name."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(
        group="parallel",
        name=spec,
        node=grammar.parse(spec),
        provider="word",
    )


def _lend_primary(library: Library) -> str:
    """Puts the primary file into Hydra's store and returns its name there: Hydra looks for the
    primary file before it reads the search path, but always in its store."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    name = f"shipped_{PRIMARY}"
    ConfigStore.instance().store(
        name=name,
        node=OmegaConf.load(library.folders[-1] / f"{PRIMARY}.yaml"),
    )
    return name


def _call_hydra(
    library: Library,
    primary: str,
    hydra_overrides: list[str],
) -> tuple[Any, dict[str, str]]:
    import yaml
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import open_dict
    from omegaconf.errors import OmegaConfBaseException

    folder = str(library.folders[0])
    # Hydra raises these for malformed files, assertions and built-in errors among them.
    refusals = (
        HydraException,
        OmegaConfBaseException,
        yaml.YAMLError,
        AssertionError,
        ValueError,
        TypeError,
        RecursionError,
    )
    try:
        with _hydra_of_caller_kept(), initialize_config_dir(folder, version_base="1.3"):
            tree = compose(primary, overrides=hydra_overrides, return_hydra_config=True)
    except refusals as error:
        raise refuse(error, library, hydra_overrides) from None
    chosen = {
        group: str(name)
        for group, name in tree.hydra.runtime.choices.items()
        if not group.startswith("hydra/")
    }
    with open_dict(tree):
        del tree["hydra"]
    return tree, chosen


@contextmanager
def _hydra_of_caller_kept() -> Iterator[None]:
    """Gives back the state that Hydra keeps in the process: whoever calls the Python API may use
    Hydra, too."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.version import VersionBase

    global_hydra = GlobalHydra.instance()
    hydra_of_caller = global_hydra.hydra
    version_of_caller = VersionBase.instance().version_base
    global_hydra.clear()
    try:
        yield
    finally:
        global_hydra.hydra = hydra_of_caller
        GlobalHydra.set_instance(global_hydra)
        VersionBase.instance().version_base = version_of_caller


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
        del plain["cluster"]["topology_nodes"]  # an unset field is not written into plans
    try:
        config = msgspec.convert(plain, Config)
    except msgspec.ValidationError as error:
        raise from_msgspec(error, plain, origin) from None
    return validate(config, origin)
