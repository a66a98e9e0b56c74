"""What may be added to a bed: simulated nodes, Kueue, JobSet. Controllers run as processes of the
bed."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.beds.base import ROOT

from . import bed_conf as conf
from .building import module_folder, program

if TYPE_CHECKING:
    from .bed import Bed

_CONVERTED = ("clusterqueues", "localqueues", "cohorts", "workloads", "multikueueclusters")
_WATCHED = {"jobs", "jobsets", "clusterqueues", "resourceflavors", "workloads", "cohorts"}


def simulated(bed: Bed) -> None:
    """`bed.shape.simulated` nodes of 8 GPUs, four under a leaf, sixteen leaves under a spine, and
    who plays kubelet."""
    argv = [sys.executable, "-m", "tests.beds.kubernetes.simulate"]
    env = {"PYTHONPATH": str(ROOT)}
    bed.run(*argv, "make", str(bed.shape.simulated), env=env, timeout=300)
    bed.daemon("simulate", argv[0], *argv[1:], "serve", env=env)
    # Each comes with the taint of one that is not ready, which the controllers take away, one after
    # the other.
    taints = ("get", "nodes", "-o", "jsonpath={.items[*].spec.taints[*].key}")
    bed.wait(
        lambda: not bed.kubectl(*taints).strip(),
        300,
        "nodes without taints",
        "kube-controller-manager",
    )


# ------------------------------------------------------------------------------------------ Kueue


def kueue(bed: Bed) -> None:
    config = module_folder("kueue", "sigs.k8s.io/kueue") / "config" / "components"
    certificate(bed, "kueue")
    overlay = bed.home / "etc"
    for subfolder in ("upper", "work"):
        (overlay / subfolder).mkdir(parents=True, exist_ok=True)
    layers = f"lowerdir=/etc,upperdir={overlay}/upper,workdir={overlay}/work"
    bed.run("mount", "-t", "overlay", "overlay", "-o", layers, "/etc")  # of the bed alone
    copy = (
        f"mkdir -p /etc/kueue/metrics/certs && cp {bed.home}/kueue-certs/*"
        " /etc/kueue/metrics/certs/"
    )
    bed.run("sh", "-c", copy)
    crds = _crds("kueue")
    for crd in crds:
        if crd["spec"]["names"]["plural"] in _CONVERTED:
            hook = {
                "clientConfig": _client(bed, "kueue", 9443, "/convert"),
                "conversionReviewVersions": ["v1"],
            }
            crd["spec"]["conversion"] = {"strategy": "Webhook", "webhook": hook}
    if not bed.shape.jobset:
        crds += _crds("jobset")
    _make_crds(bed, crds)
    bed.kubectl("create", "namespace", "kueue-system", check=False)
    start_kueue(bed)
    _hooks(bed, "kueue", 9443, config / "webhook" / "manifests.yaml", _WATCHED)


def start_kueue(bed: Bed, own_rates: bool = False) -> None:
    """Its process. `own_rates`: it asks the API server as often as in the configuration that it is
    shipped with."""
    path = _write_configuration(
        bed, "kueue", "kueue.x-k8s.io/v1beta2", 9443, 8081, namespace="kueue-system",
        clientConnection={"qps": 50, "burst": 100} if own_rates else {"qps": 500, "burst": 1000},
        integrations={"frameworks": ["batch/job", "jobset.x-k8s.io/jobset"]},
    )  # fmt: skip
    flags = [f"--config={path}", "--feature-gates=VisibilityOnDemand=false", "--zap-log-level=1"]
    bed.daemon("kueue", program("kueue"), *flags)
    _await_port(bed, 9443, "kueue")


def kueue_kinds(bed: Bed) -> None:
    """Kueue's kinds, without Kueue."""
    _make_crds(bed, _crds("kueue"))


def _crds(tool: str) -> list[dict[str, Any]]:
    bases = module_folder(tool, f"sigs.k8s.io/{tool}") / "config" / "components" / "crd" / "bases"
    return list(_documents(bases.glob("*.yaml")))


def any_kind(group: str, version: str, kind: str) -> dict[str, Any]:
    """A kind whose objects may hold anything."""
    plural = f"{kind.lower()}s"
    anything = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    names = {"kind": kind, "plural": plural, "singular": kind.lower()}
    versions = [{"name": version, "served": True, "storage": True, "schema": anything}]
    spec = {"group": group, "scope": "Namespaced", "names": names, "versions": versions}
    about = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
    return {**about, "metadata": {"name": f"{plural}.{group}"}, "spec": spec}


def jobset(bed: Bed) -> None:
    config = module_folder("jobset", "sigs.k8s.io/jobset") / "config" / "components"
    certificate(bed, "jobset")
    _make_crds(bed, _crds("jobset"))
    metrics = {"bindAddress": "0", "certDir": f"{bed.home}/jobset-certs"}
    path = _write_configuration(
        bed, "jobset", "jobset.x-k8s.io/v1alpha1", 9543, 8082, metrics=metrics
    )
    bed.daemon("jobset", program("jobset"), f"--config={path}")
    _await_port(bed, 9543, "jobset")
    _hooks(bed, "jobset", 9543, config / "webhook" / "manifests.yaml", {"jobsets"})


# ------------------------------------------------------------------------------------------ parts


