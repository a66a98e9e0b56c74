"""Whole workers: they train, save, resume to the bit, stop when told, and end with the code that
the contract says."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from orchestrator.observe.data_replay import replay
from orchestrator.observe.timeline import Step
from orchestrator.plan import Exit, Plan, seal, to_json
from orchestrator.plan.flops import model_flops_per_token
from orchestrator.plan.worker import PINS, pin_file
from tests.beds.plans import make_plan, tiny_model
from tests.patience import PATIENCE_S
from tests.trainer.states import flip_bit
from tests.trainer.workers import Workers, free_port, running, worker_env
from trainer.checkpoint.format import rank_file, step_name
from trainer.data.build import open_tokens
from trainer.data.order import SampleOrder
from trainer.data.store import TokenStore

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
TEXT = Path(json.__file__).parent  # some tens of KiB of Python
ALONE = {"micro_batches": 2}
EIGHT = {"tp": 2, "pp": 2, "dp": 2, "zero": 1, "nodes": 2, "bucket_bytes": 1 << 13}


def job(cache: str, steps: int = 6, every: int = 0, **layout: object) -> Plan:
    options = {
        "steps": steps,
        "checkpoint_every_steps": every,
        "cache_dir": cache,
        "data_paths": [str(TEXT)],
    }
    return make_plan(**options | {"model": tiny_model(tied_embeddings=True)} | layout)


def changed(plan: Plan, section_name: str, **values: object) -> Plan:
    """The plan with some fields of a section of its job replaced, sealed anew."""
    section = msgspec.structs.replace(getattr(plan.job, section_name), **values)
    sections = {section_name: section}
    return seal(msgspec.structs.replace(plan, job=msgspec.structs.replace(plan.job, **sections)))


def finish(
    plan: Plan, run_dir: Path, epoch: int = 0, changes: dict | None = None
) -> tuple[list[int], Workers]:
    with running(plan, run_dir, epoch, changes) as workers:
        return workers.wait(), workers


def saved_state(run_dir: Path, plan: Plan, step: int) -> dict[str, torch.Tensor]:
    folder = run_dir / "checkpoints" / step_name(step)
    return {
        f"{rank} {key}": tensor
        for rank in range(plan.parallel.world_size)
        for key, tensor in load_file(folder / rank_file(rank)).items()
    }


def assert_same_state(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [key for key in first if not torch.equal(first[key], second[key])] == []


@contextlib.contextmanager
def worker_process(plan: Plan, run_dir: Path) -> Iterator[subprocess.Popen]:
    """`python -m trainer` as a process of its own, for a plan of one rank and without an agent."""
    path = run_dir / "plan.json"
    path.write_bytes(to_json(plan))
    env = worker_env(plan, 0, master_port=free_port(), plan=str(path), run_dir=str(run_dir))
    command = [sys.executable, "-m", "trainer", "--plan", str(path)]
    environment = {**os.environ, **env.variables(), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    ) as worker:
        try:
            yield worker
        finally:
            worker.kill()


# ----------------------------------------------------------------------------------------------
#     training


@pytest.mark.parametrize("layout", [ALONE, EIGHT], ids=["alone", "tp2_pp2_zero1"])
def test_it_trains_and_a_killed_and_resumed_run_equals_an_uninterrupted_one_to_the_bit(
    cache, tmp_path, layout
):
    plan = changed(job(cache, steps=8, every=3, **layout), "optim", lr=2e-2, warmup_steps=3)
    codes, uninterrupted = finish(plan, tmp_path / "whole")
    assert codes == [0] * plan.parallel.world_size, uninterrupted.log(0)
    losses = uninterrupted.losses()
    assert list(losses) == list(range(1, 9))
    assert losses[1] > 4.5 and min(losses[7], losses[8]) < losses[1] - 1.0
    for rank in range(plan.parallel.world_size):
        for name in ("ranks_checked", "data_ready", "done"):
            assert len(uninterrupted.events(name, rank)) == 1, f"rank {rank}: {name}"
    assert [event.step for event in uninterrupted.events("checkpoint_saved")] == [3, 6, 8]
    if layout is EIGHT:  # same seed, same samples, so the same losses as one process up to rounding
        single_plan = changed(
            job(cache, steps=8, micro_batches=4), "optim", lr=2e-2, warmup_steps=3
        )
        _, single_workers = finish(single_plan, tmp_path / "one")
        assert list(single_workers.losses().values())[:4] == pytest.approx(
            list(losses.values())[:4], rel=1e-4
        )

    last = plan.parallel.world_size - 1
    with running(plan, tmp_path / "cut", held=8) as workers:
        workers.until(0, "checkpoint_saved")
        workers.until(last, 4)
        os.kill(workers.pids[last], signal.SIGKILL)
        workers.release()
        codes = workers.wait()
        assert codes[last] == -signal.SIGKILL and set(codes[:last]) <= {Exit.RESTART}
        for rank in range(last):
            assert "a peer is gone or silent" in workers.log(rank)
    codes, resumed = finish(plan, tmp_path / "cut", epoch=1)
    assert codes == [0] * len(codes), resumed.log(0)
    (event,) = resumed.events("resumed")
    assert (
        event.step in (3, 6)
        and event.fields["samples"] == event.step * plan.parallel.global_batch_samples
    )
    assert {step: losses[step] for step in resumed.losses()} == resumed.losses()
    assert max(resumed.losses()) == 8
    assert_same_state(
        saved_state(tmp_path / "whole", plan, 8), saved_state(tmp_path / "cut", plan, 8)
    )


def test_a_step_report_says_what_the_step_did(cache, tmp_path):
    plan = job(cache, steps=6, dp=2, zero=1, memory_every_steps=1)
    _, workers = finish(plan, tmp_path)
    first, second, *later_steps = workers.steps(0)
    size = plan.parallel.global_batch_samples
    assert (first.samples, second.samples) == (size, 2 * size)
    assert first.tokens == plan.parallel.global_batch_tokens
    assert first.grad_norm > 0 and first.lr == plan.job.optim.lr
    parameters = plan.model.parameters
    assert parameters * 4 <= first.memory_bytes["params"] < parameters * 4 * 1.2
    assert parameters * 4 <= first.memory_bytes["optimizer"] < parameters * 4 * 1.2, (
        "two moments, halved by zero1"
    )
    assert first.memory_bytes["activations"] > 0
    assert first.memory_bytes["total"] == sum(
        v for k, v in first.memory_bytes.items() if k != "total"
    )
    # ZeRO-1: reduce-scatter and all-gather of all parameters, (n - 1) / n of the bytes each
    assert first.comm_bytes["dp"] == pytest.approx(first.memory_bytes["params"], rel=0.01)
    assert {"data", "forward", "backward", "optimizer", "comm"} <= first.phase_s.keys()
    shares = [sum(step.phase_s.values()) / step.step_s for step in (second, *later_steps)]
    assert 0.5 < max(shares) <= 1, (
        "unless the processor was taken from it between phases, in each of these steps"
    )
    rate = first.tokens / first.step_s / 2 / plan.cluster.gpu.peak_flops["fp32"]
    assert first.mfu == pytest.approx(
        rate * model_flops_per_token(plan.model, plan.job.train.seq_len)
    )
    assert first.hfu == first.mfu


def test_a_pipeline_reports_its_bubble(cache, tmp_path):
    plan = job(cache, steps=2, pp=2, micro_batches=4)
    _, workers = finish(plan, tmp_path)
    assert all(0 <= step.bubble_ratio < 1 for rank in (0, 1) for step in workers.steps(rank))
    _, alone = finish(job(cache, steps=1), tmp_path / "alone")
    assert alone.steps()[0].bubble_ratio is None


# ----------------------------------------------------------------------------------------------
#     resuming


def test_bf16_resumes_to_the_bit_from_the_fp32_master(cache, tmp_path):
    plan = job(cache, steps=6, every=3, precision="bf16", dp=2, zero=1)
    finish(plan, tmp_path / "whole")
    shorter = changed(plan, "train", steps=3)
    shorter = changed(shorter, "optim", decay_steps=6)
    finish(shorter, tmp_path / "cut")
    longer = changed(plan, "optim", decay_steps=6)
    codes, _ = finish(longer, tmp_path / "cut", epoch=1)
    assert codes == [0, 0]
    assert_same_state(
        saved_state(tmp_path / "whole", plan, 6), saved_state(tmp_path / "cut", plan, 6)
    )


def test_a_finished_run_that_is_started_again_is_done_at_once(cache, tmp_path):
    plan = job(cache, steps=2)
    finish(plan, tmp_path)
    codes, again = finish(plan, tmp_path, epoch=1)
    assert codes == [0] and again.steps() == [] and len(again.events("done")) == 1
    assert again.events("checkpoint_saved") == []


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(cache, tmp_path):
    plan = job(cache, steps=4, every=2, dp=2)
    finish(plan, tmp_path)
    flip_bit(tmp_path / "checkpoints" / step_name(4) / rank_file(0))
    codes, again = finish(plan, tmp_path, epoch=1)
    assert codes == [0, 0]
    assert rank_file(0) in again.events("checkpoint_rejected")[0].fields["problem"]
    assert again.events("resumed")[0].step == 2 and [step.step for step in again.steps()] == [3, 4]


def test_only_damaged_checkpoints_are_refused_with_65(cache, tmp_path):
    plan = job(cache, steps=2)
    finish(plan, tmp_path)
    os.truncate(tmp_path / "checkpoints" / step_name(2) / rank_file(0), 10)
    codes, again = finish(plan, tmp_path, epoch=1)
    assert codes == [Exit.CONFIG]
    assert "rank-00000.safetensors has 10 bytes" in again.log(0) and "Traceback" not in again.log(0)


def test_another_model_in_the_checkpoint_folder_is_refused_with_65(cache, tmp_path):
    finish(job(cache, steps=1), tmp_path)
    codes, again = finish(
        job(cache, steps=1, model=tiny_model(ffn_hidden=64, tied_embeddings=True)),
        tmp_path,
        epoch=1,
    )
    assert codes == [Exit.CONFIG] and "shape" in again.log(0)


def test_a_save_that_fails_on_the_way_is_reported_and_training_goes_on(cache, tmp_path):
    plan = job(cache, steps=6, every=2, dp=2)
    (tmp_path / "checkpoints").mkdir()
    (
        tmp_path / "checkpoints" / f".tmp-{step_name(4)}.e0"
    ).touch()  # where step 4's folder is to be made
    codes, workers = finish(plan, tmp_path)
    assert codes == [0, 0]
    (failed,) = workers.events("checkpoint_failed")
    assert failed.step == 4 and "File exists" in failed.fields["error"]
    assert [event.step for event in workers.events("checkpoint_saved")] == [2, 6]


def test_other_text_is_refused_until_it_is_allowed_and_another_plan_is_said(cache, tmp_path):
    finish(job(cache, steps=1), tmp_path)
    _, resumed = finish(job(cache, steps=1), tmp_path, epoch=1)
    fields = resumed.events("resumed")[0].fields
    assert fields["same_plan"] and fields["same_data"]
    longer = changed(job(cache, steps=2), "data", paths=[str(TEXT / "decoder.py")])
    codes, refused = finish(longer, tmp_path, epoch=2)
    assert codes == [Exit.CONFIG] and "is not what this run began with" in refused.log(0)
    assert "--allow changed-data" in refused.log(0) and not refused.events("resumed")
    pin_file(tmp_path, PINS["changed-data"]).unlink()  # what the option does
    codes, allowed = finish(longer, tmp_path, epoch=2)
    fields = allowed.events("resumed")[0].fields
    assert codes == [0] and not fields["same_plan"] and not fields["same_data"]


def test_token_files_overwritten_at_the_same_size_end_the_run_and_vanished_checkpoints_do_not_start_it_over(
    tmp_path,
):
    corpus_file = tmp_path / "text.txt"
    cache = tmp_path / "cache"
    corpus_file.write_text("the quick brown fox jumps over the lazy dog\n" * 500)
    run_dir = tmp_path / "run"
    plan = job(str(cache), steps=50_000, every=2, dp=2, data_paths=[str(corpus_file)])
    with running(plan, run_dir) as workers:
        workers.until(0, "checkpoint_saved")
        (tokens,) = cache.glob("*/tokens.bin")
        written = tokens.read_bytes()
        tokens.write_bytes(
            b"\1\0" * (len(written) // 2)
        )  # as somebody would who prepares another corpus there
        codes = workers.wait()
    assert Exit.CONFIG in codes and set(codes) <= {Exit.CONFIG, Exit.RESTART}
    log = workers.log(codes.index(Exit.CONFIG))
    assert (
        f"{tokens.parent} are damaged (tokens.bin has changed since it was written, among tokens"
        " 0 to" in log
    )
    assert "Traceback" not in log
    tokens.write_bytes(written)

    plan = job(str(cache), steps=4, every=2, dp=2, data_paths=[str(corpus_file)])
    shutil.rmtree(run_dir / "checkpoints")
    codes, refused = finish(plan, run_dir, epoch=1)
    assert codes == [Exit.CONFIG] * 2
    assert f"there is no checkpoint in {run_dir / 'checkpoints'} now" in refused.log(1)
    assert "--allow fresh-start" in refused.log(1) and not refused.steps(0)
    pin_file(run_dir, PINS["fresh-start"]).unlink()
    codes, anew = finish(plan, run_dir, epoch=2)
    assert codes == [0, 0] and list(anew.losses()) == [1, 2, 3, 4]


def tampered(monkeypatch, sample: int, on: str = "0") -> None:
    """A bit of a sample's first token flips after the token file has been read and found good."""
    window = TokenStore.window

    def flipped(self, number, seq_len):
        tokens = window(self, number, seq_len)
        if number == sample and os.environ["RANK"] in on:
            tokens = tokens.copy()
            tokens[0] ^= 1
        return tokens

    monkeypatch.setattr(TokenStore, "window", flipped)


