"""One GPU has many names: a data sheet's, a label's, a Slurm type's, a person's."""

from __future__ import annotations

import pytest

from orchestrator.cluster.gpu_models import gpu_model, same_model

#: A model, its label as the device plugin writes it -> how people call it.
NAMES = {
    ("h100", "NVIDIA-H100-80GB-HBM3"): [
        "NVIDIA H100 80GB",
        "H100-SXM5-80GB",
        "nvidia_h100_pcie",
        "8xH100",
        "H100SXM",
    ],
    ("h200", "NVIDIA-H200"): ["H200 141GB", "NVIDIA HGX H200", "h200"],
    ("a100", "NVIDIA-A100-SXM4-40GB"): [
        "Tesla A100",
        "A100_40G",
        "A100-PCIE-80GB",
        "NVIDIA DGX A100",
    ],
    ("gb200", "NVIDIA-GB200"): ["GB200", "NVIDIA GB200 NVL72"],
    ("gh200", "NVIDIA-GH200-480GB"): ["GH200 480GB", "NVIDIA GH200 Grace Hopper"],
    ("b200", "NVIDIA-B200"): ["B200", "DGX B200 180GB", "B200 Blackwell"],
    ("l40s", "NVIDIA-L40S"): ["L40S", "nvidia l40s 48 GB"],
    ("l4", "NVIDIA-L4"): ["L4", "NVIDIA L4 Tensor Core"],
    ("v100", "Tesla-V100-SXM2-16GB"): ["V100-SXM3-32GB", "tesla_v100"],
    ("a10g", "NVIDIA-A10G"): ["A10G"],
    ("4090", "NVIDIA-GeForce-RTX-4090"): ["RTX4090", "GeForce RTX 4090 24GB"],
    ("a6000", "NVIDIA-RTX-A6000"): ["RTX A6000", "rtxa6000"],
    ("ada6000", "NVIDIA-RTX-6000-Ada-Generation"): [
        "RTX 6000",
        "rtx6000ada",
        "RTX 6000 Ada 48GB",
        "6000_ada",
    ],
    ("ada4000", "NVIDIA-RTX-4000-SFF-Ada-Generation"): ["RTX 4000 Ada"],
    ("quadro6000", "Quadro-RTX-6000"): [
        "NVIDIA Quadro RTX 6000 24GB",
        "quadro_rtx_6000",
        "quadrortx6000",
    ],
    ("pro6000", "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition"): [
        "RTX PRO 6000",
        "rtx_pro_6000",
        "rtxpro6000",
        "RTX 6000 Blackwell",
        "pro6000",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    ],
    ("pro4500", "NVIDIA-RTX-PRO-4500-Blackwell"): ["RTX PRO 4500"],
    ("8000", "Quadro-RTX-8000"): ["RTX 8000", "rtx8000"],
    ("l40", "NVIDIA-L40"): ["L40", "NVIDIA L40 Ada Lovelace"],
    ("4070tisuper", "NVIDIA-GeForce-RTX-4070-Ti-SUPER"): ["4070 Ti Super", "rtx4070tisuper"],
    ("4070ti", "NVIDIA-GeForce-RTX-4070-Ti"): ["4070Ti", "RTX 4070 Ti 12GB"],
    ("4070super", "NVIDIA-GeForce-RTX-4070-SUPER"): ["4070super"],
    ("3080tilaptop", "NVIDIA-GeForce-RTX-3080-Ti-Laptop-GPU"): ["RTX 3080 Ti Laptop"],
    ("3090", "NVIDIA-GeForce-RTX-3090"): ["RTX 3090", "3090"],
    ("3090ti", "NVIDIA-GeForce-RTX-3090-Ti"): ["RTX 3090 Ti", "3090ti"],
    ("mi300x", "AMD_Instinct_MI300X_OAM"): ["MI300X", "AMD Instinct MI300X 192GB"],
}


@pytest.mark.parametrize(("model", "label"), NAMES)
def test_every_name_of_a_model_is_the_same_one(model, label):
    assert {gpu_model(name) for name in (label, *NAMES[model, label])} == {model}
    rest = [gpu for kind, gpu in NAMES if kind != model]
    assert not any(same_model(name, gpu) for name in NAMES[model, label] for gpu in rest)


@pytest.mark.parametrize("name", ["", "cpu", "our GPUs", "tesla", "80GB HBM3", "NVL72", "SXM5"])
def test_a_name_without_a_model_is_of_any(name):
    assert gpu_model(name) == ""


@pytest.mark.parametrize(
    ("gpu", "same_names", "other_names"),
    [
        ("3090", ("3090", "rtx3090", "NVIDIA-GeForce-RTX-3090"), ("3090ti", "RTX 3090 Ti", "4090")),
        ("RTX-3090", ("3090", "geforce_rtx_3090"), ("rtx2080ti", "rtx_a6000")),
        (
            "A100-SXM4-80GB",
            ("a100", "nvidia_a100_80gb_pcie", "tesla_a100"),
            ("a1000", "a10", "a800"),
        ),
        (
            "H100-SXM5-80GB",
            ("h100", "nvidia_h100_80gb_hbm3", "h100sxm5", "dgx2_h100"),
            ("gh200", "h200", "gold"),
        ),
        ("2080Ti", ("2080ti", "rtx2080ti", "2080_ti"), ("2080", "1080ti")),
        ("L4", ("l4", "nvidia_l4"), ("l40", "l40s")),
    ],
)
def test_a_gpu_is_told_by_its_model(gpu, same_names, other_names):
    assert all(same_model(gpu, name) for name in same_names)
    assert not any(same_model(gpu, name) for name in other_names)
