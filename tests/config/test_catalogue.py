"""What ships in conf/: files load, numbers have sources, models have their published sizes,
clusters plan."""

from __future__ import annotations

import msgspec
import pytest
import yaml
from msgspec import UNSET

from orchestrator.config import grammar
from orchestrator.config.compose import load
from orchestrator.config.groups import GROUPS, Library, shipped
from orchestrator.cost.model.layers import parameter_count, resolve
from tests.planner.configs import build_plan

LIBRARY = Library([shipped()])
CLUSTERS = LIBRARY.files("cluster")
FILES = [(group, name) for group in LIBRARY.groups() for name in LIBRARY.files(group)]

#: Published: exact where the weights are released, else the paper's figure. DeepSeek-V3: the main
#: model without the multi-token head (arXiv 2412.19437, section 4.2: 671B) and the router's
#: offsets, which no gradient trains.
PARAMETERS = {
    "gpt2": 124_439_808,
    "bert_large": 336_226_108,
    "llama32_1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_620_634_112,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "deepseek_v3": 671_026_404_352,
    "turing_nlg_17b": pytest.approx(17.2e9, rel=0.005),
    "gpt3_175b": pytest.approx(174.6e9, rel=0.0005),
    "megatron_530b": pytest.approx(529.6e9, rel=0.0001),
    "megatron_1t": pytest.approx(1008.0e9, rel=0.0001),
    "zero_100b": pytest.approx(100e9, rel=0.012),
}


def test_the_catalogue_is_the_one_that_is_promised():
    promised = {
        "local",
        "h100x8",
        "h100x64",
        "h100x1024",
        "h100x16384",
        "a100x64",
        "v100x400",
        "gb200_nvl72x8",
    }
    assert promised <= set(CLUSTERS)
    assert {*PARAMETERS, "tiny", "tiny_moe", "tiny_mla", "tiny_bert"} == set(LIBRARY.files("model"))
    assert set(GROUPS) <= set(LIBRARY.groups())


@pytest.mark.parametrize(("group", "name"), FILES, ids=[f"{group}/{name}" for group, name in FILES])
def test_every_file_loads(group, name):
    cluster = ["cluster=h100x64"] if group == "cluster/node" else []
    config = load(
        [*cluster, f"{group}={name}", *(["data.paths=[/corpus]"] if name == "text" else [])]
    )
    assert config.choices[group] == name


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_the_published_ones(name):
    assert parameter_count(load([f"model={name}"]).model) == PARAMETERS[name]


def test_deepseek_v3_with_its_prediction_module_has_the_size_of_the_release():
    """Its README_WEIGHTS.md: 11.5B parameters of the module's own; with copies of embedding and
    head 14B, so that the release has 685B. The model's embedding and head are counted once here, so
    they are not in ours."""
    alone, ahead = (
        parameter_count(load(["model=deepseek_v3", f"model.mtp.depth={d}"]).model) for d in (0, 1)
    )
    module_parameters = ahead - alone
    tables = 2 * 129280 * 7168
    attention = (
        7168 * 1536
        + 1536
        + 1536 * 128 * 192
        + 7168 * 576
        + 512
        + 512 * 128 * 256
        + 128 * 128 * 7168
    )
    experts = 257 * 3 * 7168 * 2048 + 256 * 7168
    assert module_parameters == attention + experts + 2 * 7168 * 7168 + 5 * 7168
    assert module_parameters == pytest.approx(11.5e9, rel=0.01)
    assert module_parameters + tables == pytest.approx(
        14e9, rel=0.04
    ) and alone + module_parameters + tables == pytest.approx(685e9, rel=0.001)


def test_plans_without_it_do_not_name_it():
    model = resolve(load(["model=deepseek_v3"]).model)
    assert model.mtp is UNSET and "mtp" not in msgspec.to_builtins(model)


def test_tiny_is_tiny_and_takes_every_small_degree():
    config = load(["cluster=local"])
    assert config.model.name == "tiny"
    assert parameter_count(config.model) < 1_000_000
    for degrees in ("tp1_pp1", "tp1_pp2", "tp2_pp1", "tp2_pp2", "tp4_pp1", "tp4_pp2", "pp4"):
        build_plan(load([f"parallel={degrees}_zero1"]))


LIVE = {"slurm", "kubernetes"}  # asked, not described


@pytest.mark.parametrize("name", [name for name in CLUSTERS if name not in LIVE])
def test_every_cluster_plans_with_its_defaults(name):
    config = load([f"cluster={name}"])
    plan = build_plan(config)
    assert (
        plan.parallel.world_size
        == config.cluster.nodes * config.cluster.gpus_per_node
        == len(plan.ranks)
    )
    assert config.model.name == ("tiny" if name.startswith("local") else "llama3_70b")
    assert config.data.demo
    if name not in ("local", "h100x8"):  # one node of eight cannot hold 70B
        assert plan.memory.total <= plan.memory.capacity


def number_blocks(tree: object, where: str = "") -> list[tuple[str, dict]]:
    """Every mapping that holds a rate, a size or a latency of hardware."""
    blocks = []
    if isinstance(tree, dict):
        measured = ("_gib", "_tflops", "_per_s", "_us", "oversubscription")
        if any(key.endswith(measured) for key in tree):
            blocks.append((where, tree))
        for key, value in tree.items():
            blocks += number_blocks(value, f"{where}.{key}")
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            blocks += number_blocks(value, f"{where}.{index}")
    return blocks


@pytest.mark.parametrize(
    "path", sorted((shipped() / "cluster").rglob("*.yaml")), ids=lambda path: path.stem
)
def test_every_number_block_of_a_cluster_has_a_source(path):
    cluster = yaml.safe_load(path.read_text())
    blocks = number_blocks(cluster)
    assert blocks or "local" in cluster["defaults"], "its numbers are those of another one"
    for where, block in blocks:
        assert len(block.get("source", "")) > 10, f"{path.name}{where} has numbers without a source"


@pytest.mark.parametrize(
    "name", [n for n in LIBRARY.files("parallel") if grammar.looks_like_spec(n)]
)
def test_a_file_named_as_a_word_is_that_word(name):
    file_content = yaml.safe_load((shipped() / "parallel" / f"{name}.yaml").read_text())
    assert file_content == grammar.parse(name)


def test_the_ragged_pods_of_the_16k_cluster_hold_all_nodes():
    cluster = load(["cluster=h100x16384"]).cluster
    pod = next(level for level in cluster.levels if level.name == "pod")
    assert sum(pod.nodes_per_switch) == cluster.nodes == 2048
    assert pod.oversubscription == 7
