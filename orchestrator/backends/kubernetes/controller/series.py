"""The controller's own metrics: those of every run that must outlive its pods, and how quickly the
controller works.

Counters are in the TrainRun's status, so they survive restarts of the run and of the controller.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from orchestrator.backends.kubernetes.phases import seconds_of
from orchestrator.backends.kubernetes.train_run import TrainRun
from orchestrator.run.state import Phase

from .ledger import Ledger

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 15.0, 60.0)
_LABELS = ["namespace", "job"]


class Series(Collector):
    """Serves the metrics from the moment it is created, also from replicas that wait. `port` 0:
    nowhere."""

    def __init__(self, port: int):
        self.registry = CollectorRegistry(auto_describe=False)
        self._runs: Callable[[], list[TrainRun]] | None = None
        self._ledger: Ledger | None = None
        self._waited = self._times("orch_reconcile_wait_seconds")
        self._took = self._times("orch_reconcile_seconds")
        self._decided = self._times("orch_decide_seconds")
        self.registry.register(self)
        if port:
            start_http_server(port, registry=self.registry)

    def _times(self, name: str) -> Histogram:
        return Histogram(name, OF_CONTROLLER[name], registry=self.registry, buckets=_BUCKETS)

    def publish(self, runs: Callable[[], list[TrainRun]], ledger: Ledger) -> None:
        """Publishes the runs' metrics, because this replica leads from now on."""
        self._runs = runs
        self._ledger = ledger

    def reconciled(self, waited_s: float, took_s: float) -> None:
        self._waited.observe(max(0.0, waited_s))
        self._took.observe(took_s)

    def decided(self, took_s: float) -> None:
        self._decided.observe(took_s)

    def collect(self) -> Iterator[Metric]:
        leads = _gauge("orch_controller_leads")
        leads.add_metric([], 1.0 if self._runs else 0.0)
        yield leads
        if self._runs is None or self._ledger is None:
            return
        families = {
            name: family(name, description, labels=[*_LABELS, *own_labels])
            for name, (family, description, own_labels) in OF_RUNS.items()
        }
        now = time.time()
        for run in self._runs():
            labels = [run.metadata.namespace, run.metadata.name]
            for name, value in _values(run, now).items():
                families[name].add_metric(labels, value)
            for phase in get_args(Phase):
                is_phase = float(run.status.state == phase)
                families["orch_run_state"].add_metric([*labels, phase], is_phase)
        yield from families.values()
        held_nodes: set[str] = set()
        for allocation in self._ledger.book.allocations.values():
            held_nodes.update(allocation.held)
        held = _gauge("orch_held_nodes")
        held.add_metric([], float(len(held_nodes)))
        yield held


#: Metrics of the controller itself -> meaning. Those in seconds are histograms, the others gauges.
OF_CONTROLLER = {
    "orch_controller_leads": "1 for the replica that leads.",
    "orch_held_nodes": "Nodes that runs hold.",
    "orch_reconcile_wait_seconds": "Seconds from a change until its run is reconciled.",
    "orch_reconcile_seconds": "Seconds per reconciliation of a run, its requests included.",
    "orch_decide_seconds": "Seconds per decision about which runs get which nodes.",
}
#: Metrics of each run -> kind, meaning, labels beside namespace and job.
OF_RUNS: dict[str, tuple[Any, str, list[str]]] = {
    "orch_run_state": (GaugeMetricFamily, "1 for the state that the run is in.", ["state"]),
    "orch_run_restarts": (
        CounterMetricFamily,
        "Restarts of all workers since the run's first start.",
        [],
    ),
    "orch_run_starts": (CounterMetricFamily, "Jobs that were created for the run.", []),
    "orch_run_lost_pods": (
        CounterMetricFamily,
        "Pods that were replaced since the run's first start.",
        [],
    ),
    "orch_run_step": (GaugeMetricFamily, "Last completed step.", []),
    "orch_run_loss": (GaugeMetricFamily, "Loss of the last step.", []),
    "orch_run_ettr_ratio": (
        GaugeMetricFamily,
        "Effective training time ratio since the run's first start.",
        [],
    ),
    "orch_run_last_step_timestamp_seconds": (
        GaugeMetricFamily,
        "When the last step completed.",
        [],
    ),
    "orch_run_wanted_nodes": (GaugeMetricFamily, "Nodes of the plan in force.", []),
    "orch_run_running_nodes": (GaugeMetricFamily, "Running pods of the run.", []),
    "orch_run_age_seconds": (GaugeMetricFamily, "Seconds since the run was requested.", []),
}


def _gauge(name: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, OF_CONTROLLER[name])


def _values(run: TrainRun, now: float) -> dict[str, float]:
    status = run.status
    values = {
        "orch_run_restarts": status.restarts,
        "orch_run_starts": status.generation + 1,
        "orch_run_lost_pods": status.lost_pods,
        "orch_run_step": status.step,
        "orch_run_loss": status.loss,
        "orch_run_ettr_ratio": status.ettr,
        "orch_run_last_step_timestamp_seconds": seconds_of(status.last_step_at),
        "orch_run_wanted_nodes": status.wanted_nodes,
        "orch_run_running_nodes": status.running_nodes,
        "orch_run_age_seconds": now - (seconds_of(run.metadata.creation_timestamp) or now),
    }
    return {name: float(value) for name, value in values.items() if value is not None}
