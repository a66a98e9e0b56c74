"""From words, or from an entry of the matrix, to cells: plans of the real planner, cut to what takes seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from pathlib import Path

from msgspec import structs

from orchestrator.cluster.build import build_cluster
from orchestrator.config.schema import ClusterSpec, Config
from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.plan.parity import Cell, Verdict

from .matrix import BUCKET_MIB, Entry

#: Processes that a layout gets where dp is left out: as many as the cluster has, and no more than this.
PROCESSES = 8
#: One process holds the model in float64 with its optimizer, and every rank its part of that.
MOST_PARAMETERS = 50_000_000
SEQ_LEN = 32  # tokens, at least: what a batch is cut to unless the user says otherwise
ACCUMULATION = 4
#: Recompute "budget" gets this share of what activations take without it, so that layers differ.
BUDGET_SHARE = 0.6
GIB = 1 << 30


def of_words(overrides: Sequence[str], config_dir: str | Path | None) -> Iterator[Cell | Verdict]:
    """A cell for each word of `parallel=word,word,...`; the other words hold for all. The model is `tiny` unless one is
    named. Raises OrchError."""
    from orchestrator.config.compose import load

    rest = [word for word in overrides if not word.lstrip("+").startswith("parallel=")]
    lists = [word.split("=", 1)[1] for word in overrides if word.lstrip("+").startswith("parallel=")]
    if not lists:
        raise OrchError(
            "`orch verify` needs a layout (parallel=tp2_pp2_zero1, or several: parallel=tp2,pp2) or --matrix"
        )
    given = {word.lstrip("+").split("=", 1)[0] for word in rest}
    if not given & {"model"}:
        rest = ["model=tiny", *rest]
    for name in [name.strip() for name in lists[-1].strip("[]").split(",")]:
        config = load([*rest, f"parallel={name}"], config_dir)
        if config.parallel.auto:
            raise OrchError(f"parallel={name}: verify needs degrees, not a search", Exit.USAGE)
        yield make(name, small(config, given))


def of_entries(entries: Sequence[Entry], config_dir: str | Path | None) -> Iterator[Cell | Verdict]:
    from orchestrator.config.compose import load

    base = load(["cluster=local", "train.precision=fp32"], config_dir)
    for entry in entries:
        yield make(entry.name, of_entry(base, entry), entry.variation.text == "packed")


def make(name: str, config: Config, packed: bool = False) -> Cell | Verdict:
    """The cell, or the planner's refusal. Raises OrchError for a model too large to hold whole."""
    from orchestrator.planner.build import build_plan

    try:
        plan = build_plan(config, build_cluster(config.cluster))
    except OrchError as error:
        return Verdict(name=name, refused=error.message)
    if plan.model.parameters > MOST_PARAMETERS:
        raise OrchError(
            f"model {plan.model.name} has {plan.model.parameters / 1e6:,.0f} million parameters, verify holds several"
            f" whole float64 copies: at most {MOST_PARAMETERS / 1e6:.0f} million; leave out model=, or shrink it with"
            " model.layers and model.hidden"
        )
    return Cell(name=name, plan=plan, packed=packed)


def of_entry(base: Config, entry: Entry) -> Config:
    model = structs.replace(base.model, name=entry.variation.model, **entry.model)
    bucket = BUCKET_MIB[entry.variation.buckets]
    parallel = structs.replace(base.parallel, **entry.degrees, micro_batch_size=1, bucket_mib=bucket)
    train = structs.replace(
        base.train,
        global_batch_samples=entry.samples,
        seq_len=16,
        steps=4,
        recompute=entry.recompute,
        compile=entry.compile,
    )
    optim = structs.replace(base.optim, warmup_steps=0)
    cluster = one_node(base.cluster, entry.processes)
    config = structs.replace(base, cluster=cluster, model=model, parallel=parallel, train=train, optim=optim)
    return _with_budget(config) if entry.recompute == "budget" else config


def _with_budget(config: Config) -> Config:
    from orchestrator.planner.build import build_plan

    free = structs.replace(config, train=structs.replace(config.train, recompute="none"))
    budget = BUDGET_SHARE * build_plan(free, build_cluster(free.cluster)).memory.activations / GIB
    return structs.replace(config, train=structs.replace(config.train, recompute_budget_gib=budget))


def small(config: Config, given: set[str]) -> Config:
    """The job with a batch that one process computes in a second, keys that the user gave aside. Raises OrchError."""
    par, train = config.parallel, config.train
    tp, pp, cp, ep = (getattr(par, axis) or 1 for axis in ("tp", "pp", "cp", "ep"))
    model_ranks = tp * pp * cp * ep
    gpus = config.cluster.nodes * config.cluster.gpus_per_node
    dp = par.dp or max(1, min(gpus, PROCESSES) // model_ranks)
    if model_ranks * dp != gpus:
        config = structs.replace(config, cluster=one_node(config.cluster, model_ranks * dp))
    if "train.seq_len" not in given:
        piece = 2 * cp * tp
        train = structs.replace(train, seq_len=piece * ceil(SEQ_LEN / piece))
    if not given & {"train.global_batch_samples", "train.global_batch_tokens"}:
        size = par.micro_batch_size or 1
        par = structs.replace(par, micro_batch_size=size)
        train = structs.replace(
            train, global_batch_samples=max(ACCUMULATION, pp) * size * dp * ep, global_batch_tokens=None
        )
    # Precision is verify's own; a ramp only says how many samples a step has.
    train = structs.replace(train, precision="fp32", grad_dtype="fp32", batch_ramp=None)
    # A full learning rate from the first of the two steps: weights that hardly move prove little.
    optim = structs.replace(config.optim, warmup_steps=0)
    return structs.replace(config, parallel=structs.replace(par, dp=dp), train=train, optim=optim)


def one_node(cluster: ClusterSpec, gpus: int) -> ClusterSpec:
    """The same hardware as one node of `gpus`: what is verified is the arithmetic, not the placement."""
    return structs.replace(
        cluster,
        nodes=1,
        gpus_per_node=gpus,
        nvlink=structs.replace(cluster.nvlink, domain_nodes=1),
        nic=structs.replace(cluster.nic, per_node=1, rails=1),
        levels=[structs.replace(cluster.levels[0], nodes_per_switch=1)],
    )
