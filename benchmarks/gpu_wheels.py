"""What a machine with a card lacks, as a folder of wheels: it may have no registry.

    python -m benchmarks.gpu_wheels [--python 3.12] [--titan]    # where a registry answers
    python -m benchmarks.gpu_wheels --install                    # on the machine with the card

An image for cards has torch and numpy (`PRESENT`). The folder holds what orch needs beyond these,
and orch itself, for Linux on x86-64 and one version of Python; with `--titan` torchtitan as well,
which gpu_node stands beside.
`--install` does nothing where everything is there in a version that pyproject.toml allows; else it
unpacks the wheels that are missing into build/gpu-packages, which `make gpu-check` puts on
PYTHONPATH: the image stays as it is, and its pip, if it has one, is not asked. This module needs
nothing but Python.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WHEELS = ROOT / "build" / "gpu-wheels"
PACKAGES = ROOT / "build" / "gpu-packages"
OLDEST_PYTHON = (3, 11)  # pyproject.toml, which an older Python cannot read
#: What an image for cards has -> the module that shows it.
PRESENT = {"torch": "torch", "numpy": "numpy"}
#: What travels -> the module that shows it; the packages that it needs itself travel as well.
TRAVELLING = {
    "hydra-core": "hydra",
    "msgspec": "msgspec",
    "safetensors": "safetensors",
    "prometheus-client": "prometheus_client",
}
#: torchtitan without what its trainer needs (benchmarks/kernels.py).
TITAN = (
    "torchtitan==0.3.0",
    "spmd_types==0.3.1",
    "tyro==1.0.17",
    "docstring_parser==0.18.0",
    "typeguard==4.6.1",
)


def requirements() -> list[str]:
    """What orch and its trainer need beyond `PRESENT`, as pyproject.toml says it."""
    return [line for name, line in bounds().items() if name not in PRESENT]


def bounds() -> dict[str, str]:
    """What orch and its trainer need, by name, as pyproject.toml says it."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = project["dependencies"] + project["optional-dependencies"]["trainer"]
    return {name_of(line): line for line in needed}


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
    print(f"{os.path.relpath(WHEELS, ROOT)}: {size / 1e6:.1f} MB: {names}")
    return 0


