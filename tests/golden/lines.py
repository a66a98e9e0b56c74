"""Command lines and what they gave before the house was rebuilt: exit code, plan hash, standard
output and error.

`python -m tests.golden.lines --texts DIR` writes the full text of every line into DIR: do it with
two commits and `diff -r` the folders. `--write` accepts what the lines give now. What is stored was
taken at commit e2cf075.

Nothing of this machine is in the texts: a bare environment, no scheduler, a home that does not
exist, or one that is named <TMP>. Of orchestrator only `main` is imported, so that this file
outlives every move.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
SHORT = 300  # characters; a longer text is stored as its digest
#: Plans say where token files lie, so their hashes hold the home: where nothing is written it is
#: one that nobody has.
NOWHERE = "/golden/home"
#: What a backend is asked with.
BACKENDS = {
    "local": "backend=local",
    "slurm": "backend=slurm backend.options.topology=none",
    "kubernetes": "backend=kubernetes backend.options.image=orch:1",
}
_FABRIC = (
    "SwitchName=leaf1 Nodes=n[1-4]\nSwitchName=leaf2 Nodes=n[5-8]\nSwitchName=spine"
    " Switches=leaf[1-2]\n"
)
#: What lies in the current folder of every line.
FILES = {
    "x.py": "print('x')\n",
    "topology.conf": _FABRIC,
    "other.conf": _FABRIC.replace("1-4", "1-3").replace("5-8", "4-8"),
    "table.csv": (
        "id,layers,hidden,heads,kv_heads,vocab,seq_len,gpu,num_gpus,tp,pp,dp,zero_stage,micro_batch,global_batch,"
        "precision,experts,topk,ep,step_time_s,peak_mem_gib,status\n"
        "a,32,4096,32,8,128256,8192,H100,64,4,2,8,1,1,128,bf16,,,,5.1,60.5,ok\n"
        "b,32,4096,32,8,128256,8192,H100,64,8,1,8,1,1,128,bf16,,,,6,41,ok\n"
        "c,32,4096,32,8,128256,8192,H100,64,1,1,64,3,1,128,bf16,,,,,,oom\n"
        "d,48,6144,48,,51200,2048,A100,64,8,1,8,0,4,512,bf16,,,,,,ok\n"
        "e,32,4096,32,8,32000,4096,H100,64,2,2,16,1,1,256,bf16,8,2,8,,,\n"
        "f,32,4096,32,8,32000,4096,H100,63,2,2,16,1,1,256,bf16,,,,,,\n"
    ),
}


_GAP = r"(?:\W|\\n)+"  # between words of JSON, in YAML or not
#: What depends on the bytes of a program's archive, and so on the version of zlib.
_OF_AN_ARCHIVE = (
    r"(?<=[ \"])H4sI[A-Za-z0-9+/=]{100,}",
    r"(?<=orch-code-)[0-9a-f]{32}",
    r"(?<=orch\.dev/code: )[0-9a-f]{32}",
    rf"(?<=packed){_GAP}sha256{_GAP}[0-9a-f]{{64}}{_GAP}bytes{_GAP}\d+",
    rf"(?<=code\.tar\.gz){_GAP}mode{_GAP}0600{_GAP}size{_GAP}\d+{_GAP}sha256{_GAP}[0-9a-f]{{64}}",
    r"(?<=code\.tar\.gz) \([^)]*\)",
    r"(?<= \()\S+ \S+(?= compressed\))",
    r"(?<=code\.000: \()\d+(?= bytes\))",
)


class Line(NamedTuple):
    """A command line of one backend."""

    backend: str
    text: str  # without the program's name
    may_change: bool = False

    @property
    def name(self) -> str:
        return f"orch {self.text}"


class Said(NamedTuple):
    """What a line gave, in normal form."""

    exit: int
    out: str
    err: str

    @property
    def plans(self) -> str:
        """The hashes of all plans in it, in order."""
        hashes = re.findall(r'(?:plan[-_]hash|, plan|"hash")\W{1,4}([0-9a-f]{64})', self.out)
        return " ".join(dict.fromkeys(hashes))


def lines() -> list[Line]:
    backend_lines, _, free = (HERE / "lines.txt").read_text().partition("# Without a backend.\n")
    command_lines = []
    for backend, backend_overrides in BACKENDS.items():
        for arguments in backend_lines.splitlines()[1:]:
            head, *program = re.split(
                r"(?= -- | --$)", arguments.removeprefix("may change: "), maxsplit=1
            )
            command_lines.append(
                Line(
                    backend,
                    " ".join([head, backend_overrides]) + "".join(program),
                    arguments.startswith("may change: "),
                )
            )
    return command_lines + [Line("any", arguments) for arguments in free.splitlines()]


# -----------------------------------------------------------------------------------------------
#     running


@contextlib.contextmanager
def bare(folder: Path, home: str, python: str) -> Iterator[None]:
    """`folder` as the current one, and of the environment what every machine has. Put back
    afterwards."""
    before = dict(os.environ)
    cwd = Path.cwd()
    executable = sys.executable
    mask = os.umask(0o022)
    (folder / "bin").mkdir(exist_ok=True)
    os.environ.clear()
    os.environ |= {
        "HOME": str(folder),
        "ORCH_HOME": home,
        "PATH": str(folder / "bin"),
        "LANG": "C.UTF-8",
    }
    os.environ |= {
        "XDG_CACHE_HOME": str(cache()),
        "KUBECONFIG": "/golden/kubeconfig",
        "COLUMNS": "100",
    }
    os.environ |= {"NO_COLOR": "1", "TMPDIR": tempfile.gettempdir()}
    sys.executable = python
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(cwd)
        sys.executable = executable
        os.environ.clear()
        os.environ |= before
        os.umask(mask)


_CACHE: list[tempfile.TemporaryDirectory] = []


def cache() -> Path:
    """One for this process: what a line has computed need not be computed again by the next."""
    if not _CACHE:
        _CACHE.append(tempfile.TemporaryDirectory(prefix="orch-golden-cache-"))
    return Path(_CACHE[0].name)


def orch(arguments: list[str]) -> Said:
    """One command line in this process."""
    from orchestrator.cli.main import main

    streams = [
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)
    ]
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        try:
            code = main(arguments)
        except SystemExit as end:  # argparse, after --help
            code = int(end.code or 0)
    out, err = (stream.buffer.getvalue().decode() for stream in streams)
    return Said(code, out, err)


def run(line: Line) -> Said:
    """One line in a folder of its own, in normal form."""
    folder = Path(
        tempfile.mkdtemp(prefix="orch-golden-", dir="/tmp")
    )  # of one length: pages are cut to a width
    try:
        for name, content in FILES.items():
            (folder / name).write_text(content)
        verb = line.text.partition(" ")[0]
        writes = verb in ("render", "bench") or (verb == "submit" and "--dry-run" not in line.text)
        arguments = shlex.split(line.text)
        if writes:  # then the home must not be in the plan
            at = arguments.index("--") if "--" in arguments else len(arguments)
            arguments[at:at] = ["data.cache_dir=/golden/data"]
        with bare(folder, str(folder / "home") if writes else NOWHERE, "/golden/bin/python"):
            output = orch(arguments)
        only_names = "version" in line.text and output.exit == 0 and "--help" not in line.text
        return Said(output.exit, *(normal(stream, folder, only_names) for stream in output[1:]))
    finally:
        shutil.rmtree(folder)


def normal(output_text: str, folder: Path, only_names: bool = False) -> str:
    """Without what differs from one time or machine to the next."""
    output_text = output_text.replace(str(folder), "<TMP>").replace(str(cache()), "<CACHE>")
    output_text = re.sub(
        r"\bkey: [A-Za-z0-9+/]{80,}=*", "key: <KEY>", output_text
    )  # of a run, drawn anew
    output_text = re.sub(
        r"(?<=[ \"])eN[A-Za-z0-9+/=]{200,}", _unpacked, output_text
    )  # zlib's bytes depend on its version
    for pattern in _OF_AN_ARCHIVE:
        output_text = re.sub(pattern, "<ARCHIVE>", output_text)
    output_text = re.sub(r"\S*/orch-crash-\S+\.txt", "<TRACEBACK>", output_text)
    output_text = re.sub(
        r"this machine has .*? of memory", "this machine has <MACHINE>", output_text
    )
    if only_names:
        output_text = re.sub(r"\d[\w.+]*|not installed", "<VERSION>", output_text)
    return output_text


def _unpacked(match: re.Match[str]) -> str:
    content = zlib.decompress(base64.b64decode(match[0]))
    return f"<zlib {len(content)} bytes {hashlib.sha256(content).hexdigest()}>"


# -----------------------------------------------------------------------------------------------
#     storing


def stored(line: Line, output: Said) -> dict[str, str | int | bool]:
    """What is kept of it: texts that are short, of others the digest."""
    record: dict[str, str | int | bool] = {"exit": output.exit}
    if output.plans:
        record["plan"] = output.plans if len(output.plans) < SHORT else digest(output.plans)
    record |= {"out": digest(output.out), "err": digest(output.err)}
    return record | ({"may change": True} if line.may_change else {})


def digest(output_text: str) -> str:
    return (
        output_text
        if len(output_text) < SHORT
        else f"sha256 {hashlib.sha256(output_text.encode()).hexdigest()}"
    )


def golden_file(backend: str) -> Path:
    return HERE / f"lines.{backend}.json"


def python_version() -> str:
    """argparse says things in words that differ between Pythons."""
    return "{}.{}".format(*sys.version_info)


def write(records: dict[str, dict[str, dict]]) -> None:
    for backend, backend_records in records.items():
        rows = ",\n".join(
            f"{json.dumps(name)}: {json.dumps(record, ensure_ascii=False)}"
            for name, record in backend_records.items()
        )
        golden_file(backend).write_text(
            f'{{"python": "{python_version()}", "lines": {{\n{rows}\n}}}}\n'
        )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.golden.lines", description="orch's command lines"
    )
    parser.add_argument("--write", action="store_true", help="take what they give now as golden")
    parser.add_argument(
        "--texts", metavar="DIR", type=Path, help="write the full text of every line there"
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="lines that hold this text")
    args = parser.parse_args(argv)
    if not (args.write or args.texts) or (args.write and args.only):
        parser.error("--write, or --texts DIR [--only TEXT]")
    records: dict[str, dict[str, dict]] = {}
    for line in lines():
        if args.only not in line.name:
            continue
        output = run(line)
        records.setdefault(line.backend, {})[line.name] = stored(line, output)
        if args.texts:
            slug = re.sub(r"[^A-Za-z0-9.=-]+", "_", line.text)[:110].strip("_")
            short = hashlib.sha256(line.name.encode()).hexdigest()[:6]
            path = args.texts / line.backend / f"{slug}.{short}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            paragraphs = (
                f"$ {line.name}",
                f"exit {output.exit}",
                "--- stdout",
                output.out,
                "--- stderr",
                output.err,
            )
            path.write_text("\n".join(paragraphs))
    if args.write:
        write(records)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
