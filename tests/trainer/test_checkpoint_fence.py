"""Who may write into a checkpoint folder, and what is deleted from it."""

import itertools
import os
import shutil
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.plan import Exit
from orchestrator.plan.worker import committed
from tests.beds.plans import make_plan
from tests.trainer.states import equal, opened, resume, saved, state
from tests.trainer.workers import worker_env
from trainer.checkpoint import fence
from trainer.checkpoint import save as save_module
from trainer.checkpoint.format import step_name
from trainer.checkpoint.retention import prune
from trainer.errors import CheckpointError, Fenced, SaveError

# ----------------------------------------------------------------------------------------------
#     fencing, retention


def test_an_older_epoch_can_neither_claim_nor_commit(tmp_path):
    old = saved(tmp_path, 1)
    _, new, _ = resume(tmp_path, epoch=3)
    with pytest.raises(Fenced, match="belongs to epoch 3 of run 'run', this is epoch 0") as caught:
        old.save(state(2), step=2, samples=0)
    assert caught.value.exit == Exit.FENCED
    with pytest.raises(Fenced):
        resume(tmp_path, epoch=2)
    new.save(state(2), step=2, samples=0)
    assert [step for step, _ in committed(tmp_path)] == [2, 1]


def test_a_claim_during_a_save_stops_its_commit(tmp_path, monkeypatch):
    """The newer epoch appears after the old one has written its files and before it renames."""
    old = saved(tmp_path, 1)
    write = save_module.write_atomic

    def claim_first(path: Path, data: bytes) -> None:
        write(path, data)
        write(tmp_path / "fence.json", b'{"run_id": "run", "epoch": 1}')

    monkeypatch.setattr(save_module, "write_atomic", claim_first)
    with pytest.raises(Fenced):
        old.save(state(2), step=2, samples=0)
    assert [step for step, _ in committed(tmp_path)] == [1]


def test_who_lists_while_another_saves_finds_the_newer_one(tmp_path, monkeypatch):
    """Between the names and the look at them the only checkpoint is replaced: there is one at every
    moment."""
    saved(tmp_path, 1)
    listed = Path.iterdir
    later = [step_name(3), step_name(2)]

    def replaced_after(folder: Path) -> Iterator[Path]:
        names = list(listed(folder))
        if later:
            (path,) = (path for path in names if path.name.startswith("step-"))
            path.rename(folder / later.pop())
        return iter(names)

    monkeypatch.setattr(Path, "iterdir", replaced_after)
    assert [step for step, _ in committed(tmp_path)] == [3]
    for _, path in committed(tmp_path):
        shutil.rmtree(path)
        path.touch()  # no folder, and it stays
    assert committed(tmp_path) == []


@pytest.mark.process
@pytest.mark.slow
def test_of_two_epochs_that_both_live_one_writes(tmp_path):
    """A hundred times: the older one saves as fast as it can when the newer one claims the folder.
    From then on nothing of the older one appears, and it ends with 77."""
    for trial in range(100):
        folder = tmp_path / str(trial)
        least_step = 1 + trial % 3
        old = saved(folder, 1)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for step in itertools.count(2):
                    old.save(state(step), step, 10 * step)
            except Fenced as error:
                code = error.exit
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(code)
        deadline = time.monotonic() + 60
        while committed(folder)[0][0] < least_step and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(trial % 7 * 0.001)  # somewhere inside the next save
        fence.acquire(folder, fence.Fence("run", 1))
        before = committed(folder)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == Exit.FENCED
        after = committed(folder)  # an old save that it was already removing may be gone
        assert after[0] == before[0] and set(after) <= set(before)
        live, manager, manifest = resume(folder)
        assert equal(live, state(manifest.step)) and manifest.step == before[0][0] >= least_step
        assert not manager.reporter.named("checkpoint_rejected")
        shutil.rmtree(folder)


def test_a_newer_claim_on_the_run_ends_the_rights_of_an_epoch(tmp_path):
    """The coordinator has moved, and nobody of its new epoch has been at the checkpoints yet."""
    claims = tmp_path / "claims"
    env = worker_env(make_plan(), 0, run_dir=str(tmp_path), run_id="run", epoch=3)
    assert fence.Fence.of(env) == fence.Fence("run", 3), (
        "no epochs are claimed where a run has one size"
    )
    claims.mkdir()
    token = fence.Fence.of(env)
    fence.acquire(tmp_path / "checkpoints", token)
    for name in ("2", "3", ".4.tmp"):
        (claims / name).touch()
    fence.check(tmp_path / "checkpoints", token)
    (claims / "4").touch()
    for right in (fence.check, fence.acquire):
        with pytest.raises(Fenced, match="belongs to epoch 4 of run 'run', this is epoch 3"):
            right(tmp_path / "checkpoints", token)
    assert fence.read(tmp_path / "checkpoints") == token


def test_a_removed_folder_is_said_and_the_next_save_makes_it_anew(tmp_path):
    folder = tmp_path / "checkpoints"
    old = opened(folder, 0)
    new = opened(folder, 1)
    new.save(state(1), 1, 1)
    shutil.rmtree(folder)
    with pytest.raises(SaveError, match="the folder was removed while this run saved there"):
        fence.check(folder, new.target.token)  # at the commit
    old.save(state(2), 2, 2)  # an epoch that the run has left behind was faster
    assert old.reporter.named("checkpoint_folder_removed")[0].fields["folder"] == str(folder)
    new.save(state(3), 3, 3)
    with pytest.raises(Fenced, match="belongs to epoch 1"):
        old.save(state(4), 4, 4)
    (folder / "fence.json").unlink()
    new.save(state(5), 5, 5)
    assert new.reporter.named("checkpoint_folder_removed")[0].step == 5
    assert [step for step, _ in committed(folder)][:2] == [5, 3]


def test_another_run_takes_the_folder_over(tmp_path):
    old = saved(tmp_path, 1)
    live, _, manifest = resume(tmp_path, epoch=0, run="other")
    assert manifest.step == 1 and equal(live, state(1))
    with pytest.raises(Fenced, match="'other'"):
        old.save(state(2), step=2, samples=0)


def test_a_broken_fence_is_refused(tmp_path):
    saved(tmp_path, 1)
    (tmp_path / "fence.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"fence\.json"):
        resume(tmp_path)


def test_only_the_newest_are_kept(tmp_path):
    saved(tmp_path, 1, 2, 3, 4, keep_last=2)
    assert [step for step, _ in committed(tmp_path)] == [4, 3]


@given(
    st.sets(st.integers(1, 30), min_size=1, max_size=6),
    st.integers(-1, 7),
    st.none() | st.integers(1, 30),
)
@settings(max_examples=40, deadline=None)
def test_pruning_keeps_the_newest_and_the_protected(tmp_path_factory, steps, keep_last, protected):
    folder = tmp_path_factory.mktemp("p")
    for step in steps:
        (folder / step_name(step)).mkdir()
    prune(folder, keep_last, protected)
    remaining_steps = {step for step, _ in committed(folder)}
    newest = sorted(steps, reverse=True)[: max(keep_last, 1)]
    assert remaining_steps == set(newest) | ({protected} & steps)
