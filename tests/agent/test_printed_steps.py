"""Steps read from printed lines: which lines count, how time is shared, and what a whole run shows
of them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from orchestrator.agent.node.disk import Disk
from orchestrator.agent.node.printed_steps import _AT_ONCE, PrintedSteps
from orchestrator.config.compose import load
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.plan.worker import StepReport
from orchestrator.run.folder import RunFolder
from tests.backends.test_verbs import home, orch
from tests.beds.bundles import wait_end, wait_for
from tests.patience import PATIENCE_S

__all__ = ["home"]  # the fixture
PATTERN = r"step (?P<step>\d+)(.* loss (?P<loss>\S+))?(.* tokens (?P<tokens>[\d,]+))?"


class Printed:
    """A log that grows while a clock runs."""

    def __init__(self, folder: Path, pattern: str = PATTERN):
        self.log = folder / "log"
        self.now = 0.0
        self.reports = list[StepReport]()
        self.log.write_bytes(b"step 99 of an earlier epoch\n")
        self.steps = PrintedSteps(pattern, self.reports.append, Disk(), lambda: self.now)
        self.steps.begin_epoch(3)
        self.steps.follow(0, self.log, self.log.stat().st_size)

    def look(self, log_text: str, at: float) -> list[tuple]:
        with self.log.open("a") as file:
            file.write(log_text)
        self.now = at
        self.reports.clear()
        asyncio.run(self.steps.look())
        return [(report.step, report.step_s, report.loss, report.tokens) for report in self.reports]


def test_each_line_with_a_step_is_one(tmp_path):
    printed = Printed(tmp_path)
    assert printed.look("hello\nstep 1 loss 2.5 tokens 1,024\n", 4.0) == [(1, 4.0, 2.5, 1024)]
    assert printed.look("--- orch: step 7\nstep 2 loss nan\n", 5.0) == [(2, 1.0, None, 0)]
    assert (printed.reports[0].rank, printed.reports[0].epoch) == (0, 3)


def test_a_line_counts_when_it_ends_and_a_last_one_when_the_worker_does(tmp_path):
    printed = Printed(tmp_path)
    assert printed.look("step 1\nste", 1.0) == [(1, 1.0, None, 0)]
    assert printed.look("p 2", 2.0) == []
    assert printed.look("0\rstep 21\r", 3.0) == [
        *[(s, 2 / 20, None, 0) for s in range(2, 22)]
    ]  # a progress bar
    assert printed.look("step 22 loss 1", 4.0) == []
    asyncio.run(printed.steps.on_worker_exit(0))
    assert [(report.step, report.loss) for report in printed.reports] == [(22, 1.0)]


def test_steps_that_are_not_printed_share_the_time_and_the_tokens_but_have_no_loss(tmp_path):
    printed = Printed(tmp_path)
    printed.look("step 10 loss 3 tokens 5\n", 8.0)
    assert printed.look("step 12 loss 2 tokens 6\nstep 14 loss 1 tokens 8\n", 10.0) == [
        (11, 0.5, None, 6),
        (12, 0.5, 2.0, 6),
        (13, 0.5, None, 8),
        (14, 0.5, 1.0, 8),
    ]
    assert printed.look("eval: step 3 loss 9\nstep 14\n", 11.0) == []
    steps = [step for step, *_ in printed.look("step 1000014\n", 12.0)]
    assert steps == list(range(1000014 - 999, 1000015))


def test_of_a_flood_the_newest_steps_are_read(tmp_path):
    printed = Printed(tmp_path)
    printed_steps = printed.look("x" * _AT_ONCE + "\nstep 5\n" + "y" * _AT_ONCE + "\nstep 6\n", 1.0)
    assert [step for step, *_ in printed_steps] == [6]
    printed.log.unlink()  # a log that is gone ends nothing
    asyncio.run(printed.steps.look())


def test_a_pattern_that_takes_exponential_time_is_cut_off_and_given_up(tmp_path):
    printed = Printed(tmp_path, r"step (?P<step>\d+)|(x+x+)+y")
    began = time.process_time()
    assert printed.look("step 1\n" + "x" * 64 + "\nstep 2\n", 1.0) == [
        (1, 1.0, None, 0)
    ]  # what was found before
    assert time.process_time() - began < 5
    assert printed.steps.given_up and "metrics.pattern took over 0.5 s" in printed.log.read_text()
    began = time.process_time()
    assert printed.look("x" * 64 + "\nstep 3\n", 2.0) == [] and time.process_time() - began < 0.2
    asyncio.run(printed.steps.on_worker_exit(0))
    printed.steps.begin_epoch(4)
    printed.steps.follow(0, printed.log, 0)
    assert printed.look("step 4\n", 3.0) == []


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("step (?P<step>", "is not a regular expression: "),
        (r"step (\d+)", r"needs a group for the step, as in step (?P<step>\d+)"),
        (r"(?P<step>\d+) (?P<los>\S+)", "has an unknown group 'los'; did you mean 'loss'"),
    ],
)
def test_a_bad_pattern_is_one_line(pattern, says):
    with pytest.raises(OrchError) as refused:
        load([f"metrics.pattern={pattern}"])
    assert says in refused.value.message and refused.value.exit == Exit.USAGE


def test_the_bundled_trainer_has_no_use_for_one(home, capsys):
    code, _, err = orch(
        capsys, "submit", "+cluster=local", f"metrics.pattern={PATTERN}", "--dry-run"
    )
    assert code == Exit.CONFIG and "metrics.pattern is for programs" in err


PROGRAM = """
import os, pathlib, time
for step in range(1, 41):
    time.sleep(0.05)
    if step % 5 == 0 and os.environ["RANK"] == "0":
        print(f"step {step} loss {1 / step:.4f} tokens 1,000", flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.05)
