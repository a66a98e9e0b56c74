"""The plan: the only contract between orchestrator and trainer.

A plan is a value: built once by the planner, hashed, written as JSON, read by agents and workers,
never changed. Units are in the names or comments: bytes, seconds, FLOP/s; ranks and indices count
from 0. JSON schema: `plan.schema.json`.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, structs

from .model import Frozen as Frozen
from .model import Mla as Mla
from .model import Model as Model
from .model import Moe as Moe
from .model import Mtp as Mtp
from .model import Yarn as Yarn
from .offload import Offload as Offload

SCHEMA = "orch.plan/1"

#: `Parallel.schedule` of a plan whose `schedule_rows` are the schedule.
TABLE = "table"

Axis = Literal["tp", "cp", "ep", "pp", "dp"]
#: Default nesting from the fastest links outwards (planning.md E1, Llama 3 order).
AXES: tuple[Axis, ...] = ("tp", "cp", "ep", "pp", "dp")

#: fp64 trains slowly and is for verification: rounding hides no mistake (`orch verify`).
Precision = Literal["fp64", "fp32", "bf16", "fp16"]
#: Precision of the layers' matrix products where it is narrower than the tensors', by recipe of
#: scaling: one scale a tensor, one a row, one a block of 128 (DeepSeek-V3, arXiv 2412.19437), one a
#: block of 32 (OCP MX); 4 bits, one a block of 16.
Matmul = Literal["", "fp8_tensor", "fp8_row", "fp8_block", "mxfp8", "nvfp4"]
#: hierarchical: a token goes once to each NVLink domain that holds some of its experts, and from
#: there on to them.
AllToAll = Literal["direct", "hierarchical"]
CpMethod = Literal["zigzag", "ring", "allgather", "ulysses"]
Recompute = Literal["none", "selective", "full"]


# ----------------------------------------------------------------------------------------------
#     cluster


class Gpu(Frozen):
    name: str
    memory_bytes: int
    peak_flops: dict[str, float]  # dense FLOP/s by precision: fp64, fp32, bf16, fp16, fp8
    hbm_bytes_per_s: float
    source: str


class Link(Frozen):
    """One direction of one GPU's share of a link."""

    bytes_per_s: float
    latency_s: float
    source: str


class SwitchLevel(Frozen):
    """One tier of the fabric, innermost first. Every node stands under exactly one switch of each
    level."""

    name: str
    switches: list[list[int]]  # node indices under each switch; ragged allowed
    # one direction, per GPU, between two nodes whose lowest common switch is on this level
    bytes_per_s: float
    latency_s: float
    oversubscription: float  # 1.0 = full bisection above this level
    source: str


class Measured(Frozen):
    """What `orch bench` found in the place of data sheets. Links carry measured rates and latencies
    themselves."""

    source: str  # when, by which run
    matmul_flops: dict[
        str, float
    ]  # FLOP/s of a matrix product on one GPU while all compute, by precision
    attention_flops: dict[str, float]
    memory_bytes_per_s: float
    launch_s: float  # one small operator
    stretch: dict[
        str, dict[str, float]
    ] = {}  # tier -> operation -> time of its bytes / bytes at the tier's rate, >= 1


class Host(Frozen):
    """A node beside its GPUs, for what is offloaded there."""

    memory_bytes: int
    memory_bytes_per_s: float
    link_bytes_per_s: float  # between one GPU and the host's memory, one direction
    disk_bytes: int
    disk_bytes_per_s: float  # reads and writes together
    source: str


class Cluster(Frozen):
    name: str
    device: Literal["cpu", "cuda"]
    node_names: list[str]  # in topology order; ranks name nodes by these
    gpus_per_node: int
    gpu: Gpu
    nvlink_domains: list[
        list[int]
    ]  # node indices that share one NVLink domain (NVL72: several nodes)
    nvlink: Link
    nics_per_node: int
    rails: int  # NIC i of every node is on rail i % rails
    levels: list[SwitchLevel]
    measured: Measured | None = None
    host: Host | UnsetType = UNSET  # where it is described
    direct_nvlink: bool | UnsetType = (
        UNSET  # true: each pair of a node's GPUs has links of its own, without a switch
    )
    left_out: dict[
        str, int
    ] = {}  # nodes of `cluster.topology_file` that no rank may use -> how many, by what they are


# ----------------------------------------------------------------------------------------------
#     parallel


