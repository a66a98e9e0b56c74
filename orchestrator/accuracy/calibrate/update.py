"""Updates the parameters by new measurements: a Bayesian update that moves the terms that caused
the miss.

For measured steps with z = ln(predicted / measured) and d ln t / d ln parameter = J, the posterior
of a linear model with covariance S and noise s is theta - S J' (J S J' + s^2)^-1 z (Kalman 1960).
The miss of a table's row is clipped, so that one odd row cannot turn the model around (accuracy.md
section 4). Every prediction that depends on a moved parameter moves with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from orchestrator.cluster.measured import Record
from orchestrator.cost.dual import Number, duals, log_gradient, value_of
from orchestrator.cost.numpy_import import np
from orchestrator.cost.parameters import INDEX, NAMES, generation_of
from orchestrator.cost.profile import FittedOn, Profile, make_profile
from orchestrator.cost.time.fabric import Floats
from orchestrator.cost.time.imbalance import LEAST_SPREAD, spread_name, spread_of
from orchestrator.plan.cluster import NVLINK
from orchestrator.plan.document import Cluster, Model

ROW_NOISE = 0.10  # Standard deviation of ln t of one measured row.
MOST_MISS = 0.3
#: Standard deviations of the logarithms of a run's median step, of a rate that `orch bench`
#: measured, and of a link's rate, whose load inside a step differs from that of the benchmark.
RUN_NOISE = 0.03
RATE_NOISE = 0.08
LINK_NOISE = 0.15
LATENCY_NOISE = 0.5  # Standard deviation of the logarithm of a link's latency.
#: Standard deviation of the spread of experts' loads, which keeps changing while a router learns.
LOAD_NOISE = 0.15
#: Rate of NVLink's collectives inside a step over their rate alone (accuracy.md section 2;
#: comm-0364).
IN_STEP = 0.7
ROUNDS = 5
LEAST_PART = 0.01  # The smallest fraction of a round's move that is tried.


class Update(NamedTuple):
    log_change: Floats  # Change of the logarithm of each parameter.
    covariance: Floats

    def values(self, profile: Profile) -> dict[str, float]:
        return {
            name: profile.values[name] * float(np.exp(self.log_change[index]))
            for index, name in enumerate(NAMES)
        }


def update(
    profile: Profile,
    misses: Sequence[float] | Floats,
    jacobian: Floats,
    noise: float = ROW_NOISE,
) -> Update:
    """Updates the parameters by measured steps.

    misses: ln(predicted / measured) of each measurement. jacobian: float [measurements,
    parameters].
    """
    clipped = np.clip(np.asarray(misses, dtype=float), -MOST_MISS, MOST_MISS)
    return _posterior(profile, clipped, jacobian, np.full(len(clipped), noise))


def _posterior(
    profile: Profile,
    misses: Floats,
    jacobian: Floats,
    noise: Floats,
) -> Update:
    spread = profile.uncertainty
    gain = spread @ jacobian.T
    inner = jacobian @ gain + np.diag(noise**2)
    covariance = spread - gain @ np.linalg.solve(inner, gain.T)
    return Update(
        -gain @ np.linalg.solve(inner, misses),
        (covariance + covariance.T) / 2,
    )


def update_with_step(
    profile: Profile,
    step_s: Callable[[Mapping[str, Number]], Number],
    measured_s: float,
    noise: float = RUN_NOISE,
    rounds: int = ROUNDS,
) -> tuple[Update, Floats]:
    """Updates the parameters by one measured step, however far it is from its prediction.

    Returns (update, derivatives at the profile's values). `step_s` predicts the step from parameter
    values. The model is not linear in parameters that move far, so each round linearises it where
    the last round ended, with the same prior (Bell and Cathey 1993, the iterated Kalman filter). A
    round whose end would be less likely than its start takes only a fraction of its move: if a term
    has almost vanished, so has its derivative, and whole moves would diverge.
    """
    precision = np.linalg.pinv(profile.uncertainty)

    def cost(miss: float, change: Floats) -> float:
        """Returns -2 ln of the posterior, up to a constant."""
        return float((miss / noise) ** 2 + change @ precision @ change)

    def linearised_after(change: Floats) -> tuple[float, Floats]:
        """Returns (miss, its derivatives) after a change of the parameters."""
        step = step_s(duals(Update(change, profile.uncertainty).values(profile)))
        return float(np.log(value_of(step) / measured_s)), log_gradient(step)

    log_change = np.zeros(len(NAMES))
    miss, jacobian = linearised_after(log_change)
    start_jacobian = jacobian
    for _ in range(rounds):
        posterior = _posterior(
            profile,
            np.array([miss - jacobian @ log_change]),
            jacobian[None],
            np.array([noise]),
        )
        move = posterior.log_change - log_change
        fraction = 1.0
        previous_cost = cost(miss, log_change)
        miss, jacobian = linearised_after(log_change + move)
        while cost(miss, log_change + fraction * move) > previous_cost and fraction > LEAST_PART:
            fraction /= 2
            miss, jacobian = linearised_after(log_change + fraction * move)
        log_change = log_change + fraction * move
        if np.abs(fraction * move).max() < 1e-3:
            break
    return Update(log_change, posterior.covariance), start_jacobian


def update_with_loads(
    profile: Profile,
    model: Model,
    ranks: int,
    fullest: float,
    spread: float | None,
) -> Update:
    """Updates the spread of experts' loads by the loads of a run.

    `fullest` is the load of the fullest of the `ranks` ranks that share the experts, over the mean.
    A single rank always has an even load, so the `spread` of the single experts counts there.
    """
    assert model.moe is not None
    if ranks > 1:
        spread = spread_of(fullest, model.moe.experts, ranks)
    name = spread_name(model.moe)
    jacobian = np.zeros((1, len(NAMES)))
    jacobian[0, INDEX[name]] = 1.0
    miss = np.log(profile.values[name] / max(LEAST_SPREAD, spread or 0.0))
    return _posterior(
        profile,
        np.array([miss]),
        jacobian,
        np.array([LOAD_NOISE]),
    )


def then(first: Update, second: Update) -> Update:
    """Returns both updates in one; `second` began where `first` ended."""
    return Update(first.log_change + second.log_change, second.covariance)


def update_with_bench(
    profile: Profile,
    data_sheet_cluster: Cluster,
    record: Record,
) -> Update:
    """Updates the parameters by the rates that `orch bench` measured, each of them a direct
    observation of one parameter.

    `data_sheet_cluster` has the rates of the data sheets. A kernel that is measured alone counts as
    the same kernel in a step, but NVLink is slower in a step (`IN_STEP`).
    """
    observed_rates = [
        rate for rate in _observed_rates(data_sheet_cluster, record) if rate.value > 0
    ]
    jacobian = np.zeros((len(observed_rates), len(NAMES)))
    for row, rate in enumerate(observed_rates):
        jacobian[row, INDEX[rate.parameter]] = 1.0
    misses = [np.log(profile.values[rate.parameter] / rate.value) for rate in observed_rates]
    noise = np.array([rate.noise for rate in observed_rates])
    return _posterior(profile, np.array(misses), jacobian, noise)


class ObservedRate(NamedTuple):
    parameter: str
    value: float  # The value of the parameter that explains the measured rate.
    noise: float = RATE_NOISE  # Standard deviation of its logarithm.


def _observed_rates(cluster: Cluster, record: Record) -> Iterator[ObservedRate]:
    """Yields an observation for every rate that was measured."""
    gpu = cluster.gpu
    measured = record.measured
    generation = generation_of(gpu.name, cluster.device)
    is_cpu = generation == "cpu"
    memory_rate = measured.memory_bytes_per_s / gpu.hbm_bytes_per_s
    yield ObservedRate("hbm.cpu" if is_cpu else "hbm", memory_rate)
    precision = next(
        (name for name in ("bf16", "fp16", "fp32") if name in measured.matmul_flops),
        None,
    )
    rates = [
        ("gemm.cpu" if is_cpu else f"gemm.{generation}.16", measured.matmul_flops),
        (_attention_parameter(generation), measured.attention_flops),
    ]
    for name, flops in rates:
        if precision in flops and precision in gpu.peak_flops and name in INDEX:
            yield ObservedRate(name, flops[precision] / gpu.peak_flops[precision])
    if is_cpu:
        yield ObservedRate("host.cpu", measured.launch_s)
    yield from _observed_links(cluster, record, is_cpu)


def _attention_parameter(generation: str) -> str:
    flash_name = f"attention.flash.{generation}"
    return flash_name if flash_name in INDEX else f"attention.{generation}"


def _observed_links(
    cluster: Cluster,
    record: Record,
    is_cpu: bool,
) -> Iterator[ObservedRate]:
    links = {NVLINK: cluster.nvlink} | {level.name: level for level in cluster.levels}
    for tier, fit in record.links.items():
        link = links.get(tier)
        if link is None:
            continue
        share = fit.bytes_per_s / link.bytes_per_s
        if is_cpu:
            yield ObservedRate("link.cpu", share, LINK_NOISE)
        elif tier == NVLINK:
            in_step_bytes_per_s = IN_STEP * fit.bytes_per_s
            yield ObservedRate("nvlink", in_step_bytes_per_s / link.bytes_per_s, LINK_NOISE)
        else:
            yield ObservedRate("nic", share, LINK_NOISE)
            if fit.latency_s > 0:
                yield ObservedRate("latency", fit.latency_s / link.latency_s, LATENCY_NOISE)


def site_profile(
    base: Profile,
    change: Update,
    kind: str,
    sources: list[str],
    date: str,
    name: str,
) -> Profile:
    """Returns `base` after an update, as a profile that can be written to a file.

    `kind` and `sources` say what was measured, such as a run and its id; `name` is the cluster's.
    """
    first_base = base.label
    earlier_runs: list[str] = []
    if base.fitted_on.base:  # The base is itself a site profile.
        first_base = base.fitted_on.base
        earlier_runs = base.fitted_on.runs
    fitted_on = FittedOn(
        what=kind,
        date=date,
        base=first_base,
        runs=[*earlier_runs, *sources],
    )
    return make_profile(name, change.values(base), change.covariance, fitted_on)


def attribution(
    change: Update,
    jacobian: Floats,
    limit: int = 3,
) -> list[tuple[str, float]]:
    """Returns (parameter, its contribution to the change of ln t), the largest first. jacobian:
    float [parameters]."""
    contributions = change.log_change * jacobian
    order = sorted(range(len(contributions)), key=lambda index: -abs(contributions[index]))
    return [
        (NAMES[index], float(contributions[index]))
        for index in order[:limit]
        if contributions[index]
    ]
