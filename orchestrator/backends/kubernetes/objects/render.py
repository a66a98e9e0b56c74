"""Renders a run as Kubernetes objects. Pure and golden-tested: the same run gives the same objects.

ConfigMap (request, packed plan, configuration, topology) · Secret (key, passed variables) ·
headless Service · Job or JobSet. The Job comes last, so a submission that breaks off before it has
started nothing.
"""

from __future__ import annotations

import base64
from pathlib import PurePosixPath

import msgspec
from msgspec import Struct, structs

from orchestrator.backends.kubernetes import names
from orchestrator.backends.kubernetes.names import JsonObject, object_name, standard_labels
from orchestrator.backends.kubernetes.options import KubernetesOptions
from orchestrator.cluster.model import Topology
from orchestrator.errors import OrchError
from orchestrator.plan.document import Plan
from orchestrator.plan.exits import Exit
from orchestrator.run.request import AgentCommand, LaunchRequest, to_bytes

from .gang import group_object, job_annotations, job_labels, join_gang
from .node_affinity import ChosenNodes, kueue_annotations, kueue_labels
from .payload import pack_plan, pack_topology
from .pod import grace_seconds, pod_failure_policy, pod_template

MOST_BYTES = 1 << 20  # sum of a ConfigMap's or Secret's values (apiserver validation)
NO_KEY = "drawn when the run is submitted"


class Manifest(Struct, frozen=True, kw_only=True):
    """Everything that the objects depend on."""

    request: LaunchRequest  # as submitted; the pods get it with their own paths
    plan: Plan
    options: KubernetesOptions
    config: bytes
    namespace: str = ""  # "": the one that the objects are applied to
    key: str = NO_KEY  # hex
    environment: dict[str, str] = {}  # values of the variables that were passed on
    topology: Topology | None = None  # all nodes that pods may be placed on, if known
    chosen: ChosenNodes | None = None
    #: hostname labels of excluded nodes; None: nobody has looked them up
    excluded: tuple[str, ...] | None = None
    submission: str = ""  # the same for a repeated submission of one run
    generation: int = 0  # number of restarts by `resume` or `resize`
    train_run: str = ""  # uid of the TrainRun that owns the objects
    gated: bool = False  # its controller chooses each pod's node
    environment_secret: str = ""  # a Secret with more variables
    sizes: dict[int, Plan] = {}  # an elastic run's plan of every size

    @property
    def name(self) -> str:
        return object_name(
            self.request.run_id,
            len(self.request.agents),
            self.options.kind,
        )


def render(run: Manifest) -> list[JsonObject]:
    """Returns the objects in the order in which they are sent. OrchError (65) if something does not
    fit Kubernetes."""
    if run.options.image is None:
        raise OrchError(
            "backend.options.image is not set: the image that holds orch and torch; see"
            " docs/kubernetes.md",
            Exit.CONFIG,
        )
    objects = [secret(run), _config_map(run)]
    if run.options.kind == "job":  # JobSet makes its own
        objects.append(_service(run))
    if run.options.network_policy:
        objects.append(_network_policy(run))
    if group := group_object(run.options, run.name, together(run), _metadata(run)):
        objects.append(group)
    return [*objects, _job_set(run) if run.options.kind == "jobset" else _job(run)]


def to_yaml(objects: list[JsonObject]) -> str:
    """Writes one document per object, keys in their order."""
    import yaml

    return yaml.safe_dump_all(
        objects,
        sort_keys=False,
        width=120,
        explicit_start=True,
    )


def pod_request(
    request: LaunchRequest,
    plan: Plan,
    options: KubernetesOptions,
) -> LaunchRequest:
    """Returns the request as the pods read it: with their paths and their interpreter, without the
    submitter's folders."""
    run_dir = str(PurePosixPath(names.RUNS, request.run_id))
    worker = request.worker
    if worker.bundled:
        argv = [
            options.python,
            "-P",
            "-m",
            "trainer",
            "--plan",
            f"{run_dir}/plan.json",
        ]
        worker = structs.replace(worker, argv=argv, cwd=run_dir)
    elif request.code.packed:
        folder = PurePosixPath(names.CODE, request.run_id, request.code.subfolder)
        worker = structs.replace(worker, cwd=str(folder))
    else:
        worker = structs.replace(worker, cwd=".")  # where the image starts process 1
    code = request.code
    if not code.packed:
        code = structs.replace(
            code,
            kind="none",
            root="",
            holds_orch=False,
        )
    environment = structs.replace(
        request.environment,
        names=[],
        path_first=[],
        python_path_first=[],
    )
    policy = structs.replace(
        request.policy,
        grace_s=float(grace_seconds(plan, options, request.policy.grace_s)),
    )
    return structs.replace(
        request,
        run_dir=run_dir,
        discovery_dir=f"{run_dir}/metrics.sd",
        agents=[AgentCommand(node=agent.node, argv=[]) for agent in request.agents],
        worker=worker,
        environment=environment,
        policy=policy,
        code=code,
        files=[],
        # An elastic run needs a folder that its pods share. Without one a Job has one size, and
        # `orch resize` creates another Job.
        sizes=elastic_sizes(request, options),
    )


