"""The packages of the wheel, which pyproject.toml cannot list by a rule; everything else is there.

The trainer, the configuration groups and what `orch init` writes are folders of the repository and
go inside our one package: general names such as `trainer` in site-packages would meet those of
other distributions. `orchestrator/bundled.py` finds them.
"""

from setuptools import find_namespace_packages, find_packages, setup

BUNDLED = {
    "trainer": "orchestrator._bundled.trainer",
    "conf": "orchestrator._bundled.conf",
    "slurm/backend": "orchestrator._bundled.slurm.backend",
    "charts/orch": "orchestrator._bundled.charts.orch",
    "charts/orch-controller": "orchestrator._bundled.charts.orch-controller",
}

packages = find_packages(include=["orchestrator", "orchestrator.*"])
for folder, package in BUNDLED.items():
    subfolders = find_namespace_packages(folder, exclude=["*__pycache__"])
    packages += [package, *(f"{package}.{name}" for name in subfolders)]

setup(
    packages=packages,
    package_dir={package: folder for folder, package in BUNDLED.items()},
)