def test_a_tampered_token_is_found_by_a_replay_of_the_data_which_names_its_step(
    cache, tmp_path, monkeypatch
):
    plan = job(cache, steps=5, dp=2)
    finish(plan, tmp_path / "good")
    (first, second), size = (
        finished_steps(tmp_path / "good", plan),
        plan.parallel.global_batch_samples,
    )
    assert [step.fingerprint for step in first] == [step.fingerprint for step in second]
    replayed = replay(tmp_path / "good" / "plan.json", first)
    assert replayed == (5, 5, []), replayed.problems
    store = open_tokens(plan.job.data)
    sample = SampleOrder(store.samples(plan.job.train.seq_len), plan.job.data.seed)(
        2 * size + 1
    )  # the third step's
    with monkeypatch.context() as patch:
        tampered(patch, sample, on="01")
        finish(plan, tmp_path / "bad")
    replayed = replay(tmp_path / "bad" / "plan.json", finished_steps(tmp_path / "bad", plan)[0])
    assert (replayed.steps, replayed.equal) == (5, 4)
    assert replayed.problems[0].startswith(
        f"step 3 of epoch 0 trained on other tokens than samples {2 * size} to"
    )

    split = job(cache, steps=5, tp=2)
    split_sample = SampleOrder(store.samples(split.job.train.seq_len), split.job.data.seed)(
        2 * split.parallel.global_batch_samples
    )
    tampered(
        monkeypatch, split_sample, on="1"
    )  # the ranks of a replica read the same samples, each by itself
    codes, odd = finish(split, tmp_path / "odd")
    assert codes == [Exit.CONFIG] * 2 and len(odd.steps(0)) == 2
    assert "step 3: rank 1 on" in odd.log(0) and "has read other tokens than rank 0 on" in odd.log(
        1
    )