def elastic_sizes(request: LaunchRequest, options: KubernetesOptions) -> list[int]:
    """Returns the sizes between which a run changes while its pods live, largest first; [] if it
    has one size."""
    sizes = [size for size in request.sizes if size <= len(request.agents)]
    return sizes if options.claim and len(sizes) > 1 else []


def together(run: Manifest) -> int:
    """Returns the number of pods that must be placed for the run to start."""
    return min(elastic_sizes(run.request, run.options) or [len(run.request.agents)])


# ------------------------------------------------------------------------------------ small objects


def _metadata(run: Manifest, **annotations: str) -> JsonObject:
    labels = standard_labels(run.request.run_id) | run.options.labels
    metadata: JsonObject = {"name": run.name}
    if run.namespace:
        metadata["namespace"] = run.namespace
    metadata["labels"] = labels
    all_annotations = {names.SUBMISSION: run.submission} if run.submission else {}
    all_annotations |= dict(run.options.annotations) | annotations
    if all_annotations:
        metadata["annotations"] = all_annotations
    if run.train_run:
        train_run = {
            "apiVersion": f"{names.GROUP}/{names.VERSION}",
            "kind": names.KIND,
            "name": run.request.run_id,
            "uid": run.train_run,
            "controller": True,
        }
        metadata["ownerReferences"] = [train_run]
    elif (owner := run.options.owner) and owner.uid:
        metadata["ownerReferences"] = [
            {"apiVersion": "v1", "kind": "ConfigMap", "name": owner.name, "uid": owner.uid}
        ]
    return metadata


def secret(run: Manifest) -> JsonObject:
    """Returns the run's first object, which does not depend on its nodes."""
    values = {
        "key": run.key,
        "environment.json": msgspec.json.encode(run.environment, order="sorted").decode(),
    }
    _check_size("Secret", sum(map(len, values.values())))
    body = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(run),
        "type": "Opaque",
    }
    if run.key == NO_KEY:
        return {**body, "stringData": values}
    encoded = {name: base64.b64encode(value.encode()).decode() for name, value in values.items()}
    return {**body, "data": encoded}


def _config_map(run: Manifest) -> JsonObject:
    request = to_bytes(pod_request(run.request, run.plan, run.options)).decode()
    binary = {"plan.bin": pack_plan(run.plan)}
    if elastic_sizes(run.request, run.options):
        binary |= {f"plan.nodes{size}.bin": pack_plan(plan) for size, plan in run.sizes.items()}
    if run.topology is not None:
        binary["topology.bin"] = pack_topology(run.topology)
    texts = {"request.json": request, "config.yaml": run.config.decode()}
    _check_size(
        "ConfigMap",
        sum(map(len, texts.values())) + sum(map(len, binary.values())),
    )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(run),
        "data": texts,
        "binaryData": {name: base64.b64encode(raw).decode() for name, raw in binary.items()},
    }


def _check_size(kind: str, size: int) -> None:
    if size > MOST_BYTES:
        raise OrchError(
            f"the run's {kind} would hold {size} bytes, Kubernetes takes {MOST_BYTES}", Exit.CONFIG
        )


def _service(run: Manifest) -> JsonObject:
    """Returns the headless Service: it only gives pod 0 its name, before pod 0 is ready, for the
    rendezvous of the pods.

    A Service that selects all pods is expensive: each change of one of 512 pods rewrites the lists
    of their addresses, and the scheduler spreads the pods of a Service by default, which it
    computes for every pod on every node (kube-scheduler, PodTopologySpread's system defaults): 512
    pods took twice as long to bind.
    """
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(run),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {names.RUN: run.request.run_id, names.INDEX: "0"},
            "ports": [
                {"name": "gather", "port": names.RENDEZVOUS_PORT},
                {"name": "control", "port": names.CONTROL_PORT},
            ],
        },
    }


