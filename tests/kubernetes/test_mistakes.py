"""What a user of a real cluster gets wrong, and how it is told: one line with what to do, and the
exit code.

What the API server refuses ends the submission; what only shows later is the reason that `orch
list` and `status` give.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from orchestrator.plan import Exit
from tests.beds.kubernetes import addons
from tests.beds.kubernetes import bed_conf as conf
from tests.beds.kubernetes.runs import SHORT, TINY, Orch

pytestmark = [pytest.mark.kubernetes, pytest.mark.process, pytest.mark.slow]
SMALL = (*TINY, *SHORT)
GPUS = ("cluster=h100x8", "model=llama3_8b", "parallel=tp8_zero1")
LITTLE = {"cpus": 0.05}  # beside whatever else runs
#: Sent without complaint: options, the words of the job, and what is told about it some seconds
#: later: why, what to do.
LATER: dict[str, tuple[dict, tuple[str, ...], str, str]] = {
    "absent-image": (
        {"image": "nowhere.invalid/orch:1", "pull_policy": "Always"}, SMALL,
        "image cannot be pulled", "backend.options.image, pull_secrets",
    ),
    "no-such-node": (
        {"node_selector": {"no": "where"}}, SMALL,
        "match Pod's node affinity/selector", "; backend.options.node_selector names",
    ),
    "absent-claim": (
        {"claim": "absent"}, SMALL,
        'persistentvolumeclaim "absent" not found', "; backend.options.claim and volumes name",
    ),
    "baseline": ({"security": "baseline"}, SMALL, "violates PodSecurity", "; backend.options.security must match"),
    "larger-than-the-queue": (
        {"queue": "small", "cpus": 0.8}, SMALL,
        "insufficient quota for cpu", "; the queue never gives that much",
    ),
    "queue-without-gpus": (
        {"queue": "small"}, GPUS, "nvidia.com/gpu unavailable in ClusterQueue", "; the queue has none of that",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def user(real_bed, tmp_path_factory) -> Iterator[Orch]:
    """A user in a namespace under the restricted profile, with a queue that is too small for
    everything here."""
    with Orch.in_new_namespace(real_bed, tmp_path_factory.mktemp("user")) as user:
        addons.queues(
            real_bed, {"cpu": "1", "memory": "8Gi"}, ("kubernetes.io/hostname",), {"orch.test/kind": "real"},
            "small", user.namespace,
        )  # fmt: skip
        user.options = {**user.options, **LITTLE}
        yield user


def refusal(
    user: Orch, *overrides: str, options: dict | None = None, env: dict | None = None
) -> tuple[int, str]:
    """(exit code, what was said) of a submission."""
    done = user(*user.submission(options), *overrides, code=None, env=env)
    error_lines = [line for line in done.stderr.splitlines() if "warning: " not in line]
    assert len(error_lines) == 1, done.stderr
    return done.returncode, error_lines[0]


@pytest.mark.full
def test_what_only_shows_later_is_the_reason_of_waiting(user):
    sent = {
        name: user.submit(*overrides, options=options).id
        for name, (options, overrides, *_) in LATER.items()
    }
    reasons: dict[str, str] = {}

    def told() -> bool:
        for listed_run in json.loads(user("list", "--json", "--all").stdout):
            reasons[listed_run["state"]["run_id"]] = (
                f"{listed_run['state']['state']}: {listed_run['state']['reason']}"
            )
        return all(
            phrase in reasons[run_id] for name, run_id in sent.items() for phrase in LATER[name][2:]
        )

    try:
        user.bed.wait(told, 300, "all reasons")
    finally:
        print(json.dumps({name: reasons.get(run_id) for name, run_id in sent.items()}, indent=1))
        user.bed.kubectl(
            "delete", "jobs", "--all", "-n", user.namespace, "--grace-period=1", "--wait=false"
        )
    assert all(reason.startswith("pending") and "\n" not in reason for reason in reasons.values())


@pytest.mark.full
def test_nodes_without_gpus_are_no_room(user):
    code, message = refusal(user, *GPUS)
    assert code == Exit.CAPACITY
    assert "0 of 2 nodes are free with 8 GPUs" in message


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"queue": "smal"}, "no LocalQueue 'smal' in namespace {space}; did you mean 'small'?"),
        (
            {"queue": "small", "workload_priority": "hihg"},
            "no WorkloadPriorityClass 'hihg'; did you mean 'high'?",
        ),
        ({"namespace": "nowhere"}, 'namespaces "nowhere" not found'),
    ],
)
def test_names_that_are_not_there_are_refused(user, options, says):
    code, message = refusal(user, *SMALL, options=options)
    assert code == Exit.CONFIG
    assert says.format(space=user.namespace) in message


@pytest.mark.full
def test_a_quota_on_jobs_and_one_on_pods(user):
    """The first refuses the submission, the second lets the Job in and none of its pods."""
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"namespace": user.namespace}}
    hard = {"jobs": {"count/jobs.batch": "0"}, "pods": {"pods": "0"}}
    sized = {name: {**quota, "metadata": {**quota["metadata"], "name": name}, "spec": {"hard": hard[name]}}
             for name in hard}  # fmt: skip

    def in_force(name: str) -> bool:
        return (
            user.bed.get("resourcequota", name, "-n", user.namespace).get("status", {}).get("hard")
            == hard[name]
        )

    user.bed.apply(sized["jobs"])
    user.bed.wait(lambda: in_force("jobs"), 120, "quota")
    code, message = refusal(user, *SMALL)
    user.bed.kubectl("delete", "resourcequota", "jobs", "-n", user.namespace)
    assert code == Exit.CAPACITY
    assert "exceeded quota: jobs" in message
    user.bed.apply(sized["pods"])
    user.bed.wait(lambda: in_force("pods"), 120, "quota")
    run = user.submit(*SMALL)
    run.until("the quota's words", lambda: "exceeded quota: pods" in (run.state().reason or ""))
    user("cancel", run.id, "--force")
    user.bed.kubectl("delete", "resourcequota", "pods", "-n", user.namespace)


@pytest.mark.parametrize(
    ("who", "exit", "says"),
    [
        ({"user": "user"}, Exit.SECURITY, "the rule to add: {apiGroups:"),
        ({"user": "somebody-whose-token-has-expired"}, Exit.SECURITY, "log in again"),
        # Eight seconds of tries; test_api_server.py has the same words of the same server.
        pytest.param(
            {"server": "https://10.77.0.1:1"},
            Exit.CAPACITY,
            "no answer from the cluster",
            marks=pytest.mark.full,
        ),
        (None, Exit.CAPACITY, "no Kubernetes cluster is configured"),
    ],
)
def test_whoever_may_not_or_cannot_reach_the_cluster(user, who, exit, says):
    path = user.home / "other.kubeconfig"
    path.write_text(conf.kubeconfig(**who) if who else "")
    code, message = refusal(
        user, *SMALL, env={"KUBECONFIG": str(path if who else user.home / "absent")}
    )
    assert code == exit
    assert says in message
