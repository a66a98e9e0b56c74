"""Builds the plan's `job`: the configuration's training keys with every derived value filled in."""

from __future__ import annotations

from msgspec import UNSET, UnsetType, structs

from orchestrator.config.schema import Config, TrainSpec
from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.plan import document as doc
from orchestrator.plan.offload import STATE_KINDS, chunk_elements, state_width

from .wide_products import wide_products


def make_job(config: Config) -> doc.Job:
    """Returns the plan's `job`. Raises OrchError (65) if its keys contradict each other."""
    data = config.data
    checkpoint = config.checkpoint
    snapshots = UNSET if checkpoint.snapshots == 1 else checkpoint.snapshots
    return doc.Job(
        train=make_train(config),
        optim=make_optim(config),
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
            snapshots=snapshots,
        ),
        metrics=doc.Metrics(
            **{name: getattr(config.metrics, name) for name in doc.Metrics.__struct_fields__}
        ),
        matmul=config.train.matmul,
    )


def make_optim(config: Config) -> doc.Optim:
    """Returns the plan's `optim`.

    Raises OrchError (65) for an optimizer that the trainer cannot run with the other keys.
    """
    optim = config.optim
    train = config.train
    if train.offload == "disk" and (optim.kind, optim.state) != ("adamw", "wide"):
        key = f"kind={optim.kind}" if optim.kind != "adamw" else f"state={optim.state}"
        raise OrchError(
            f"optim.{key} with train.offload=disk, which holds the wide state of optim.kind=adamw,"
            " in chunks that cut matrices: train.offload=host",
            Exit.CONFIG,
        )
    if optim.kind == "muon" and train.offload_delayed:
        raise OrchError(
            "train.offload_delayed updates beside the next step, with which ranks that compute"
            " whole matrices together would compete: optim.kind=adamw or sgd",
            Exit.CONFIG,
        )
    if optim.kind == "muon" and optim.state != "wide":
        raise OrchError(
            f"optim.state={optim.state} is kept by rules that look at each element alone:"
            " optim.kind=adamw or sgd",
            Exit.CONFIG,
        )
    copied = {
        name: getattr(optim, name)
        for name in doc.Optim.__struct_fields__
        if name not in ("kind", "state")
    }
    kind = UNSET if optim.kind == "adamw" else optim.kind
    state = UNSET if optim.state == "wide" else optim.state
    return doc.Optim(**copied, kind=kind, state=state)


def make_train(config: Config) -> doc.Train:
    """Returns the plan's `train`.

    No key gives `recompute_layers`, which keeps its default until it is derived. Raises OrchError
    (65).
    """
    train = config.train
    if train.matmul and train.compile:
        raise OrchError(
            f"train.matmul={train.matmul} with train.compile=true: 8-bit products need"
            " train.compile=false",
            Exit.CONFIG,
        )
    _check_contiguous(config)
    _check_comm_buffer(config)
    derived = {
        "recompute",
        "recompute_layers",
        "batch_ramp",
        "compile",
        "partition_activations",
        "contiguous_activations",
        "comm_buffer_bytes",
        "offload",
        "recompute_latents",
        "deterministic",
        "objective",
        "matmul_wide",
        "grad_wire",
    }
    copied_keys = set(doc.Train.__struct_fields__) - derived
    ramp = make_ramp(train)
    recompute = train.recompute or "none"
    compiled = (
        config.cluster.device == "cuda" and not train.matmul
        if train.compile is None
        else train.compile
    )
    copied = {name: getattr(train, name) for name in copied_keys}
    return doc.Train(
        **copied,
        recompute=recompute,
        batch_ramp=ramp,
        compile=compiled,
        partition_activations=train.partition_activations or UNSET,
        contiguous_activations=train.contiguous_activations or UNSET,
        comm_buffer_bytes=comm_buffer_bytes(train) or UNSET,
        recompute_latents=train.recompute_latents or UNSET,
        deterministic=train.deterministic or UNSET,
        offload=make_offload(config),
        objective=objective_of(config),
        matmul_wide=wide_products(config),
        grad_wire=train.grad_wire or UNSET,
    )


