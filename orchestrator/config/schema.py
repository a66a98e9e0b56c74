"""The typed configuration: what `compose.load` returns and the planner takes.

This is the only definition of every configuration key: its type, legal range, default and meaning.
Hydra's structured config (`structured.py`) is derived from these classes, and so are the lists of
legal keys in error messages. Units are in the names (`gbit_per_s`, `latency_us`, `memory_gib`); a
plan holds SI units. A field without a default must be set by the file of its group. `None` means
"derived": the comment says from what.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType, field
from msgspec.structs import force_setattr

from orchestrator.config.passed import PASSED
from orchestrator.plan.document import (
    AllToAll,
    Axis,
    CpMethod,
    Frozen,
    GradWire,
    Matmul,
    Mla,
    Moe,
    Mtp,
    Precision,
    Recompute,
    Yarn,
)

from .values import (
    Beta,
    Count,
    Degree,
    EnvName,
    EnvPattern,
    Extension,
    Name,
    Natural,
    NodeRange,
    NonNegative,
    Path,
    Positive,
    Quantity,
    Ratio,
    RunName,
    Source,
    Text,
    WorkerCause,
)

# ---------------------------------------------------------------------------------------- cluster


class GpuSpec(Frozen):
    name: Name  # The GPU's model, as its maker spells it.
    memory_gib: Quantity  # Memory of one GPU.
    #: Dense TFLOP/s by precision. The GPU cannot compute in a precision that is left out.
    peak_tflops: dict[Literal["fp64", "fp32", "bf16", "fp16", "fp8"], Quantity]
    hbm_gb_per_s: Quantity  # Rate of its memory, reads and writes together.
    source: Source  # Where the numbers come from.


class NvlinkSpec(Frozen):
    """The fast domain. One direction of one GPU."""

    domain_nodes: Degree  # Nodes that share one domain; more than 1 for rack-scale systems.
    gb_per_s: Quantity  # To all other GPUs of the domain together.
    latency_us: NonNegative  # Of one message inside the domain.
    source: Source  # Where the numbers come from.
    #: False: without NVSwitch, each pair of a node's GPUs has an equal part of their links.
    switched: bool = True


class NicSpec(Frozen):
    per_node: Degree  # Network cards of a node.
    rails: Degree  # NIC i of every node is on rail i % rails.
    gbit_per_s: Quantity  # Of one NIC, in one direction.
    latency_us: NonNegative  # Of one message between two nodes, at least.
    source: Source  # Where the numbers come from.


class LevelSpec(Frozen):
    """One tier of switches."""

    name: Name  # The level's name, such as leaf or spine.
    #: A list describes unequal switches: one entry per switch, in node order.
    nodes_per_switch: Degree | list[Degree]
    #: Of the path of one NIC between two nodes that meet on this level, before oversubscription.
    gbit_per_s: Quantity
    latency_us: NonNegative  # Of one message between nodes that meet on this level.
    source: Source  # Where the numbers come from.
    #: Of the links from this level's switches upwards; 1 means none.
    oversubscription: Annotated[float, Meta(ge=1)] = 1.0


class HostSpec(Frozen):
    """A node beside its GPUs, for train.offload."""

    memory_gib: Quantity  # Memory of a node that offloaded state may use.
    memory_gb_per_s: Quantity  # Rate of the node's memory, for all its GPUs together.
    link_gb_per_s: Quantity  # Between one GPU and the host's memory, in one direction.
    disk_gib: Quantity  # Space on a node's disk for offloaded state.
    disk_gb_per_s: Quantity  # Reads and writes together.
    source: Source  # Where the numbers come from.


#: Prefixes of `cluster.topology_file` that name the running cluster instead of a file.
LIVE = ("slurm:", "kubernetes:")


class ClusterSpec(Frozen):
    """A regular description; the planner unfolds it to explicit nodes, domains and switches."""

    name: Name  # The cluster's name, in plans, lists and the memory of bad nodes.
    device: Literal["cpu", "cuda"]  # What ranks compute on.
    nodes: Degree  # Number of nodes.
    gpus_per_node: Degree  # GPUs of a node; on CPUs: processes of a node.
    gpu: GpuSpec  # The GPU that every node has.
    nvlink: NvlinkSpec  # The fast links inside a node or rack.
    nic: NicSpec  # The network cards of a node.
    levels: list[LevelSpec]  # Tiers of switches, the innermost first.
    #: The real nodes and switches, in any form that `orch topology` reads. Speeds and latencies
    #: stay those of this description.
    topology_file: Path | None = None
    topology_name: Name | None = None  # The cluster to take from a file that describes several.
    #: The number of nodes to take from the file. Unset: `cluster.nodes` if it was given on the
    #: command line, else all.
    topology_nodes: Degree | UnsetType = UNSET
    host: HostSpec | None = None  # For train.offload. None: predictions assume a host, and say so.
    #: Whether to plan with the rates that `orch bench` measured on this cluster, if it ran there.
    measured: bool = True


# ------------------------------------------------------------------------------------------- model


class MoeSpec(Moe):
    """The plan's, with null for what it does not name."""

    balance_over: Literal["sequence", "batch"] | None = None  # type: ignore[assignment]
    bias_update: float | None = None  # type: ignore[assignment]
    capacity_factor: float | None = None  # type: ignore[assignment]
    jitter: float | None = None  # type: ignore[assignment]