def finished_steps(run_dir: Path, plan: Plan) -> list[list[Step]]:
    """Each rank's steps, from its report file."""
    rank_steps = []
    for rank in range(plan.parallel.world_size):
        lines = [
            json.loads(line)
            for line in (run_dir / f"rank-{rank}.e0.jsonl").read_text().splitlines()
        ]
        step_lines = [line for line in lines if line["kind"] == "step"]
        rank_steps.append(
            [
                Step(0, x["step"], 0.0, x["step_s"], 0.0, x["samples"], x["fingerprint"])
                for x in step_lines
            ]
        )
    return rank_steps


def test_an_older_epoch_is_fenced_with_77(cache, tmp_path):
    plan = job(cache, steps=2, dp=2)
    finish(plan, tmp_path, epoch=3)
    codes, old = finish(plan, tmp_path, epoch=2)
    assert codes == [Exit.FENCED] * 2 and "belongs to epoch 3" in old.log(1)


def test_an_epoch_fenced_while_it_trains_writes_nothing_more(cache, tmp_path):
    plan = job(cache, steps=10_000, every=10_000)
    with running(plan, tmp_path) as workers:
        workers.until(0, 2)
        (tmp_path / "checkpoints" / "fence.json").write_text('{"run_id": "test", "epoch": 1}')
        os.kill(workers.pids[0], signal.SIGTERM)
        assert workers.wait() == [Exit.FENCED]
    assert list((tmp_path / "checkpoints").glob("step-*")) == []


