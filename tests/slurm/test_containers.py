"""Runs inside an image, with a real Charliecloud on the test cluster: the image's own interpreter and packages."""

from __future__ import annotations

import json

import pytest
from msgspec import structs

from orchestrator import start
from orchestrator.agent.node.worker_control import with_own_python
from orchestrator.backends.slurm.job import task
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.run.request import Worker
from tests.beds.bundles import make_bundle
from tests.beds.debian import provide
from tests.beds.plans import make_plan
from tests.beds.slurm.image import PYTHON, make_image
from tests.beds.slurm.runs import Orch

from .test_render import bash_accepts, script
from .test_runs import two_nodes

real = [pytest.mark.slurm, pytest.mark.process, pytest.mark.slow]


def test_the_bundled_trainer_runs_under_the_agents_interpreter(monkeypatch):
    monkeypatch.setattr("sys.executable", "/opt/env/bin/python")
    bundled = Worker(argv=["/home/u/venv/bin/python", "-P", "-m", "trainer", "--plan", "p"], cwd="/r", bundled=True)
    assert with_own_python(bundled).argv == ["/opt/env/bin/python", "-P", str(start.FILE), "trainer", "--plan", "p"]
    bench = structs.replace(bundled, argv=["/home/u/venv/bin/python", "-P", "-m", "trainer.bench"], bundled=False)
    assert with_own_python(bench).argv == ["/opt/env/bin/python", "-P", str(start.FILE), "trainer.bench"]
    users = structs.replace(bundled, argv=["python", "-m", "trainer"], bundled=False)
    assert with_own_python(users) == users


def test_inside_an_image_nothing_of_the_submitters_leads(monkeypatch, tmp_path):
    request = make_bundle(make_plan(), tmp_path / "runs").request
    monkeypatch.setattr("sys.executable", "/opt/env/bin/python")
    first = request.environment.path_first[0]
    assert task.environment(request, {"PATH": "/usr/bin"})["PATH"] == f"{first}:/usr/bin"
    assert task.environment(request, {"PATH": "/usr/bin", "ORCH_SUBMITTER": "1"})["PATH"] == "/opt/env/bin:/usr/bin"
    text = script({"container": {"runtime": "apptainer", "image": "/i.sif"}})
    assert "unset PYTHONPATH PYTHONHOME VIRTUAL_ENV\nexport PYTHONNOUSERSITE=1\n" in text and "/opt/py/bin" not in text


def test_an_image_with_another_version_is_refused_before_ranks_are_placed(monkeypatch, tmp_path, capsys):
    task._check_version({})
    with pytest.raises(OrchError, match="use one version") as refused:
        task._check_version({"ORCH_SUBMITTER": "99.0"})
    assert refused.value.exit == Exit.CONFIG


def test_charliecloud_mounts_what_no_other_mount_holds():
    container = {"runtime": "charliecloud", "image": "/images/llm.sqfs", "mounts": ["/home/", "/x:/data"]}
    text = script({"container": container}, bind=("/home/u/run", "/data/tokens", "/x/y"))
    assert (
        "ch-run --bind=/home/ --bind=/x:/data --bind=/data/tokens --bind=/x/y "
        "'--cd=/home/o'\"'\"'neil/5% runs/tiny-1' /images/llm.sqfs -- "
        "python3 -P -m orch_start orchestrator.slurm.task place"
    ) in text
    assert bash_accepts(text)


@pytest.fixture
def image(orch: Orch, tmp_path_factory):
    """Words that run everything in the image, from which the submitter's virtual environment cannot be seen."""
    if reason := provide(("ch-run",), ("charliecloud",)):
        pytest.skip(f"no Charliecloud: {reason}")
    made = tmp_path_factory.mktemp("image")
    empty = tmp_path_factory.mktemp("empty")
    mounts, hidden = make_image(made, empty)
    mounts = json.dumps([*mounts, "/tmp", *hidden])
    return f"backend.options.container={{runtime: charliecloud, image: '{made}', mounts: {mounts}, python: {PYTHON}}}"


@pytest.mark.parametrize("_", [pytest.param("", marks=real)])
def test_it_trains_in_an_image_for_real(orch: Orch, image, _):
    """Bundled trainer and a program of the user's, both on two nodes; the loss falls."""
    seen = 'import os, sys; open(f"seen-{os.environ[\'RANK\']}", "w").write(f"{sys.executable} {sys.path}")'
    own = orch.submit(*two_nodes(image), program=("python", "-c", seen))
    words = ["train.steps=6", "train.log_every_steps=1", image]
    run = orch.submit(*two_nodes(*words), program=None)
    assert own.wait("done").exit_code == 0
    for rank in range(4):
        said = next(own.folder.rglob(f"seen-{rank}"), orch.home / f"seen-{rank}").read_text()
        assert said.startswith(PYTHON) and ".venv" not in said
    assert run.wait("done").exit_code == 0
    losses = run.losses()
    assert sorted(losses) == list(range(1, 7)) and losses[6] < losses[1] - 0.5