class ModelSpec(Frozen):
    """A transformer by its shapes; parameters and FLOPs are derived."""

    name: Name  # The model's name, in plans and lists.
    layers: Degree  # Number of layers.
    hidden: Degree  # Width of the hidden states.
    heads: Degree  # Attention heads of a layer.
    ffn_hidden: Degree  # Inner width of the feed-forward part.
    vocab: Count  # Size of the vocabulary.
    max_seq_len: Count  # The longest sequence that the model takes.
    norm: Literal["rms", "layer"]  # RMSNorm or LayerNorm.
    position: Literal["rope", "learned", "none"]  # How positions enter attention.
    mlp: Literal["gated", "plain"]  # gated: three matrices (SwiGLU); plain: two.
    #: The function between the matrices; gelu is the approximation by tanh, gelu_erf exact.
    activation: Literal["silu", "gelu", "gelu_erf"]
    bias: bool  # Whether linear layers have a bias.
    tied_embeddings: bool  # Whether the output projection is the input embedding.
    source: Source  # Where the shapes come from.
    kv_heads: Degree | None = None  # Heads of keys and values. None: as many as `heads`.
    head_dim: Degree | None = None  # Width of a head. None: hidden / heads.
    norm_eps: Positive = 1e-5  # Added to the variance in norms.
    rope_theta: Positive = 10000.0  # The base of rotary positions.
    causal: bool = True  # False: tokens also attend to later ones (an encoder).
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0  # Share of activations that dropout zeroes.
    moe: MoeSpec | None = None  # A mixture of experts. None: dense layers.
    mla: Mla | None = None  # Latent attention. None: attention with `heads` and `kv_heads`.
    qk_norm: bool = False  # Whether queries and keys are normalised, per head.
    yarn: Yarn | None = None  # YaRN's stretched rotary positions. None: as they are.
    mtp: Mtp | None = None  # Prediction of further tokens; depth 0 means none.
    block: Name | None = None  # Kind of the layers, pre_norm or post_norm. None: pre_norm.
    head_transform: bool = False  # Whether a matrix and a norm precede the output projection.
    #: Parameters outside the layers, such as BERT's pooler, which are counted and not trained.
    extra_params: dict[str, Natural] = {}

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


# --------------------------------------------------------------------------------------- parallel


