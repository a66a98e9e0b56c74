"""The Prometheus metrics of a node. Names, types and units: docs/protocol.md, Metrics.

Labels are job (the run id) and node; gauges, which are valid for one epoch, also have plan_epoch.
Counters and histograms continue from one epoch to the next, so that the page does not grow with the
epochs of a run. There is no rank label, since a job may have tens of thousands of ranks: a series
is the sum or the maximum over the ranks of its node, as its help text says; `sum by (job)` or `max
by (job)` over the nodes gives the job's value. Handling a report costs microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from orchestrator import __version__
from orchestrator.observe.goodput.intervals import WallState
from orchestrator.observe.goodput.meter import WallMeter
from orchestrator.plan import Plan
from orchestrator.plan.expert_mesh import expert_mesh
from orchestrator.plan.worker import EventReport, StepReport

BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    25.0,
    60.0,
    150.0,
    600.0,
)
_LABELS = ["job", "node"]

_COUNTERS = {
    "orch_step": "Optimizer steps completed, replayed ones included.",
    "orch_tokens": "Tokens trained on, this node's share: sum over nodes gives the job.",
    "orch_comm_bytes": "Bytes sent by the workers of this node, by axis of parallelism.",
    "orch_expert_bytes": "Of axis ep: bytes sent to experts of other ranks, by what reaches them.",
    "orch_expert_seconds": (
        "Of axis ep: seconds in the exchange, by its slowest level, summed over the workers."
    ),
    "orch_comm_seconds": "Seconds in communication, summed over the workers of this node.",
    "orch_wall_seconds": "Seconds of this node's agent, each in one state (docs/reliability.md).",
    "orch_faults": "Failures, by kind and by who detected them.",
    "orch_restarts": "Restarts of all workers, by reason.",
    "orch_replans": "Changes of the nodes that the run uses, by kind: grow, shrink or swap.",
    "orch_checkpoint_failures": "Checkpoints that could not be saved while training went on.",
    "orch_reports_dropped": "Reports that workers dropped because their pipe was full.",
    "orch_reports_unreadable": "Lines on report pipes that could not be read.",
}
_GAUGES = {
    "orch_last_step": "Last completed step.",
    "orch_last_step_timestamp_seconds": "When the last step completed.",
    "orch_loss": "Loss of the last step, mean over the tokens of the whole job.",
    "orch_loss_term": (
        "What a term adds to the loss of the last step, by name; not part of orch_loss."
    ),
    "orch_grad_norm": "Norm of the last gradient of the whole job, before clipping.",
    "orch_learning_rate": "Learning rate of the last step.",
    "orch_ettr_ratio": (
        "Effective training time ratio: productive seconds of this node over all its seconds."
    ),
    "orch_tokens_per_second": "Tokens per second of the whole job over the last step.",
    "orch_mfu_ratio": "Model FLOP/s over peak FLOP/s, last step.",
    "orch_hfu_ratio": "Executed FLOP/s (recomputation counted) over peak FLOP/s, last step.",
    "orch_pipeline_bubble_ratio": (
        "Share of the last step that a worker of this node waited for other stages, at most."
    ),
    "orch_expert_load_ratio": (
        "Tokens of a layer's expert that got most over the mean, last sampled step."
    ),
    "orch_expert_rank_load_ratio": (
        "The same of the ranks that share the layer's experts: it waits for the fullest."
    ),
    "orch_expert_balance_ratio": (
        "Entropy of a layer's load: 1 even, 0 all tokens chose the same experts."
    ),
    "orch_expert_dropped_ratio": "Share of a layer's choices that no expert took.",
    "orch_router_entropy_ratio": (
        "Entropy of a token's scores, mean over tokens: 1 if all experts score equal."
    ),
    "orch_router_bias_range": "Highest less lowest balancing bias of a layer.",
    "orch_checkpoint_bytes": "Size of the last durable checkpoint.",
    "orch_memory_bytes": "Memory by category, of the worker of this node that uses most of it.",
    "orch_last_durable_checkpoint_timestamp_seconds": (
        "When the last checkpoint was safely on disk."
    ),
    "orch_last_durable_checkpoint_step": "Step of the last checkpoint that was safely on disk.",
    "orch_workers": "Workers alive on this node.",
    "orch_healthy_nodes": "Nodes whose agents are connected.",
    "orch_wanted_nodes": "Nodes that the plan uses.",
    "orch_spare_nodes": "Connected nodes that hold no rank.",
    "orch_node_slowdown_ratio": (
        "Compute time of this node over the median of its peers; 1 if it is not a straggler."
    ),
    "orch_plan_info": "The plan in force, as labels.",
    "orch_build_info": "The version of orch.",
}
_HISTOGRAMS = {
    "orch_step_duration_seconds": (
        "Duration of a step and of its phases, as reported by the node's first worker."
    ),
    "orch_checkpoint_duration_seconds": (
        "Duration of a save, from the first byte to durable, if a worker of this node reports it."
    ),
    "orch_recovery_duration_seconds": (
        "From the first sign of an epoch's end to the start of the next step, if steps were"
        " interrupted."
    ),
}
_EXTRA_LABELS = {
    "orch_step_duration_seconds": ["phase"],
    "orch_loss_term": ["term"],
    "orch_expert_bytes": ["level"],
    "orch_expert_seconds": ["level"],
    "orch_expert_load_ratio": ["layer"],
    "orch_expert_rank_load_ratio": ["layer"],
    "orch_expert_balance_ratio": ["layer"],
    "orch_expert_dropped_ratio": ["layer"],
    "orch_router_entropy_ratio": ["layer"],
    "orch_router_bias_range": ["layer"],
    "orch_comm_bytes": ["axis"],
    "orch_comm_seconds": ["axis"],
    "orch_memory_bytes": ["category"],
    "orch_wall_seconds": ["state"],
    "orch_faults": ["kind", "detected_by"],
    "orch_restarts": ["reason"],
    "orch_replans": ["reason"],
    "orch_plan_info": ["plan_hash", "tp", "cp", "ep", "pp", "dp", "zero", "schedule"],
    "orch_build_info": ["version"],
}


class Family(NamedTuple):
    """The description of a metric, without its values."""

    name: str  # as Prometheus shows it: a counter ends with `_total`
    kind: str
    labels: list[str]
    meaning: str


def families() -> Iterator[Family]:
    """Yields the description of every metric of a node."""
    for name, meaning in _COUNTERS.items():
        yield Family(f"{name}_total", "counter", _labels(name), meaning)
    for name, meaning in _GAUGES.items():
        yield Family(name, "gauge", _labels(name, "plan_epoch"), meaning)
    for name, meaning in _HISTOGRAMS.items():
        yield Family(name, "histogram", _labels(name), meaning)


def _labels(name: str, *further: str) -> list[str]:
    return [*_LABELS, *further, *_EXTRA_LABELS.get(name, [])]


class _Histogram:
    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        index = next((i for i, bound in enumerate(BUCKETS) if value <= bound), len(BUCKETS))
        self.counts[index] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        total = 0.0
        bounds_and_counts: list[tuple[str, float]] = []
        for bound, count in zip((*BUCKETS, float("inf")), self.counts, strict=True):
            total += count
            bounds_and_counts.append(("+Inf" if bound == float("inf") else str(bound), total))
        return bounds_and_counts


class NodeMetrics(Collector):
    """The metrics of one node, computed from the reports of its workers."""

    def __init__(
        self,
        job: str,
        node: str,
        plan: Plan,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._job = job
        self._node = node
        self._clock = clock
        self._wall = WallMeter(
            clock(),
            lambda state, seconds: self.add("orch_wall_seconds", seconds, state),
        )
        self._recoveries: dict[tuple[str, ...], _Histogram] = {}
        self._plan = plan
        self._ranks = sorted(rank.rank for rank in plan.ranks if rank.node == node)
        self._epoch = -1
        self._counters: dict[tuple[str, tuple[str, ...]], float] = {}
        self._gauges: dict[tuple[str, tuple[str, ...]], float] = {}
        self._durations: dict[tuple[str, ...], _Histogram] = {}  # by phase
        self._saves: dict[tuple[str, ...], _Histogram] = {}
        self._bubbles: dict[int, float] = {}  # rank -> ratio
        self._memory: dict[int, dict[str, int]] = {}  # rank -> bytes by category
        self._dropped: dict[int, int] = {}
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        for reason in ("failure", "saved"):  # so that the first restart shows as an increase
            self.add("orch_restarts", 0, reason)

    def begin_epoch(self, epoch: int) -> None:
        """Starts an epoch: gauges of older epochs are dropped, counters are kept."""
        self.enter("rendezvous")
        self._epoch = epoch
        kept_prefixes = (
            "orch_last_durable",
            "orch_checkpoint",
            "orch_healthy",
            "orch_wanted",
            "orch_spare",
        )
        self._gauges = {
            key: value for key, value in self._gauges.items() if key[0].startswith(kept_prefixes)
        }
        self._memory.clear()
        self._bubbles.clear()
        self._dropped.clear()
        self._set_plan_info()
        self.set("orch_build_info", 1, __version__)

    def replan(self, plan: Plan) -> None:
        """Sets the plan in force from this epoch on."""
        self._plan = plan
        self._ranks = sorted(rank.rank for rank in plan.ranks if rank.node == self._node)
        self._gauges = {
            key: value for key, value in self._gauges.items() if key[0] != "orch_plan_info"
        }
        self._set_plan_info()

    def _set_plan_info(self) -> None:
        parallel = self._plan.parallel
        degrees = (str(getattr(parallel, axis)) for axis in ("tp", "cp", "ep", "pp", "dp", "zero"))
        self.set(
            "orch_plan_info",
            1,
            self._plan.hash[:16],
            *degrees,
            parallel.schedule,
        )

    def enter(self, state: WallState) -> None:
        """Sets the state that this node's time counts as, until its next step."""
        self._wall.enter(state, self._clock())

    def add(self, name: str, value: float, *labels: str) -> None:
        key = (name, labels)
        self._counters[key] = self._counters.get(key, 0) + value

    def set(self, name: str, value: float | None, *labels: str) -> None:
        if value is not None:
            self._gauges[name, labels] = value

    def on_step(self, report: StepReport, at: float) -> None:
        if self._ranks and report.rank == self._ranks[0]:  # one worker reports for the node
            self._on_node_step(report, at)
        self.set("orch_loss", report.loss)
        for name, value in report.loss_terms.items():
            self.set("orch_loss_term", value, name)
        self.set("orch_grad_norm", report.grad_norm)
        self.set("orch_learning_rate", report.lr)
        for axis, count in report.comm_bytes.items():
            self.add("orch_comm_bytes", count, axis)
        for axis, seconds in report.comm_s.items():
            self.add("orch_comm_seconds", seconds, axis)
        self._on_experts(report)
        self._on_memory(report)
        if report.bubble_ratio is not None:
            self._bubbles[report.rank] = report.bubble_ratio
            self.set("orch_pipeline_bubble_ratio", max(self._bubbles.values()))
        dropped = report.dropped_reports - self._dropped.get(report.rank, 0)
        if dropped > 0:
            self._dropped[report.rank] = report.dropped_reports
            self.add("orch_reports_dropped", dropped)

    def _on_node_step(self, report: StepReport, at: float) -> None:
        stall_s = report.phase_s.get("checkpoint", 0.0)
        recovery_s = self._wall.step(
            report.step,
            report.step_s,
            stall_s,
            self._clock(),
        )
        if recovery_s is not None:
            self._recoveries.setdefault((), _Histogram()).observe(recovery_s)
        node_tokens = report.tokens * len(self._ranks) / self._plan.parallel.world_size
        self.add("orch_step", 1)
        self.add("orch_tokens", node_tokens)
        self.set("orch_last_step", report.step)
        self.set("orch_last_step_timestamp_seconds", at)
        if report.step_s > 0:
            self.set("orch_tokens_per_second", report.tokens / report.step_s)
        self.set("orch_mfu_ratio", report.mfu)
        self.set("orch_hfu_ratio", report.hfu)
        for phase, seconds in {"step": report.step_s, **report.phase_s}.items():
            self._durations.setdefault((phase,), _Histogram()).observe(seconds)

    def _on_memory(self, report: StepReport) -> None:
        if not report.memory_bytes:
            return
        self._memory[report.rank] = report.memory_bytes
        for category in report.memory_bytes:
            largest = max(memory.get(category, 0) for memory in self._memory.values())
            self.set("orch_memory_bytes", largest, category)

    def _on_experts(self, report: StepReport) -> None:
        for level, count in report.expert_bytes.items():
            self.add("orch_expert_bytes", count, level)
        for level, seconds in report.expert_s.items():
            self.add("orch_expert_seconds", seconds, level)
        if (moe := self._plan.model.moe) is None:
            return
        expert_ranks = expert_mesh(self._plan.parallel).ep
        for layer, load in report.experts.items():
            self.set("orch_expert_load_ratio", load.ratio, layer)
            self.set("orch_expert_rank_load_ratio", load.rank_ratio(expert_ranks), layer)
            self.set("orch_expert_balance_ratio", load.balance(moe.top_k), layer)
            self.set("orch_expert_dropped_ratio", load.dropped, layer)
            self.set("orch_router_entropy_ratio", load.entropy, layer)
            self.set(
                "orch_router_bias_range",
                load.bias and load.bias[1] - load.bias[0],
                layer,
            )

    def on_event(self, report: EventReport, at: float) -> None:
        if report.name == "checkpoint_failed":
            self.add("orch_checkpoint_failures", 1)
        if report.name == "checkpoint_saved":
            self.set("orch_last_durable_checkpoint_timestamp_seconds", at)
            self.set("orch_last_durable_checkpoint_step", report.step)
            size = report.fields.get("bytes")
            seconds = report.fields.get("seconds")
            if isinstance(size, int | float):
                self.set("orch_checkpoint_bytes", size)
            if isinstance(seconds, int | float):
                self._saves.setdefault((), _Histogram()).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        self._wall.look(self._clock())
        self.set("orch_ettr_ratio", self._wall.ettr)
        for name, help_text in _COUNTERS.items():
            family = CounterMetricFamily(
                name,
                help_text,
                labels=_labels(name),
            )
            for (series, labels), value in list(self._counters.items()):
                if series == name:
                    family.add_metric([self._job, self._node, *labels], value)
            yield family
        for name, help_text in _GAUGES.items():
            gauge = GaugeMetricFamily(
                name,
                help_text,
                labels=_labels(name, "plan_epoch"),
            )
            for (series, labels), value in list(self._gauges.items()):
                if series == name:
                    gauge.add_metric(
                        [
                            self._job,
                            self._node,
                            str(self._epoch),
                            *labels,
                        ],
                        value,
                    )
            yield gauge
        yield self._histogram("orch_step_duration_seconds", self._durations)
        yield self._histogram("orch_checkpoint_duration_seconds", self._saves)
        yield self._histogram("orch_recovery_duration_seconds", self._recoveries)

    def _histogram(
        self,
        name: str,
        histograms: Mapping[tuple[str, ...], _Histogram],
    ) -> Metric:
        family = HistogramMetricFamily(name, _HISTOGRAMS[name], labels=_labels(name))
        for labels, histogram in list(histograms.items()):
            family.add_metric(
                [self._job, self._node, *labels],
                histogram.cumulative(),
                histogram.total,
            )
        return family
