"""The programs of the test cluster: built once from pinned Go modules into a cache folder, else
said plainly.

`tools/<tool>/go.mod` pins one program each, so that their dependencies never meet. First build:
about twenty minutes on two cores and 11 GB, Go's own caches included; `python -m
tests.beds.kubernetes.building` builds ahead.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import subprocess
import sys
from pathlib import Path

from tests.beds.debian import find, provide

TOOLS = Path(__file__).parent / "tools"
VERSION = "v1.35.4"
_STAMP = " ".join(
    f"-X k8s.io/component-base/version.{name}={value}"  # else the server calls itself v0.0.0
    for name, value in (("gitVersion", VERSION), ("gitMajor", "1"), ("gitMinor", "35"))
)
#: program -> (module folder, package)
PROGRAMS: dict[str, tuple[str, str]] = {
    **{
        name: ("kubernetes", f"k8s.io/kubernetes/cmd/{name}")
        for name in (
            "kube-apiserver",
            "kube-controller-manager",
            "kube-scheduler",
            "kubelet",
            "kube-proxy",
            "kubectl",
        )
    },
    "coredns": ("coredns", "github.com/coredns/coredns"),
    "helm": ("helm", "helm.sh/helm/v4/cmd/helm"),
    "kubeconform": ("kubeconform", "github.com/yannh/kubeconform/cmd/kubeconform"),
    "kueue": ("kueue", "sigs.k8s.io/kueue/cmd/kueue"),
    "jobset": ("jobset", "sigs.k8s.io/jobset"),
}
#: Built only where a test asks for it: one that enforces network policies.
ON_DEMAND: dict[str, tuple[str, str]] = {
    "kube-network-policies": ("policies", "sigs.k8s.io/kube-network-policies/cmd"),
}
DEBIAN_PROGRAMS = ("etcd", "containerd", "runc", "busybox", "iptables", "ip")
DEBIAN = (
    "etcd-server",
    "containerd",
    "runc",
    "containernetworking-plugins",
    "busybox-static",
    "iptables",
    "iproute2",
)


def cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base, "orch-test", "kubernetes")


def program(name: str) -> Path:
    """Says where the program of this tree's module files is, built or not. Any kubectl will do:
    this machine's, if it has one."""
    if name == "kubectl" and (kubectl_path := find("kubectl")):
        return Path(kubectl_path)
    folder, package = (PROGRAMS | ON_DEMAND)[name]
    pins = b"".join((TOOLS / folder / file).read_bytes() for file in ("go.mod", "go.sum"))
    digest = hashlib.sha256(pins + package.encode() + _STAMP.encode()).hexdigest()[:12]
    return cache() / f"{name}-{digest}"


@functools.cache
def module_folder(tool: str, module: str) -> Path:
    """The sources of a module as Go keeps them: CRDs and stages are read from there."""
    argv = ["go", "list", "-m", "-f", "{{.Dir}}", module]
    env = {**os.environ, "GOFLAGS": "-mod=readonly"}
    done = subprocess.run(
        argv, cwd=TOOLS / tool, env=env, capture_output=True, text=True, timeout=300
    )
    if done.returncode or not done.stdout.strip():
        raise RuntimeError(f"go list -m {module}: {done.stderr.strip()[-300:]}")
    return Path(done.stdout.strip())


def missing(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if not program(name).exists()]


def build(
    names: tuple[str, ...] = tuple(PROGRAMS), allowed: bool = True, seconds: float = 3600
) -> str | None:
    """Makes these programs present, each within `seconds`. None, or one line: why it cannot. Unless
    it is `allowed`, nothing is built; and where something would have to be, nothing is installed
    either."""
    if missing(names) and not allowed:
        build_advice = (
            "`make test-kubernetes` and `make testbed-kubernetes` build all of them, and they are"
            " kept"
        )
        return f"{', '.join(missing(names))} not built yet; {build_advice}"
    if failed := provide(DEBIAN_PROGRAMS, DEBIAN):
        return failed
    if not missing(names):
        return None
    if find("go") is None:
        return f"{', '.join(missing(names))} not built, and this machine has no Go"
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in missing(names):
            if failed := _build(name, seconds):
                return failed
    return None


def _build(name: str, seconds: float) -> str | None:
    folder, package = (PROGRAMS | ON_DEMAND)[name]
    target = program(name)
    partial_file = target.with_suffix(".part")
    flags = f"-s -w {_STAMP}" if folder == "kubernetes" else "-s -w"
    argv = ["go", "build", "-trimpath", "-ldflags", flags, "-o", str(partial_file), package]
    env = {**os.environ, "GOFLAGS": "-mod=readonly -buildvcs=false", "CGO_ENABLED": "0"}
    try:
        done = subprocess.run(
            argv, cwd=TOOLS / folder, env=env, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return (
            f"go build {package}: not done after {seconds:.0f} s; Go keeps what is done, so try"
            " again"
        )
    if done.returncode:
        return f"go build {package}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}"
    partial_file.rename(target)
    return None


if __name__ == "__main__":
    if reason := build(tuple(sys.argv[1:]) or tuple(PROGRAMS)):
        print(reason, file=sys.stderr)
        sys.exit(1)
    print(cache())
