"""Runs inside an image, with a real Charliecloud on the test cluster: the image's own interpreter
and packages."""

from __future__ import annotations

import json
import shlex

import pytest
from msgspec import structs

from orchestrator import __version__, start
from orchestrator.agent.node.worker_control import with_own_python
from orchestrator.backends.slurm.job import task
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.run.request import Worker
from tests.beds.bundles import make_bundle, refusal
from tests.beds.debian import provide
from tests.beds.plans import make_plan
from tests.beds.slurm.image import PYTHON, make_image
from tests.beds.slurm.runs import Orch

from .test_render import bash_accepts, script
from .test_runs import two_nodes

live = [pytest.mark.slurm, pytest.mark.process]
real = [pytest.mark.slurm, pytest.mark.process, pytest.mark.slow]


def test_the_bundled_trainer_runs_under_the_agents_interpreter(monkeypatch):
    monkeypatch.setattr("sys.executable", "/opt/env/bin/python")
    bundled = Worker(
        argv=["/home/u/venv/bin/python", "-P", "-m", "trainer", "--plan", "p"],
        cwd="/r",
        bundled=True,
    )
    assert with_own_python(bundled).argv == [
        "/opt/env/bin/python",
        "-P",
        str(start.FILE),
        "trainer",
        "--plan",
        "p",
    ]
    bench = structs.replace(
        bundled, argv=["/home/u/venv/bin/python", "-P", "-m", "trainer.bench"], bundled=False
    )
    assert with_own_python(bench).argv == [
        "/opt/env/bin/python",
        "-P",
        str(start.FILE),
        "trainer.bench",
    ]
    users = structs.replace(bundled, argv=["python", "-m", "trainer"], bundled=False)
    assert with_own_python(users) == users


def test_inside_an_image_nothing_of_the_submitters_leads(monkeypatch, tmp_path):
    request = make_bundle(make_plan(), tmp_path / "runs").request
    monkeypatch.setattr("sys.executable", "/opt/env/bin/python")
    first = request.environment.path_first[0]
    assert task.environment(request, {"PATH": "/usr/bin"})["PATH"] == f"{first}:/usr/bin"
    assert (
        task.environment(request, {"PATH": "/usr/bin", "ORCH_SUBMITTER": "1"})["PATH"]
        == "/opt/env/bin:/usr/bin"
    )
    job_script = script({"container": {"runtime": "apptainer", "image": "/i.sif"}})
    assert (
        "unset PYTHONPATH PYTHONHOME VIRTUAL_ENV\nexport PYTHONNOUSERSITE=1\n" in job_script
        and "/opt/py/bin" not in job_script
    )


def test_an_image_with_another_version_is_refused_before_ranks_are_placed(
    monkeypatch, tmp_path, capsys
):
    task._check_version({})
    task._check_version({"ORCH_SUBMITTER": start.code_version()})
    for file, changed_source in (
        ("orchestrator/x.py", "y = 1\n"),
        ("orchestrator/x.py", "y = 2\n"),
        ("trainer/x.py", "y = 1\n"),
    ):
        theirs = tmp_path / file / changed_source.strip()
        (theirs / file).parent.mkdir(parents=True)
        (theirs / file).write_text(changed_source)
        with monkeypatch.context() as patch:
            patch.setattr(start, "FILE", theirs / "orch_start.py")
            version = start.code_version.__wrapped__()
        assert version.startswith(f"{__version__}+")
        with pytest.raises(OrchError, match="use one version") as refused:
            task._check_version({"ORCH_SUBMITTER": version})
        assert refused.value.exit == Exit.CONFIG


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer", "charliecloud"])
def test_a_path_that_a_runtime_would_split_is_refused(runtime):
    container = {"runtime": runtime, "image": "/i.sif"}
    for path in ("/data/a:b", "/data/a,b") if runtime != "charliecloud" else ("/data/a:b",):
        with refusal(f"{path!r} cannot be mounted: {runtime}", Exit.CONFIG):
            script({"container": container}, bind=("/home/u", path))
    script({"container": container | {"mounts": ["/data:/data:ro"]}})
    if runtime != "charliecloud":
        with refusal("'/a:/a,/b:/b' cannot be mounted", Exit.CONFIG):
            script({"container": container | {"mounts": ["/a:/a,/b:/b"]}})
    script({}, bind=("/data/a:b",))