class ParallelSpec(Frozen):
    """All degrees. world = tp * cp * ep * pp * dp.

    `auto` (parallel=auto) searches what is left out of tp, cp, ep, etp, fold_cp, expert_all_to_all,
    pp, dp, zero, vpp, sp, cp_method, schedule, micro_batch_size and train.recompute; what is given
    is kept. Without it, what is left out has its default.
    """

    auto: bool = False  # Whether the planner searches the degrees that are left out.
    tp: Degree | None = None  # Tensor-parallel ranks. None: 1.
    cp: Degree | None = None  # Context-parallel ranks. None: 1.
    ep: Degree | None = None  # Expert-parallel ranks. None: 1.
    #: Tensor-parallel ranks that each expert is cut over; others hold other experts. None: all.
    etp: Degree | None = None
    #: Whether context-parallel ranks hold different experts. None: they do not.
    fold_cp: bool | None = None
    #: How tokens reach experts. None: directly. `hierarchical`: once to each NVLink domain.
    expert_all_to_all: AllToAll | None = None
    pp: Degree | None = None  # Pipeline-parallel ranks. None: 1.
    dp: Degree | None = None  # Data-parallel replicas. None: as many as the cluster has GPUs for.
    zero: Annotated[int, Meta(ge=0, le=3)] | None = None  # The ZeRO stage. None: 0.
    vpp: Degree | None = None  # Virtual stages per pipeline rank. None: 1.
    sp: bool | None = None  # Sequence parallelism on the tensor-parallel group. None: on if tp > 1.
    tp_pieces: Degree | None = None  # Most pieces of a tensor-parallel message. None: by its size.
    schedule: Name | None = None  # The pipeline's schedule. None: 1f1b, or interleaved if vpp > 1.
    #: A schedule of your own, as CSV or JSON: a table with one row of actions per pipeline rank.
    schedule_file: Path | None = None
    cp_method: CpMethod | None = None  # How ranks share a long sequence. None: zigzag.
    #: Ranks that share one copy of what ZeRO shards. 0: all that hold the same weights.
    zero_group: Natural = 0
    #: Samples per micro-batch. None: 1 on GPUs, up to 8 on CPUs.
    micro_batch_size: Degree | None = None
    #: Whether some replicas may take one micro-batch more if the global batch does not divide.
    uneven: bool = False
    #: Layers of each of the pp * vpp stages. None: balanced by cost.
    stage_layers: list[Natural] | None = None
    #: The nesting of the axes, the innermost first. None: the planner chooses it by bytes.
    order: list[Axis] | None = None
    #: Whether tensor-parallel and expert-parallel groups may leave their NVLink domain.
    allow_tp_across_nvlink: bool = False
    #: Size of a gradient bucket, in MiB of `train.grad_dtype`. None: chosen for the layout.
    bucket_mib: Quantity | None = None


# ------------------------------------------------------------------------------------------- job


class DataSpec(Frozen):
    name: Name  # The corpus's name, in plans.
    #: Files or folders. "stdlib" stands for the sources of Python's standard library.
    paths: Annotated[list[Path], Meta(min_length=1)]
    extensions: list[Extension]  # Files in folders that belong to the corpus.
    tokenizer: Path = "bytes"  # "bytes", or the path of a JSON file of the `tokenizers` library.
    seed: Natural | None = None  # The seed of the order of samples. None: `train.seed`.
    cache_dir: Path | None = None  # The folder of token files. None: <home>/data.
    #: Whether attention and positions stop where a document ends inside a sample.
    isolate_documents: bool = False
    #: Whether the corpus only shows how training works, and teaches no language: the plan warns.
    demo: bool = False


class OptimSpec(Frozen):
    """The rule of the update, and its learning rate with a warm-up."""

    lr: Positive  # The peak of the learning rate.
    kind: Literal["adamw", "sgd", "muon"] = "adamw"  # The rule of the update.
    #: The format of moments. `bf16` is rounded stochastically; `8bit` has scales per block.
    state: Literal["wide", "bf16", "8bit"] = "wide"
    min_lr_ratio: Ratio = 0.1  # The lowest learning rate, as a share of `lr`.
    schedule: Literal["constant", "cosine", "wsd"] = "cosine"  # The rate after the warm-up.
    warmup_steps: Natural = 0  # Steps in which the learning rate rises from 0 to `lr`.
    #: For cosine: the step at which the learning rate is lowest; 0 means `train.steps`. For wsd:
    #: the length of the final decay; 0 means a tenth of the run.
    decay_steps: Natural = 0
    beta1: Beta = 0.9  # Decay of the first moment; for sgd and muon's matrices, the momentum.
    beta2: Beta = 0.95  # Decay of the second moment.
    eps: Positive = 1e-8  # Added to the root of the second moment.
    weight_decay: NonNegative = 0.1  # Decoupled decay of weights; norms and biases have none.


class BatchRampSpec(Frozen):
    """The global batch grows linearly from `start` to its full size while the first `over` samples
    are consumed."""

    #: The first batch, in samples. Set one of the `start` keys and one of the `over` keys.
    start_samples: Count | None = None
    start_tokens: Count | None = None  # The first batch, in tokens.
    over_samples: Count | None = None  # The length of the ramp, in samples.
    over_tokens: Count | None = None  # The length of the ramp, in tokens.


