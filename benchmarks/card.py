"""One card: what it is, what it can do, and whether a step waits for it."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from orchestrator.accuracy.predict.hardware import GPUS, gpu_of

TRAINER = f"{Path(__file__).resolve().parents[1] / 'trainer'}/"


def device_to_measure(dry: bool) -> torch.device | None:
    """The card of this machine, else the CPU for a dry run; None, and a line that says so, if there
    is nothing to measure."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if dry:
        return torch.device("cpu")
    print("skipped: this machine has no CUDA device")
    return None


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def sheet_flops(name: str) -> float | None:
    """Dense bf16 FLOP/s of a card's data sheet, if it is known here."""
    gpu, is_named = gpu_of(name)
    return GPUS[gpu].half_tflops * 1e12 if is_named else None


def card_words(name: str) -> tuple[str, ...]:
    """The words with which a plan is for the card of this name, as the driver spells it; none for
    a card that is not known here."""
    gpu, is_named = gpu_of(name)
    if not is_named:
        return ()
    card = GPUS[gpu]
    half = f"{card.half_tflops:g}"
    return (
        f"cluster.gpu.name={gpu}",
        f"cluster.gpu.memory_gib={card.memory_gib:g}",
        f"cluster.gpu.hbm_gb_per_s={card.hbm_gb_per_s:g}",
        f"cluster.gpu.peak_tflops.bf16={half}",
        f"cluster.gpu.peak_tflops.fp16={half}",
    )


def seconds(step: Callable[[], object], device: torch.device) -> float:
    begin = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def median_s(step: Callable[[], object], device: torch.device) -> float:
    return statistics.median([seconds(step, device) for _ in range(12)][2:])


def matmul_ceiling(device: torch.device, sizes: tuple[int, ...]) -> float:
    """FLOP/s of the best square bf16 product."""
    best = 0.0
    for size in sizes:
        a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
        spent = median_s(lambda a=a, b=b: a @ b, device)
        best = max(best, 2 * size**3 / spent)
    return best


def memory_ceiling(device: torch.device, size: int) -> dict[str, float]:
    """Bytes/s of the card's memory, read and written: of a copy, and of a triad `a = b + s c`, by
    arrays of `size` bytes."""
    a, b, c = (torch.ones(size // 4, device=device) for _ in range(3))
    copied = median_s(lambda: a.copy_(b), device)
    triad = median_s(lambda: torch.add(b, c, alpha=3.0, out=a), device)
    return {"copy_bytes_per_s": 2 * size / copied, "triad_bytes_per_s": 3 * size / triad}


def collect(device: torch.device) -> None:
    """Gives back garbage and the allocator's blocks. Raises RuntimeError if the device is lost:
    after some errors every call of the process fails."""
    gc.collect()
    gc.collect()  # what the first pass has freed held more
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def forget(device: torch.device) -> None:
    """Gives back what is no longer held, compiled graphs too. Raises as `collect` does."""
    torch.compiler.reset()
    collect(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


# ----------------------------------------------------------------------- waits of the host


@contextlib.contextmanager
def sync_mode(mode: str) -> Iterator[None]:
    """torch's sync debug mode inside: "error" raises, "warn" warns where the host waits for a
    card. It sees copies and streams; not `torch.cuda.synchronize`, nor an event's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def wait_in(step: Callable[[], object], device: torch.device) -> str:
    """Where the host first waits for the card in a steady step: "file:line function", "" if it
    does not. Other errors are raised. An optimizer on the host waits by design."""
    if device.type != "cuda":
        step()
        return ""
    try:
        with sync_mode("error"):
            step()
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        return _place_of(error)
    return ""


def _place_of(error: BaseException) -> str:
    """The innermost place in the trainer that an error came from; else that of the error."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(TRAINER)]
    if ours:
        return f"{ours[-1].filename.removeprefix(TRAINER)}:{ours[-1].lineno} {ours[-1].name}"
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].name}"


@contextlib.contextmanager
def waits_of_the_host(device: torch.device) -> Iterator[list[str]]:
    """All places, in this process, where the host waits for the card inside: "file:line" each,
    once."""
    places = list[str]()
    if device.type != "cuda":
        yield places
        return
    with warnings.catch_warnings(record=True) as caught, sync_mode("warn"):
        warnings.simplefilter("always")
        yield places
    for warning in caught:
        place = f"{Path(warning.filename).name}:{warning.lineno}"
        if "synchronizing CUDA operation" in str(warning.message) and place not in places:
            places.append(place)
