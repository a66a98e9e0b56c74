"""The plan: the only contract between orchestrator and trainer.

A plan is a value: the planner builds it once, hashes it and writes it as JSON; agents and workers
read it; nothing changes it. Units are in the names or comments: bytes, seconds, FLOP/s; ranks and
indices count from 0. JSON schema: `plan.schema.json`.
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

#: The `Parallel.schedule` of a plan whose `schedule_rows` define the schedule.
TABLE = "table"

Axis = Literal["tp", "cp", "ep", "pp", "dp"]
#: The default nesting, from the fastest links outwards (planning.md E1, Llama 3 order).
AXES: tuple[Axis, ...] = ("tp", "cp", "ep", "pp", "dp")

#: fp64 is slow and serves verification (`orch verify`): its rounding errors hide no mistakes.
Precision = Literal["fp64", "fp32", "bf16", "fp16"]
GradWire = Literal["bf16", "fp16"]
#: The recipe of scaling for matrix products that are narrower than their tensors; "": none. The
#: 8-bit recipes have one scale per tensor, per row, per block of 128 (DeepSeek-V3, arXiv
#: 2412.19437) and per block of 32 (OCP MX); the 4-bit recipe has one per block of 16.
Matmul = Literal["", "fp8_tensor", "fp8_delayed", "fp8_row", "fp8_block", "mxfp8", "nvfp4"]
#: direct: a token goes to each of its experts; hierarchical: it goes once to each NVLink domain
#: that holds some of its experts, and from there to the experts.
AllToAll = Literal["direct", "hierarchical"]
CpMethod = Literal["zigzag", "ring", "allgather", "ulysses"]
Recompute = Literal["none", "selective", "full"]
#: What a model learns to predict, if not the next token; masked: tokens that it does not see.
Objective = Literal["masked"]


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
    """One tier of the fabric, innermost first. Every node is under exactly one switch of each
    level."""

    name: str
    switches: list[list[int]]  # node indices under each switch; ragged allowed
    #: per GPU and direction, between two nodes whose lowest common switch is on this level
    bytes_per_s: float
    latency_s: float
    oversubscription: float  # 1.0 = full bisection above this level
    source: str


class Measured(Frozen):
    """The measurements of `orch bench`, which replace data sheets. Links have their measured rates
    and latencies in their own fields."""

    source: str  # when, by which run
    #: FLOP/s of a matrix product on one GPU while all GPUs compute, by precision
    matmul_flops: dict[str, float]
    attention_flops: dict[str, float]
    memory_bytes_per_s: float
    launch_s: float  # one small operator
    #: tier -> operation -> its time over the time of its bytes at the tier's rate, >= 1
    stretch: dict[str, dict[str, float]] = {}


class Host(Frozen):
    """The memory, links and disk of a node that offloading uses."""

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
    #: node indices that share one NVLink domain (NVL72: several nodes)
    nvlink_domains: list[list[int]]
    nvlink: Link
    nics_per_node: int
    rails: int  # NIC i of every node is on rail i % rails
    levels: list[SwitchLevel]
    measured: Measured | None = None
    host: Host | UnsetType = UNSET  # UNSET: not described
    #: true: each pair of a node's GPUs has its own links, without a switch
    direct_nvlink: bool | UnsetType = UNSET
    #: number of nodes of `cluster.topology_file` that no rank may use, by their kind
    left_out: dict[str, int] = {}


# ----------------------------------------------------------------------------------------------
#     parallel


class Parallel(Frozen):
    """All degrees of parallelism. world = tp * cp * ep * pp * dp; dense weights are replicated over
    dp * ep * cp."""

    tp: int
    cp: int
    ep: int
    pp: int
    dp: int
    zero: Literal[0, 1, 2, 3]
    vpp: int  # virtual stages per pipeline rank
    sp: bool  # sequence parallel on the tensor-parallel group
    world_size: int
    order: list[Axis]  # nesting chosen by the planner, innermost first
    schedule: str  # name in orchestrator.plan.schedules
    stage_layers: list[int]  # decoder layers of each of the pp * vpp stages, in model order
    micro_batch_size: int  # samples
    #: per replica and step, the number that the pipeline runs; the largest, if replicas differ
    micro_batches: int
    accumulation: int  # micro-batches summed before one optimizer step (= micro_batches)
    global_batch_samples: int  # micro_batch_size * micro_batches * dp * ep, unless replicas differ
    global_batch_tokens: int
    bucket_bytes: int  # gradient bucket size, bytes of reduce dtype
    cp_method: CpMethod = "zigzag"
    #: neighbours in "grad" that share one copy of sharded state; 0 = all; fewer: hybrid sharding
    zero_group: int = 0
    #: each pipeline rank's actions in order, as "0F3"; for schedule "table"
    schedule_rows: list[list[str]] = []
    #: micro-batches of each data-parallel replica, if they differ; empty: all have equally many
    replica_micro_batches: list[int] = []
    #: ranks of tp that share each expert, if fewer than tp (`plan.expert_mesh`)
    etp: int | UnsetType = UNSET
    fold_cp: bool | UnsetType = UNSET  # true: ranks of cp hold different experts
    expert_all_to_all: AllToAll | UnsetType = UNSET  # UNSET: direct
    #: assumed load of the fullest expert rank over the mean; UNSET: 1
    expert_imbalance: float | UnsetType = UNSET
    #: the most pieces of a micro-batch in which tensor parallelism communicates, so that one
    #: travels while another is multiplied; UNSET: one
    tp_pieces: int | UnsetType = UNSET


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
    """Bounds how much better another placement or nesting order could be."""

    bound_s: float  # least seconds of a step on these nodes, for any placement
    gap: float  # 0.03: a better placement could be at most 3 % faster
    exact: bool  # every placement was costed, and none is better
    given_step_s: float  # predicted step with the nodes in their given order


class Memory(Frozen, omit_defaults=True):
    """Bytes on the worst rank. Each category has its own peak; `total` is the sum of the categories
    minus `apart`."""

    params: int
    grads: int
    optimizer: int
    activations: int
    buffers: int
    total: int
    capacity: int
    worst_rank: int
    sd: float = 0.0  # standard deviation of the relative error of `total`, from the profile
    host: int = 0  # offloaded to the memory of the rank's host, not part of `total`
    disk: int = 0  # offloaded to a disk of the rank's node
    apart: int = 0  # bytes of the categories that are absent at the peak of `total`
    context: int = 0  # of `buffers`: the device's context and NCCL's communicators


class Time(Frozen, omit_defaults=True):
    step_s: float
    compute_s: float
    exposed_comm_s: dict[str, float]  # by axis
    #: share of `step_s` in which the slowest rank waits for other pipeline stages
    bubble_ratio: float
    limited_by: str  # one phrase: what to change first
    sd: float = 0.0  # standard deviation of the relative error of `step_s`, from the profile
    #: seconds of the step by term of the cost model; they sum to `step_s`
    terms: dict[str, float] = {}
    software: str = ""  # the software whose kernels and overlap were assumed
    profile: str = ""  # the fitted parameters: "<name> <first digits of the file's hash>"
    #: a site's own parameters, which differ from the shipped profile
    parameters: dict[str, float] = {}


class BatchRamp(Frozen):
    """Grows the global batch linearly with the consumed samples, in whole micro-batches per
    replica."""

    start_samples: int  # global batch of the first step
    #: consumed samples after which the global batch is `parallel.global_batch_samples`
    over_samples: int


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
    #: the planner's choice for each layer, for recompute "budget"
    recompute_layers: list[Recompute] = []
    batch_ramp: BatchRamp | None = None
    #: consecutive steps with a non-finite gradient that are skipped; one more stops the run
    skip_non_finite_steps: int = 0
    #: true: each tensor-parallel rank keeps only its share of recomputed inputs
    partition_activations: bool | UnsetType = UNSET
    #: true: recomputed inputs are copied into one buffer that each rank reserves at the start
    contiguous_activations: bool | UnsetType = UNSET
    #: true: selective layers recompute queries, keys and values from latents
    recompute_latents: bool | UnsetType = UNSET
    #: bytes of the largest gradient bucket or gathered bucket of weights, whatever the model
    comm_buffer_bytes: int | UnsetType = UNSET
    offload: Offload | UnsetType = UNSET
    #: true: GPUs use kernels and orders of sums that give the same bits in every run
    deterministic: bool | UnsetType = UNSET
    objective: Objective | UnsetType = UNSET  # UNSET: the next token
    #: linears that stay wide while `Job.matmul` narrows the others (`plan.rounding.wide`)
    matmul_wide: list[str] | UnsetType = UNSET
    #: format in which gradients travel to the rank that sums them; UNSET: `grad_dtype`
    grad_wire: GradWire | UnsetType = UNSET


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
    #: UNSET: adamw, so that older plans keep their meaning
    kind: Literal["sgd", "muon"] | UnsetType = UNSET
    #: precision of the moments; UNSET: that of the master weights
    state: Literal["bf16", "8bit"] | UnsetType = UNSET


class Data(Frozen):
    name: str
    #: files or folders; "stdlib" = the sources of the running Python's standard library
    paths: list[str]
    extensions: list[str]
    tokenizer: str  # "bytes", or the path of a tokenizers JSON file
    seed: int
    cache_dir: str  # folder of token files, keyed by content
    demo: bool = False
    #: true: attention and positions stop at document borders inside a sample
    isolate_documents: bool = False


class Checkpoint(Frozen):
    dir: str  # "" = <run folder>/checkpoints
    every_steps: int  # 0 = only at the end and on a termination signal
    keep_last: int
    #: steps between copies of the state in the memory of two nodes; 0 = no copies
    memory_every_steps: int = 0
    #: copies of a rank's state in host memory, for saves in the background; absent = 1
    snapshots: int | UnsetType = UNSET


class Metrics(Frozen):
    host: str
    port: int  # of the first node's agent; 0 = any free port
    memory_every_steps: int
    #: number of first steps whose actions and memory by category are recorded over time
    trace_steps: int = 0


#: Values for the unknown properties of a user's program. They exist only in memory, never in a plan
#: document: see `Plan.program`.
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
    """Fills each field of `kind` that has no default with an empty value."""
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
    #: true: writes the experts that tokens chose, one file per rank and reported step, for
    #: `orch verify`
    record_choices: bool = False


class Plan(Frozen, omit_defaults=True, kw_only=True):
    """A plan of a job. The plan of a user's program (`program`) has ranks, groups and placement,
    but no model, memory, time and rates, because they are unknown."""

    schema: str
    hash: str  # sha256 of the canonical JSON with this field empty; "" until sealed
    cluster: Cluster
    model: Model = NO_MODEL
    parallel: Parallel
    job: Job
    ranks: list[Rank]  # ranks[i].rank == i
    #: axis -> rank lists in order of the coordinate; also grad, model, embedding
    groups: dict[str, list[list[int]]]
    placement: dict[str, AxisPlacement]
    memory: Memory = NO_MEMORY
    time: Time = NO_TIME
    mfu: float = 0.0
    tokens_per_s_per_gpu: float = 0.0
    warnings: list[str]
    certificate: Certificate | None
    program: bool = False  # true: the plan of a user's program, without a model