@pytest.mark.parametrize(
    ("gpu", "flag"),
    [("NVIDIA H100 80GB", "--nv"), ("AMD Instinct MI300X", "--rocm"), ("mi250x", "--rocm"), ("MI355X-OAM", "--rocm"),
     ("RTX A6000", "--nv"), ("cpu", "--nv")],
)  # fmt: skip
def test_apptainer_gives_the_gpus_that_there_are(gpu, flag):
    plan = make_plan()
    cluster = structs.replace(plan.cluster, gpu=structs.replace(plan.cluster.gpu, name=gpu))
    job_script = script(
        {"container": {"runtime": "apptainer", "image": "/i.sif"}},
        plan=structs.replace(plan, cluster=cluster),
    )
    assert job_script.count(f"apptainer exec {flag} ") == job_script.count("apptainer exec ") == 3


@pytest.mark.parametrize(
    "python",
    [pytest.param("python3", marks=live), pytest.param("/opt/image/bin/python3", marks=live)],
)
def test_srun_may_look_for_the_program_before_there_is_a_container(full_cluster, python):
    """The script's sruns start a program that host and image both have; the image's Python need not
    be here."""
    container = {"runtime": "pyxis", "image": "/i.sqsh", "python": python}
    lines = [
        line
        for line in script({"container": container}).splitlines()
        if "--container-image" in line
    ]
    starts = [shlex.split(line.removesuffix(" &")) for line in lines]
    assert len(starts) == 3
    for argv in starts:
        program = next(
            argument for argument in argv[argv.index("srun") + 1 :] if not argument.startswith("-")
        )
        test = f"SLURM_TEST_EXEC=1 srun -N1 {program} true"
        assert full_cluster.run("bash", "-c", f"{test} 2>&1") == ""
        assert argv[argv.index(program) + 1] == python


def test_charliecloud_mounts_what_no_other_mount_holds():
    container = {
        "runtime": "charliecloud",
        "image": "/images/llm.sqfs",
        "mounts": ["/home/", "/x:/data"],
    }
    job_script = script({"container": container}, bind=("/home/u/run", "/data/tokens", "/x/y"))
    assert (
        "ch-run --bind=/home/ --bind=/x:/data --bind=/data/tokens --bind=/x/y "
        "'--cd=/home/o'\"'\"'neil/5% runs/tiny-1' /images/llm.sqfs -- "
        "python3 -P -m orch_start orchestrator.slurm.task place" in job_script
    )
    assert bash_accepts(job_script)


@pytest.fixture
def image(orch: Orch, tmp_path_factory):
    """Words that run everything in the image, from which the submitter's virtual environment cannot
    be seen."""
    if reason := provide(("ch-run",), ("charliecloud",)):
        pytest.skip(f"no Charliecloud: {reason}")
    root = tmp_path_factory.mktemp("image")
    empty = tmp_path_factory.mktemp("empty")
    mounts, hidden = make_image(root, empty)
    mounts = json.dumps([*mounts, "/tmp", *hidden])
    return (
        f"backend.options.container={{runtime: charliecloud, image: '{root}', mounts: {mounts},"
        f" python: {PYTHON}}}"
    )


@pytest.mark.parametrize("_", [pytest.param("", marks=real)])
def test_it_trains_in_an_image_for_real(orch: Orch, image, _):
    """Bundled trainer and a program of the user's, both on two nodes; the loss falls."""
    seen = (
        'import os, sys; open(f"seen-{os.environ[\'RANK\']}", "w").write(f"{sys.executable}'
        ' {sys.path}")'
    )
    program_run = orch.submit(*two_nodes(image), program=("python", "-c", seen))
    overrides = ["train.steps=6", "train.log_every_steps=1", image]
    run = orch.submit(*two_nodes(*overrides), program=None)
    assert program_run.wait("done").exit_code == 0
    for rank in range(4):
        output = next(
            program_run.folder.rglob(f"seen-{rank}"), orch.home / f"seen-{rank}"
        ).read_text()
        assert output.startswith(PYTHON) and ".venv" not in output
    assert run.wait("done").exit_code == 0
    losses = run.losses()
    assert sorted(losses) == list(range(1, 7)) and losses[6] < losses[1] - 0.5
