"""The cases of a long list that `make test` runs: few in which every pair of settings of the list
still meets.

A fault of a layout comes from one setting or from two that meet; three at once find hardly more.
This is what pairwise testing rests on. The other cases of a list run with `make verify`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import combinations
from typing import Any

import pytest
from msgspec import Struct, structs

from tests.beds.plans import make_plan, tiny_model
from tests.trainer.together import world

Setting = tuple[str, str]
Pair = frozenset[Setting]  # or one setting alone

#: Settings that matter as "given" alone: their value decides how much is computed, not how.
_GIVEN = ("replica_micro_batches", "schedule_rows", "recompute_layers")
_NOT_COUNTED = ("name", "parameters")  # fields of a model that follow from others
_PLAIN = structs.asdict(tiny_model())  # the model of a case that names none


def covering(cases: Mapping[Any, Mapping[str, Any]]) -> set[Any]:
    """The names of the chosen cases, arguments of `make_plan` each: cheap ones that meet many new
    pairs first."""
    met = {name: _pairs(settings(case)) for name, case in cases.items()}
    cost = {name: _cost(case) for name, case in cases.items()}
    unmet = set[Pair]().union(*met.values())
    chosen: list[Any] = []
    while unmet:
        best = max(met, key=lambda name: len(met[name] & unmet) / cost[name])
        chosen.append(best)
        unmet -= met[best]
    for name in sorted(chosen, key=lambda name: -cost[name]):
        met_elsewhere = set[Pair]().union(
            *(met[chosen_name] for chosen_name in chosen if chosen_name != name)
        )
        if met[name] <= met_elsewhere:
            chosen.remove(name)
    return set(chosen)


def launches(
    cases: Mapping[tuple, Mapping[str, Any]], chosen: Collection[tuple] | None = None
) -> list:
    """Parameters of a test: cases by name that run one after the other on the same ranks.

    A key is a case's name, after the words of its group, if any: launches are of one group and one
    number of ranks. Cases that are not `chosen`, by `covering` if nobody else, run with `make
    verify`.
    """
    if chosen is None:
        chosen = covering(cases)
    cases_by_launch: dict[tuple, dict[str, Mapping[str, Any]]] = {}
    for key, case in cases.items():
        *group, name = key
        full = key not in chosen
        cases_by_launch.setdefault((*group, world(case), full), {})[name] = case
    return [
        pytest.param(
            cases_by_launch[launch],
            id="-".join(map(str, launch[:-1])) + "-full" * launch[-1],
            marks=[pytest.mark.full] * launch[-1],
        )
        for launch in sorted(cases_by_launch)
    ]


def settings(case: Mapping[str, Any]) -> frozenset[Setting]:
    """What a fault may depend on in a case."""
    pp = case.get("pp", 1)
    return frozenset(
        setting for name, value in case.items() for setting in _settings_of(name, value, pp)
    )


def _settings_of(name: str, value: Any, pp: int) -> list[Setting]:
    match name:
        case "model":
            return _settings_of_model(_fields_of_model(value))
        case "micro_batches":
            return [(name, _kind_of_count(value, pp))]
        case "stage_layers":
            return [(name, "empty stage" if 0 in value else "uneven")]
        case "bucket_bytes":
            default = make_plan.__kwdefaults__[name]
            return [(name, "many buckets" if value < default else "one bucket")]
        case _ if name in _GIVEN:
            return [(name, "given")]
        case _:
            return [(name, str(value))]


def _fields_of_model(model: Struct | dict[str, Any]) -> dict[str, Any]:
    """A model is given whole, or as what it has other than the tests' default model."""
    return _PLAIN | model if isinstance(model, dict) else structs.asdict(model)


def _settings_of_model(fields: Mapping[str, Any]) -> list[Setting]:
    """Fields that differ from the tests' default model."""
    model_settings = []
    for name, value in fields.items():
        if isinstance(value, Struct):
            model_settings.append((f"model.{name}", "given"))
            model_settings += [(f"model.{name}.{option}", "given") for option in _options_of(value)]
        elif value != _PLAIN[name] and name not in _NOT_COUNTED:
            model_settings.append((f"model.{name}", str(value)))
    return model_settings


def _options_of(section: Struct) -> list[str]:
    """The options of experts, latent attention or predictions that differ from their defaults.
    Sizes have no defaults."""
    return [
        field.name
        for field in structs.fields(section)
        if not field.required and _is_given(section, field)
    ]


def _is_given(section: Struct, field: structs.FieldInfo) -> bool:
    return bool(getattr(section, field.name) != field.default)


def _kind_of_count(micro_batches: int, pp: int) -> str:
    if pp == 1:
        return "several" if micro_batches > 1 else "one"
    if micro_batches < pp:
        return "fewer than stages"
    return "not a multiple of stages" if micro_batches % pp else "a multiple of stages"


def _pairs(case_settings: frozenset[Setting]) -> set[Pair]:
    return {frozenset([setting]) for setting in case_settings} | {
        frozenset(pair) for pair in combinations(case_settings, 2)
    }


def _cost(case: Mapping[str, Any]) -> float:
    """Layers that all ranks run in a step, less than in proportion: long cases meet much."""
    layers = _fields_of_model(case.get("model", {}))["layers"]
    return float(world(case) * case.get("micro_batches", 2) * layers) ** 0.7