class TrainSpec(Frozen):
    steps: Count  # Optimizer steps of the run.
    seq_len: Count  # Tokens per sample.
    #: Samples per step over all replicas. Set this or `global_batch_tokens`.
    global_batch_samples: Count | None = None
    global_batch_tokens: Count | None = None  # Tokens per step over all replicas.
    seed: Natural = 1234  # The seed of weights and dropout.
    #: What is predicted. None: the next token, or masked ones if the model is not causal.
    objective: Literal["next_token", "masked"] | None = None
    precision: Precision = "bf16"  # The format that layers compute in.
    #: The fp8 or fp4 recipe of the layers' matrix products. "": they compute in `precision`.
    matmul: Matmul = ""
    #: With matmul: linears that compute in `precision`, as `wo`, `first`, `last` or `3.down`.
    matmul_wide: list[str] = []
    grad_dtype: Precision = "fp32"  # The precision in which gradients are accumulated and reduced.
    #: The 16 bits in which gradients travel to be summed in `grad_dtype`. None: in `grad_dtype`.
    grad_wire: GradWire | None = None
    #: `budget`: each layer recomputes as little as fits. None: nothing, or what a search finds.
    recompute: Recompute | Literal["budget"] | None = None
    #: Memory for the activations of a rank. None: what the GPU's memory leaves.
    recompute_budget_gib: Quantity | None = None
    #: Whether tensor-parallel ranks keep shares of the inputs of recomputed layers (ZeRO-R's Pa).
    partition_activations: bool = False
    #: Whether those inputs are copied into one buffer, reserved at the start (ZeRO-R's MD).
    contiguous_activations: bool = False
    #: Whether recompute=selective also recomputes latent attention's queries, keys and values.
    recompute_latents: bool = False
    #: Where master weights and moments are kept: on the device (none), or elsewhere.
    offload: Literal["none", "host", "disk"] = "none"
    comm_buffer_mib: Quantity | None = None  # The largest bucket (ZeRO-R's CB). None: unbounded.
    #: With offload=host: updates run beside the next step, which computes with older weights.
    offload_delayed: bool = False
    #: Where the inputs of recomputed layers are until backward; none: on the device.
    offload_activations: Literal["none", "host", "disk"] = "none"
    #: Weights and gradients are where the optimizer is: ZeRO-3's shards, or on CPUs all, on a disk.
    offload_weights: bool = False
    #: With offload=disk: a folder on a disk of each node. None: a folder in the run folder.
    offload_dir: Path | None = None
    #: With offload=disk: host memory per rank through which the state passes.
    offload_buffer_mib: Quantity = 256.0
    batch_ramp: BatchRampSpec | None = None  # A batch that grows at the start. None: always full.
    #: The largest norm of the gradient. 0: gradients are not clipped.
    clip_grad_norm: NonNegative = 1.0
    #: How many steps in a row may have a gradient that is inf or nan, which is not applied.
    skip_non_finite_steps: Natural = 0
    log_every_steps: Count = 1  # Steps between two lines of loss in the logs.
    compile: bool | None = None  # Whether blocks are compiled, one by one. None: on GPUs only.
    deterministic: bool = False  # Whether GPUs use kernels that give the same bits every time.


class CostSpec(Frozen):
    """What predictions assume; it changes no run."""

    #: The software whose kernels, overlap and memory are predicted: a family of
    #: orchestrator/cost/software.py.
    software: Text = "orch"
    #: Fitted parameters (`orch calibrate`). None: those of the site, else the shipped ones.
    profile: Path | None = None
    #: The load of the fullest of the ranks that share experts, divided by the mean load; 1 means
    #: equal loads. None: the profile's value.
    expert_imbalance: Annotated[float, Meta(ge=1)] | None = None


class ExperimentSpec(Frozen):
    """What was published of the run that a file of the group `experiment` repeats; it changes no
    run."""

    #: Seconds per optimizer step, as printed or as they follow from the printed figures.
    step_s: Positive
    published: Text  # The figure as printed, and what it counts.
    source: Source  # Where the figure was published.


class CheckpointSpec(Frozen):
    #: Steps between two checkpoints. 0: only at the end and on a termination signal.
    every_steps: Natural = 0
    keep_last: Count = 2  # Number of checkpoints to keep.
    #: Copies of the state in host memory. With 2, a save does not wait until another is written.
    snapshots: Literal[1, 2] = 1
    dir: Path | None = None  # Where they are saved. None: <run folder>/checkpoints.
    #: Steps between two copies of the state in the memory of two nodes each, between checkpoints.
    #: 0: no copies.
    memory_every_steps: Natural = 0