def certificate(bed: Bed, name: str) -> None:
    folder = bed.home / f"{name}-certs"
    folder.mkdir()
    argv = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "30",
        "-subj",
        "/CN=127.0.0.1",
    ]
    argv += [
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        f"{folder}/tls.key",
        "-out",
        f"{folder}/tls.crt",
    ]
    bed.run(*argv)


def _client(bed: Bed, name: str, port: int, path: str) -> dict[str, str]:
    bundle = base64.b64encode((bed.home / f"{name}-certs" / "tls.crt").read_bytes()).decode()
    return {"url": f"https://127.0.0.1:{port}{path}", "caBundle": bundle}


def _write_configuration(
    bed: Bed, tool: str, api: str, port: int, health: int, **extra_settings: object
) -> Path:
    """Writes the configuration of a controller with webhooks on `port`."""
    settings = {
        "apiVersion": f"config.{api}",
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "webhook": {"port": port, "certDir": f"{bed.home}/{tool}-certs"},
        "metrics": {"bindAddress": "0"},
    }
    (bed.home / f"{tool}.yaml").write_text(json.dumps(settings | extra_settings))
    return bed.home / f"{tool}.yaml"


def _documents(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    import yaml

    loader = getattr(
        yaml, "CSafeLoader", yaml.SafeLoader
    )  # Kueue's kinds take the other one ten seconds
    for path in sorted(paths):
        yield from filter(None, yaml.load_all(path.read_text(), loader))


def _make_crds(bed: Bed, crds: list[dict[str, Any]]) -> None:
    bed.apply(*crds)
    names = [f"crd/{crd['metadata']['name']}" for crd in crds]
    wait = (str(program("kubectl")), "wait", "--for=condition=Established", "--timeout=60s", *names)
    # kubectl does not wait for conditions to begin with: it fails on a kind that has none yet
    bed.wait(
        lambda: bed.run(*wait, check=False, timeout=90).returncode == 0,
        180,
        "kinds",
        "kube-apiserver",
    )


def _hooks(bed: Bed, name: str, port: int, manifest: Path, resources: set[str]) -> None:
    """Webhooks by URL, and only for what these tests use: a hook on all pods would slow every one
    of them."""
    hook_configurations = []
    for body in _documents([manifest]):
        hooks = [
            hook
            for hook in body["webhooks"]
            if {r for rule in hook["rules"] for r in rule["resources"]} & resources
        ]
        for hook in hooks:
            hook["clientConfig"] = _client(bed, name, port, hook["clientConfig"]["service"]["path"])
        hook_configurations.append(
            {**body, "metadata": {"name": f"{name}-{body['metadata']['name']}"}, "webhooks": hooks}
        )
    bed.apply(*hook_configurations)


def _await_port(bed: Bed, port: int, log: str) -> None:
    probe = ("bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{port}")
    bed.wait(lambda: bed.run(*probe, check=False).returncode == 0, 180, f"port {port}", log)


# ------------------------------------------------------------------------------------------ queues


def queues(
    bed: Bed,
    quota: Mapping[str, str],
    levels: Iterable[str],
    selector: Mapping[str, str],
    name: str = "main",
    namespace: str = "default",
) -> None:
    """A topology (none without levels), a flavor over the selected nodes, a ClusterQueue with this
    quota that preempts, a LocalQueue."""
    kueue_api = {"apiVersion": "kueue.x-k8s.io/v1beta2"}
    resources = [{"name": key, "nominalQuota": amount} for key, amount in quota.items()]
    group = {"coveredResources": list(quota), "flavors": [{"name": name, "resources": resources}]}
    named = [{"nodeLabel": level} for level in levels]
    topology = {
        **kueue_api,
        "kind": "Topology",
        "metadata": {"name": name},
        "spec": {"levels": named},
    }
    bed.apply(
        *([topology] if named else ()),
        {**kueue_api, "kind": "ResourceFlavor", "metadata": {"name": name},
         "spec": {"nodeLabels": dict(selector), **({"topologyName": name} if named else {})}},
        {**kueue_api, "kind": "ClusterQueue", "metadata": {"name": name},
         "spec": {"namespaceSelector": {}, "resourceGroups": [group],
                  "preemption": {"withinClusterQueue": "LowerPriority"}}},
        {**kueue_api, "kind": "LocalQueue", "metadata": {"name": name, "namespace": namespace},
         "spec": {"clusterQueue": name}},
        {**kueue_api, "kind": "WorkloadPriorityClass", "metadata": {"name": "high"}, "value": 1000},
    )  # fmt: skip


# ------------------------------------------------------------------------------------------ network
#     policies


def network_policies(bed: Bed) -> None:
    """Enforces them, by the reference implementation of SIG Network. Pods are on one bridge, whose
    packets the kernel shows to its filters where it is told to."""
    account = "/run/secrets/kubernetes.io/serviceaccount"
    bed.run("sh", "-c", f"mkdir -p {account} && printf %s {conf.TOKENS['admin']} > {account}/token && "
            f"printf default > {account}/namespace && cp {bed.home}/pki/apiserver.crt {account}/ca.crt && "
            "sysctl -qw net.bridge.bridge-nf-call-iptables=1")  # fmt: skip
    host, port = conf.API.removeprefix("https://").split(":")
    env = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
    flags = ["--disable-nri", "--hostname-override=node-0", "--nfqueue-id=98", "--v=2"]
    bed.daemon("policies", program("kube-network-policies"), *flags, env=env)