# ----------------------------------------------------------------------------------------------
#     stopping


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(
            pytest.param(signal_number, marks=pytest.mark.full)
            for signal_number in (signal.SIGUSR1, signal.SIGINT)
        ),
    ],
    ids=lambda number: number.name,
)
def test_a_termination_signal_to_any_rank_saves_the_same_step_on_all_and_ends_with_75(
    cache, tmp_path, number
):
    plan = job(cache, steps=10_000, **EIGHT)
    signalled_rank = {signal.SIGTERM: 7, signal.SIGUSR1: 0, signal.SIGINT: 3}[number]
    with running(plan, tmp_path) as workers:
        workers.until(0, 3)
        os.kill(workers.pids[signalled_rank], signal.SIGUSR2)  # must not hurt
        os.kill(workers.pids[signalled_rank], number)
        assert workers.wait() == [Exit.RESTART] * 8, workers.log(signalled_rank)
    steps = {workers.events("stopping", rank)[0].step for rank in range(8)}
    (saved,) = workers.events("checkpoint_saved")
    assert steps == {saved.step}
    assert workers.events("stopping", signalled_rank)[0].fields["reason"] == number.name
    assert f"{number.name}: saved at step {saved.step}" in workers.log(signalled_rank)
    with running(plan, tmp_path, epoch=1) as again:
        again.until(0, saved.step + 1)
        assert again.events("resumed")[0].step == saved.step


