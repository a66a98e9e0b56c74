"""`backend.options.pod`: a site's own fields of the pod, merged into the one that the plan asks
for. Pure.

A strategic merge as `kubectl patch` does it: mappings merge, null deletes, lists of named entries
merge by that name ({"$patch": "delete"} takes one out), other lists are replaced. A volume with a
source replaces the one of its name. Every field and type is checked against the models of the
installed kubernetes package, so that a wrong word is refused before anything has been sent.

Source: https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/
and patchMergeKey of each list in the API's reference.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from orchestrator.backends.kubernetes.names import CONTAINER, INPUT, OWN_FIELDS, REQUIRED
from orchestrator.errors import OrchError, check_installed, did_you_mean
from orchestrator.plan.exits import Exit

PLACE = "backend.options.pod"
NODE_AFFINITY = "spec.affinity.nodeAffinity"
#: List -> the field by which two of its entries are the same one.
_KEYS = {
    **dict.fromkeys(
        ("containers", "initContainers", "volumes", "env", "resourceClaims", "claims"), "name"
    ),
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
_ENDS = "the run decides how its pods end"
_NAMES = "the run's pods find each other by it"
_PLACED = "nodes are chosen by the plan"
_INPUT = "the run's plan and key lie there"
#: What may be added to and not taken away.
_NEEDED = {"metadata", "spec", "spec.containers", "spec.volumes"}
_NEEDED |= {f"spec.containers.{CONTAINER}.{name}" for name in ("env", "ports", "volumeMounts")}
#: Field of the pod, or of the agent's container -> why it is refused. An option's name: there is
#: one for it.
_REFUSED = {
    "metadata.labels": "labels",
    "spec.nodeSelector": "node_selector",
    "spec.tolerations": "tolerations",
    "spec.imagePullSecrets": "pull_secrets",
    "spec.serviceAccountName": "service_account",
    "spec.priorityClassName": "priority_class",
    f"spec.containers.{CONTAINER}.image": "image",
    f"spec.containers.{CONTAINER}.imagePullPolicy": "pull_policy",
    **dict.fromkeys(
        ("spec.restartPolicy", "spec.terminationGracePeriodSeconds", "spec.activeDeadlineSeconds"),
        _ENDS,
    ),
    **dict.fromkeys(("spec.hostname", "spec.subdomain", "spec.hostnameOverride"), _NAMES),
    "spec.nodeName": _PLACED,
    NODE_AFFINITY: (
        f"{_PLACED}; backend.options.exclude leaves nodes out, and where a queue places the run,"
        " NotIn does"
    ),
    **dict.fromkeys(
        (f"spec.containers.{CONTAINER}.command", f"spec.containers.{CONTAINER}.args"),
        "it starts the agent",
    ),
    "spec.volumes.input": _INPUT,
    f"spec.containers.{CONTAINER}.volumeMounts.{INPUT}": _INPUT,
    **dict.fromkeys((f"spec.containers.{CONTAINER}.env.{name}" for name in OWN_FIELDS), _NAMES),
    "spec.ephemeralContainers": "Kubernetes takes none in a Job",
}


def patched(
    template: dict[str, Any], patch: Mapping[str, Any], in_queue: bool = False
) -> dict[str, Any]:
    """The pod template with the patch in it; the same one without. `in_queue`: a queue chooses the
    nodes, so that the patch may leave some out.

    OrchError (65): a field that Kubernetes does not have, a value of another type, or what the run
    itself needs, each with its place; no kubernetes package to tell them by.
    """
    if not patch:
        return template
    check_installed("kubernetes", PLACE)
    kept_off: list[Any] = []
    if in_queue and (affinity := _at(patch, NODE_AFFINITY)) is not None:
        kept_off = _exclusions(affinity)
        patch = _without(patch, NODE_AFFINITY.split("."))
    for name in patch.keys() - {"metadata", "spec"}:
        _refuse(
            name, f"is not a part of a pod template; {did_you_mean(name, ('metadata', 'spec'))}"
        )
    _check(patch, "V1PodTemplateSpec", "")
    for name in patch.get("metadata", {}).keys() - {"annotations"}:
        _refuse(f"metadata.{name}", "is not for a pod template, which takes annotations alone")
    found: dict[str, Any] = _merge(template, patch, "")
    spec = found["spec"]
    if kept_off:
        spec["affinity"] = _with_terms(spec.get("affinity", {}), kept_off)
    for container in spec["containers"]:
        if container["name"] != CONTAINER:
            text = (
                "would live on after the run; put it into initContainers with restartPolicy: Always"
            )
            _refuse(f"spec.containers.{container['name']}", text)
    if spec.get("hostNetwork"):  # else pods could not resolve pod 0's name
        spec.setdefault("dnsPolicy", "ClusterFirstWithHostNet")
    return found


def _at(value: object, path: str) -> object:
    """What stands at that place; None for nothing, or something of another shape on the way."""
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _without(value: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """A copy that lacks what stands there."""
    first, *rest = path
    if not rest:
        return {name: one for name, one in value.items() if name != first}
    return {**value, first: _without(value[first], rest)}


def _exclusions(affinity: object) -> list[Any]:
    """The terms of a node affinity that leaves nodes out and does nothing else."""
    place = f"{NODE_AFFINITY}.{REQUIRED}"
    for name in _mapping(affinity, NODE_AFFINITY):
        if name != REQUIRED:
            _refuse(
                f"{NODE_AFFINITY}.{name}", f"cannot be set: only {REQUIRED}, which leaves nodes out"
            )
    _check(_at(affinity, REQUIRED), "V1NodeSelector", place)
    terms = _at(affinity, f"{REQUIRED}.nodeSelectorTerms")
    if not isinstance(terms, list) or not terms:
        _refuse(f"{place}.nodeSelectorTerms", "must be a list of terms")
    for index, term in enumerate(terms):
        at = f"{place}.nodeSelectorTerms.{index}"
        rules = _at(term, "matchExpressions")
        if (
            set(_mapping(term, at)) != {"matchExpressions"}
            or not isinstance(rules, list)
            or not rules
        ):
            _refuse(at, "must have matchExpressions and nothing else")
        for rule in rules:
            if rule.get("operator") not in ("NotIn", "DoesNotExist"):
                text = (
                    "operator must be NotIn or DoesNotExist; backend.options.node_selector names"
                    " labels to have"
                )
                _refuse(f"{at}.matchExpressions", text)
    return terms


def _with_terms(affinity: Mapping[str, Any], terms: Sequence[Any]) -> dict[str, Any]:
    """The affinity, where one of these terms must hold beside those that it has."""
    nodes = affinity.get("nodeAffinity", {})
    ours = nodes.get(REQUIRED, {}).get("nodeSelectorTerms") or [{"matchExpressions": []}]
    both = [
        {"matchExpressions": [*a["matchExpressions"], *b["matchExpressions"]]}
        for a in ours
        for b in terms
    ]
    return {**affinity, "nodeAffinity": {**nodes, REQUIRED: {"nodeSelectorTerms": both}}}


def _refuse(place: str, text: str) -> NoReturn:
    raise OrchError(f"{PLACE}{'.' + place if place else ''} {text}", Exit.CONFIG)


# ------------------------------------------------------------------------------------------ types


def _check(value: object, kind: str, place: str) -> None:
    """`kind` as the models write it: str, int, bool, object, List[X], dict(str, X), or the name of
    a model."""
    if reason := _REFUSED.get(place):
        option = re.fullmatch("[a-z_]+", reason)
        _refuse(
            place,
            (
                f"has an option of its own: backend.options.{reason}"
                if option
                else f"cannot be set: {reason}"
            ),
        )
    if value is None and place in _NEEDED:
        _refuse(place, "cannot be deleted: the run needs it")
    if value is None or kind in ("object", "datetime"):
        return
    if inner := re.fullmatch(r"[lL]ist\[(.+)\]", kind):
        _check_list(value, inner[1], place)
    elif inner := re.fullmatch(r"[dD]ict[(\[]str, (.+)[)\]]", kind):
        for name, one in _mapping(value, place).items():
            _check(one, inner[1], f"{place}.{name}")
    elif kind in ("str", "int", "float", "bool"):
        _check_scalar(value, kind, place)
    else:
        _check_model(_mapping(value, place), kind, place)


def _check_list(value: object, kind: str, place: str) -> None:
    if not isinstance(value, list):
        _refuse(place, f"must be a list, not {value!r}")
    key = _KEYS.get(place.rpartition(".")[2])
    for index, entry in enumerate(value):
        name: object = index
        if key is not None:
            name = _mapping(entry, f"{place}.{index}").get(key)
            if not isinstance(name, str | int):
                _refuse(f"{place}.{index}", f"needs {key!r}, by which it is merged")
        if not (isinstance(entry, dict) and entry.get("$patch") == "delete"):
            _check(entry, kind, f"{place}.{name}")
        elif name == CONTAINER or f"{place}.{name}" in _REFUSED:
            _refuse(f"{place}.{name}", "cannot be deleted: the run needs it")


def _check_scalar(value: object, kind: str, place: str) -> None:
    quantity = (
        kind == "str" and re.search(r"\.(requests|limits|capacity)\.[^.]*", place) is not None
    )
    fits = {"str": isinstance(value, str), "bool": isinstance(value, bool)}.get(
        kind,
        isinstance(value, int | (float if kind == "float" else int))
        and not isinstance(value, bool),
    )
    if not fits and not (quantity and isinstance(value, int | float)):
        _refuse(place, f"must be {'true or false' if kind == 'bool' else kind}, not {value!r}")


def _check_model(value: Mapping[str, Any], kind: str, place: str) -> None:
    from kubernetes import client

    model = getattr(client, kind)
    types = {model.attribute_map[name]: one for name, one in model.openapi_types.items()}
    for name, one in value.items():
        if name not in types:
            _refuse(
                f"{place}.{name}".lstrip("."),
                f"is not a field of Kubernetes; {did_you_mean(name, types)}",
            )
        _check(one, types[name], f"{place}.{name}".lstrip("."))


def _mapping(value: object, place: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        _refuse(place, f"must be a mapping, not {value!r}")
    return value


# ---------------------------------------------------------------------------------------- the merge


def _merge(old: Any, new: Any, name: str) -> Any:
    """`name`: of the field whose values these are."""
    if isinstance(old, dict) and isinstance(new, Mapping):
        merged = {
            key: value for key, value in old.items() if key not in new or new[key] is not None
        }
        for key, value in new.items():
            if value is not None:
                merged[key] = _merge(merged.get(key), value, key)
        return merged
    if isinstance(new, Mapping):
        return {key: _merge(None, value, key) for key, value in new.items() if value is not None}
    if isinstance(new, list) and (key := _KEYS.get(name)):
        entries = {entry[key]: entry for entry in old or []}
        for entry in new:
            if entry.get("$patch") == "delete":
                entries.pop(entry[key], None)
            elif name == "volumes" and len(entry) > 1:  # a volume has one source
                entries[entry[key]] = entry
            else:
                entries[entry[key]] = _merge(entries.get(entry[key]), entry, "")
        return list(entries.values())
    return new
