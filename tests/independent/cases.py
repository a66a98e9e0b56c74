"""The cases of `python -m tests.independent`: small jobs, each begun in one layout and resumed in
another.

A case is a pair of layouts in one precision. Over the cases everything varies that the loop does:
micro-batches of 1 to 3 samples, documents apart or not, masks, a growing batch, recomputation, all
learning-rate schedules, the networks, the initial state and one of a run under way. The corpus is
so small that a run reads it several times.
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
from orchestrator.config.schema import BatchRampSpec, Config
from orchestrator.errors import OrchError
from orchestrator.plan import Exit, Plan, seal
from orchestrator.plan.document import Mla, Moe, Mtp, Precision, Yarn
from orchestrator.plan.trained import problems
from orchestrator.verify.cells import few_nodes

PRECISIONS: tuple[Precision, ...] = ("fp64", "fp32", "bf16", "fp16")
#: Words that a user may give; everything else of a job is the cases' own.
OPEN = ("parallel", "model", "cluster")
MOST_RANKS = 16
MOST_PARAMETERS = 5_000_000
STEPS = 6
RESUME_AT = 3
SEQ_LEN = 128
#: Samples of the corpus: a prime, so that no batch divides an epoch.
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
#: Mixtral, Qwen3-MoE, DeepSeek-V3 with stretched positions and two modules that predict further,
#: and what DeepSeek-V2 had otherwise: no latent of queries, soft-max scores of which groups count
#: by the best, weights that do not sum to 1, experts of a bounded capacity.
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
    """Two runs: the first from its start to its end, the second from the first one's checkpoint of
    `RESUME_AT`."""

    name: str
    precision: Precision
    start: str  # "initial", or "harsh": a state that hides less
    plans: tuple[Plan, Plan]
    scale: tuple[float, int] = (
        2.0**20,
        0,
    )  # loss scale of fp16 at the start, and steps since it changed


class Refusal(NamedTuple):
    """A case that is not run, and why."""

    name: str
    precision: Precision
    reason: str


def cases(
    overrides: Sequence[str],
    precisions: Sequence[Precision],
    config_dir: str | Path | None,
    home: Path,
) -> Iterator[Case | Refusal]:
    """Of `parallel=word,word,...`: each word begins a case and the next goes on with it; one word
    alone is gone on with by one process. `home`: a folder that lasts as long as the runs. Raises
    OrchError."""
    other_overrides = [
        override for override in overrides if not override.lstrip("+").startswith("parallel=")
    ]
    layout_lists = [
        override.split("=", 1)[1]
        for override in overrides
        if override.lstrip("+").startswith("parallel=")
    ]
    if not layout_lists:
        raise OrchError(
            "the independent oracle needs layouts: parallel=tp2_pp2_zero1,dp4", Exit.USAGE
        )
    for override in other_overrides:
        key = override.lstrip("+").split("=", 1)[0]
        if key.split(".")[0] not in OPEN:
            raise OrchError(
                f"the independent oracle sets {key} itself; yours: {', '.join(OPEN)}", Exit.USAGE
            )
    own_model = any(override.lstrip("+").startswith("model") for override in other_overrides)
    layouts = [name.strip() for name in layout_lists[-1].strip("[]").split(",")]
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
                    other_overrides,
                    config_dir,
                    home,
                    own_model,
                )
            except Refused as error:
                yield Refusal(name, precision, str(error))


class Refused(Exception):
    """A layout that is not run, and why."""


def make(
    name: str,
    layouts: tuple[str, str],
    precision: Precision,
    number: int,
    overrides: Sequence[str],
    config_dir: str | Path | None,
    home: Path,
    own_model: bool = False,
) -> Case:
    from orchestrator.config.compose import load

    turn = number + PRECISIONS.index(precision)
    base = [] if own_model else ["model=tiny"]
    configs = [
        load(["cluster=local", *base, *overrides, f"parallel={layout}"], config_dir)
        for layout in layouts
    ]
    if any(config.parallel.auto for config in configs):
        raise OrchError("the independent oracle needs degrees, not a search", Exit.USAGE)
    if not own_model:
        has_expert_parallel = any(
            (one.parallel.ep or 1) > 1 or one.parallel.etp is not None for one in configs
        )
        shapes = EXPERTS if has_expert_parallel else DENSE
        shape = shapes[number % len(shapes)]
        layers = max(
            shape["layers"], *((one.parallel.pp or 1) * (one.parallel.vpp or 1) for one in configs)
        )
        model = structs.replace(configs[0].model, **shape | {"layers": layers})
        configs = [structs.replace(config, model=model) for config in configs]
    sizes = [
        config.parallel.micro_batch_size or 1 + (turn + at) % 3 for at, config in enumerate(configs)
    ]
    batch = _batch(configs, sizes)
    apart = (number % 2 == 0) == (precision in ("fp64", "fp16"))
    plans = [
        _plan(config, precision, turn, apart, size, batch, home)
        for config, size in zip(configs, sizes, strict=True)
    ]
    start = "initial" if precision == "fp64" and number % 2 == 0 else "harsh"
    return Case(
        name,
        precision,
        start,
        (plans[0], plans[1]),
        (2.0**20, 0) if number % 2 == 0 else (2.0**12, 1998),
    )


def _dp(config: Config) -> int:
    return config.parallel.dp or 1


def _batch(configs: Sequence[Config], sizes: Sequence[int]) -> int:
    """Samples of a step that both layouts cut into whole micro-batches, two at least and enough for
    their pipelines."""
    units = [
        size * _dp(config) * (config.parallel.ep or 1)
        for config, size in zip(configs, sizes, strict=True)
    ]
    both = lcm(*units)
    for times in count(1):
        fits = True
        for config, unit in zip(configs, units, strict=True):
            micro_batches = times * both // unit
            pp = config.parallel.pp or 1
            is_dualpipe = (config.parallel.schedule or "").startswith("dualpipe")
            fits &= (
                micro_batches >= max(2, 2 * pp if is_dualpipe else pp)
                and micro_batches % (2 if is_dualpipe else 1) == 0
            )
            fits &= config.parallel.vpp in (None, 1) or micro_batches % pp == 0
        if fits:
            return times * both
    raise AssertionError


def _plan(
    config: Config, precision: Precision, turn: int, apart: bool, size: int, batch: int, home: Path
) -> Plan:
    """The layout's plan of the case's job. Raises Refused, OrchError."""
    from orchestrator.planner.build import build_plan

    par = config.parallel
    dp = _dp(config)
    degrees = [par.tp or 1, par.cp or 1, par.ep or 1, par.pp or 1, dp]
    ranks = prod(degrees)
    if ranks > MOST_RANKS:
        raise Refused(f"{ranks} ranks are too many to run on one machine (at most {MOST_RANKS})")
    by_domain = par.expert_all_to_all == "hierarchical" and ranks % 2 == 0
    cluster = few_nodes(config.cluster, ranks, 2 if by_domain else 1)
    gpu = structs.replace(
        cluster.gpu, peak_tflops=dict.fromkeys(PRECISIONS, 0.02)
    )  # what is verified is arithmetic
    piece = 2 * degrees[1] * degrees[0]
    train = structs.replace(
        config.train,
        steps=STEPS,
        seq_len=piece * ceil(SEQ_LEN / piece),
        global_batch_samples=batch,
        global_batch_tokens=None,
        seed=1234 + turn,
        precision=precision,
        log_every_steps=1,
        grad_dtype="fp64" if precision == "fp64" else "fp32",
        clip_grad_norm=0.0 if turn % 4 == 3 else 0.7,
        recompute=("none", "full", "selective")[turn % 3],
        batch_ramp=(
            BatchRampSpec(start_samples=batch // 2, over_samples=2 * batch)
            if turn % 4 == 1
            else None
        ),
    )
    data = structs.replace(
        config.data,
        name="independent",
        paths=[str(home / "text")],
        extensions=[".txt", ".jsonl"],
        seed=99 + turn,
        cache_dir=str(home / "tokens"),
        isolate_documents=apart,
        demo=False,
    )
    changed = structs.replace(
        config,
        cluster=structs.replace(cluster, gpu=gpu),
        parallel=structs.replace(
            par, dp=dp, micro_batch_size=size, bucket_mib=(25.0, 2.0**-8)[turn % 2]
        ),
        train=train,
        data=data,
        optim=structs.replace(
            config.optim, lr=1e-2, weight_decay=0.3, eps=1e-8, **_OPTIM[turn % 4]
        ),
        checkpoint=structs.replace(config.checkpoint, every_steps=1, keep_last=STEPS + 2, dir=None),
        metrics=structs.replace(config.metrics, trace_steps=0),
    )
    try:
        plan = build_plan(changed, build_cluster(changed.cluster))
    except OrchError as error:
        raise Refused(error.message) from None
    if refusal := next(problems(plan), ""):
        raise Refused(refusal)
    if plan.model.parameters > MOST_PARAMETERS:
        millions = plan.model.parameters / 1e6
        raise OrchError(
            f"model {plan.model.name} has {millions:,.0f} million parameters; the independent"
            " oracle takes 5"
        )
    if plan.model.moe is None:
        return plan
    return seal(structs.replace(plan, job=structs.replace(plan.job, record_choices=True)))


def write_corpus(folder: Path) -> None:
    """Documents of many lengths, in files whose order by name and by folder differs; short
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
