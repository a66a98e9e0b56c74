"""What a machine with a card lacks, as a folder of wheels: it may have no registry.

    python -m benchmarks.gpu_wheels [--python 3.12] [--titan]    # where a registry answers
    python -m benchmarks.gpu_wheels --install                    # on the machine with the card

An image for cards has torch, numpy, safetensors and prometheus-client (`PRESENT`). The folder holds
what orch needs beyond these, and orch itself, for Linux on x86-64 and one version of Python; with
`--titan` torchtitan as well, which gpu_node stands beside.
`--install` does nothing where everything is there; else it unpacks the wheels into
build/gpu-packages, which `make gpu-check` puts on PYTHONPATH: the image stays as it is. This module
needs nothing but Python.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WHEELS = ROOT / "build" / "gpu-wheels"
PACKAGES = ROOT / "build" / "gpu-packages"
#: What an image for cards has -> the module that shows it.
PRESENT = {
    "torch": "torch",
    "numpy": "numpy",
    "safetensors": "safetensors",
    "prometheus-client": "prometheus_client",
}
#: What travels -> the module that shows it; the packages that it needs itself travel as well.
TRAVELLING = {"hydra-core": "hydra", "msgspec": "msgspec"}
#: torchtitan without what its trainer needs (benchmarks/kernels.py).
TITAN = ("torchtitan", "spmd_types", "tyro", "docstring_parser", "typeguard")


def requirements() -> list[str]:
    """What orch and its trainer need beyond `PRESENT`, as pyproject.toml says it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = project["dependencies"] + project["optional-dependencies"]["trainer"]
    return [line for line in needed if name_of(line) not in PRESENT]


def name_of(requirement: str) -> str:
    (name,) = re.findall(r"^[A-Za-z0-9._-]+", requirement)
    return name


def build(python: str, titan: bool) -> int:
    """Fills the folder of wheels, with the versions of .ci/constraints.txt. `python`: the version
    that binary wheels are for; "": this Python's."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="gpu-wheels-") as folder:
        pip = [with_pip(Path(folder) / "venv"), "-m", "pip"]
        wheel = [*pip, "wheel", "--quiet", "--disable-pip-version-check"]
        wheel += ["--wheel-dir", str(WHEELS)]
        constraints = ["-c", str(ROOT / ".ci" / "constraints.txt")]
        subprocess.run([*wheel, *constraints, *requirements()], check=True)
        if titan:
            subprocess.run([*wheel, "--no-deps", *TITAN], check=True)
        # Of a copy: what an earlier build has left beside the source would be in the wheel.
        subprocess.run([*wheel, "--no-deps", str(copy_of_source(Path(folder)))], check=True)
        if python:
            replace_binaries(pip, python)
    size = sum(path.stat().st_size for path in WHEELS.iterdir())
    names = ", ".join(sorted(path.name for path in WHEELS.iterdir()))
    print(f"{WHEELS.relative_to(ROOT)}: {size / 1e6:.1f} MB: {names}")
    return 0


def replace_binaries(pip: list[str], python: str) -> None:
    """Puts the wheels of another version of Python in the place of those of this one."""
    download = [*pip, "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    download += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python]
    for platform in ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"):
        download += ["--platform", platform]
    for path in WHEELS.glob("*.whl"):
        if not path.name.endswith("-none-any.whl"):
            name, version, *_ = path.name.split("-")
            path.unlink()
            argv = [*download, "--dest", str(WHEELS), f"{name}=={version}"]
            subprocess.run(argv, check=True)


def copy_of_source(folder: Path) -> Path:
    argv = ["git", "ls-files", "-z"]
    listing = subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    source = folder / "source"
    for name in filter(None, listing.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    return source


def with_pip(folder: Path) -> str:
    """This Python in an environment that has pip."""
    own_uv = ROOT / ".venv" / ".uv" / "bin" / "uv"
    uv = shutil.which("uv") or (str(own_uv) if own_uv.exists() else None)
    argv = [sys.executable, "-m", "venv", str(folder)]
    if uv is not None:
        argv = [uv, "venv", "--quiet", "--seed", "--python", sys.executable, str(folder)]
    subprocess.run(argv, check=True)
    return str(folder / "bin" / "python")


def missing(names: dict[str, str]) -> list[str]:
    """The packages whose modules this Python does not find, or finds for another Python."""
    absent = []
    for name, module in names.items():
        if importlib.util.find_spec(module) is None:
            absent.append(name)
        elif name in TRAVELLING:
            try:
                importlib.import_module(module)
            except ImportError:
                absent.append(name)
    return absent


def install() -> int:
    """Makes the modules importable from `PACKAGES`, if some are missing."""
    if absent := missing(PRESENT):
        print(f"missing: {', '.join(absent)}; this Python's image must bring them")
        return 1
    wheels = sorted(map(str, WHEELS.glob("*.whl")))
    has_titan = any(WHEELS.glob("torchtitan-*.whl"))
    absent = missing(TRAVELLING | ({"torchtitan": "torchtitan"} if has_titan else {}))
    if not absent:
        return 0
    if not wheels:
        print(
            f"missing: {', '.join(absent)}; run `make gpu-wheels` where a registry answers, and"
            f" copy {WHEELS.relative_to(ROOT)} here"
        )
        return 1
    shutil.rmtree(PACKAGES, ignore_errors=True)
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    argv += ["--no-index", "--find-links", str(WHEELS), "--no-deps", "--target", str(PACKAGES)]
    ended = subprocess.run([*argv, *wheels], capture_output=True, text=True)
    if ended.returncode:
        reason = (ended.stderr.strip() or ended.stdout.strip()).splitlines()[-1]
        version = "{}.{}".format(*sys.version_info)
        print(f"missing: {', '.join(absent)}; this is Python {version}; pip: {reason}")
        return 1
    print(f"{PACKAGES.relative_to(ROOT)}: {', '.join(absent)} and what they need")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_wheels", description=__doc__.partition("\n")[2]
    )
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--python", default="", metavar="VERSION", help="default: this Python's")
    parser.add_argument("--titan", action="store_true", help="torchtitan, too")
    args = parser.parse_args()
    return install() if args.install else build(args.python, args.titan)


if __name__ == "__main__":
    sys.exit(main())
