"""The chart's files, without Helm: they contradict nothing of ours."""

from __future__ import annotations

import json
import re

import jsonschema
import yaml
from prometheus_client.core import CounterMetricFamily

from orchestrator.agent.node import metrics
from orchestrator.backends.kubernetes.controller import series
from orchestrator.backends.kubernetes.options import KubernetesOptions
from tests.beds.base import ROOT

CHART = ROOT / "charts" / "orch"
FULL = {
    "cluster": "h100x64",
    "parallel": "tp8_pp4_zero1",
    "overrides": ["train.steps=100"],
    "image": {
        "repository": "registry.example/orch",
        "digest": "sha256:" + "0" * 64,
        "pullSecrets": ["reg"],
    },
    "options": {
        "levels": {"leaf": "example.org/leaf"},
        "cpus": 96,
        "annotations": {"note": "it's: #1"},
    },
    "claim": {"create": True, "storageClass": ""},
    "monitoring": {
        "podMonitor": True,
        "dashboard": True,
        "rules": True,
        "labels": {"release": "prom"},
    },
    "kueue": {"create": True, "quota": {"cpu": "64", "nvidia.com/gpu": "64"}},
    "launcher": {"volumes": [{"claim": "site", "path": "/opt/site"}], "environment": {"A": "b c"}},
}


def test_schema_and_options_know_the_same_words():
    """Everything that `options:` takes is an option of the backend, and all are there that the
    chart does not set."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    allowed = set(schema["properties"]["options"]["propertyNames"]["enum"]) - {
        "gather_timeout_s"
    }  # an old name
    set_by_chart = {
        "image",
        "pull_policy",
        "pull_secrets",
        "network_policy",
        "namespace",
        "owner",
        "claim",
    }
    set_by_chart |= {
        "service_account",
        "context",
        "controller",
        "bad_nodes",
    }  # the last by orch, at each start
    assert allowed | set_by_chart == set(KubernetesOptions.__struct_fields__)
    assert not allowed & set_by_chart


def test_values_meet_their_schema():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    values["image"]["repository"] = "registry.example/orch"
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.validate(values, schema)
    jsonschema.validate(FULL, schema)


def test_the_controllers_values_meet_their_schema_and_its_alerts_name_its_series():
    chart = CHART.parent / "orch-controller"
    values = yaml.safe_load((chart / "values.yaml").read_text())
    values["image"]["repository"] = "registry.example/orch"
    jsonschema.validate(values, json.loads((chart / "values.schema.json").read_text()))
    counters = {
        name for name, (family, *_) in series.OF_RUNS.items() if family is CounterMetricFamily
    }
    series_names = (
        {f"{name}_total" for name in counters}
        | set(series.OF_RUNS) - counters
        | {"orch_controller_leads"}
    )
    named = set(re.findall(r"\borch_[a-z_]+\b", (chart / "files" / "rules.yaml").read_text()))
    assert named and named <= series_names, named - series_names


def test_alerts_and_panels_name_series_that_exist():
    """A dashboard of series that nobody exports is worse than none."""
    series_names = {f"{name}_total" for name in metrics._COUNTERS} | set(metrics._GAUGES)
    for file in ("dashboard.json", "rules.yaml"):
        named = set(re.findall(r"\borch_[a-z_]+\b", (CHART / "files" / file).read_text()))
        assert named and named <= series_names, named - series_names
