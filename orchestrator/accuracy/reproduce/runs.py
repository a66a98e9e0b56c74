"""Reproduces published training runs: the step times of the presets, and the cost of whole
trainings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orchestrator.accuracy.reproduce import published as pub
from orchestrator.cost.model.layers import resolve
from orchestrator.plan.flops import model_flops_per_token

from .rows import Plans, Row, Section

#: Runs whose software nobody has planned, so that no limit is set: hand-fused kernels.
OTHER_SOFTWARE = ("bert_large_44min",)


def sections(plans: Plans, experiments: Sequence[str]) -> Iterator[Section]:
    rows = []
    sources = []
    for name in experiments:
        plan = plans.plan(f"experiment={name}")
        config = plans.config(f"experiment={name}")
        assert config.experiment is not None
        experiment = config.experiment
        gib = 1 << 30
        sd = plan.time.sd
        step_s = plan.time.step_s
        rows.append(
            Row(
                name,
                step_s,
                experiment.step_s,
                "s",
                "a step",
                within=None if name in OTHER_SOFTWARE else 0.10,
                sd=sd,
            )
        )
        rows.append(Row(name, 100 * plan.mfu, None, "%", "MFU, ours", sd=sd))
        rows.append(
            Row(
                name,
                plan.memory.total / gib,
                plan.memory.capacity / gib,
                "GiB",
                "fullest GPU, of",
                bound="less",
                sd=plan.memory.sd,
            )
        )
        sources.append(f"`{name}`: {experiment.published} ({experiment.source})")
    yield Section(
        "Published runs: `orch plan +experiment=NAME`",
        "conf/experiment:\n\n- " + "\n- ".join(sources),
        rows,
        "Steps as printed, or as they follow from the printed FLOP/s. MFU is ours alone: by this"
        " project's count (causal attention once, recomputation not counted), which is not the one"
        " of those who published theirs.",
        "BERT's run had hand-fused kernels, and logits of masked tokens alone. ZeRO's software is a"
        " family that no measured run was fitted to; Llama 3's has a factor of 1.02 from its run on"
        " 8,192 GPUs, which is not above. DeepSeek-V3 routes a token to at most four nodes, sends"
        " it in 8 bits and predicts one more token, none of which is modelled.",
    )
    yield _flops(plans)


def _flops(plans: Plans) -> Section:
    rows = []
    for name, (published_flops, tokens, source) in pub.TRAINING.items():
        config = plans.config(f"model={name}")
        model = resolve(config.model)
        rows.append(
            Row(
                f"{name}, 6 N D ({source})",
                6 * model.parameters * tokens,
                published_flops,
                "FLOP",
                within=0.01,
            )
        )
        counted_flops = model_flops_per_token(model, config.model.max_seq_len) * tokens
        rows.append(
            Row(
                f"{name}, with attention, without the token table",
                counted_flops,
                published_flops,
                "FLOP",
                within=0.06,
            )
        )
    plan = plans.plan("experiment=deepseek_v3")
    hours = pub.DEEPSEEK_TOKENS / plan.tokens_per_s_per_gpu / 3600
    rows.append(
        Row(
            f"DeepSeek-V3, 14.8 T tokens ({pub.DEEPSEEK_SOURCE})",
            hours / 1e6,
            pub.DEEPSEEK_HOURS / 1e6,
            "M hours",
            sd=plan.time.sd,
        )
    )
    return Section(
        "What trainings cost",
        "as named in each row",
        rows,
        "Parameters by `parameter_count`, FLOPs by `orchestrator/plan/flops.py`, hours by the"
        " preset `deepseek_v3`.",
    )
