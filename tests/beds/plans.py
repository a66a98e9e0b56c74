"""Small valid plans without the planner: what tests of agents, launchers and the trainer run on."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType, structs

from orchestrator.cost.model.layers import parameter_count
from orchestrator.plan import AXES, SCHEMA, Plan, seal
from orchestrator.plan import document as doc
from orchestrator.plan.ranks import all_groups, coords

CPU = doc.Gpu(
    name="cpu", memory_bytes=4 << 30, peak_flops={"fp32": 1e11}, hbm_bytes_per_s=1e10, source="test"
)


def tiny_model(**changes: object) -> doc.Model:
    """A decoder of four layers whose parameter count is right; `changes` replace any field but
    `parameters`."""
    fields: dict = {
        "name": "test",
        "layers": 4,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "ffn_hidden": 48,
        "vocab": 257,
        "max_seq_len": 64,
        "norm": "rms",
        "norm_eps": 1e-5,
        "position": "rope",
        "rope_theta": 1e4,
        "mlp": "gated",
        "activation": "silu",
        "bias": False,
        "tied_embeddings": False,
        "causal": True,
        "source": "test",
    }
    fields |= changes
    model = doc.Model(**fields, parameters=0)
    return structs.replace(model, parameters=parameter_count(model))


def make_plan(
    *,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    pp: int = 1,
    dp: int = 1,
    zero: int = 0,
    vpp: int = 1,
    sp: bool | None = None,
    nodes: int = 1,
    node_names: list[str] | None = None,
    order: tuple[doc.Axis, ...] = AXES,
    schedule: str = "1f1b",
    micro_batch_size: int = 1,
    micro_batches: int = 2,
    replica_micro_batches: list[int] | None = None,
    stage_layers: list[int] | None = None,
    steps: int = 4,
    seq_len: int = 16,
    seed: int = 1234,
    precision: doc.Precision = "fp32",
    recompute: str = "none",
    recompute_layers: list[str] | None = None,
    compile: bool = False,
    batch_ramp: doc.BatchRamp | None = None,
    cp_method: str = "zigzag",
    zero_group: int = 0,
    etp: int | UnsetType = UNSET,
    fold_cp: bool | UnsetType = UNSET,
    expert_all_to_all: str | UnsetType = UNSET,
    tp_pieces: int | UnsetType = UNSET,
    schedule_rows: list[list[str]] | None = None,
    clip_grad_norm: float = 1.0,
    bucket_bytes: int = 1 << 16,
    data_paths: list[str] | None = None,
    cache_dir: str = "",
    checkpoint_dir: str = "",
    checkpoint_every_steps: int = 0,
    copy_every_steps: int = 0,
    snapshots: int | UnsetType = UNSET,
    metrics_host: str = "127.0.0.1",
    metrics_port: int = 0,
    memory_every_steps: int = 5,
    trace_steps: int = 0,
    isolate_documents: bool = False,
    model: doc.Model | None = None,
    partition_activations: bool = False,
    contiguous_activations: bool = False,
    comm_buffer_bytes: int = 0,
    grad_wire: str | UnsetType = UNSET,
    deterministic: bool = False,
    offload: doc.Offload | dict | None = None,
    optim_kind: str | UnsetType = UNSET,
    optim_state: str | UnsetType = UNSET,
    matmul_wide: list[str] | UnsetType = UNSET,
) -> Plan:
    """A sealed plan of tp*cp*ep*pp*dp CPU ranks, filled node by node; the world must split evenly
    over `nodes`."""
    model = model or tiny_model()
    degrees = {"tp": tp, "cp": cp, "ep": ep, "pp": pp, "dp": dp}
    world = tp * cp * ep * pp * dp
    names = node_names or [f"node{index}" for index in range(nodes)]
    gpus, rest = divmod(world, len(names))
    if rest:
        raise ValueError(f"{world} ranks do not split evenly over {len(names)} nodes")
    if stage_layers is None:
        each, extra = divmod(model.layers, pp * vpp)
        stage_layers = [each + (index < extra) for index in range(pp * vpp)]
    places = coords(order, degrees)
    counts = replica_micro_batches or [micro_batches] * (dp * ep)
    samples = micro_batch_size * sum(counts)
    micro_batches = max(counts)
    link = doc.Link(bytes_per_s=1e9, latency_s=1e-5, source="test")
    switch = doc.SwitchLevel(
        name="leaf",
        switches=[list(range(len(names)))],
        bytes_per_s=1e9,
        latency_s=1e-5,
        oversubscription=1.0,
        source="test",
    )
    plan = Plan(
        schema=SCHEMA,
        hash="",
        cluster=doc.Cluster(
            name="test",
            device="cpu",
            node_names=names,
            gpus_per_node=gpus,
            gpu=CPU,
            nvlink_domains=[[index] for index in range(len(names))],
            nvlink=link,
            nics_per_node=1,
            rails=1,
            levels=[switch],
        ),
        model=model,
        parallel=doc.Parallel(
            **degrees,
            zero=zero,
            vpp=vpp,
            sp=tp > 1 if sp is None else sp,
            world_size=world,
            order=list(order),
            schedule=schedule,
            stage_layers=stage_layers,
            micro_batch_size=micro_batch_size,
            micro_batches=micro_batches,
            accumulation=micro_batches,
            global_batch_samples=samples,
            global_batch_tokens=samples * seq_len,
            bucket_bytes=bucket_bytes,
            cp_method=cp_method,
            zero_group=zero_group,
            etp=etp,
            fold_cp=fold_cp,
            expert_all_to_all=expert_all_to_all,
            schedule_rows=schedule_rows or [],
            replica_micro_batches=replica_micro_batches or [],
            tp_pieces=tp_pieces,
        ),
        job=doc.Job(
            train=doc.Train(
                steps=steps,
                seq_len=seq_len,
                seed=seed,
                precision=precision,
                grad_dtype="fp32",
                recompute=recompute,
                clip_grad_norm=clip_grad_norm,
                log_every_steps=1,
                recompute_layers=recompute_layers or [],
                compile=compile,
                batch_ramp=batch_ramp,
                partition_activations=partition_activations or UNSET,
                contiguous_activations=contiguous_activations or UNSET,
                comm_buffer_bytes=comm_buffer_bytes or UNSET,
                deterministic=deterministic or UNSET,
                grad_wire=grad_wire,
                objective=UNSET if model.causal else "masked",
                offload=msgspec.convert(offload, doc.Offload) if offload else UNSET,
                matmul_wide=matmul_wide,
            ),
            optim=doc.Optim(
                lr=1e-3,
                min_lr_ratio=0.1,
                schedule="cosine",
                warmup_steps=1,
                decay_steps=0,
                beta1=0.9,
                beta2=0.95,
                eps=1e-8,
                weight_decay=0.1,
                kind=optim_kind,
                state=optim_state,
            ),
            data=doc.Data(
                name="test",
                paths=data_paths or ["stdlib"],
                extensions=[".py"],
                tokenizer="bytes",
                seed=seed,
                cache_dir=cache_dir,
                isolate_documents=isolate_documents,
            ),
            checkpoint=doc.Checkpoint(
                dir=checkpoint_dir,
                every_steps=checkpoint_every_steps,
                keep_last=2,
                memory_every_steps=copy_every_steps,
                snapshots=snapshots,
            ),
            metrics=doc.Metrics(
                host=metrics_host,
                port=metrics_port,
                memory_every_steps=memory_every_steps,
                trace_steps=trace_steps,
            ),
        ),
        ranks=[
            doc.Rank(
                rank=rank,
                node=names[rank // gpus],
                gpu=rank % gpus,
                nic=0,
                coord=doc.Coord(**place),
            )
            for rank, place in enumerate(places)
        ],
        groups=all_groups(places, pp),
        placement={
            axis: doc.AxisPlacement(worst_level="leaf", bytes_per_step_by_level={}) for axis in AXES
        },
        memory=doc.Memory(
            params=1,
            grads=1,
            optimizer=1,
            activations=1,
            buffers=1,
            total=5,
            capacity=CPU.memory_bytes,
            worst_rank=0,
        ),
        time=doc.Time(
            step_s=0.1, compute_s=0.1, exposed_comm_s={}, bubble_ratio=0.0, limited_by="test"
        ),
        mfu=0.1,
        tokens_per_s_per_gpu=1000.0,
        warnings=[],
        certificate=None,
    )
    return seal(plan)
