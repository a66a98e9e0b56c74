"""Committed measurements against what the pages claim of them. A new measurement that no longer
shows a claim fails here when it is committed, not when somebody reads the page."""

import json
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def result(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_a_model_of_four_times_the_memory_learns_at_the_rate_of_the_disk():
    measured = result("offload")["result"]
    assert measured["state_bytes"] >= 4 * measured["limit_bytes"]
    assert measured["within"]["charged"] <= measured["limit_bytes"]
    assert measured["largest_difference_of_losses"] <= 1e-5
    assert measured["update_over_probe"] >= 0.8


def test_steps_with_the_optimizer_elsewhere_are_predicted_within_15_percent():
    steps = result("offload_prediction")["ways"]
    for storage in ("on the host", "on the host, delayed", "on the disk"):
        assert 0.85 <= steps[storage]["planned_over_measured"] <= 1.15, storage
