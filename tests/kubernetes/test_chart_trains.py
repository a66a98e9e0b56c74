"""`helm install` on real nodes: the launcher in the cluster, pods under the restricted profile, a
real Prometheus."""

from __future__ import annotations

import json
import sys

import pytest

from orchestrator.backends.kubernetes.names import METRICS_PORT
from tests.beds import debian
from tests.beds.kubernetes import image
from tests.beds.kubernetes.bed import Bed, BedError
from tests.beds.kubernetes.building import build
from tests.beds.kubernetes.runs import (
    NEVER_HANGS,
    SHORT,
    SMALL,
    TINY,
    Helm,
    Orch,
    Run,
    check_rank_map,
    held_before,
)

from .test_chart import CHART

pytestmark = [pytest.mark.kubernetes, pytest.mark.process, pytest.mark.slow]
ASK = (
    "import sys, urllib.request; sys.stdout.write(urllib.request.urlopen(sys.argv[1],"
    " timeout=5).read().decode())"
)


@pytest.fixture
def helm(real_bed, orch) -> Helm:
    if reason := build(("helm",)):
        pytest.skip(reason)
    return Helm(real_bed, orch.namespace)


def values(*extra_overrides: str, options: dict | None = None) -> dict:
    """What a user of this bed writes: torch comes from a volume, everything is small. `more`:
    overrides."""
    site = {"claim": "site", "path": image.SITE}
    by_chart = {"image", "pull_policy", "claim"}
    small = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
    cluster, *overrides = TINY
    return {
        "cluster": cluster.removeprefix("cluster="),
        "overrides": [
            *overrides,
            *SHORT,
            "backend.grace_s=20",
            "backend.heartbeat_timeout_s=10",
            *extra_overrides,
        ],
        "image": (
            dict(zip(("repository", "tag"), image.NAME.split(":"), strict=True))
            | {"pullPolicy": "Never"}
        ),
        "options": (
            {name: value for name, value in SMALL.items() if name not in by_chart} | (options or {})
        ),
        "claim": {"existing": "runs"},
        "launcher": {"volumes": [site], "resources": small},
    }


def prometheus(bed: Bed, service: str, namespace: str) -> None:
    """Debian's, told one name: the run's Service, behind which pod 0 tells where all pods are."""
    if reason := debian.provide(("prometheus",), ("prometheus",)):
        pytest.skip(reason)
    url = f"http://{service}.{namespace}.svc.cluster.local:{METRICS_PORT}/targets"
    job = {
        "job_name": "pods",
        "honor_labels": True,
        "http_sd_configs": [{"url": url, "refresh_interval": "1s"}],
    }
    config = {"global": {"scrape_interval": "500ms"}, "scrape_configs": [job]}
    (bed.home / "prometheus.yaml").write_text(json.dumps(config))
    bed.run(
        "mount", "--bind", str(bed.home / "resolv.conf"), "/etc/resolv.conf"
    )  # of the bed alone
    flags = [f"--config.file={bed.home}/prometheus.yaml", f"--storage.tsdb.path={bed.home}/tsdb"]
    bed.daemon(
        "prometheus", debian.find("prometheus"), *flags, "--web.listen-address=127.0.0.1:9090"
    )


def query(bed: Bed, expression: str) -> list[dict]:
    url = f"http://127.0.0.1:9090/api/v1/query?query={expression}"
    done = bed.run(sys.executable, "-c", ASK, url, check=False)
    return json.loads(done.stdout)["data"]["result"] if done.returncode == 0 else []


def scraped_steps(bed: Bed) -> dict[str, int]:
    """Node -> its last step; of a pod that has ended meanwhile, too."""
    samples = query(bed, "max_over_time(orch_last_step[1h])")
    return {sample["metric"]["node"]: int(float(sample["value"][1])) for sample in samples}


def installed(orch: Orch, helm, *overrides: str, options: dict | None = None) -> Run:
    """A release, and the run that its launcher has sent."""
    bed = orch.bed
    space = orch.namespace
    helm("install", "my-run", CHART, values=values(*overrides, options=options))
    sent = lambda: bed.get("jobs", "-n", space, "-l", "orch.dev/run")["items"]  # noqa: E731
    try:
        bed.wait(sent, 300, "run of the release")
    except BedError as error:
        launcher_log = bed.kubectl(
            "logs", "-n", space, "-l", "app.kubernetes.io/component=launcher", check=False
        )
        raise AssertionError(f"{error}; the launcher: {launcher_log}") from None
    return Run(orch, sent()[0]["metadata"]["labels"]["orch.dev/run"])


def complete(run: Run) -> None:
    wait_command = ("wait", "-n", run.orch.namespace, f"job/{run.id}", "--for=condition=Complete")
    run.orch.bed.kubectl(*wait_command, "--timeout=600s", timeout=620)


def test_installed_trained_scraped_and_gone(orch, helm):
    bed = orch.bed
    space = orch.namespace
    run_overrides = ("train.steps=30", "checkpoint.every_steps=10", NEVER_HANGS)
    run = installed(orch, helm, *run_overrides, options=held_before(30))
    prometheus(bed, run.id, space)
    try:
        run.step(3)
        check_rank_map(orch, run)
        run.until(
            "four pods scraped",
            lambda: len(seen := scraped_steps(bed)) == 4 and max(seen.values()) >= 3,
        )
        assert set(scraped_steps(bed)) == {rank["node"] for rank in run.plan["ranks"]}
        run.release(30)
        complete(run)
    finally:
        bed.end("--web.listen-address=127.0.0.1:9090")
        bed.run("umount", "/etc/resolv.conf")
    losses = run.steps()
    assert sorted(losses) == list(range(1, 31))
    assert losses[30] < losses[1] - 0.3
    assert max(run.saved()) == 30
    helm("test", "my-run", "--timeout", "180s", timeout=200)
    helm("uninstall", "my-run", "--wait", "--timeout", "60s")
    kinds = "all,secrets,configmaps,networkpolicies,serviceaccounts,roles,rolebindings"
    labelled = lambda kinds, label: bed.get(kinds, "-n", space, "-l", label)["items"]  # noqa: E731
    is_gone = lambda: (  # noqa: E731
        not labelled(kinds, "app.kubernetes.io/name=orch") and not labelled("pods", "orch.dev/run")
    )
    bed.wait(is_gone, 120, "end of everything of the release")


@pytest.mark.full
def test_a_release_trains_as_a_submission_does(orch, helm, undisturbed):
    run = installed(orch, helm)
    complete(run)
    assert run.steps() == pytest.approx(undisturbed, abs=1e-9)
    helm("uninstall", "my-run", "--wait", "--timeout", "60s")
