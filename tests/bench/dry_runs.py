"""python -m tests.bench.dry_runs single|node FOLDER: a benchmark of GPUs run dry, every line that
it executes noted, also in the processes that it forks. The lines are in FOLDER/lines, one
`file:number` each."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from orchestrator.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
SINGLE = ("benchmarks/gpu_single.py",)
NODE = tuple(
    f"benchmarks/gpu_node/{name}.py" for name in ("__main__", "cases", "measure", "page", "rivals")
)
#: Ours alone, beside each rival, in pipelines, from packed text; one that the planner refuses.
CASES = ("ZeRO-0", "ZeRO-3", "packed documents", "PP 1f1b", "refused", "compiled")


def noting(files: tuple[str, ...], path: Path) -> Callable[..., Any]:
    """A trace function that appends each line of `files` to `path` once a process."""
    names = {str(ROOT / file): file for file in files}
    seen = set[tuple[str, int]]()
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        file = names.get(frame.f_code.co_filename)
        if file is None:
            return None
        if event == "line" and (file, frame.f_lineno) not in seen:
            seen.add((file, frame.f_lineno))
            os.write(out, f"{file}:{frame.f_lineno}\n".encode())
        return trace

    return trace


def lines_of(file: str) -> set[int]:
    """The lines inside functions of a file."""
    line_numbers = set[int]()
    todo = list[CodeType]()
    module = compile((ROOT / file).read_text(), file, "exec")
    todo += [const for const in module.co_consts if isinstance(const, CodeType)]
    while todo:
        code = todo.pop()
        todo += [const for const in code.co_consts if isinstance(const, CodeType)]
        if code.co_name not in CLASSES:
            line_numbers |= {
                line for _, _, line in code.co_lines() if line and line != code.co_firstlineno
            }
    return line_numbers


#: Bodies of classes run once, on import.
CLASSES = ("Case", "Where", "Node")


def fail(*_: Any) -> Any:
    raise RuntimeError("a rival that fails")


def main(kind: str, folder: Path) -> int:
    import torch  # noqa: F401  # before the trace: it does not look at a thing of torch's

    sys.settrace(noting(SINGLE if kind == "single" else NODE, folder / "lines"))
    if kind == "single":
        from benchmarks import gpu_single

        original_plain = gpu_single.plain

        def plain(plan: Plan, *rest: Any) -> Any:
            return fail() if plan.job.train.compile else original_plain(plan, *rest)

        gpu_single.plain = plain
        arguments = ["--dry", "--rounds", "2", "--out", str(folder / "single.json")]
        return gpu_single.main(arguments)
    from benchmarks.gpu_node import __main__ as node
    from benchmarks.gpu_node import measure
    from benchmarks.gpu_node.cases import SMALL, Case, Where, plan_of

    def ours(plan: Plan, *rest: Any) -> Any:
        return fail() if plan.parallel.zero == 2 else real(plan, *rest)

    original_cases = node.cases
    rivals = node.available
    real = measure.ours
    measure.ours = ours
    layout = "parallel=dp2_zero1"
    extra_cases = [
        Case("refused", SMALL, ("parallel=tp3",)),
        Case("compiled", SMALL, (layout, "train.compile=true"), ("loop",)),
        Case("fails", SMALL, (layout,), ("failing",)),
        Case("dies", SMALL, (layout,), ("dying",)),
        Case("ours fails", SMALL, ("parallel=dp2_zero2",), ("loop",)),
    ]
    node.cases = lambda gpus: [*original_cases(gpus), *extra_cases]
    node.available = lambda folder: (
        rivals(folder) | {"failing": fail, "dying": lambda *_: os._exit(3)}
    )
    plan_of(SMALL, (layout, "train.global_batch_samples=8"), 2, Where(dry=False, cuda=True))
    out = folder / "result.json"
    titan = os.environ.get("TORCHTITAN", "")
    page = folder / "performance.md"
    page.write_text((ROOT / "docs" / "performance.md").read_text())
    arguments = ["--dry", "--gpus", "2", "--rounds", "1", "--out", str(out), "--page", str(page)]
    arguments += ["--torchtitan", titan, "--only"]
    node.main([*arguments, *CASES])
    tempfile.tempdir = str(folder)  # where it writes unless told
    late = ["--dry", "--gpus", "2", "--minutes", "1e-5", "--page", str(page), "--only", "refused"]
    node.main(late)
    return 0 if node.main([*arguments, "fails", "dies", "ours fails"]) == 1 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