class Parallel(Frozen):
    """All degrees. world = tp * cp * ep * pp * dp; dense weights are replicated over dp * ep *
    cp."""

    tp: int
    cp: int
    ep: int
    pp: int
    dp: int
    zero: Literal[0, 1, 2, 3]
    vpp: int  # virtual stages a pipeline rank
    sp: bool  # sequence parallel on the tensor-parallel group
    world_size: int
    order: list[Axis]  # nesting chosen by the planner, innermost first
    schedule: str  # name in orchestrator.plan.schedules
    stage_layers: list[int]  # decoder layers of each of the pp * vpp stages, in model order
    micro_batch_size: int  # samples
    # a data-parallel rank and step; what the pipeline sees; the most, where replicas differ
    micro_batches: int
    accumulation: int  # micro-batches summed before one optimizer step (= micro_batches)
    global_batch_samples: int  # micro_batch_size * micro_batches * dp * ep, unless replicas differ
    global_batch_tokens: int
    bucket_bytes: int  # gradient bucket size, bytes of reduce dtype
    cp_method: CpMethod = "zigzag"
    # neighbours in "grad" that share one copy of what ZeRO shards; 0 = all (hybrid when fewer)
    zero_group: int = 0
    schedule_rows: list[
        list[str]
    ] = []  # of schedule "table": each pipeline rank's actions in order, as "0F3"
    replica_micro_batches: list[
        int
    ] = []  # of each data-parallel replica, where it does not divide; empty: all alike
    etp: int | UnsetType = (
        UNSET  # ranks of tp that each expert is cut over, where fewer (`plan.expert_mesh`)
    )
    fold_cp: bool | UnsetType = UNSET  # ranks of cp hold different experts
    expert_all_to_all: AllToAll | UnsetType = UNSET  # UNSET: direct
    expert_imbalance: float | UnsetType = (
        UNSET  # load of the fullest expert rank over the mean, assumed; UNSET: 1
    )


class Coord(Frozen):
    pp: int
    dp: int
    cp: int
    ep: int
    tp: int


class Rank(Frozen):
    rank: int
    node: str
    gpu: int  # local index on its node
    nic: int  # local index of the NIC nearest to that GPU
    coord: Coord


class AxisPlacement(Frozen):
    worst_level: str  # "self", "nvlink" or the name of a switch level
    bytes_per_step_by_level: dict[str, float]  # sent by the busiest rank


class Certificate(Frozen):
    """How good the choice of nodes and of the nesting order is."""

    bound_s: float  # a step takes at least this on these nodes, whoever sits where
    gap: float  # 0.03: a better placement could be at most 3 % faster
    exact: bool  # every placement was costed: there is none better
    given_step_s: float  # predicted step with the nodes in the order in which they came


class Memory(Frozen, omit_defaults=True):
    """Bytes on the worst rank. Each category at its own peak; `total` is the sum of all, less
    `apart`."""

    params: int
    grads: int
    optimizer: int
    activations: int
    buffers: int
    total: int
    capacity: int
    worst_rank: int
    sd: float = 0.0  # standard deviation of the relative error of `total`, from the profile
    host: int = 0  # offloaded: in the memory of the rank's host, no part of `total`
    disk: int = 0  # offloaded: on a disk of its node
    apart: int = 0  # of the categories, what is not there at the peak of `total`


class Time(Frozen, omit_defaults=True):
    step_s: float
    compute_s: float
    exposed_comm_s: dict[str, float]  # by axis
    bubble_ratio: (
        float  # share of `step_s` in which the slowest rank waits for other pipeline stages
    )
    limited_by: str  # one phrase: what to change first
    sd: float = 0.0  # standard deviation of the relative error of `step_s`, from the profile
    terms: dict[
        str, float
    ] = {}  # seconds of the step by term of the cost model; they sum to `step_s`
    software: str = ""  # whose kernels and overlap were assumed
    profile: str = ""  # the fitted parameters: "<name> <first digits of the file's hash>"
    parameters: dict[
        str, float
    ] = {}  # those whose values are not the shipped profile's: a site's own


class BatchRamp(Frozen):
    """The global batch grows linearly with the samples consumed, in whole micro-batches on every
    replica."""

    start_samples: int  # global batch of the first step
    over_samples: int  # from this many consumed samples on it is `parallel.global_batch_samples`


