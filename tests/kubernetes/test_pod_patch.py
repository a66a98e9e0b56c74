"""`backend.options.pod`: what is merged, what is refused and in which words, and what the scheduler
counts of it."""

from __future__ import annotations

import contextlib
import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.backends.kubernetes.fitting import pod_needs
from orchestrator.backends.kubernetes.objects.pod import pod_template
from orchestrator.backends.kubernetes.objects.pod_patch import patched
from orchestrator.backends.kubernetes.options import read_options
from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from tests.beds.bundles import refusal
from tests.beds.plans import make_plan

PLAN = make_plan(tp=2, dp=2, nodes=2)


def template(pod: dict | None = None) -> dict:
    options = read_options({"image": "x", "pod": pod or {}})
    return pod_template("run", PLAN, options, 60, {"a": "b"}, {}, None, subdomain=True)


def agent(body: dict) -> dict:
    (container,) = body["spec"]["containers"]
    return container


def test_mappings_merge_named_entries_merge_and_null_deletes():
    spec = {
        "securityContext": {"fsGroup": 7, "runAsGroup": None},
        "volumes": [
            {"name": "work", "hostPath": {"path": "/nvme"}},
            {"name": "models", "emptyDir": {}},
        ],
        "containers": [
            {
                "name": "agent",
                "env": [{"name": "X", "value": "1"}],
                "volumeMounts": [{"mountPath": "/tmp", "name": "models"}],
            }
        ],
    }
    plain = template()
    merged = template({"spec": spec})
    assert merged["spec"]["securityContext"] == {
        name: value
        for name, value in (plain["spec"]["securityContext"] | {"fsGroup": 7}).items()
        if name != "runAsGroup"
    }
    volumes = {entry["name"]: entry for entry in merged["spec"]["volumes"]}
    assert (
        volumes["work"] == {"name": "work", "hostPath": {"path": "/nvme"}}
        and "emptyDir" in volumes["models"]
    )
    assert [entry["name"] for entry in merged["spec"]["volumes"]] == [
        "work",
        "shm",
        "input",
        "models",
    ]
    assert agent(merged)["env"] == [*agent(plain)["env"], {"name": "X", "value": "1"}]
    mounts = {entry["mountPath"]: entry["name"] for entry in agent(merged)["volumeMounts"]}
    assert mounts == {
        entry["mountPath"]: entry["name"] for entry in agent(plain)["volumeMounts"]
    } | {"/tmp": "models"}
    assert agent(merged)["command"] == agent(plain)["command"]


def test_an_entry_is_taken_out():
    merged = template(
        {
            "spec": {
                "topologySpreadConstraints": [
                    {"topologyKey": "kubernetes.io/hostname", "$patch": "delete"}
                ]
            }
        }
    )
    assert (
        template()["spec"]["topologySpreadConstraints"]
        and merged["spec"]["topologySpreadConstraints"] == []
    )


