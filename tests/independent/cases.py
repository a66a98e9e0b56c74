"""The cases of `python -m tests.independent`: small jobs, each started in one layout and
resumed in another.

A case is a pair of layouts in one precision. The cases vary everything that the training loop does:
micro-batches of 1 to 3 samples, isolated documents or not, masks, a growing batch, recomputation,
all learning-rate schedules, the networks, and the start from an initial state or from that of a
running job. The corpus is so small that a run reads it several times.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from itertools import count
from math import ceil, lcm, prod
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs

from orchestrator.cluster.build import build_cluster
from orchestrator.config.schema import (
    BatchRampSpec,
    ClusterSpec,
    Config,
    DataSpec,
    ModelSpec,
    TrainSpec,
)
from orchestrator.errors import OrchError
from orchestrator.plan import Exit, Plan, seal
from orchestrator.plan.document import Mla, Moe, Mtp, Precision, Yarn
from orchestrator.plan.trained import problems
from orchestrator.verify.cells import few_nodes

PRECISIONS: tuple[Precision, ...] = ("fp64", "fp32", "bf16", "fp16")
#: Groups of overrides that a user may give; the cases set everything else.
OPEN = ("parallel", "model", "cluster")
MOST_RANKS = 16
MOST_PARAMETERS = 5_000_000
STEPS = 6
RESUME_AT = 3
SEQ_LEN = 128
#: Samples of the corpus: a prime number, so that no batch divides an epoch.
SAMPLES = 17

_SHAPE: dict[str, Any] = {
    "layers": 4,
    "hidden": 64,
    "heads": 8,
    "ffn_hidden": 96,
    "vocab": 257,
    "max_seq_len": 512,
}
LLAMA = {
    **_SHAPE,
    "name": "llama",
    "kv_heads": 2,
    "head_dim": 16,
    "norm": "rms",
    "position": "rope",
    "mlp": "gated",
}
LLAMA |= {
    "activation": "silu",
    "bias": False,
    "tied_embeddings": False,
    "norm_eps": 1e-5,
    "rope_theta": 700.0,
}
GPT2 = {
    **_SHAPE,
    "name": "gpt2",
    "kv_heads": 8,
    "head_dim": 8,
    "norm": "layer",
    "position": "learned",
    "mlp": "plain",
}
GPT2 |= {"activation": "gelu", "bias": True, "tied_embeddings": True, "norm_eps": 1e-5}
#: Mixtral, Qwen3-MoE, DeepSeek-V3 with stretched positions and two modules of multi-token
#: prediction, and the differences of DeepSeek-V2: no query latent, softmax scores with groups
#: ranked by their best expert, weights that do not sum to 1, and experts with a capacity.
MIXTRAL = {
    **LLAMA,
    "name": "mixtral",
    "moe": Moe(experts=8, top_k=2, ffn_hidden=48, balance_loss=0.05, z_loss=0.01),
}
QWEN3 = {**LLAMA, "name": "qwen3", "qk_norm": True, "tied_embeddings": True}
QWEN3 |= {"moe": Moe(experts=8, top_k=3, ffn_hidden=40, balance_loss=0.05, balance_over="batch")}
_SHARED: dict[str, Any] = {
    "experts": 8,
    "top_k": 3,
    "ffn_hidden": 24,
    "shared_ffn_hidden": 40,
    "first_dense_layers": 1,
}
_SHARED |= {"groups": 4, "top_groups": 2}
_MLA = Mla(q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12)
DEEPSEEK_V3: dict[str, Any] = {
    **LLAMA,
    "name": "deepseek-v3",
    "kv_heads": 8,
    "mla": _MLA,
    "mtp": Mtp(depth=2),
}
DEEPSEEK_V3 |= {"yarn": Yarn(factor=4.0, original_seq_len=32, beta_fast=4.0, beta_slow=0.5)}
DEEPSEEK_V3 |= {
    "moe": Moe(**_SHARED, score="sigmoid", routed_scale=2.5, balance_loss=0.05, bias_update=0.03)
}
DEEPSEEK_V2: dict[str, Any] = {**LLAMA, "name": "deepseek-v2", "kv_heads": 8, "mtp": Mtp(depth=1)}
DEEPSEEK_V2 |= {"mla": structs.replace(_MLA, q_lora_rank=0)}
DEEPSEEK_V2 |= {
    "moe": Moe(
        **_SHARED,
        norm_topk=False,
        routed_scale=4.0,
        balance_loss=0.05,
        z_loss=0.01,
        capacity_factor=1.2,
    )
}
DENSE = (LLAMA, GPT2)
EXPERTS = (DEEPSEEK_V3, MIXTRAL, DEEPSEEK_V2, QWEN3)

_OPTIM: tuple[dict[str, Any], ...] = (
    {"schedule": "cosine", "warmup_steps": 2, "min_lr_ratio": 0.2},
    {"schedule": "wsd", "warmup_steps": 1, "decay_steps": 3},
    {"schedule": "constant", "warmup_steps": 4},
    {"schedule": "cosine", "warmup_steps": 0, "decay_steps": 4},
)


class Case(NamedTuple):
    """Two runs: the first from its start to its end, the second from the checkpoint of the first at
    step `RESUME_AT`."""

    name: str
    precision: Precision
    start: str  # "initial", or "harsh": a state that hides fewer errors
    plans: tuple[Plan, Plan]
    #: The loss scale of fp16 at the start, and the steps since its last change.
    scale: tuple[float, int] = (2.0**20, 0)


class Refusal(NamedTuple):
    """A case that is not run, and the reason."""

    name: str
    precision: Precision
    reason: str


def cases(
    overrides: Sequence[str],
    precisions: Sequence[Precision],
    config_dir: str | Path | None,
    home: Path,
) -> Iterator[Case | Refusal]:
    """Yields the cases of `parallel=layout,layout,...`: each layout starts a case, and the next one
    resumes it; a single layout is resumed by one process. `home`: a folder that exists as long as
    the runs. Raises OrchError."""
    further_overrides = []
    layouts: list[str] = []
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key == "parallel":
            layouts = [name.strip() for name in value.strip("[]").split(",")]
        else:
            further_overrides.append(override)
    if not layouts:
        raise OrchError(
            "the independent oracle needs layouts: parallel=tp2_pp2_zero1,dp4", Exit.USAGE
        )
    for override in further_overrides:
        key = override.lstrip("+").split("=", 1)[0]
        if key.split(".")[0] not in OPEN:
            raise OrchError(
                f"the independent oracle sets {key} itself; you may set: {', '.join(OPEN)}",
                Exit.USAGE,
            )
    own_model = any(override.lstrip("+").startswith("model") for override in further_overrides)
    write_corpus(home / "text")
    for number, first in enumerate(layouts):
        second = layouts[(number + 1) % len(layouts)] if len(layouts) > 1 else "dp1"
        for precision in precisions:
            name = f"{first} -> {second}"
            try:
                yield make(
                    name,
                    (first, second),
                    precision,
                    number,
                    home,
                    overrides=further_overrides,
                    config_dir=config_dir,
                    own_model=own_model,
                )
            except Refused as error:
                yield Refusal(name, precision, str(error))


class Refused(Exception):
    """A layout that is not run, with the reason."""


def make(
    name: str,
    layouts: tuple[str, str],
    precision: Precision,
    number: int,
    home: Path,
    *,
    overrides: Sequence[str] = (),
    config_dir: str | Path | None = None,
    own_model: bool = False,
) -> Case:
    """Returns the case of two layouts. `number` and the precision select what varies between the
    cases; `own_model`: the overrides name the model."""
    from orchestrator.config.compose import load

    variant = number + PRECISIONS.index(precision)
    base = [] if own_model else ["model=tiny"]
    configs = [
        load(["cluster=local", *base, *overrides, f"parallel={layout}"], config_dir)
        for layout in layouts
    ]
    if any(config.parallel.auto for config in configs):
        raise OrchError("the independent oracle needs degrees, not a search", Exit.USAGE)
    if not own_model:
        model = _model(configs, number)
        configs = [structs.replace(config, model=model) for config in configs]
    sizes = [
        config.parallel.micro_batch_size or 1 + (variant + index) % 3
        for index, config in enumerate(configs)
    ]
    batch = _batch(configs, sizes)
    isolated = (number % 2 == 0) == (precision in ("fp64", "fp16"))
    first, second = (
        _plan(config, precision, variant, home, isolated=isolated, size=size, batch=batch)
        for config, size in zip(configs, sizes, strict=True)
    )
    start = "initial" if precision == "fp64" and number % 2 == 0 else "harsh"
    # The second scale grows during the run: after 2,000 steps without a change.
    scale = (2.0**20, 0) if number % 2 == 0 else (2.0**12, 1998)
    return Case(name, precision, start, (first, second), scale)


def _model(configs: Sequence[Config], number: int) -> ModelSpec:
    """Returns the model of a case: one with experts if a layout has expert parallelism, with enough
    layers for the stages of both layouts."""
    spread = any(
        (config.parallel.ep or 1) > 1 or config.parallel.etp is not None for config in configs
    )
    shapes = EXPERTS if spread else DENSE
    shape = shapes[number % len(shapes)]
    stages = [(config.parallel.pp or 1) * (config.parallel.vpp or 1) for config in configs]
    layers = max(shape["layers"], *stages)
    return structs.replace(configs[0].model, **shape | {"layers": layers})


def _dp(config: Config) -> int:
    return config.parallel.dp or 1


def _batch(configs: Sequence[Config], sizes: Sequence[int]) -> int:
    """Returns the samples of a step: both layouts cut them into whole micro-batches, at least two
    and enough for their pipelines."""
    units = [
        size * _dp(config) * (config.parallel.ep or 1)
        for config, size in zip(configs, sizes, strict=True)
    ]
    common = lcm(*units)
    for samples in count(common, common):
        counts = [samples // unit for unit in units]
        if all(map(_fills_pipeline, configs, counts)):
            return samples
    raise AssertionError


def _fills_pipeline(config: Config, micro_batches: int) -> bool:
    """Whether the schedule of the layout takes this number of micro-batches, at least two."""
    par = config.parallel
    pp = par.pp or 1
    bidirectional = (par.schedule or "").startswith("dualpipe")
    if bidirectional and micro_batches % 2:
        return False
    if par.vpp not in (None, 1) and micro_batches % pp:
        return False
    return micro_batches >= max(2, 2 * pp if bidirectional else pp)


def _plan(
    config: Config,
    precision: Precision,
    variant: int,
    home: Path,
    *,
    isolated: bool,
    size: int,
    batch: int,
) -> Plan:
    """Returns the plan of a layout. `isolated`: documents do not see each other; `size`: samples of
    a micro-batch; `batch`: samples of a step. Raises Refused, OrchError."""
    from orchestrator.planner.build import build_plan

    par = config.parallel
    job = structs.replace(
        config,
        cluster=_cluster(config),
        parallel=structs.replace(
            par, dp=_dp(config), micro_batch_size=size, bucket_mib=(25.0, 2.0**-8)[variant % 2]
        ),
        train=_train(config, precision, variant, batch),
        data=_data(config, variant, home, isolated),
        optim=structs.replace(
            config.optim, lr=1e-2, weight_decay=0.3, eps=1e-8, **_OPTIM[variant % 4]
        ),
        checkpoint=structs.replace(config.checkpoint, every_steps=1, keep_last=STEPS + 2, dir=None),
        metrics=structs.replace(config.metrics, trace_steps=0),
    )
    try:
        plan = build_plan(job, build_cluster(job.cluster))
    except OrchError as error:
        raise Refused(error.message) from None
    if refusal := next(problems(plan), ""):
        raise Refused(refusal)
    if plan.model.parameters > MOST_PARAMETERS:
        millions = plan.model.parameters / 1e6
        raise OrchError(
            f"model {plan.model.name} has {millions:,.0f} million parameters; the independent oracle"
            f" takes at most {MOST_PARAMETERS / 1e6:.0f}"
        )
    if plan.model.moe is None:
        return plan
    return seal(structs.replace(plan, job=structs.replace(plan.job, record_choices=True)))


def _degrees(config: Config) -> list[int]:
    par = config.parallel
    return [par.tp or 1, par.cp or 1, par.ep or 1, par.pp or 1, _dp(config)]


def _cluster(config: Config) -> ClusterSpec:
    """Returns a cluster with a GPU for each rank. Raises Refused for too many ranks."""
    ranks = prod(_degrees(config))
    if ranks > MOST_RANKS:
        raise Refused(f"{ranks} ranks are too many to run on one machine (at most {MOST_RANKS})")
    by_domain = config.parallel.expert_all_to_all == "hierarchical" and ranks % 2 == 0
    cluster = few_nodes(config.cluster, ranks, 2 if by_domain else 1)
    # Any rate will do: the arithmetic is verified, not the speed.
    peak_tflops = dict.fromkeys(PRECISIONS, 0.02)
    return structs.replace(cluster, gpu=structs.replace(cluster.gpu, peak_tflops=peak_tflops))


def _data(config: Config, variant: int, home: Path, isolated: bool) -> DataSpec:
    """Returns the data settings: the corpus, read in an order of the variant."""
    return structs.replace(
        config.data,
        name="independent",
        paths=[str(home / "text")],
        extensions=[".txt", ".jsonl"],
        seed=99 + variant,
        cache_dir=str(home / "tokens"),
        isolate_documents=isolated,
        demo=False,
    )


def _train(config: Config, precision: Precision, variant: int, batch: int) -> TrainSpec:
    """Returns the training settings of a variant with `batch` samples per step."""
    tp, cp, *_ = _degrees(config)
    multiple = 2 * cp * tp
    ramp = BatchRampSpec(start_samples=batch // 2, over_samples=2 * batch)
    clip_grad_norm = 0.0 if variant % 4 == 3 else 0.7
    grad_dtype = "fp64" if precision == "fp64" else "fp32"
    return structs.replace(
        config.train,
        steps=STEPS,
        seq_len=multiple * ceil(SEQ_LEN / multiple),
        global_batch_samples=batch,
        global_batch_tokens=None,
        seed=1234 + variant,
        precision=precision,
        log_every_steps=1,
        grad_dtype=grad_dtype,
        clip_grad_norm=clip_grad_norm,
        recompute=("none", "full", "selective")[variant % 3],
        batch_ramp=ramp if variant % 4 == 1 else None,
    )


def write_corpus(folder: Path) -> None:
    """Writes documents of many lengths, in files whose order by name and by folder differs. Short
    documents leave a sample half as many targets as long ones."""
    draw = random.Random(7)
    letters = "etaoin shrdlu\n"

    def text(length: int) -> str:
        return "".join(draw.choice(letters) for _ in range(length))

    (folder / "b").mkdir(parents=True)
    (folder / "b" / "first.txt").write_text(text(150))
    (folder / "b.txt").write_text(text(90))
    lengths = [1, 2, 1, 1, 3, 1, 2, 1, 1, 1, 2, 70, 5, 1, 1, 2, 1, 40, 130, 1, 1, 1, 1, 2, 9]
    lines = "".join(json.dumps({"text": text(length)}) + "\n" for length in lengths)
    (folder / "c.jsonl").write_text(lines + '{"text": ""}\n\n')
    written = 150 + 90 + sum(lengths) + 2 + len(lengths)
    (folder / "d.txt").write_text(text(SAMPLES * SEQ_LEN + 6 - written))