class Train(Frozen):
    steps: int
    seq_len: int
    seed: int
    precision: Precision
    grad_dtype: Precision  # accumulation and reduction
    recompute: Recompute | Literal["budget"]
    clip_grad_norm: float  # 0 = off
    log_every_steps: int
    compile: bool = False
    recompute_layers: list[
        Recompute
    ] = []  # of recompute "budget": what the planner chose for each layer
    batch_ramp: BatchRamp | None = None
    skip_non_finite_steps: int = 0  # in a row, whose gradient is not applied, before the run stops
    partition_activations: bool | UnsetType = (
        UNSET  # tensor-parallel ranks keep a share of each recomputed input
    )
    recompute_latents: bool | UnsetType = (
        UNSET  # selective layers make queries, keys and values from latents again
    )
    offload: Offload | UnsetType = UNSET
    deterministic: bool | UnsetType = (
        UNSET  # on GPUs kernels, and orders of sums, that give the same bits every time
    )


class Optim(Frozen):
    lr: float
    min_lr_ratio: float
    schedule: Literal["constant", "cosine", "wsd"]
    warmup_steps: int
    decay_steps: int  # 0 = until train.steps; for wsd the length of the final decay
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    kind: Literal["sgd", "muon"] | UnsetType = (
        UNSET  # UNSET: adamw, as in plans from before there was a choice
    )
    state: Literal["bf16", "8bit"] | UnsetType = (
        UNSET  # of the moments; UNSET: as wide as master weights
    )


class Data(Frozen):
    name: str
    paths: list[
        str
    ]  # files or folders; "stdlib" = the sources of the running Python's standard library
    extensions: list[str]
    tokenizer: str  # "bytes", or the path of a tokenizers JSON file
    seed: int
    cache_dir: str  # token files live here, keyed by content
    demo: bool = False
    isolate_documents: bool = (
        False  # attention and positions stop at document borders inside a sample
    )


class Checkpoint(Frozen):
    dir: str  # "" = <run folder>/checkpoints
    every_steps: int  # 0 = only at the end and on a notice
    keep_last: int
    memory_every_steps: int = 0  # a copy of the state in the memory of two nodes, each; 0 = none


class Metrics(Frozen):
    host: str
    port: int  # of the first node's agent; 0 = any free port
    memory_every_steps: int
    trace_steps: int = (
        0  # the first steps are recorded: what ran when, memory by category over time
    )


#: What stands in memory for what nobody knows of a user's program. Documents do not name it: see
#: `Plan.program`.
_NONE: dict[str, Any] = {"norm": "rms", "position": "none", "mlp": "plain", "activation": "gelu"}
_NONE |= {
    "name": "",
    "source": "",
    "limited_by": "",
    "tokenizer": "",
    "cache_dir": "",
    "paths": [],
    "extensions": [],
}
_NONE |= {
    "precision": "fp32",
    "grad_dtype": "fp32",
    "recompute": "none",
    "exposed_comm_s": {},
    "schedule": "constant",
}


def _nothing(kind: type[Struct]) -> dict[str, Any]:
    """The fields of `kind` that have no default, each nought."""
    return {
        field.name: _NONE.get(field.name, 0) for field in structs.fields(kind) if field.required
    }


NO_MODEL = Model(**_nothing(Model))
NO_MEMORY = Memory(**_nothing(Memory))
NO_TIME = Time(**_nothing(Time))
NO_TRAIN = Train(**_nothing(Train))
NO_OPTIM = Optim(**_nothing(Optim))
NO_DATA = Data(**_nothing(Data))


class Job(Frozen, omit_defaults=True, kw_only=True):
    train: Train = NO_TRAIN
    optim: Optim = NO_OPTIM
    data: Data = NO_DATA
    checkpoint: Checkpoint
    metrics: Metrics
    matmul: Matmul = ""  # "": in `train.precision`
    record_choices: bool = (
        False  # which experts tokens chose, a file a rank and reported step: for `orch verify`
    )


class Plan(Frozen, omit_defaults=True, kw_only=True):
    """Of a user's program (`program`) it holds ranks, groups and placement; model, memory, time and
    rates are not in the document, because nobody knows them."""

    schema: str
    hash: str  # sha256 of the canonical JSON with this field empty; "" until sealed
    cluster: Cluster
    model: Model = NO_MODEL
    parallel: Parallel
    job: Job
    ranks: list[Rank]  # ranks[i].rank == i
    groups: dict[
        str, list[list[int]]
    ]  # axis -> rank lists in order of the coordinate; also grad, model, embedding
    placement: dict[str, AxisPlacement]
    memory: Memory = NO_MEMORY
    time: Time = NO_TIME
    mfu: float = 0.0
    tokens_per_s_per_gpu: float = 0.0
    warnings: list[str]
    certificate: Certificate | None
    program: bool = False  # the plan of a user's program that no model was named for