def test_pods_on_the_host_network_still_find_pod_0_by_name():
    assert (
        template({"spec": {"hostNetwork": True}})["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
    )
    own_policy = {"spec": {"hostNetwork": True, "dnsPolicy": "None"}}
    assert (
        template(own_policy)["spec"]["dnsPolicy"] == "None"
        and "dnsPolicy" not in template()["spec"]
    )


@pytest.mark.parametrize(
    ("pod", "reason"),
    [
        ({"spce": {}}, "pod.spce is not a part of a pod template; did you mean 'spec'"),
        ({"metadata": {"name": "x"}}, "pod.metadata.name is not for a pod template"),
        ({"spec": {"runtimeClasName": "x"}}, "is not a field of Kubernetes; did you mean 'runtimeClassName'"),
        ({"spec": {"runtimeClassName": 3}}, "spec.runtimeClassName must be str, not 3"),
        ({"spec": {"hostNetwork": "yes"}}, "spec.hostNetwork must be true or false, not 'yes'"),
        ({"spec": {"priority": True}}, "spec.priority must be int, not True"),
        ({"spec": None}, "pod.spec cannot be deleted: the run needs it"),
        ({"spec": {"containers": [{"name": "agent", "env": None}]}}, "agent.env cannot be deleted"),
        ({"spec": {"containers": [{"name": "agent", "env": [{"name": "ORCH_POD", "value": "x"}]}]}}, "find each other"),
        ({"spec": []}, "pod.spec must be a mapping"),
        ({"spec": {"containers": {"name": "agent"}}}, "spec.containers must be a list"),
        ({"spec": {"containers": ["agent"]}}, "spec.containers.0 must be a mapping"),
        ({"spec": {"containers": [{"env": []}]}}, "spec.containers.0 needs 'name'"),
        ({"spec": {"containers": [{"name": "agent", "envv": []}]}}, "spec.containers.agent.envv is not a field"),
        ({"spec": {"containers": [{"name": "agent", "command": ["sh"]}]}}, "cannot be set: it starts the agent"),
        ({"spec": {"containers": [{"name": "agent", "image": "y"}]}}, "option of its own: backend.options.image"),
        ({"spec": {"containers": [{"name": "agent", "$patch": "delete"}]}}, "cannot be deleted: the run needs it"),
        ({"spec": {"containers": [{"name": "logs", "image": "y"}]}}, "initContainers with restartPolicy: Always"),
        ({"spec": {"volumes": [{"name": "input", "emptyDir": {}}]}}, "the run's plan and key are there"),
        ({"spec": {"volumes": [{"name": "input", "$patch": "delete"}]}}, "cannot be deleted: the run needs it"),
        ({"spec": {"tolerations": []}}, "spec.tolerations has an option of its own: backend.options.tolerations"),
        ({"spec": {"restartPolicy": None}}, "spec.restartPolicy cannot be set: the run decides how its pods end"),
        ({"spec": {"affinity": {"nodeAffinity": {}}}}, "nodes are chosen by the plan"),
        ({"metadata": {"labels": {"a": "b"}}}, "has an option of its own: backend.options.labels"),
        ({"spec": {"containers": [{"name": "agent", "resources": {"limits": {"a/b": []}}}]}}, "limits.a/b must be str"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_its_place(pod, reason):
    with refusal(reason, Exit.CONFIG):
        template(pod)


RULE = {"key": "rack", "operator": "NotIn", "values": ["r7"]}
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def kept_off(*terms: object, **extra_rules: object) -> dict:
    return {
        "spec": {
            "affinity": {
                "nodeAffinity": {REQUIRED: {"nodeSelectorTerms": list(terms)}} | extra_rules
            }
        }
    }


def in_queue(pod: dict, **extra_options: object) -> dict:
    options = read_options({"image": "x", "queue": "q", "pod": pod} | extra_options)
    return pod_template("run", PLAN, options, 60, {}, {}, None, subdomain=True)["spec"].get(
        "affinity", {}
    )


def test_where_a_queue_places_the_run_a_site_may_leave_nodes_out():
    rack = {"matchExpressions": [RULE]}
    broken = {"key": "broken", "operator": "DoesNotExist"}
    assert in_queue(kept_off(rack)) == {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [rack]}}}
    not_broken = {"matchExpressions": [broken, RULE]}
    excluded = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["n1"]}
    terms = in_queue(kept_off(rack, not_broken), exclude=["n1"])["nodeAffinity"][REQUIRED][
        "nodeSelectorTerms"
    ]
    assert [term["matchExpressions"] for term in terms] == [
        [excluded, RULE],
        [excluded, broken, RULE],
    ]
    apart = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    both = kept_off(rack)
    both["spec"]["affinity"] |= apart
    assert in_queue(both) == apart | {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [rack]}}}


@pytest.mark.parametrize(
    ("pod", "reason"),
    [
        (
            kept_off({"matchExpressions": [RULE | {"operator": "In"}]}),
            "operator must be NotIn or DoesNotExist",
        ),
        (
            kept_off({"matchExpressions": [RULE, RULE | {"operator": "Exists"}]}),
            "backend.options.node_selector",
        ),
        (
            kept_off({"matchExpressions": [RULE], "matchFields": []}),
            "must have matchExpressions and nothing else",
        ),
        (kept_off({"matchExpressions": []}), "must have matchExpressions and nothing else"),
        (kept_off(), "nodeSelectorTerms must be a list of terms"),
        (kept_off("r7"), "nodeSelectorTerms.0 must be a mapping"),
        (
            kept_off({"matchExpressions": [{"key": "rack", "opertor": "NotIn"}]}),
            "did you mean 'operator'",
        ),
        (
            kept_off(preferredDuringSchedulingIgnoredDuringExecution=[]),
            "only requiredDuringScheduling",
        ),
        ({"spec": {"affinity": {"nodeAffinity": [RULE]}}}, "nodeAffinity must be a mapping"),
    ],
)
def test_and_nothing_else_of_where_it_goes(pod, reason):
    with refusal(reason, Exit.CONFIG):
        in_queue(pod)


def test_the_scheduler_counts_what_the_patch_asks_for():
    spec = {"containers": [{"name": "agent", "resources": {"limits": {"vendor/nic": 2}}}]}
    spec["initContainers"] = [
        {
            "name": "logs",
            "image": "x",
            "restartPolicy": "Always",
            "resources": {"requests": {"cpu": "500m"}},
        },
        {"name": "once", "image": "x", "resources": {"requests": {"cpu": "64"}}},
    ]
    plain = pod_needs(PLAN, read_options({"image": "x"})).requests
    requests = pod_needs(PLAN, read_options({"image": "x", "pod": {"spec": spec}})).requests
    assert requests == plain | {"vendor/nic": 2.0, "cpu": 64.5}  # `once` runs alone, beside `logs`
    spec["initContainers"].pop()
    requests = pod_needs(PLAN, read_options({"image": "x", "pod": {"spec": spec}})).requests
    assert requests == plain | {"vendor/nic": 2.0, "cpu": plain["cpu"] + 0.5}


WORDS = st.sampled_from(["name", "env", "volumes", "containers", "$patch", "hostNetwork"])
NESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=12,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(["metadata", "spec", "x"]), NESTED, max_size=2))
def test_any_patch_is_merged_or_refused_and_changes_nothing_else(patch):
    plain = template()
    before = copy.deepcopy(plain)
    original = copy.deepcopy(patch)
    with contextlib.suppress(OrchError):
        patched(plain, patch)
    assert (plain, patch) == (before, original)