def _check_contiguous(config: Config) -> None:
    """Raises OrchError (65) for a buffer of inputs that no layer needs, or that are elsewhere."""
    train = config.train
    if not train.contiguous_activations:
        return
    searched = train.recompute is None and config.parallel.auto
    key = "train.contiguous_activations=true reserves a buffer for inputs of recomputed layers"
    if train.recompute in (None, "none") and not searched:
        raise OrchError(f"{key}: train.recompute=selective, full or budget", Exit.CONFIG)
    if train.offload_activations != "none":
        raise OrchError(
            f"{key}, which train.offload_activations={train.offload_activations} keeps elsewhere:"
            " train.offload_activations=none",
            Exit.CONFIG,
        )


def comm_buffer_bytes(train: TrainSpec) -> int | None:
    """Returns the bound on buckets in bytes; None if there is none."""
    return None if train.comm_buffer_mib is None else max(1, int(train.comm_buffer_mib * 2**20))


def _check_comm_buffer(config: Config) -> None:
    """Raises OrchError (65) for a rule of the optimizer that needs whole matrices."""
    if config.train.comm_buffer_mib is not None and config.optim.kind == "muon":
        raise OrchError(
            "train.comm_buffer_mib cuts parameters, of which optim.kind=muon needs whole matrices:"
            " optim.kind=adamw or sgd",
            Exit.CONFIG,
        )


def objective_of(config: Config) -> doc.Objective | UnsetType:
    """Returns what the model learns to predict; UNSET: the next token."""
    if config.train.objective is None:
        return UNSET if config.model.causal else "masked"
    return UNSET if config.train.objective == "next_token" else config.train.objective


def make_offload(config: Config) -> doc.Offload | UnsetType:
    """Returns the data that is kept outside the device's memory; UNSET if there is none.

    Raises OrchError (65) if the keys contradict each other.
    """
    train = config.train
    if train.offload_delayed and train.offload != "host":
        raise OrchError(
            "train.offload_delayed delays the updates that the host computes: train.offload=host",
            Exit.CONFIG,
        )
    offload = doc.Offload(
        activations="" if train.offload_activations == "none" else train.offload_activations
    )
    if train.offload_dir is not None and "disk" not in (train.offload, offload.activations):
        raise OrchError(
            "train.offload_dir is the folder of train.offload=disk or"
            " train.offload_activations=disk",
            Exit.CONFIG,
        )
    if offload.activations == "disk":
        offload = structs.replace(offload, dir=train.offload_dir or "")
    if train.offload_weights and train.offload == "none":
        raise OrchError(
            "train.offload_weights follows the optimizer's state: train.offload=host or"
            " train.offload=disk",
            Exit.CONFIG,
        )
    if train.offload != "disk":
        if train.offload == "host":
            offload = structs.replace(
                offload,
                optimizer="host",
                delayed=train.offload_delayed,
                weights=train.offload_weights,
            )
        return UNSET if offload == doc.Offload() else offload
    if config.checkpoint.memory_every_steps:
        raise OrchError(
            "train.offload=disk keeps state that is larger than memory: copies in memory"
            " (checkpoint.memory_every_steps) need checkpoint.memory_every_steps=0",
            Exit.CONFIG,
        )
    buffer_bytes = int(train.offload_buffer_mib * 2**20)
    width = state_width(train.precision)
    if not chunk_elements(buffer_bytes, STATE_KINDS, width):
        raise OrchError(
            f"train.offload_buffer_mib={train.offload_buffer_mib:g} is too small: at least 0.1",
            Exit.CONFIG,
        )
    disk_settings = {
        "weights": train.offload_weights,
        "dir": train.offload_dir or "",
        "buffer_bytes": buffer_bytes,
    }
    return structs.replace(offload, optimizer="disk", **disk_settings)


def make_ramp(train: TrainSpec) -> doc.BatchRamp | None:
    """Returns the batch ramp in samples, or None if the batch does not grow.

    Raises OrchError (65) unless each length is given once.
    """
    spec = train.batch_ramp
    if spec is None:
        return None
    samples_by_key = {}
    for name in ("start", "over"):
        samples = getattr(spec, f"{name}_samples")
        tokens = getattr(spec, f"{name}_tokens")
        if (samples is None) == (tokens is None):
            raise OrchError(
                f"train.batch_ramp: set exactly one of {name}_samples and {name}_tokens",
                Exit.CONFIG,
            )
        samples_by_key[f"{name}_samples"] = samples or max(1, tokens // train.seq_len)
    return doc.BatchRamp(**samples_by_key)
