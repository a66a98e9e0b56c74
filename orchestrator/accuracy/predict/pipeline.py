"""Finds the pipeline of a row: its schedule, its virtual stages, and the layers of each stage."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from orchestrator.cost.model.stages import balance_stages
from orchestrator.cost.software import Software
from orchestrator.plan.document import Model

from .cells import Row

#: (pattern of words in `pp_schedule`, in lower case without separators, the schedule that they
#: mean). The first match counts.
_SCHEDULES: tuple[tuple[str, str], ...] = (
    ("zbv|zeroblev|zerobubblev|vhalf|vmin", "zbv"),
    ("zb2p|zbh2|zb2", "zb_h2"),
    ("zb|zerobubble", "zb_h1"),
    ("dualpipev", "dualpipev"),
    ("dualpipe", "dualpipe"),
    ("notstated", ""),
    ("interleav|virtual|vpp|loop", "interleaved"),
    ("1f1b|onef|pipedream|default", "1f1b"),
    ("gpipe|afab|allforward|fillandrain|filldrain", "afab"),
)
#: Families whose recipes interleave pipeline stages by default.
_INTERLEAVE = ("nemo", "megatron")


class Pipeline(NamedTuple):
    schedule: str  # The name in plans.
    vpp: int  # Virtual stages per rank.


def pipeline_of(
    row: Row,
    model: Model,
    software: Software,
    pp: int,
    micro_batches: int,
) -> Pipeline:
    """Returns the pipeline of a row with `pp` stages."""
    pipeline = _pipeline(row, model, software, pp)
    if pipeline.schedule.startswith("dualpipe") and (pp % 2 or micro_batches % 2):
        row.say("pp_schedule=1f1b: dualpipe wants even numbers")
        return Pipeline("1f1b", 1)
    return pipeline


def _pipeline(row: Row, model: Model, software: Software, pp: int) -> Pipeline:
    vpp = row.degree("vpp")
    if pp == 1:
        return Pipeline("1f1b", 1)
    name = _stated_schedule(row, software, vpp)
    if name in ("zb_h1", "zb_h2", "dualpipe"):
        if vpp is not None and vpp > 1:
            row.say(f"pp_schedule={name}: vpp={vpp} is not of it")
        return Pipeline(name, 1)
    if name in ("zbv", "dualpipev"):
        if model.layers >= 2 * pp:
            return Pipeline(name, 2)
        row.say("pp_schedule=zb_h1: too few layers for two stages per rank")
        return Pipeline("zb_h1", 1)
    if name == "afab":
        return Pipeline("afab", min(vpp or 1, max(1, model.layers // pp)))
    if name == "1f1b":
        if vpp is None or vpp == 1:
            return Pipeline("1f1b", 1)
        row.say("pp_schedule=interleaved")
    if vpp is not None:
        return _with_stated_stages(row, model, name, pp, vpp)
    if name == "interleaved" or (name is None and software.name in _INTERLEAVE):
        return _with_usual_stages(row, model, software, name, pp)
    row.say("pp_schedule=1f1b")
    return Pipeline("1f1b", 1)


def _stated_schedule(row: Row, software: Software, vpp: int | None) -> str | None:
    """Returns the schedule that a row names; an empty string if it says that none is stated, and
    None for a blank cell or an unknown name."""
    cell = re.sub(r"[\s_\-]+", "", row.text("pp_schedule").lower())
    name = next(
        (name for pattern, name in _SCHEDULES if re.search(pattern, cell)),
        None,
    )
    if cell and name is None and cell != "none":
        row.say(f"pp_schedule={cell[:20]!r}: unknown")
    if "notstated" in cell and name in ("zb_h1", "zb_h2", "dualpipe"):
        return ""
    is_lora = "lora" in row.text("task").lower()
    if name == "1f1b" and vpp is None and software.name == "nemo" and not is_lora:
        # NeMo's recipes interleave by default; tables of runs without interleaving write vpp 1.
        return "interleaved"
    return name


def _interleaved(vpp: int) -> Pipeline:
    return Pipeline("interleaved" if vpp > 1 else "1f1b", vpp)


def _with_stated_stages(
    row: Row,
    model: Model,
    name: str | None,
    pp: int,
    vpp: int,
) -> Pipeline:
    """Returns the pipeline with the virtual stages that the row states, or as many as the model has
    layers for."""
    most_stages = max(1, (model.layers + 2) // pp)
    if vpp > most_stages:
        row.say(f"vpp={most_stages} of {vpp}: the model has {model.layers} layers")
        vpp = most_stages
    if vpp == 1 and name == "interleaved":
        row.say("pp_schedule=1f1b: one stage per rank")
    return _interleaved(vpp)


def _with_usual_stages(
    row: Row,
    model: Model,
    software: Software,
    name: str | None,
    pp: int,
) -> Pipeline:
    """Returns an interleaved pipeline with the virtual stages that recipes usually have."""
    vpp = _most_stages(model.layers, pp)
    if software.memory in ("fsdp", "orch"):
        vpp = min(2, model.layers // pp)  # PyTorch's pipelines have two stages per rank.
    elif name is None:
        vpp = max(
            (stages for stages in range(2, 13) if vpp % stages == 0),
            default=vpp,
        )
    pipeline = _interleaved(vpp)
    if name:
        row.say(f"vpp={vpp}")
    else:
        row.say(f"pp_schedule={pipeline.schedule}, vpp={vpp}")
    return pipeline


def _most_stages(layers: int, pp: int) -> int:
    """Returns the number of virtual stages per rank if each has one layer. If the layers do not
    divide evenly, the embedding and the head count as layers."""
    if layers % pp == 0:
        return layers // pp
    if (layers + 2) % pp == 0:
        return (layers + 2) // pp
    return 1


@lru_cache(maxsize=4096)
def _even(layers: int, stages: int) -> tuple[int, ...] | None:
    """Returns the layers of each stage of an even split, or None if there is none.

    As in the frameworks, the embedding and the head, or the head alone, count as layers if only
    then the layers divide evenly.
    """
    if layers % stages == 0:
        return (layers // stages,) * stages
    if stages > 1 and (layers + 2) % stages == 0:
        layers_per_stage = (layers + 2) // stages
        return (
            layers_per_stage - 1,
            *(layers_per_stage,) * (stages - 2),
            layers_per_stage - 1,
        )
    if (layers + 1) % stages == 0:
        layers_per_stage = (layers + 1) // stages
        return (*(layers_per_stage,) * (stages - 1), layers_per_stage - 1)
    return None


def stage_layers(model: Model, stages: int, software: Software) -> list[int]:
    """Returns the number of decoder layers of each stage, split as evenly as frameworks do it.
    Nanotron balances the cost of the head against the layers."""
    balanced = software.name == "nanotron" and stages <= model.layers
    even = None if balanced else _even(model.layers, stages)
    return list(even or balance_stages(model, stages, model.max_seq_len))
