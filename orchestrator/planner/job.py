"""The plan's `job`: the configuration's training keys with every derived value filled in."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from orchestrator.config.schema import BatchRampSpec, Config, TrainSpec
from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.plan import document as doc


def make_job(config: Config) -> doc.Job:
    data, checkpoint = config.data, config.checkpoint
    return doc.Job(
        train=make_train(config),
        optim=doc.Optim(**{name: getattr(config.optim, name) for name in doc.Optim.__struct_fields__}),
        data=doc.Data(
            name=data.name,
            paths=list(data.paths),
            extensions=list(data.extensions),
            tokenizer=data.tokenizer,
            seed=config.train.seed if data.seed is None else data.seed,
            cache_dir=data.cache_dir or "",
            demo=data.demo,
            isolate_documents=data.isolate_documents,
        ),
        checkpoint=doc.Checkpoint(
            dir=checkpoint.dir or "",
            every_steps=checkpoint.every_steps,
            keep_last=checkpoint.keep_last,
            memory_every_steps=checkpoint.memory_every_steps,
        ),
        metrics=doc.Metrics(**{name: getattr(config.metrics, name) for name in doc.Metrics.__struct_fields__}),
        matmul=config.train.matmul,
    )


def make_train(config: Config) -> doc.Train:
    """The plan's `train`; `recompute_layers`, which no key gives, keeps its default until it is derived."""
    train = config.train
    derived = {"recompute", "recompute_layers", "batch_ramp", "compile", "partition_activations", "offload"}
    same = set(doc.Train.__struct_fields__) - derived
    ramp = make_ramp(train.batch_ramp, train.seq_len) if train.batch_ramp else None
    recompute = train.recompute or "none"
    compiled = config.cluster.device == "cuda" if train.compile is None else train.compile
    given = {name: getattr(train, name) for name in same}
    return doc.Train(
        **given,
        recompute=recompute,
        batch_ramp=ramp,
        compile=compiled,
        partition_activations=train.partition_activations or UNSET,
        offload=make_offload(train),
    )


def make_offload(train: TrainSpec) -> doc.Offload | UnsetType:
    """What is kept outside of the device's memory; UNSET: nothing."""
    if train.offload == "none":
        return UNSET
    return doc.Offload(optimizer=train.offload)


def make_ramp(spec: BatchRampSpec, seq_len: int) -> doc.BatchRamp:
    """In samples. Raises OrchError."""
    found = {}
    for name in ("start", "over"):
        samples, tokens = getattr(spec, f"{name}_samples"), getattr(spec, f"{name}_tokens")
        if (samples is None) == (tokens is None):
            raise OrchError(f"train.batch_ramp: set exactly one of {name}_samples and {name}_tokens", Exit.CONFIG)
        found[f"{name}_samples"] = samples or max(1, tokens // seq_len)
    return doc.BatchRamp(**found)