"""


@pytest.mark.process
def test_status_prometheus_and_report_show_what_is_printed(home, capsys):
    Path("train.py").write_text(PROGRAM)
    argv = ["nproc=2", f"metrics.pattern={PATTERN}", "--json", "--", sys.executable, "train.py"]
    code, out, err = orch(capsys, "submit", *argv)
    assert code == 0, err
    folder = RunFolder(Path(json.loads(out)["run_dir"]))

    def live() -> dict:
        return json.loads(orch(capsys, "status", folder.run_id, "--json")[1])["live"]

    wait_for(lambda: live()["step"] == 40, what="step 40")
    live_status = live()
    assert live_status["loss"] == pytest.approx(1 / 40) and live_status["step_s"] > 0
    assert live_status["tokens_per_s"] * live_status["step_s"] == pytest.approx(1000)
    assert "step        40, as printed" in orch(capsys, "status", folder.run_id)[1]
    (target,) = json.loads(folder.discovery.read_text())
    with urllib.request.urlopen(
        f"http://{target['targets'][0]}/metrics", timeout=PATIENCE_S
    ) as page:
        page_text = page.read().decode()
    assert any(
        line.startswith("orch_last_step{") and line.endswith(" 40.0")
        for line in page_text.splitlines()
    )
    assert any(
        line.startswith("orch_loss{") and line.endswith(" 0.025") for line in page_text.splitlines()
    )
    Path("go").write_text("")
    assert wait_end(folder).state == "done"
    report = json.loads(orch(capsys, "report", folder.run_id, "--json")[1])
    assert report["steps"]["completed"] == 40
    assert (
        report["steps"]["tokens"] == 36_000
    )  # what came before the first printed step is not known
    assert report["loss"]["last"] == pytest.approx(0.025)


@pytest.mark.process
def test_without_a_match_progress_is_unknown_and_a_program_that_reports_is_believed(home, capsys):
    Path("train.py").write_text("import time; print('hello', flush=True); time.sleep(1)")
    _, out, _ = orch(
        capsys, "submit", f"metrics.pattern={PATTERN}", "--json", "--", sys.executable, "train.py"
    )
    folder = RunFolder(Path(json.loads(out)["run_dir"]))
    assert wait_end(folder).state == "done"
    assert "unknown: metrics.pattern has found no step" in orch(capsys, "status", folder.run_id)[1]
    program = (
        "import orch_report, time\norch_report.report(step=2, loss=5)\ntime.sleep(1)\nprint('step"
        " 9', flush=True)"
    )
    Path("reports.py").write_text(program)
    _, out, _ = orch(
        capsys, "submit", f"metrics.pattern={PATTERN}", "--json", "--", sys.executable, "reports.py"
    )
    folder = RunFolder(Path(json.loads(out)["run_dir"]))
    assert wait_end(folder).state == "done"
    live_status = json.loads(orch(capsys, "status", folder.run_id, "--json")[1])["live"]
    assert (live_status["step"], live_status["loss"]) == (2, 5.0)


HELD = """
import pathlib, sys, time
print("step 1", flush=True)
while not pathlib.Path("fail").exists():
    time.sleep(0.05)
sys.exit(3)
"""


@pytest.mark.process
def test_a_log_that_cannot_be_read_costs_steps_and_not_the_node(home, capsys):
    """Opening it hangs, as on a file system whose server is away; here it is a pipe that nobody
    writes to."""
    Path("train.py").write_text(HELD)
    rules = ["backend.heartbeat_timeout_s=5", "backend.max_restarts=0"]
    argv = [
        "nproc=1",
        f"metrics.pattern={PATTERN}",
        *rules,
        "--json",
        "--",
        sys.executable,
        "train.py",
    ]
    _, out, _ = orch(capsys, "submit", *argv)
    folder = RunFolder(Path(json.loads(out)["run_dir"]))
    (target,) = wait_for(
        lambda: folder.discovery.exists() and json.loads(folder.discovery.read_text())
    )

    def page() -> dict[str, float]:
        """Told by the agent itself, between its looks."""
        with urllib.request.urlopen(
            f"http://{target['targets'][0]}/metrics", timeout=PATIENCE_S
        ) as answer:
            lines = (
                line.rpartition(" ")
                for line in answer.read().decode().splitlines()
                if line[0] != "#"
            )
            return {name.partition("{")[0]: float(value) for name, _, value in lines}

    wait_for(lambda: page().get("orch_last_step") == 1, what="step 1")
    os.mkfifo(folder.path / "pipe")
    (folder.path / "pipe").rename(folder.rank_log(0))
    silent = time.monotonic() + 2 * 5.0
    wait_for(
        lambda: page()["orch_workers"] == 1 and time.monotonic() > silent,
        what="two time-outs of its coordinator",
    )
    Path("fail").touch()
    state = wait_end(folder)
    assert (state.state, state.cause.kind, state.cause.code) == ("failed", "worker_exit", 3)
    assert state.cause.tail == [] and state.cause.step == 1
