"""The typed configuration: what `compose.load` returns and the planner takes.

This is the only definition of every configuration key: its type, legal range, default and meaning.
Hydra's structured config (`structured.py`) is derived from these classes, and so are the lists of
legal keys in error messages. Units are in the names (`gbit_per_s`, `latency_us`, `memory_gib`); a
plan holds SI units. A field without a default must be set by the file of its group. `None` means
"derived": the comment says from what.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import force_setattr

from orchestrator.plan.document import (
    AllToAll,
    Axis,
    CpMethod,
    Frozen,
    Matmul,
    Mla,
    Moe,
    Mtp,
    Precision,
    Recompute,
    Yarn,
)

# ------------------------------------------------------------------------------------------- kinds
#     of values

#: What a name may be: it becomes a label, a file name and a part of metrics.
NAME_RULE = "1 to 63 of A-Z a-z 0-9 . _ -, starting and ending with a letter or digit"
Name = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?\Z", description=NAME_RULE)
]
#: A run's name is the stem of Kubernetes objects, whose names (DNS-1123 labels) hold 63 characters
#: with our suffixes.
RUN_NAME_RULE = (
    "1 to 40 of a-z 0-9 -, starting and ending with a letter or digit (a DNS-1123 label with room"
    " for suffixes)"
)
RunName = Annotated[
    str, Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?\Z", description=RUN_NAME_RULE)
]
Source = Annotated[
    str, Meta(min_length=1, max_length=1000, description="where the numbers beside it come from")
]
Path = Annotated[
    str, Meta(min_length=1, max_length=4096, description="a path of 1 to 4096 printable characters")
]
Text = Annotated[str, Meta(max_length=1000, description="at most 1000 printable characters")]

Extension = Annotated[
    str, Meta(pattern=r"^\.[A-Za-z0-9]{1,16}\Z", description="a dot and 1 to 16 letters or digits")
]

#: Elastic: the job may run on any legal number of nodes in the range.
NodeRange = Annotated[
    str,
    Meta(
        pattern=r"^[1-9][0-9]{0,6}\.\.[1-9][0-9]{0,6}\Z",
        description="a range of node counts like 4..8",
    ),
]

EnvName = Annotated[
    str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}\Z", description="a name of A-Z a-z 0-9 _")
]

EnvPattern = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z_*][A-Za-z0-9_*]{0,127}\Z",
        description="a name of A-Z a-z 0-9 _, * for any of these",
    ),
]

#: Faults of workers, as `orchestrator.run.state` tells them.
WorkerCause = Literal[
    "worker_exit",
    "worker_frozen",
    "worker_spinning",
    "worker_stuck",
    "collective_hung",
    "non_finite",
    "disk_full",
    "straggler",
]

_MANY = 2**53  # every integer up to here is exact in JSON and in a float
Count = Annotated[int, Meta(ge=1, le=_MANY)]
Natural = Annotated[int, Meta(ge=0, le=_MANY)]
Degree = Annotated[int, Meta(ge=1, le=2**20)]
Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Ratio = Annotated[float, Meta(ge=0, le=1)]
Beta = Annotated[float, Meta(ge=0, lt=1)]

# -------------------------------------------------------------------------------------------
#     cluster


class GpuSpec(Frozen):
    name: Name
    memory_gib: Positive
    peak_tflops: dict[
        Literal["fp64", "fp32", "bf16", "fp16", "fp8"], Positive
    ]  # dense; left out: it cannot do that
    hbm_gb_per_s: Positive
    source: Source


class NvlinkSpec(Frozen):
    """The fast domain. One direction of one GPU."""

    domain_nodes: Degree  # nodes that share one domain; more than 1 for rack-scale systems
    gb_per_s: Positive  # to all others of the domain together
    latency_us: NonNegative
    source: Source
    #: false: no NVSwitch, each pair of a node's GPUs has an equal part of their links
    switched: bool = True


class NicSpec(Frozen):
    per_node: Degree
    rails: Degree  # NIC i of every node is on rail i % rails
    gbit_per_s: Positive  # of one NIC, one direction
    latency_us: NonNegative
    source: Source


class LevelSpec(Frozen):
    """One tier of switches."""

    name: Name
    nodes_per_switch: (
        Degree | list[Degree]
    )  # a list is ragged: one entry a switch, in node order, summing to `nodes`
    #: of one NIC's path between two nodes that meet on this level, before oversubscription
    gbit_per_s: Positive
    latency_us: NonNegative
    source: Source
    #: of the links from this level's switches upwards; 1 = none
    oversubscription: Annotated[float, Meta(ge=1)] = 1.0


class HostSpec(Frozen):
    """A node beside its GPUs, for train.offload."""

    memory_gib: Positive
    memory_gb_per_s: Positive
    link_gb_per_s: Positive  # between one GPU and the host's memory, one direction
    disk_gib: Positive
    disk_gb_per_s: Positive  # reads and writes together
    source: Source


#: Prefixes of `cluster.topology_file` that name the running cluster instead of a file.
LIVE = ("slurm:", "kubernetes:")


class ClusterSpec(Frozen):
    """A regular description; the planner unfolds it to explicit nodes, domains and switches."""

    name: Name
    device: Literal["cpu", "cuda"]
    nodes: Degree
    gpus_per_node: Degree
    gpu: GpuSpec
    nvlink: NvlinkSpec
    nic: NicSpec
    levels: list[LevelSpec]  # innermost first
    #: the real nodes and switches, any form `orch topology` reads; figures stay
    topology_file: Path | None = None
    topology_name: Name | None = None  # which of a file that holds several
    #: so many of the file's; unset: cluster.nodes where typed, else all
    topology_nodes: Degree | UnsetType = UNSET
    host: HostSpec | None = None  # None: predictions of train.offload assume one, and say so
    measured: bool = True  # plan with what `orch bench` has found on this cluster, where it was run


# ------------------------------------------------------------------------------------------- model


class MoeSpec(Moe):
    """The plan's, with null for what it does not name."""

    balance_over: Literal["sequence", "batch"] | None = None  # type: ignore[assignment]
    bias_update: float | None = None  # type: ignore[assignment]
    capacity_factor: float | None = None  # type: ignore[assignment]
    jitter: float | None = None  # type: ignore[assignment]


