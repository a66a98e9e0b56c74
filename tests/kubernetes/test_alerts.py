"""Each alert of the chart is raised by its fault, in the real Prometheus's engine, and by no
healthy or ended run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from tests.beds import debian
from tests.beds.base import ROOT

RULES = ROOT / "charts" / "orch" / "files" / "rules.yaml"
CONTROLLER_RULES = ROOT / "charts" / "orch-controller" / "files" / "rules.yaml"
R0 = 'job="r",node="n0"'
ALIVE = {f'orch_build_info{{{R0},plan_epoch="0",version="1"}}': "1x300"}
JOB = 'namespace="a",job_name="r"'
KNOWN = {f'kube_job_labels{{{JOB},label_orch_dev_run="r"}}': "1x300"}
STEPS = "0+60x300"  # a step a minute; the value is when it was
GONE = "0+60x20 _x280"  # the pod is gone after twenty minutes
ENDED = {f'kube_job_complete{{{JOB},condition="true"}}': "_x21 1x280"}


def epoch(metric: str, number: int, values: str, **labels: str) -> dict[str, str]:
    label_text = "".join(f',{name}="{value}"' for name, value in labels.items())
    return {f'{metric}{{{R0},plan_epoch="{number}"{label_text}}}': values}


def step(values: str, number: int = 0) -> dict[str, str]:
    return epoch("orch_last_step_timestamp_seconds", number, values)


def nodes(wanted_count: str, healthy: str, number: int = 0) -> dict[str, str]:
    return epoch("orch_wanted_nodes", number, wanted_count) | epoch(
        "orch_healthy_nodes", number, healthy
    )


def restarts(count: int, every: int) -> dict[str, str]:
    """A counter that grows each `every` minutes."""
    grows = " ".join(f"{number}x{every - 1}" for number in range(count))
    return {f'orch_restarts_total{{{R0},reason="failure"}}': f"{grows} {count}x300"}


def epochs(count: int, every: int) -> dict[str, str]:
    """A new epoch each `every` minutes, whose agent is new, too, as with a pod that comes back."""
    all_series = {}
    for i in range(count):
        end = f"1x{every - 1} _x300"
        all_series |= epoch("orch_wanted_nodes", i, f"_x{i * every} {end}" if i else end)
    return all_series


BALANCE = "orch_expert_balance_ratio"
SPREAD = epoch(BALANCE, 0, "0.9x300", layer="4")
SAVED = "orch_last_durable_checkpoint_timestamp_seconds"
FIRED = [  # (alert, minutes, series)
    ("OrchNoStep", 40, ALIVE | step("0+60x20 1200x280")),
    ("OrchNoStep", 40, KNOWN | step(GONE)),  # its pods are gone and do not come back
    ("OrchNoStep", 40, ALIVE | step("0+60x20 _x280", 0)),  # a restart: the new epoch has no step
    ("OrchNodesMissing", 20, ALIVE | nodes("8x300", "7x300")),
    ("OrchNodesMissing", 40, KNOWN | nodes("8x20 _x280", "8x20 _x280")),  # all of them
    ("OrchNodesMissing", 40, ALIVE | nodes("8x300", "8x20 _x280")),
    ("OrchPending", 40, KNOWN),
    ("OrchPending", 70, KNOWN | {next(iter(ALIVE)): "1x20 _x280"}),
    ("OrchNeverStepped", 70, ALIVE),
    ("OrchRestarts", 29, restarts(5, 5)),
    ("OrchRestarts", 29, epochs(5, 6)),  # a coordinator that itself is new each time
    ("OrchExpertsCollapsed", 40, ALIVE | epoch(BALANCE, 0, "0.9x20 0.1x280", layer="3") | SPREAD),
    ("OrchCheckpointOld", 150, ALIVE | epoch(SAVED, 0, "0x300")),
    ("OrchCheckpointOld", 150, KNOWN | epoch(SAVED, 0, "0x10 _x290")),
]
QUIET = [
    (250, ALIVE | KNOWN | step(STEPS) | nodes("8x300", "8x300") | epoch(SAVED, 0, STEPS)),
    # a layer of experts is spread; another is not for some minutes of its beginning
    (250, ALIVE | step(STEPS) | SPREAD | epoch(BALANCE, 0, "0.1x8 0.9x292", layer="3")),
    # done: its series have ended and its Job is complete, or nobody knows of a Job
    (250, KNOWN | ENDED | step(GONE) | nodes("8x20 _x280", "8x20 _x280") | epoch(SAVED, 0, GONE)),
    (250, step(GONE) | nodes("8x20 _x280", "8x20 _x280") | epoch(SAVED, 0, GONE)),
    # shrunk from eight nodes to six on purpose
    (
        250,
        ALIVE
        | step(STEPS)
        | nodes("8x20 _x280", "8x20 _x280")
        | nodes("_x20 6x280", "_x20 6x280", 1),
    ),
    # restarted four times within two hours, and five times in the first of five
    (130, ALIVE | step(STEPS) | restarts(4, 30)),
    (250, ALIVE | step(STEPS) | restarts(5, 5)),
]


# ------------------------------------------------------------------------------------------ the
#     controller's

RUN = 'namespace="a",job="r"'
LEADS = {'orch_controller_leads{pod="one"}': "1x300", 'orch_controller_leads{pod="two"}': "0x300"}


def run_in(state: str, values: str = "1x300") -> dict[str, str]:
    return {f'orch_run_state{{{RUN},state="{state}"}}': values}


def of_run(**series: str) -> dict[str, str]:
    return {f"orch_run_{name}{{{RUN}}}": values for name, values in series.items()}


WHOLE = {  # another run, which lacks nothing
    selector.replace('job="r"', 'job="s"'): values
    for selector, values in (
        run_in("running") | of_run(running_nodes="8x300", wanted_nodes="8x300")
    ).items()
}
CONTROLLER_FIRED = [
    ("OrchControllerDown", 15, {'orch_controller_leads{pod="one"}': "1x3 _x297"}),
    ("OrchControllerDown", 10, {'orch_controller_leads{pod="one"}': "0x300"}),
    ("OrchRunPending", 40, LEADS | run_in("pending")),
    (
        "OrchRunNoStep",
        40,
        LEADS | run_in("running") | of_run(last_step_timestamp_seconds="0+60x20 1200x280"),
    ),
    (
        "OrchRunNoStep",
        40,
        LEADS | run_in("restarting") | of_run(last_step_timestamp_seconds="0+60x20 1200x280"),
    ),
    (
        "OrchRunNodesMissing",
        20,
        LEADS | run_in("running") | of_run(running_nodes="7x300", wanted_nodes="8x300"),
    ),
    (
        "OrchRunNodesMissing",
        20,
        LEADS | run_in("running") | of_run(running_nodes="7x300", wanted_nodes="8x300") | WHOLE,
    ),
    # pods and coordinators come and go, the counter only grows; a controller that takes over goes
    # on from the status
    (
        "OrchRunRestarts",
        29,
        LEADS | run_in("running") | of_run(restarts_total="0 0 1 1 2 2 3 3 4 4 5 5 6x290"),
    ),
    ("OrchRunFailed", 5, LEADS | run_in("failed")),
]
CONTROLLER_QUIET = [
    (
        250,
        LEADS
        | run_in("running")
        | of_run(
            last_step_timestamp_seconds=STEPS,
            running_nodes="8x300",
            wanted_nodes="8x300",
            restarts_total="3x300",
        ),
    ),
    (
        250,
        LEADS
        | run_in("done")
        | run_in("running", "0x300")
        | of_run(last_step_timestamp_seconds="0+60x20 1200x280"),
    ),
    (25, LEADS | run_in("pending")),
    (250, LEADS | run_in("cancelled") | of_run(running_nodes="0x300", wanted_nodes="8x300")),
]


def renamed(series: dict[str, str]) -> dict[str, str]:
    """The series as a Prometheus keeps them that does not honour labels: job and namespace are
    those of who was scraped."""
    renamed_series = {}
    for series_name, values in series.items():
        if series_name.startswith("orch_"):
            series_name = series_name.replace(
                'namespace="a"', 'namespace="orch",exported_namespace="a"'
            )
            series_name = re.sub('job="([rs])"', r'job="pods",exported_job="\1"', series_name)
        renamed_series[series_name] = values
    return renamed_series


def all_renamed(cases: list[tuple]) -> list[tuple]:
    return [(*about, renamed(series)) for *about, series in cases]


@pytest.fixture(scope="module")
def promtool():
    if reason := debian.provide(("promtool",), ("prometheus",)):
        pytest.skip(reason)


@pytest.mark.process
@pytest.mark.parametrize(
    ("rules", "fired", "quiet"),
    [
        (RULES, FIRED, QUIET),
        (RULES, all_renamed(FIRED), all_renamed(QUIET)),
        (CONTROLLER_RULES, CONTROLLER_FIRED, CONTROLLER_QUIET),
        (CONTROLLER_RULES, all_renamed(CONTROLLER_FIRED), all_renamed(CONTROLLER_QUIET)),
    ],
    ids=["run", "run without honor_labels", "controller", "controller without honor_labels"],
)
def test_each_alert_is_raised_by_its_fault_and_by_nothing_else(
    tmp_path, promtool, rules, fired, quiet
):
    shutil.copy(rules, tmp_path / "rules.yaml")
    cases = [(minutes, series, name) for name, minutes, series in fired]
    cases += [(minutes, series, "") for minutes, series in quiet]
    tests = []
    for minutes, series, name in cases:
        which = f'alertname="{name}"' if name else 'alertname=~".+"'
        expression = f'count by (alertname) (ALERTS{{alertstate="firing",{which}}})'
        samples = [{"labels": f'{{alertname="{name}"}}', "value": 1}] if name else []
        checks = [{"expr": expression, "eval_time": f"{minutes}m", "exp_samples": samples}]
        input_series = [
            {"series": series_name, "values": values} for series_name, values in series.items()
        ]
        tests.append({"interval": "1m", "input_series": input_series, "promql_expr_test": checks})
    path = tmp_path / "tests.json"  # JSON is YAML
    path.write_text(
        json.dumps({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests})
    )
    argv = ["promtool", "test", "rules", str(path)]
    promtool_run = subprocess.run(argv, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert promtool_run.returncode == 0, promtool_run.stdout + promtool_run.stderr
    assert {name for name, *_ in fired} == {
        line.split("alert:")[1].split("#")[0].strip()
        for line in rules.read_text().splitlines()
        if "alert:" in line
    }
