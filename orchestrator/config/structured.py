"""Derives Hydra's structured config from `schema.py`, so that every key is defined once.

Hydra wants mutable dataclasses of OmegaConf types. The derived classes carry the structure
(which keys exist, what nests in what), the defaults and the plain numeric types; msgspec checks
the rest (ranges, literals, names, unions) when the composed tree becomes a `Config`. Strings
stay untyped here: OmegaConf would turn a number into text in its own spelling (1e5 ->
"100000.0"), and strings must pass byte-exact or not at all.
"""

from __future__ import annotations

import dataclasses
import types
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec.structs import FieldInfo

from .schema import Config


@cache
def fields(struct: type[msgspec.Struct]) -> dict[str, FieldInfo]:
    """Returns the fields of one part of the schema, by name."""
    return {field.name: field for field in msgspec.structs.fields(struct)}


def bare(annotation: Any) -> Any:
    """Returns the type without `Annotated`, and without `| None`."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (types.UnionType, Union):
        kinds = [bare(kind) for kind in get_args(annotation) if kind is not type(None)]
        return kinds[0] if len(kinds) == 1 else Any
    return annotation


def optional(annotation: Any) -> bool:
    return type(None) in get_args(annotation)


def struct_of(annotation: Any) -> type[msgspec.Struct] | None:
    """Returns the schema class that a field nests, None for a leaf."""
    kind = bare(annotation)
    return kind if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else None


def is_open(annotation: Any) -> bool:
    """Tells whether a field takes keys of the user's choosing."""
    return get_origin(bare(annotation)) is dict


def is_text(annotation: Any) -> bool:
    kind = bare(annotation)
    if get_origin(kind) is Literal:
        return all(isinstance(choice, str) for choice in get_args(kind))
    return kind is str


def _omega_type(annotation: Any) -> Any:
    kind = bare(annotation)
    nested = struct_of(annotation)
    if nested is not None:
        omega: Any = config_dataclass(nested)
    elif get_origin(kind) is list:
        item = struct_of(get_args(kind)[0])
        omega = list[config_dataclass(item)] if item else list[Any]  # type: ignore[misc]
    elif get_origin(kind) is dict:
        omega = dict[str, Any]
    elif kind in (int, float, bool):
        omega = kind
    else:
        return Any
    return omega | None if optional(annotation) else omega


def _default(field: FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return dataclasses.field(default_factory=field.default_factory)
    if isinstance(field.default, msgspec.Struct):
        return dataclasses.field(default_factory=config_dataclass(type(field.default)))
    if field.default is msgspec.UNSET:
        return None
    if field.default is not msgspec.NODEFAULT:
        return field.default
    return "???"  # OmegaConf's MISSING


@cache
def config_dataclass(struct: type[msgspec.Struct]) -> type:
    """Builds the dataclass that OmegaConf sees for one part of the schema."""
    body: dict[str, Any] = {name: _default(field) for name, field in fields(struct).items()}
    body["__annotations__"] = {
        name: _omega_type(field.type) for name, field in fields(struct).items()
    }
    # OmegaConf reads fields and calls no methods, so Python need not compile any.
    return dataclasses.dataclass(
        type(struct.__name__, (), body),
        init=False,
        eq=False,
        repr=False,
    )


def register() -> None:
    """Registers the schema where `defaults: [schema]` of conf/orch.yaml finds it."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(
        name="schema",
        node=config_dataclass(Config),
        provider="orchestrator.config.schema",
    )
