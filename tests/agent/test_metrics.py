"""The Prometheus endpoint, read by Prometheus's own parser and, where it is installed, by
Prometheus itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as classic

from orchestrator.agent.node.metrics import NodeMetrics
from orchestrator.agent.node.metrics_server import serve
from orchestrator.plan.document import Moe
from orchestrator.plan.expert_load import ExpertLoad
from orchestrator.plan.worker import EventReport, StepReport
from orchestrator.run.folder import RunFolder
from orchestrator.run.registry import Discovery
from tests.beds import debian
from tests.beds.plans import make_plan, tiny_model

PLAN = make_plan(tp=2, dp=4, nodes=2, sp=False)


def report(rank=4, epoch=1, step=1, **fields) -> StepReport:
    base = {
        "samples": 8,
        "tokens": 1000,
        "step_s": 0.5,
        "loss": 3.0,
        "lr": 0.1,
        "grad_norm": 2.0,
        "mfu": 0.4,
        "hfu": 0.5,
    }
    measures = {
        "comm_bytes": {"tp": 10},
        "comm_s": {"tp": 0.1},
        "memory_bytes": {"params": 100 + rank},
    }
    measures |= {
        "phase_s": {"data": 0.01},
        "bubble_ratio": rank / 100,
        "loss_terms": {"balance": 0.02},
    }
    fields = base | measures | fields
    return StepReport(rank=rank, epoch=epoch, step=step, **fields)


def node_metrics() -> NodeMetrics:
    metrics = NodeMetrics("run-1", "node1", PLAN)
    metrics.begin_epoch(1)
    for step in (1, 2):
        for rank in (4, 5, 6, 7):
            metrics.on_step(report(rank=rank, step=step), at=100.0 + step)
    saved = {"bytes": 4096, "seconds": 0.3}
    metrics.on_event(
        EventReport(rank=4, epoch=1, name="checkpoint_saved", step=2, fields=saved), at=103.0
    )
    return metrics


def scrape(metrics: NodeMetrics, path="/metrics", accept="", method="GET") -> tuple[str, str]:
    async def main():
        server = await serve(metrics, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}", headers={"Accept": accept}, method=method
        )
        answer = await asyncio.to_thread(urllib.request.urlopen, request, None, 5)
        server.close()
        return answer.headers["Content-Type"], answer.read().decode()

    return asyncio.run(main())


def values(page: str) -> dict[str, float]:
    """name{extra labels} -> value, after checking the labels that every series has."""
    sample_values = {}
    for family in classic(page):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("job"), labels.pop("node")) == ("run-1", "node1")
            assert "rank" not in labels
            extra = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
            sample_values[f"{sample.name}{{{extra}}}"] = sample.value
    return sample_values


def test_numbers_names_and_labels():
    kind, page = scrape(node_metrics())
    samples = values(page)
    assert kind.startswith("text/plain")
    epoch_label = "{plan_epoch=1}"
    assert (
        sum(value for key, value in samples.items() if key.startswith("orch_wall_seconds_total{"))
        > 0
    )
    assert 0 <= samples["orch_ettr_ratio" + epoch_label] <= 1
    assert samples["orch_step_total{}"] == 2
    assert samples["orch_tokens_total{}"] == 1000  # 2 steps of 1000, half of the ranks are here
    assert samples["orch_tokens_per_second" + epoch_label] == 2000
    assert samples["orch_loss" + epoch_label] == 3.0
    assert samples["orch_loss_term{plan_epoch=1,term=balance}"] == 0.02
    assert samples["orch_last_durable_checkpoint_timestamp_seconds" + epoch_label] == 103.0
    assert samples["orch_checkpoint_bytes" + epoch_label] == 4096
    assert samples["orch_checkpoint_duration_seconds_sum{}"] == 0.3
    assert samples["orch_pipeline_bubble_ratio" + epoch_label] == 0.07
    assert samples["orch_comm_bytes_total{axis=tp}"] == 80  # all ranks
    assert samples["orch_memory_bytes{category=params,plan_epoch=1}"] == 107  # the fullest
    assert samples["orch_step_duration_seconds_count{phase=step}"] == 2
    assert samples["orch_step_duration_seconds_sum{phase=step}"] == 1.0
    assert samples["orch_step_duration_seconds_bucket{le=0.5,phase=step}"] == 2
    assert samples["orch_step_duration_seconds_bucket{le=0.25,phase=step}"] == 0
    info = next(key for key in samples if key.startswith("orch_plan_info"))
    assert f"plan_hash={PLAN.hash[:16]}" in info and "tp=2" in info


def test_load_of_experts_by_layer_and_bytes_by_level():
    model = tiny_model(moe=Moe(experts=4, top_k=2, ffn_hidden=8))
    metrics = NodeMetrics("run-1", "node1", make_plan(ep=2, dp=2, nodes=2, model=model))
    metrics.begin_epoch(1)
    loads = {
        "0": ExpertLoad([8, 8, 8, 8], 1.0),
        "1": ExpertLoad([16, 16, 0, 0], 0.5, 0.25, (-0.5, 1.0)),
    }
    sent = {"expert_bytes": {"network": 100, "nvlink": 300}, "expert_s": {"network": 0.5}}
    metrics.on_step(report(rank=2, experts=loads, **sent), at=100.0)
    metrics.on_step(report(rank=3, **sent), at=100.0)
    samples = values(scrape(metrics)[1])
    assert samples["orch_expert_bytes_total{level=network}"] == 200  # both ranks
    assert samples["orch_expert_seconds_total{level=network}"] == 1.0

    def of(name: str) -> list[float | None]:
        return [samples.get(f"orch_{name}{{layer={layer},plan_epoch=1}}") for layer in (0, 1)]

    assert of("expert_load_ratio") == [1, 2] and of("expert_rank_load_ratio") == [1, 2]
    assert of("expert_balance_ratio") == [1, 0] and of("expert_dropped_ratio") == [0, 0.25]
    assert of("router_entropy_ratio") == [1, 0.5] and of("router_bias_range") == [None, 1.5]


def test_a_new_epoch_keeps_counters_and_forgets_values_of_the_moment():
    metrics = node_metrics()
    metrics.begin_epoch(2)
    samples = values(scrape(metrics)[1])
    assert samples["orch_step_total{}"] == 2
    assert not [key for key in samples if key.startswith(("orch_loss", "orch_memory_bytes"))]
    assert samples["orch_last_durable_checkpoint_step{plan_epoch=2}"] == 2


@pytest.mark.parametrize("kind", ["failure", "another plan"])
def test_the_page_does_not_grow_with_the_epochs_of_a_run(kind):
    metrics = node_metrics()

    def pages() -> list[dict[str, float]]:
        page_samples = []
        for epoch in range(2, 22):
            metrics.add("orch_restarts", 1, "failure")
            metrics.begin_epoch(epoch)
            if kind == "another plan":
                metrics.replan(make_plan(tp=2, dp=2 + epoch % 2, nodes=2))
            metrics.on_step(report(rank=metrics._ranks[0], phase_s={"compute": 0.1}), at=100.0)
            metrics.on_event(
                EventReport(rank=4, epoch=epoch, name="checkpoint_saved", fields={"seconds": 0.1}),
                at=1.0,
            )
            page_samples.append(values(scrape(metrics)[1]))
        return page_samples

    first, *_, last = pages()
    assert len(last) == len(first)
    assert last["orch_step_total{}"] - first["orch_step_total{}"] == 19, (
        "what is counted does not fall"
    )
    assert last["orch_restarts_total{reason=failure}"] == 20


def test_open_metrics_on_request():
    kind, page = scrape(node_metrics(), accept="application/openmetrics-text;version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert {family.name for family in open_metrics(page)} >= {
        "orch_step",
        "orch_loss",
        "orch_step_duration_seconds",
    }


def test_dropped_reports_are_counted_once():
    metrics = NodeMetrics("run-1", "node1", PLAN)
    metrics.begin_epoch(0)
    for dropped in (0, 3, 3, 5):
        metrics.on_step(report(rank=4, dropped_reports=dropped), at=1.0)
    assert values(scrape(metrics)[1])["orch_reports_dropped_total{}"] == 5


@pytest.mark.parametrize(
    ("path", "method", "code"),
    [("/", "GET", 404), ("/../etc", "GET", 404), ("/metrics", "POST", 405)],
)
def test_nothing_but_get_metrics(path, method, code):
    with pytest.raises(urllib.error.HTTPError) as refused:
        scrape(node_metrics(), path, method=method)
    assert refused.value.code == code


async def test_a_taken_port_is_not_the_end():
    first = await serve(node_metrics(), "127.0.0.1", 0)
    port = first.sockets[0].getsockname()[1]
    second = await serve(node_metrics(), "127.0.0.1", port)
    assert second.sockets[0].getsockname()[1] != port
    first.close()
    second.close()


async def test_a_client_that_never_asks_holds_nothing_up():
    server = await serve(node_metrics(), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    _, silent = await asyncio.open_connection(host, port)
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    assert b"200 OK" in await asyncio.wait_for(reader.read(), 60)
    silent.close()
    server.close()


async def test_hundreds_of_clients_that_never_ask_take_no_descriptors():
    server = await serve(node_metrics(), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    before = len(os.listdir("/proc/self/fd"))
    silent = [await asyncio.open_connection(host, port) for _ in range(200)]
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    assert b"200 OK" in await asyncio.wait_for(reader.read(), 60)
    assert len(os.listdir("/proc/self/fd")) - before <= 201 + 70, "both ends are here"
    for _, silent_writer in silent:
        silent_writer.close()
    server.close()


async def test_targets_are_those_of_the_coordinator_s_file(tmp_path):
    """What Prometheus's http_sd asks for; none before there are any, and after the run."""

    async def ask(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /targets HTTP/1.1\r\n\r\n")
        head, body = (await asyncio.wait_for(reader.read(), 60)).split(b"\r\n\r\n")
        writer.close()
        assert b"200 OK" in head and b"Content-Type: application/json" in head
        return body

    folder = RunFolder(tmp_path)
    server = await serve(node_metrics(), "127.0.0.1", 0, targets=folder.discovery)
    port = server.sockets[0].getsockname()[1]
    assert json.loads(await ask(port)) == []
    discovery = Discovery(folder, str(tmp_path / "shared"))
    discovery.publish({"node0": "10.0.0.1:9401", "node1": "10.0.0.2:9401"})
    targets = json.loads(await ask(port))
    assert [target["targets"] for target in targets] == [["10.0.0.1:9401"], ["10.0.0.2:9401"]]
    assert [target["labels"]["node"] for target in targets] == ["node0", "node1"]
    discovery.withdraw()
    assert json.loads(await ask(port)) == []
    server.close()


@pytest.fixture(scope="module")
def prometheus():
    """Debian's Prometheus and its promtool."""
    if reason := debian.provide(("prometheus", "promtool"), ("prometheus",)):
        pytest.skip(reason)


@pytest.mark.process
def test_promtool_finds_nothing_to_complain_about(prometheus):
    page = scrape(node_metrics())[1]
    check = subprocess.run(
        ["promtool", "check", "metrics"], input=page.encode(), capture_output=True, timeout=300
    )
    assert check.returncode == 0, check.stderr.decode()


@pytest.mark.process
@pytest.mark.slow
async def test_a_real_prometheus_discovers_and_scrapes(tmp_path, prometheus):
    """Through the file_sd JSON that the coordinator writes, with honor_labels as docs/protocol.md
    says."""
    server = await serve(node_metrics(), "127.0.0.1", 0)
    host, at = server.sockets[0].getsockname()
    target = f"{host}:{at}"
    folder = RunFolder(tmp_path / "runs" / "run-1")
    folder.create()
    Discovery(folder, str(tmp_path / "metrics.sd")).publish({"node1": target})
    files = [{"files": [f"{tmp_path}/metrics.sd/*.json"]}]
    config = {"job_name": "orch", "honor_labels": True, "file_sd_configs": files}
    (tmp_path / "p.yml").write_text(
        json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": [config]})
    )
    port = 20_000 + time.time_ns() % 10_000
    argv = ["prometheus", f"--config.file={tmp_path}/p.yml", f"--storage.tsdb.path={tmp_path}/db"]
    process = await asyncio.create_subprocess_exec(
        *argv, f"--web.listen-address=127.0.0.1:{port}", stderr=(tmp_path / "log").open("wb")
    )
    try:
        url = f"http://127.0.0.1:{port}/api/v1/query?query=orch_tokens_total"
        for _ in range(150):
            await asyncio.sleep(0.2)
            try:
                answer = await asyncio.to_thread(urllib.request.urlopen, url, None, 2)
            except OSError:
                continue
            if result := json.load(answer)["data"]["result"]:
                assert result[0]["metric"]["job"] == "run-1"
                assert float(result[0]["value"][1]) == 1000
                return
        raise AssertionError((tmp_path / "log").read_text()[-2000:])
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        server.close()
