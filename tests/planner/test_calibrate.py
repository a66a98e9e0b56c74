"""Profiles: fits that repeat, updates that move what was wrong, files whole or refused, plans that
read them."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec import structs

from orchestrator import api as orch
from orchestrator.accuracy.calibrate.accuracy import accuracy
from orchestrator.accuracy.calibrate.drift import attribution_of, drift
from orchestrator.accuracy.calibrate.fit import fit, leave_one_source_out, linearised
from orchestrator.accuracy.calibrate.observations import after_row, observations
from orchestrator.accuracy.calibrate.table import fit_table
from orchestrator.accuracy.calibrate.update import (
    site_profile,
    update,
    update_with_bench,
    update_with_step,
)
from orchestrator.accuracy.predict.predict import COLUMNS, predict
from orchestrator.cli.main import main
from orchestrator.cluster.measured import Fit, Record, site_profile_path
from orchestrator.cluster.resolve import resolve
from orchestrator.cost.of_plan import step_of
from orchestrator.cost.parameters import INDEX
from orchestrator.cost.profile import (
    Profile,
    differing,
    make_profile,
    prior_profile,
    read_profile,
    shipped,
)
from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.plan.document import Measured
from orchestrator.plan.interval import half_width, interval
from orchestrator.planner import build
from orchestrator.planner.elastic.replan import replan
from orchestrator.submit.cluster import ClusterResolver
from tests.planner import configs, shapes
from tests.planner.test_predict import GPT_1_7B

PRIOR = prior_profile()
#: Layouts of that model: computation alone, tensor parallelism, many small replicas, a pipeline; of
#: two people.
LAYOUTS = (
    {"tp": "1", "dp": "32"},
    {"tp": "2", "dp": "16"},
    {"tp": "8", "dp": "4"},
    {"tp": "1", "dp": "32", "gpu": "V100"},
    {"tp": "1", "dp": "256", "num_gpus": "256", "global_batch": "256", "micro_batch": "1"},
    {"pp": "4", "dp": "8"},
)


def changed(**factors: float) -> dict[str, float]:
    """Values of the prior, some of them times a factor; `__` stands for a dot."""
    return PRIOR.values | {name.replace("__", "."): PRIOR.values[name.replace("__", ".")] * factor
                           for name, factor in factors.items()}  # fmt: skip


def table(truth: dict[str, float]) -> list[dict[str, str]]:
    """Rows whose steps are exactly what the model says with the true values."""
    rows = [
        GPT_1_7B | layout | {"id": f"{source}-{at}", "recompute": recompute}
        for source, recompute in (("one", "full"), ("two", "none"))
        for at, layout in enumerate(LAYOUTS)
    ]
    observed_rows = observations(rows)
    assert len(observed_rows) == len(rows)
    return [
        row | {"step_time_s": repr(float(observed.step_s(truth)))}
        for row, observed in zip(rows, observed_rows, strict=True)
    ]  # type: ignore[arg-type]


def misses(profile: Profile, rows: list[dict[str, str]]) -> np.ndarray:
    return linearised(observations(rows), profile.values)[0]


# ----------------------------------------------------------------------------------------------
#     fits


def test_a_fit_is_repeatable_bit_for_bit_and_explains_what_made_the_rows():
    rows = table(changed(gemm__a100__16=0.9, nvlink=0.75))
    first, second = (
        fit_table(rows, "t", "sha", "2026-01-01", lambda *_: None).profile for _ in range(2)
    )
    assert msgspec.json.encode(first) == msgspec.json.encode(second)
    assert np.abs(misses(first, rows)).mean() < 0.3 * np.abs(misses(PRIOR, rows)).mean()
    assert first.values["gemm.a100.16"] < PRIOR.values["gemm.a100.16"]
    assert first.values["gemm.hopper.16"] == PRIOR.values["gemm.hopper.16"], (
        "no row says anything of it"
    )
    assert first.fitted_on.rows == {"one": 6, "two": 6} and {
        left_out_fit.source for left_out_fit in first.left_out
    } == {"one", "two"}
    assert all(left_out_fit.fitted < left_out_fit.prior for left_out_fit in first.left_out)


def test_what_a_source_is_predicted_by_has_not_seen_it():
    """A left-out source's fit starts from the fit to all: it ends where one that starts from the
    priors ends."""
    truth = changed(gemm__a100__16=0.6, nvlink=0.3, optimizer=90.0)
    odd = {"one": 1.0, "two": 1.7}
    rows = [
        row | {"step_time_s": repr(odd[row["id"].split("-")[0]] * float(row["step_time_s"]))}
        for row in table(truth)
    ]
    observed_rows = observations(rows)
    seen, blind = (
        {
            left_out_fit.source: left_out_fit.residuals
            for left_out_fit in leave_one_source_out(observed_rows, start)
        }
        for start in (fit(observed_rows).values, PRIOR.values)
    )
    assert all(seen[source] == pytest.approx(blind[source], abs=2e-3) for source in odd)


def test_one_odd_row_does_not_turn_a_fit_around():
    rows = table(PRIOR.values)
    rows[0] = rows[0] | {"step_time_s": repr(3 * float(rows[0]["step_time_s"]))}
    robust_fit = fit(observations(rows))
    assert np.abs(robust_fit.residuals[1:]).max() < 0.05


def test_a_source_counts_as_so_many_rows_at_most():
    rows = table(PRIOR.values)
    long = [row | {"id": f"long-{at}", "step_time_s": repr(1.2 * float(row["step_time_s"]))}
            for at in range(100) for row in rows[:1]]  # fmt: skip
    short = fit(observations(rows + long[:25]))
    drowned = fit(observations(rows + long))
    assert short.residuals[0] == pytest.approx(drowned.residuals[0], abs=0.005)


# ----------------------------------------------------------------------------------------------
#     updates


def test_an_update_moves_what_was_wrong_and_is_never_worse_than_a_factor():
    """Slow links: the row that shows them says little of the rows that communicate less."""
    rows = table(changed(nvlink=0.6))
    before = misses(PRIOR, rows)
    for at, row in enumerate(rows):
        after = misses(after_row(PRIOR, row), rows)
        other_indices = [index for index in range(len(rows)) if index != at]
        factor = np.abs(before[other_indices] - before[at]).mean()
        assert (
            np.abs(after[other_indices]).mean()
            <= max(factor, np.abs(before[other_indices]).mean()) + 1e-6
        ), row["id"]
    wide = next(row for row in rows if row["tp"] == "8")
    profile = after_row(PRIOR, wide)
    moved = {name: abs(np.log(profile.values[name] / PRIOR.values[name])) for name in INDEX}
    assert profile.values["nvlink"] < PRIOR.values["nvlink"] and moved["nvlink"] > 5 * moved["nic"]
    assert abs(misses(profile, [wide])[0]) < abs(misses(PRIOR, [wide])[0])


def test_an_update_leaves_less_uncertainty_and_says_what_it_is_made_of():
    rows = table(PRIOR.values)
    residuals, jacobian = linearised(observations(rows), PRIOR.values)
    change = update(PRIOR, residuals, jacobian)
    profile = site_profile(PRIOR, change, "run", ["a-run"], "2026-01-01", "site")
    assert np.all(np.diag(profile.uncertainty) <= np.diag(PRIOR.uncertainty) + 1e-9)
    assert (
        profile.uncertainty[INDEX["gemm.a100.16"], INDEX["gemm.a100.16"]]
        < 0.9 * PRIOR.uncertainty[INDEX["gemm.a100.16"], INDEX["gemm.a100.16"]]
    )
    again = site_profile(
        profile, update(profile, residuals, jacobian), "run", ["other"], "2026-01-02", "site"
    )
    assert again.fitted_on.base == PRIOR.label and again.fitted_on.runs == ["a-run", "other"]


def test_what_bench_measures_is_what_the_parameters_become():
    spec = configs.cluster()
    cluster = resolve(spec)
    measured = Measured(
        source="t",
        matmul_flops={"bf16": 0.6 * 989e12},
        attention_flops={"bf16": 0.4 * 989e12},
        memory_bytes_per_s=0.9 * 3350e9,
        launch_s=1e-6,
    )
    links = {"leaf": Fit(0.5 * cluster.levels[0].bytes_per_s, cluster.levels[0].latency_s, {}, 0.0)}
    record = Record(
        schema="orch.bench/1",
        cluster=spec.name,
        key="",
        at="now",
        run="r",
        links=links,
        measured=measured,
        rows=[],
        compute=[],
        load=0.0,
    )
    values = update_with_bench(PRIOR, cluster, record).values(PRIOR)
    for name, ratio in (
        ("gemm.hopper.16", 0.6),
        ("hbm", 0.9),
        ("attention.flash.hopper", 0.4),
        ("nic", 0.5),
    ):
        assert abs(np.log(values[name] / ratio)) < 0.6 * abs(np.log(PRIOR.values[name] / ratio)), (
            name
        )
    assert values["gemm.a100.16"] == PRIOR.values["gemm.a100.16"]


def test_a_measured_step_far_off_is_taken_over_and_the_blame_sums_to_it():
    plan = configs.main_line()
    measured = 2.5 * plan.time.step_s
    step_drift = drift(plan, measured)
    assert (
        step_drift.z > 1.96
        and not step_drift.inside
        and step_drift.attribution[0].text.endswith("was assumed")
    )
    assert [cause.share for cause in step_drift.attribution] == sorted(
        (cause.share for cause in step_drift.attribution), reverse=True
    )
    change, _ = update_with_step(shipped(), step_of(plan), measured)
    assert float(step_of(plan)(change.values(shipped()))) == pytest.approx(measured, rel=0.1)  # type: ignore[arg-type]


def test_every_parameter_has_a_sentence():
    """`gemm_wave` had none, and `orch calibrate` ended in a traceback once it moved."""
    for name in INDEX:
        assert attribution_of(name, 1.0, 2.0, 0.5).text.endswith("was assumed")


@pytest.mark.parametrize("far", [-2.5, -2.0, -1.5, -1.0, 1.0, 2.5])
def test_a_fast_machine_is_taken_over_as_a_slow_one_is(far, tmp_path, monkeypatch):
    """Whole rounds ran away from a step that took much less than planned: its miss was 0.7 after
    five of them."""
    monkeypatch.setenv("ORCH_HOME", str(tmp_path))
    plan = orch.plan("+cluster=local", "cluster.gpus_per_node=1", "cluster.nodes=1")
    measured = plan.time.step_s * float(np.exp(far))
    change, _ = update_with_step(shipped(), step_of(plan), measured)
    after = float(step_of(plan)(change.values(shipped())))  # type: ignore[arg-type]
    assert abs(np.log(after / measured)) < 0.05


# ----------------------------------------------------------------------------------------------
#     files and plans


def slow(factor: float = 1.5) -> Profile:
    """A site whose everything takes longer."""
    values = shipped().values | {"family.orch": factor * shipped().values["family.orch"]}
    return make_profile(
        "site", values, shipped().posterior, structs.replace(shipped().fitted_on, base="shipped")
    )


def test_a_profile_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "p.json"
    path.write_bytes(msgspec.json.encode(slow()))
    assert read_profile(path) == slow() and read_profile(path).label == slow().label
    assert set(differing(slow())) == {"family.orch"} and not differing(shipped())


def damaged(name: str) -> bytes:
    document = json.loads(msgspec.json.encode(PRIOR))
    if name == "cut":
        return msgspec.json.encode(PRIOR)[:1000]
    if name == "schema":
        document["schema"] = "orch.profile/9"
    if name == "negative":
        document["parameters"][3]["value"] = -1.0
    if name == "triangle":
        document["covariance"].pop()
    if name == "variance":
        document["covariance"][2][2] = 0.0
    if name == "word":
        document["parameters"][0]["sd"] = "wide"
    return json.dumps(document).encode() if name != "empty" else b""


@pytest.mark.parametrize(
    "name", ["cut", "schema", "negative", "triangle", "variance", "word", "empty", "missing"]
)
def test_a_damaged_profile_is_refused_in_one_line(name, tmp_path, capsys):
    path = tmp_path / "p.json"
    if name != "missing":
        path.write_bytes(damaged(name))
    with pytest.raises(OrchError) as caught:
        read_profile(path)
    assert caught.value.exit == Exit.CONFIG and str(path) in caught.value.message
    table = write(tmp_path / "t.csv", [GPT_1_7B])
    assert main(["predict", "--table", str(table), "--profile", str(path)]) == Exit.CONFIG
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_site_s_profile_is_the_plan_s_and_that_of_its_replans(tmp_path):
    config = configs.config(configs.cluster(), shapes.llama3_8b(), {"tp": 2, "zero": 1})
    resolver = ClusterResolver(tmp_path)
    assert resolver.profile(config) is None
    path = site_profile_path(config.cluster, tmp_path)
    assert path == site_profile_path(structs.replace(config.cluster, nodes=4), tmp_path), (
        "a job on fewer of its nodes"
    )
    path.parent.mkdir()
    path.write_bytes(msgspec.json.encode(slow()))
    profile = resolver.profile(config)
    assert profile is not None and profile.label == slow().label
    usual, site_plan = (
        build.build_plan(config, resolve(config.cluster), profile=plan_profile)
        for plan_profile in (None, profile)
    )
    assert (
        site_plan.time.step_s == pytest.approx(1.5 * usual.time.step_s)
        and site_plan.time.profile == slow().label
    )
    assert usual.time.parameters == {} and site_plan.time.parameters == {
        "family.orch": slow().values["family.orch"]
    }
    again = replan(site_plan, site_plan.cluster)
    assert (
        again.time.step_s == pytest.approx(site_plan.time.step_s)
        and again.time.sd == site_plan.time.sd
    )
    assert (
        again.time.profile == site_plan.time.profile
        and again.time.parameters == site_plan.time.parameters
    )
    named_path = tmp_path / "given.json"
    named_path.write_bytes(msgspec.json.encode(PRIOR))
    config = structs.replace(config, cost=structs.replace(config.cost, profile=str(named_path)))
    assert resolver.profile(config).label == PRIOR.label, "what the configuration names comes first"


# ----------------------------------------------------------------------------------------------
#     intervals and scores


def test_intervals():
    low, high = interval(10.0, 0.1)
    assert (low, high) == (pytest.approx(8.2201, abs=1e-4), pytest.approx(12.1653, abs=1e-4))
    assert half_width(0.1) == pytest.approx((high - low) / 20.0)


@pytest.mark.parametrize(("plan", "sd"), [(configs.main_line, 0.19), (configs.largest, 0.19)])
def test_golden_intervals(plan, sd):
    """Nobody has measured this trainer on GPUs, so its family's own factor is most of the
    interval."""
    assert plan().time.sd == pytest.approx(sd, abs=0.02)
    assert sum(plan().time.terms.values()) == pytest.approx(plan().time.step_s)


def test_a_score_predicts_each_source_by_the_others():
    rows = table(changed(nvlink=0.7))
    profile = fit_table(rows, "t", "sha", "", lambda *_: None).profile
    predictions = list(predict(rows, profile))
    seen, unseen = (
        accuracy(rows, predictions, profile, source_known, lambda *_: None)
        for source_known in (True, False)
    )
    assert [group_error.group for group_error in seen.time] == [
        "one",
        "two",
        "all",
        "mean of groups",
    ]
    assert seen.time[0].fitted == unseen.time[0].mean and seen.time[0].mean >= unseen.time[0].mean
    assert unseen.time[0].fitted is None and all(
        0 <= group_error.inside68 <= group_error.inside95 <= 1 for group_error in seen.time
    )
    assert seen.time[-1].mean == pytest.approx((seen.time[0].mean + seen.time[1].mean) / 2)
    rows = table(changed(gemm__a100__16=0.7))
    prior = accuracy(rows, list(predict(rows, PRIOR)), PRIOR, False, lambda *_: None)
    assert prior.time[0].after_one < 0.75 * prior.time[0].mean


# ---------------------------------------------------------------------------------------------- the
#     verbs


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_calibrate_and_predict_with_what_it_wrote(tmp_path, capsys):
    rows = table(changed(gemm__a100__16=0.85))
    path = write(tmp_path / "t.csv", rows)
    out = tmp_path / "p.json"
    assert main(["calibrate", "--table", str(path), "--out", str(out)]) == 0
    assert "mean of sources" in capsys.readouterr().out
    profile = read_profile(out)
    assert profile.name == "p" and len(profile.fitted_on.sha256) == 64
    page = tmp_path / "page.md"
    page.write_text(
        "a\n<!-- orch predict --score: begin -->\nold\n<!-- orch predict --score: end -->\nb\n"
    )
    assert (
        main(
            ["predict", "--table", str(path), "--profile", str(out), "--score", "--into", str(page)]
        )
        == 0
    )
    page_text = page.read_text()
    assert (
        page_text.startswith("a\n")
        and page_text.endswith("b\n")
        and "old" not in page_text
        and profile.label in page_text
    )
    assert "fitted" in page_text and "after 1" in page_text
    assert main(["predict", "--table", str(path), "--profile", str(out), "--score", "--json"]) == 0
    score_report = json.loads(capsys.readouterr().out)
    assert {"time", "memory", "order", "fits"} < set(score_report) and score_report[
        "profile"
    ] == profile.label


def test_predict_after_a_row(tmp_path, capsys):
    rows = table(changed(gemm__a100__16=0.7))
    path = write(tmp_path / "t.csv", rows)
    before = tmp_path / "before.csv"
    after = tmp_path / "after.csv"
    assert main(["predict", "--table", str(path), "--out", str(before)]) == 0
    assert main(["predict", "--table", str(path), "--out", str(after), "--after", "one-0"]) == 0
    first, second = (list(csv.DictReader(csv_path.open())) for csv_path in (before, after))
    assert tuple(first[0]) == COLUMNS and [row["id"] for row in second] == [
        row["id"] for row in rows
    ]
    assert float(second[6]["step_time_s"]) > float(first[6]["step_time_s"])
    width = [
        float(row["step_time_high_s"]) / float(row["step_time_low_s"])
        for row in (first[6], second[6])
    ]
    assert width[1] < width[0] and float(first[0]["step_time_low_s"]) < float(
        first[0]["step_time_s"]
    )
    for name, code in (("nobody", Exit.USAGE), ("", Exit.USAGE)):
        assert main(["predict", "--table", str(path), "--after", name]) == code
    write(path, [rows[0] | {"step_time_s": ""}])
    assert main(["predict", "--table", str(path), "--after", "one-0"]) == Exit.CONFIG
    assert "--after one-0: step_time_s is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_time_s": "-3"}, "row 1 (one-0): step_time_s=-3"),
        ({"step_time_s": "3515.2"}, "row one-0: step_time_s=3515.2"),  # milliseconds
        ({"step_time_s": "soon"}, "row 1 (one-0): step_time_s='soon' is not a number"),
        ({"layers": "1e9"}, "row 1 (one-0): layers"),
        ({"step_time_s": ""}, "no rows with a step_time_s"),
    ],
)
def test_a_table_that_cannot_be_fitted_names_the_row(change, message, tmp_path, capsys):
    rows = table(PRIOR.values)
    path = write(tmp_path / "t.csv", [row | change for row in rows])
    out = tmp_path / "p.json"
    assert main(["calibrate", "--table", str(path), "--out", str(out)]) == Exit.CONFIG
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1 and not out.exists()
    if change[
        "step_time_s" if "step_time_s" in change else "layers"
    ]:  # one bad row among good ones is left out
        write(path, [rows[0] | change, *rows[1:]])
        assert main(["calibrate", "--table", str(path), "--out", str(out)]) == 0
        assert f"left out: {message}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--table", "t.csv", "--from", "bench"],
        ["--table", "t.csv"],
        ["--from", "bench", "+cluster=local"],
    ],
)
def test_calibrate_says_what_it_wants(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("ORCH_HOME", str(tmp_path))
    assert main(["calibrate", *arguments]) == Exit.USAGE
    assert capsys.readouterr().err.startswith("orch: error: ")


def test_the_page_counts_rows_and_sources_of_the_shipped_profile():
    rows = shipped().fitted_on.rows
    page = (Path(__file__).parents[2] / "docs" / "accuracy.md").read_text()
    match = re.search(r"fitted to (\d+) step times of\s+(\d+) public sources", page)
    assert match and [int(count) for count in match.groups()] == [sum(rows.values()), len(rows)]