def test_a_termination_signal_before_the_first_step_ends_with_75(cache, tmp_path):
    plan = job(cache, steps=10_000)
    with running(plan, tmp_path) as workers:
        workers.until(0, "ranks_checked")
        os.kill(workers.pids[0], signal.SIGTERM)
        assert workers.wait() == [Exit.RESTART]
    if not workers.steps():
        assert "nothing to save yet" in workers.log(0) and not list(
            (tmp_path / "checkpoints").glob("step-*")
        )


def test_a_termination_signal_during_the_imports_ends_with_75(cache, tmp_path):
    """The first second of a real process, when torch is not even loaded."""
    with worker_process(job(cache, steps=10_000), tmp_path) as worker:
        time.sleep(0.5)
        worker.terminate()
        _, output = worker.communicate(timeout=PATIENCE_S)
    assert worker.returncode in (Exit.RESTART, -signal.SIGTERM), output
    if worker.returncode == Exit.RESTART:
        assert "SIGTERM before the first step: nothing to save yet" in output


@pytest.mark.parametrize(
    "victim", [0, pytest.param(5, marks=pytest.mark.full)]
)  # the last one: above
def test_a_killed_peer_is_noticed_by_all_with_75(cache, tmp_path, victim):
    plan = job(cache, steps=10_000, **EIGHT)
    with running(plan, tmp_path) as workers:
        workers.until(0, 2)
        os.kill(workers.pids[victim], signal.SIGKILL)
        codes = workers.wait()
    assert codes.pop(victim) == -signal.SIGKILL
    assert codes == [Exit.RESTART] * 7


# ----------------------------------------------------------------------------------------------
#     refusing


def refused(
    plan: Plan, run_dir: Path, code: Exit, message: str, changes: dict | None = None
) -> None:
    codes, workers = finish(plan, run_dir, changes=changes)
    assert codes == [code] * plan.parallel.world_size, workers.log(0)
    for rank in range(plan.parallel.world_size):
        line = workers.log(rank).strip().splitlines()
        assert (
            len(line) == 1
            and message in line[0]
            and line[0].startswith(f"trainer: rank {rank} on ")
        ), line
        assert workers.events("failed", rank)[0].fields["exit"] == code


@pytest.mark.parametrize(
    ("layout", "paths", "message", "changes"),
    [
        ({"dp": 2}, None, "was assigned plan 000000000000", {1: {"plan_hash": "0" * 64}}),
        (
            {"dp": 2, "nodes": 2},
            None,
            "rank 0 runs on 'node1'",
            {0: {"node": "node1"}, 1: {"node": "node0"}},
        ),
        ({}, ["/nowhere/at/all"], "'/nowhere/at/all' does not exist", None),
        ({"ep": 2}, None, "ep=2, but test has no experts", None),
    ],
    ids=["another plan", "swapped nodes", "missing text", "unsupported layout"],
)
def test_what_cannot_run_stops_all_workers_with_65(
    cache, tmp_path, layout, paths, message, changes
):
    plan = job(cache, **layout)
    refused(
        changed(plan, "data", paths=paths) if paths else plan,
        tmp_path,
        Exit.CONFIG,
        message,
        changes,
    )