class ModelSpec(Frozen):
    """A transformer by its shapes; parameters and FLOPs are derived."""

    name: Name
    layers: Degree
    hidden: Degree
    heads: Degree
    ffn_hidden: Degree
    vocab: Count
    max_seq_len: Count
    norm: Literal["rms", "layer"]
    position: Literal["rope", "learned", "none"]
    mlp: Literal["gated", "plain"]
    activation: Literal["silu", "gelu"]
    bias: bool
    tied_embeddings: bool
    source: Source
    kv_heads: Degree | None = None  # None: heads (an int once loaded)
    head_dim: Degree | None = None  # None: hidden / heads (an int once loaded)
    norm_eps: Positive = 1e-5
    rope_theta: Positive = 10000.0
    causal: bool = True
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    moe: MoeSpec | None = None
    mla: Mla | None = None
    qk_norm: bool = False
    yarn: Yarn | None = None
    mtp: Mtp | None = None  # depth 0: none
    extra_params: dict[
        str, Natural
    ] = {}  # outside the decoder (BERT's pooler): counted, not trained

    def __post_init__(self) -> None:
        if self.kv_heads is None:
            force_setattr(self, "kv_heads", self.heads)
        elif self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.head_dim is None:
            if self.hidden % self.heads:
                raise ValueError(
                    f"hidden {self.hidden} is not a multiple of heads {self.heads}, and head_dim is"
                    " not set"
                )
            force_setattr(self, "head_dim", self.hidden // self.heads)


# -------------------------------------------------------------------------------------------
#     parallel


class ParallelSpec(Frozen):
    """All degrees. world = tp * cp * ep * pp * dp.

    `auto` (parallel=auto) searches what is left out of tp, cp, ep, etp, fold_cp, expert_all_to_all,
    pp, dp, zero, vpp, sp, cp_method, schedule, micro_batch_size and train.recompute; what is given
    is kept. Without it, what is left out has its default.
    """

    auto: bool = False
    tp: Degree | None = None  # None: 1, as the next three
    cp: Degree | None = None
    ep: Degree | None = None
    #: ranks of tp that each expert is cut over; None: all. The others hold different experts
    etp: Degree | None = None
    fold_cp: bool | None = None  # ranks of cp hold different experts; None: they do not
    #: None: direct; hierarchical: a token goes once to each NVLink domain
    expert_all_to_all: AllToAll | None = None
    pp: Degree | None = None
    dp: Degree | None = None  # None: what the cluster leaves
    zero: Annotated[int, Meta(ge=0, le=3)] | None = None  # None: 0
    vpp: Degree | None = None  # virtual stages a pipeline rank; None: 1
    sp: bool | None = None  # sequence parallel on the tensor-parallel group; None: on when tp > 1
    schedule: Name | None = None  # of the pipeline; None: 1f1b, interleaved when vpp > 1
    #: a table of your own, CSV or JSON: one row of actions a pipeline rank
    schedule_file: Path | None = None
    cp_method: CpMethod | None = None  # None: zigzag
    #: ranks that share one copy of what ZeRO shards (hybrid); 0: all that hold the same weights
    zero_group: Natural = 0
    micro_batch_size: Degree | None = None  # samples; None: 1 on GPUs, up to 8 on CPUs
    #: where the global batch does not divide, some replicas take a micro-batch more than others
    uneven: bool = False
    #: layers of each of the pp * vpp stages; None: balanced by cost
    stage_layers: list[Natural] | None = None
    #: nesting of the axes, innermost first; None: the planner chooses by bytes
    order: list[Axis] | None = None
    #: tensor- and expert-parallel groups may leave their NVLink domain
    allow_tp_across_nvlink: bool = False
    bucket_mib: Positive = 25.0  # gradient bucket, MiB of the reduce dtype


# ------------------------------------------------------------------------------------------- job


class DataSpec(Frozen):
    name: Name
    paths: Annotated[
        list[Path], Meta(min_length=1)
    ]  # files or folders; "stdlib" = Python's standard-library sources
    extensions: list[Extension]
    tokenizer: Path = "bytes"  # or the path of a tokenizers JSON file
    seed: Natural | None = None  # of the order of samples; None: train.seed
    cache_dir: Path | None = None  # of token files; None: <home>/data
    #: attention and positions stop where a document ends inside a sample
    isolate_documents: bool = False
    #: a corpus to show the machinery with, not to learn language from: the plan warns
    demo: bool = False


class OptimSpec(Frozen):
    """The rule of the update, and its learning rate with a warm-up."""

    lr: Positive  # peak
    kind: Literal["adamw", "sgd", "muon"] = "adamw"
    #: of moments; bf16 is rounded stochastically, 8bit has blocks
    state: Literal["wide", "bf16", "8bit"] = "wide"
    min_lr_ratio: Ratio = 0.1
    schedule: Literal["constant", "cosine", "wsd"] = "cosine"
    warmup_steps: Natural = 0
    decay_steps: Natural = 0  # 0: until train.steps; for wsd the length of the final decay
    beta1: Beta = 0.9  # for sgd and the matrices of muon: the momentum
    beta2: Beta = 0.95
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.1


class BatchRampSpec(Frozen):
    """The global batch grows linearly from `start` to its full size while the first `over` samples
    are consumed."""

    start_samples: Count | None = None  # exactly one of each pair
    start_tokens: Count | None = None
    over_samples: Count | None = None
    over_tokens: Count | None = None


class TrainSpec(Frozen):
    steps: Count
    seq_len: Count  # tokens
    global_batch_samples: Count | None = None  # exactly one of these two
    global_batch_tokens: Count | None = None
    seed: Natural = 1234
    precision: Precision = "bf16"
    matmul: Matmul = ""  # of the layers' matrix products, by fp8 or fp4 recipe; "": precision
    grad_dtype: Precision = "fp32"  # of accumulation and reduction
    #: budget: by layer, as little as fits; None: none, or searched
    recompute: Recompute | Literal["budget"] | None = None
    #: for activations on a rank; None: what the GPU's memory leaves
    recompute_budget_gib: Positive | None = None
    #: tp ranks each keep a share of the input of a recomputed layer (ZeRO-R's Pa)
    partition_activations: bool = False
    #: of recompute=selective: latent attention's queries, keys and values as well
    recompute_latents: bool = False
    #: where master weights and moments are, if not on the device
    offload: Literal["none", "host", "disk"] = "none"
    #: of offload=host: updates run beside the next step, which computes with older weights
    offload_delayed: bool = False
    #: where inputs of recomputed layers are until backward
    offload_activations: Literal["none", "host", "disk"] = "none"
    #: of offload=disk on CPUs: weights and gradients in mapped pages of the disk too
    offload_weights: bool = False
    #: of offload=disk: a folder of a disk of each node; None: in the run folder
    offload_dir: Path | None = None
    #: of offload=disk: host memory through which the state passes, on each rank
    offload_buffer_mib: Positive = 256.0
    batch_ramp: BatchRampSpec | None = None
    clip_grad_norm: NonNegative = 1.0  # 0: off
    #: in a row, whose gradient is inf or nan and not applied, before the run stops
    skip_non_finite_steps: Natural = 0
    log_every_steps: Count = 1
    compile: bool | None = None  # blocks, one by one; None: on GPUs
    deterministic: bool = False  # on GPUs: kernels that give the same bits every time


class CostSpec(Frozen):
    """What predictions assume; it changes no run."""

    #: whose kernels, overlap and memory: a family of orchestrator/cost/software.py
    software: Text = "orch"
    #: fitted parameters (orch calibrate); None: the site's, else the shipped ones
    profile: Path | None = None
    #: Load of the fullest of the ranks that share experts over the mean; 1: even; None: as the
    #: profile says.
    expert_imbalance: Annotated[float, Meta(ge=1)] | None = None


class ExperimentSpec(Frozen):
    """What was published of the run that a file of the group `experiment` repeats; it changes no
    run."""

    step_s: Positive  # seconds of one optimizer step, as printed or as they follow from what was
    published: Text  # the figure as printed, and how it counts
    source: Source


class CheckpointSpec(Frozen):
    every_steps: Natural = 0  # 0: only at the end and on a notice
    keep_last: Count = 2
    dir: Path | None = None  # None: <run folder>/checkpoints
    #: copies in the memory of two nodes each, between checkpoints; 0: none
    memory_every_steps: Natural = 0


class MetricsSpec(Frozen):
    host: Annotated[
        str, Meta(pattern=r"^[A-Za-z0-9.:_-]{1,253}\Z", description="a host name or address")
    ] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 0  # of the first node's agent; 0: any free port
    memory_every_steps: Count = 10
    #: the first steps' timeline and memory, a file a rank; 0: none
    trace_steps: Annotated[int, Meta(ge=0, le=100)] = 0
    #: of a program's printed lines, with a group (?P<step>...): its steps; None: not read
    pattern: Text | None = None


class BackendSpec(Frozen):
    name: Name
    max_restarts: Natural = 3  # after a failure; a saved-and-wants-restart exit does not count
    grace_s: Positive = 30.0  # between asking workers to save and killing them
    heartbeat_timeout_s: Positive = 15.0  # an agent silent for longer is lost
    max_restarts_by_cause: dict[
        WorkerCause, Natural
    ] = {}  # budgets of their own; the rest share max_restarts
    hang_after_s: Positive = 30.0  # a run is hung that has not moved for so long, and for
    hang_after_steps: Positive = 10.0  # so many times its median step
    start_hang_after_s: Positive = 1800.0  # instead: before an epoch's second step, and in saves
    #: own compute time over the peers' median: slow
    straggler_ratio: Annotated[float, Meta(gt=1)] = 1.5
    #: exclude: go on with a spare in its place, where there is one
    on_straggler: Literal["name", "exclude"] = "name"
    #: failures in a row on one node of several, at different steps: leave it out; 0: never
    bad_node_after: Natural = 3
    #: nodes that were left out, for the next runs of this user; 0: not
    remember_bad_nodes_h: NonNegative = 24.0
    #: an elastic run waits so long for nodes to come back before it ends with 76
    min_nodes_grace_s: NonNegative = 30.0
    #: `orch drill` may break parts of the run; None: on the local backend alone
    allow_drills: bool | None = None
    #: rank 0's store answers the run's nodes alone; false: for a NAT between nodes
    store_filter: bool = True
    #: each worker runs on the cores of its GPU's NUMA domain, docs/programs.md; false: on all
    numa_binding: bool = True
    env: dict[
        EnvName, Text
    ] = {}  # for the workers, on top of the allow-list; never a place for secrets
    pass_env: list[
        EnvPattern
    ] = []  # further variables of the shell to pass on: names, and patterns like WANDB_*
    options: dict[str, Any] = {}  # of this backend alone


class RunSpec(Frozen):
    name: RunName | None = None  # None: <model>-<parallel choice> (text once loaded)
    dir: Path | None = None  # run folders are made here; None: <home>/runs
    allow_oom: bool = False  # submit even when the plan does not fit the memory


# ------------------------------------------------------------------------------------------- the
#     whole


class Config(Frozen):
    """One resolved job. `choices` records the file or word that each group was chosen by."""

    cluster: ClusterSpec
    model: ModelSpec
    parallel: ParallelSpec
    data: DataSpec
    optim: OptimSpec
    train: TrainSpec
    checkpoint: CheckpointSpec
    metrics: MetricsSpec
    backend: BackendSpec
    run: RunSpec = RunSpec()
    cost: CostSpec = CostSpec()
    experiment: ExperimentSpec | None = None
    #: sizes that the job may be started at, in place of cluster.nodes
    nodes: NodeRange | None = None
    #: ranks of a user's program; None: what parallel gives, else all of the cluster's
    nproc: Degree | None = None
    choices: dict[str, str] = {}