def _network_policy(run: Manifest) -> JsonObject:
    """Allows only the run's own pods to reach its pods. Anything may read metrics: to a policy, a
    Prometheus on its node's network is not a pod. If outgoing traffic is limited, the pods reach
    one another, DNS, and the addresses of the options."""
    own_pods = {"matchLabels": {names.RUN: run.request.run_id}}
    spec: JsonObject = {
        "podSelector": own_pods,
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [{"podSelector": own_pods}]},
            {"ports": [{"port": names.METRICS_PORT, "protocol": "TCP"}]},
        ],
    }
    if run.options.egress is not None:
        spec["policyTypes"].append("Egress")
        # DNS servers are pods, addresses of their nodes, or external machines: only the port names
        # them
        dns = [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]
        spec["egress"] = [{"to": [{"podSelector": own_pods}]}, {"ports": dns}]
        for egress in run.options.egress:
            rule: JsonObject = {"to": [{"ipBlock": {"cidr": egress.cidr}}]}
            if egress.ports:
                rule["ports"] = [{"port": port, "protocol": "TCP"} for port in egress.ports]
            spec["egress"].append(rule)
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(run),
        "spec": spec,
    }


# ------------------------------------------------------------------------------------------ the job


def _job_spec(run: Manifest) -> JsonObject:
    pods = len(run.request.agents)
    options = run.options
    labels = (
        names.pod_labels(run.request.run_id)
        | options.labels
        | {names.GENERATION: str(run.generation)}
    )
    template = pod_template(
        run.name,
        run.plan,
        options,
        grace_seconds(run.plan, options, run.request.policy.grace_s),
        labels=labels,
        annotations=dict(options.annotations) | kueue_annotations(run.plan, options),
        chosen=run.chosen,
        subdomain=options.kind == "job",
        excluded=run.excluded,
        packed=run.request.code.packed or None,
    )
    containers = {container["name"]: container for container in template["spec"]["containers"]}
    agent = containers[names.CONTAINER]
    ending: JsonObject = {}
    if elastic_sizes(run.request, run.options):  # it does not wait for pods that found no node
        ending["successPolicy"] = {"rules": [{"succeededCount": 1}]}
        source = {"fieldRef": {"fieldPath": f"metadata.annotations['{names.TOGETHER}']"}}
        agent["env"] = [*agent["env"], {"name": "ORCH_TOGETHER", "valueFrom": source}]
    if run.environment_secret:
        agent.setdefault("envFrom", []).append({"secretRef": {"name": run.environment_secret}})
    join_gang(template, options, run.name)
    if run.gated:
        template["spec"]["schedulingGates"] = [{"name": names.GATE}]
    return {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        "backoffLimit": options.max_pod_failures,
        # each pod is retried until it has failed that often itself
        "backoffLimitPerIndex": options.max_pod_failures,
        "maxFailedIndexes": 0,
        "podReplacementPolicy": "Failed",  # never two pods of one index
        "podFailurePolicy": pod_failure_policy(),
        **ending,
        "template": template,
    }


def _main_metadata(run: Manifest) -> JsonObject:
    summary = " ".join(f"{key}={value}" for key, value in run.request.summary.items())
    annotations = {names.PLAN: run.plan.hash, names.SUMMARY: summary}
    if run.chosen:
        annotations[names.NODES] = ",".join(run.chosen.nodes)
    metadata = _metadata(
        run,
        **annotations,
        **job_annotations(run.options, together(run)),
    )
    metadata["labels"] = (
        metadata["labels"] | {names.GENERATION: str(run.generation)} | kueue_labels(run.options)
    )
    metadata["labels"] |= job_labels(run.options)
    return metadata


def _ending(run: Manifest) -> JsonObject:
    ending: JsonObject = {}
    if run.options.ttl_s is not None:
        ending["ttlSecondsAfterFinished"] = run.options.ttl_s
    if run.options.queue is not None:
        # until Kueue admits it; Kueue's webhook sets the same if it is installed
        ending["suspend"] = True
    return ending


def _job(run: Manifest) -> JsonObject:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _main_metadata(run),
        "spec": {**_ending(run), **_job_spec(run)},
    }


def _job_set(run: Manifest) -> JsonObject:
    replicated = {
        "name": names.JOB_OF_SET,
        "replicas": 1,
        "template": {"spec": _job_spec(run)},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _main_metadata(run),
        "spec": {
            **_ending(run),
            "network": {
                "enableDNSHostnames": True,
                "subdomain": run.name,
                "publishNotReadyAddresses": True,
            },
            "failurePolicy": {"maxRestarts": 0},  # the Job inside counts for itself
            "replicatedJobs": [replicated],
        },
    }