def test_a_gpu_that_is_not_there_is_the_nodes_fault(cache, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    plan = job(cache)
    plan = seal(
        msgspec.structs.replace(plan, cluster=msgspec.structs.replace(plan.cluster, device="cuda"))
    )
    refused(plan, tmp_path, Exit.NODE, "wants GPU 0 of node0, which has 0 usable")


def test_a_loss_that_explodes_stops_the_run_and_says_where(cache, tmp_path):
    plan = changed(job(cache, dp=2), "optim", lr=1e38, warmup_steps=0)
    refused(
        plan,
        tmp_path,
        Exit.USER,
        "step 2: the gradient norm is nan; the loss is not finite on rank 0, 1",
    )
    assert list((tmp_path / "checkpoints").glob("step-*")) == [], "what has exploded is not saved"


def test_steps_that_are_not_finite_are_skipped_as_often_as_was_allowed(cache, tmp_path):
    """What explodes here stays so: the samples of the last step are named, rank by rank."""
    plan = changed(job(cache, dp=2), "optim", lr=1e38, warmup_steps=0)
    plan = changed(plan, "train", skip_non_finite_steps=1)
    assert plan.parallel.global_batch_samples == 4
    says = (
        "step 3: the gradient norm is nan; the loss is not finite on rank 0, 1, whose samples are"
        " 8, 10; 9, 11 in"
    )
    refused(plan, tmp_path, Exit.USER, says)


def test_a_changed_plan_file_is_refused(cache, tmp_path):
    plan = job(cache)
    workers = Workers(plan, tmp_path, changes={0: {"plan": str(tmp_path / "other.json")}})
    assert workers.wait() == [Exit.CONFIG] and "cannot read plan" in workers.log(0)
    (tmp_path / "other.json").write_bytes(to_json(plan).replace(b'"steps":6', b'"steps":7'))
    workers = Workers(plan, tmp_path, changes={0: {"plan": str(tmp_path / "other.json")}})
    assert workers.wait() == [Exit.CONFIG] and "does not match its content" in workers.log(0)


# ---------------------------------------------------------------------------------------------- as
#     a command


def test_without_an_agents_environment_it_is_a_usage_error():
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "ORCH_PLAN")}
    done = subprocess.run(
        [sys.executable, "-m", "trainer"], cwd=ROOT, env=clean, capture_output=True, text=True
    )
    assert done.returncode == Exit.USAGE and "environment variable RANK is not set" in done.stderr


def test_python_dash_m_trainer_runs_a_plan_and_prints_its_progress(cache, tmp_path):
    with worker_process(job(cache, steps=2), tmp_path) as worker:
        _, output = worker.communicate(timeout=PATIENCE_S)
    assert worker.returncode == 0, output
    assert "step 2  loss " in output and "done (step 2)" in output


def test_a_worker_imports_the_compiler_only_where_its_plan_needs_it(tmp_path):
    """torch._dynamo is 900 modules: a second and 100 MiB in every process, for nothing that runs
    uncompiled.

    The process that imports it forks the workers: it has one thread, and it has not asked CUDA's
    driver for devices, which `torch.compiler.reset` does in torch 2.11 (an H200 showed it: no
    forked worker could use the GPU).
    """
    plans = {
        "plain": make_plan(dp=2, zero=1),
        "sharded": make_plan(dp=2, zero=3),
        "compiled": make_plan(compile=True),
    }
    for name, plan in plans.items():
        (tmp_path / f"{name}.json").write_bytes(to_json(plan))
    code = (
        "import os, sys, torch; from trainer import preload; from trainer.metrics.memory import"
        " StorageTracker\nasked = []\ntorch._C._cuda_getDeviceCount = lambda: asked.append(1) or"
        " 0\ntorch.compiler.reset = torch.cuda.is_available\npreload.prepare(['--plan',"
        " sys.argv[1]], {})\nwith StorageTracker(): torch.zeros(3) + 1\nbefore = 'torch._dynamo' in"
        " sys.modules\npreload.prepare([], {'ORCH_PLAN': sys.argv[2]})\nprint(before,"
        " {'torch._dynamo', 'torch.distributed.fsdp'} <= sys.modules.keys())\npreload.prepare([],"
        " {'ORCH_PLAN': sys.argv[3]})\nprint('asked', len(asked), 'threads',"
        " len(os.listdir('/proc/self/task')))"
    )
    command = [sys.executable, "-c", code, *(tmp_path / f"{name}.json" for name in plans)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=PATIENCE_S, capture_output=True, text=True
    )
    assert done.stdout == "False True\nasked 0 threads 1\n", done.stderr