class MetricsSpec(Frozen):
    host: Annotated[
        str, Meta(pattern=r"^[A-Za-z0-9.:_-]{1,253}\Z", description="a host name or address")
    ] = "127.0.0.1"  # The address on which agents serve metrics; 0.0.0.0: every one.
    #: The port of the first node's agent. 0: any free port.
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    memory_every_steps: Count = 10  # Steps between two measurements of memory by category.
    #: Number of first steps whose timeline and memory are recorded, in one file per rank. 0: none.
    trace_steps: Annotated[int, Meta(ge=0, le=100)] = 0
    #: Finds steps in the lines that a program prints, by a group (?P<step>...). None: not read.
    pattern: Text | None = None


class BackendSpec(Frozen):
    name: Name  # local, slurm, kubernetes, or a backend of another package.
    #: The most restarts after failures; a worker's exit that asks for a restart does not count.
    max_restarts: Natural = 3
    grace_s: Positive = 30.0  # Seconds between the request to save and the kill of the workers.
    heartbeat_timeout_s: Positive = 15.0  # An agent that is silent for longer is lost.
    #: Restart budgets of single causes; the other causes share `max_restarts`.
    max_restarts_by_cause: dict[WorkerCause, Natural] = {}
    #: A run hangs if it has not moved for this time and for `hang_after_steps`.
    hang_after_s: Positive = 30.0
    #: The multiple of the run's median step that belongs to `hang_after_s`.
    hang_after_steps: Positive = 10.0
    #: The same limit before the second step of an epoch, and during saves.
    start_hang_after_s: Positive = 1800.0
    #: A node is slow if its own compute time exceeds the median of its peers by this factor.
    straggler_ratio: Annotated[float, Meta(gt=1)] = 1.5
    #: `exclude`: the run continues with a spare in the place of the slow node, if it has one.
    on_straggler: Literal["name", "exclude"] = "name"
    #: Failures in a row, at different steps, that exclude one node of several. 0: never.
    bad_node_after: Natural = 3
    #: Hours for which the next runs of this user avoid nodes that were left out. 0: they do not.
    remember_bad_nodes_h: NonNegative = 24.0
    #: How long an elastic run waits for nodes to come back before it ends with 76.
    min_nodes_grace_s: NonNegative = 30.0
    #: Whether `orch drill` may break parts of the run. None: on the local backend only.
    allow_drills: bool | None = None
    #: Whether rank 0's store answers only the run's nodes. False: for a NAT between nodes.
    store_filter: bool = True
    #: Whether each worker runs on the cores of its GPU's NUMA domain only (docs/programs.md).
    numa_binding: bool = True
    #: Values for the workers, whatever the shell sets. They are not a place for secrets.
    env: dict[EnvName, Text] = {}
    #: Patterns of variables of the shell that reach a run on other machines (docs/programs.md).
    passed: list[EnvPattern] = field(default_factory=lambda: [*PASSED])
    #: Further variables of the shell to pass on: names, which always pass, and patterns.
    pass_env: list[EnvPattern] = []
    options: dict[str, Any] = {}  # Options of this backend only.


class RunSpec(Frozen):
    name: RunName | None = None  # How the run's id begins. None: <model>-<choice of parallel>.
    dir: Path | None = None  # The folder in which run folders are made. None: <home>/runs.
    allow_oom: bool = False  # Whether to submit a plan that does not fit the memory.


# --------------------------------------------------------------------------------------- the whole


class Config(Frozen):
    """One resolved job. `choices` records the file or word that each group was chosen by."""

    cluster: ClusterSpec  # The machines.
    model: ModelSpec  # The model by its shapes.
    parallel: ParallelSpec  # The layout.
    data: DataSpec  # The corpus.
    optim: OptimSpec  # The optimizer and its learning rate.
    train: TrainSpec  # Steps, batch, precision, memory.
    checkpoint: CheckpointSpec  # When and where state is saved.
    metrics: MetricsSpec  # What is measured, and where it is served.
    backend: BackendSpec  # What starts the job, and what it does about failures.
    run: RunSpec = RunSpec()  # The run's name and folder.
    cost: CostSpec = CostSpec()  # What predictions assume.
    experiment: ExperimentSpec | None = None  # A published result to compare with.
    #: Sizes that the job may be started at: 4..8, or 4:8. One number sets `cluster.nodes`.
    nodes: NodeRange | None = None
    #: Ranks of a user's program. None: as `parallel` says, else all of the cluster's GPUs.
    nproc: Degree | None = None
    choices: dict[str, str] = {}  # Derived: the file or word by which each group was chosen.