def replace_binaries(pip: list[str], python: str) -> None:
    """Puts the wheels of another version of Python in the place of those of this one."""
    download = [*pip, "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    download += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python]
    for tag in ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"):
        download += ["--platform", tag]
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
    """The packages that this Python does not find, finds for another Python, or has in a version
    that pyproject.toml does not allow, each with that version."""
    absent = []
    for name, module in names.items():
        is_found = importlib.util.find_spec(module) is not None
        if not is_found or (name in TRAVELLING and not is_importable(module)):
            absent.append(name)
        elif problem := version_problem(name):
            absent.append(f"{name} ({problem})")
    return absent


def is_importable(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def version_problem(name: str) -> str:
    """Why the version of a package is not allowed; "" if it is, or if the package has no version.
    The part before a suffix counts: 2.11.0a0+git of an image has what 2.11 has."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
    for sign, bound in re.findall(r"(>=|<)([0-9.]+)", bounds().get(name, "")):
        is_older = numbers(version) < numbers(bound)
        if is_older is (sign == ">="):
            return f"{version} is not {sign}{bound}"
    return ""


def numbers(version: str) -> list[int]:
    """[2, 11] of 2.11.0+cu130, which is no later than 2.11."""
    release = re.match(r"[0-9]+(\.[0-9]+)*", version)
    parts = [int(part) for part in release.group().split(".")] if release else []
    while parts and not parts[-1]:
        parts.pop()
    return parts


def install() -> int:
    """Makes the modules importable from `PACKAGES`, if some are missing."""
    if absent := missing(PRESENT):
        print(f"missing: {', '.join(absent)}; this Python's image must bring them")
        return 1
    # Of wheels for several Pythons, the one for this.
    paths = sorted(WHEELS.glob("*.whl"), key=fits)
    wheels = {normalised(path.name.partition("-")[0]): path for path in paths}
    titan = {"torchtitan": "torchtitan"} if "torchtitan" in wheels else {}
    absent = missing(TRAVELLING | titan)
    if not absent:
        return 0
    if not wheels:
        print(
            f"missing: {', '.join(absent)}; run `make gpu-wheels` where a registry answers, and"
            f" copy {WHEELS.relative_to(ROOT)} here"
        )
        return 1
    names = [normalised(name_of(line)) for line in absent]
    chosen = needed_wheels(names, wheels)
    problems = [f"no wheel of {name}" for name in names if name not in wheels]
    strangers = ["-".join(path.name.split("-")[:3]) for path in chosen if not fits(path)]
    problems += [f"{name} is for another Python or machine" for name in strangers]
    if problems:
        version = "{}.{}".format(*sys.version_info)
        here = f"this is Python {version} on {platform.machine()}"
        print(f"missing: {', '.join(absent)}; {here}: {', '.join(problems)}")
        return 1
    PACKAGES.mkdir(parents=True, exist_ok=True)
    for path in chosen:
        for earlier in PACKAGES.glob(f"{path.name.partition('-')[0]}-*.dist-info"):
            shutil.rmtree(earlier)
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(PACKAGES)
    print(f"{PACKAGES.relative_to(ROOT)}: {', '.join(absent)} and what they need")
    return 0


def needed_wheels(names: list[str], wheels: dict[str, Path]) -> list[Path]:
    """The wheels of these packages, of orch and of what they need in turn; what the image has of
    `TRAVELLING` stays the image's."""
    todo = ["orch-train", *names]
    if "torchtitan" in names:
        todo += [name_of(line) for line in TITAN]
    chosen: dict[str, Path] = {}
    while todo:
        name = normalised(todo.pop())
        if name not in wheels or name in chosen:
            continue
        chosen[name] = wheels[name]
        if name != "orch-train":
            todo += [each for each in requires(wheels[name]) if each not in TRAVELLING]
    return list(chosen.values())


def requires(path: Path) -> list[str]:
    """What a wheel needs without its extras."""
    with zipfile.ZipFile(path) as wheel:
        (entry,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        lines = wheel.read(entry).decode().splitlines()
    needed = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
    return [normalised(name_of(line)) for line in needed if "extra ==" not in line]


def normalised(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def fits(path: Path) -> bool:
    """Whether this Python can import a wheel, by the tags at the end of its name."""
    pythons, abis, platforms = path.stem.split("-")[-3:]
    minor_versions = [re.fullmatch(r"cp3(\d+)", tag) for tag in pythons.split(".")]
    cpython = [int(match[1]) for match in minor_versions if match]
    here = sys.version_info.minor
    # A wheel of the stable interface is for the Python that it names and all later ones.
    has_python = abis == "none" or here in cpython or (abis == "abi3" and min(cpython) <= here)
    return has_python and (platforms == "any" or platforms.endswith(platform.machine()))


def what_compilation_lacks() -> str:
    """What Triton needs to start a compiled kernel, and this machine does not have; "" if all is
    there."""
    lacking = []
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        lacking.append("a C compiler (gcc, clang or $CC)")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        lacking.append(f"{header} (python3-dev)")
    return " and ".join(lacking)


def main() -> int:
    if sys.version_info < OLDEST_PYTHON:
        here = "{}.{}".format(*sys.version_info)
        print("orch needs Python {}.{} or later; this is {}".format(*OLDEST_PYTHON, here))
        return 1
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_wheels", description=__doc__.partition("\n")[2]
    )
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--python", default="", metavar="VERSION", help="default: this Python's")
    parser.add_argument("--titan", action="store_true", help="torchtitan, too")
    args = parser.parse_args()
    if not args.install:
        return build(args.python, args.titan)
    if lacking := what_compilation_lacks():
        print(f"compiled cases will fail: Triton needs {lacking}; train.compile=false does not")
    return install()


if __name__ == "__main__":
    sys.exit(main())
