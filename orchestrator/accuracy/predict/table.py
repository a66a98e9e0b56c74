"""Reads the rows of a CSV file one at a time: finds the separator and the columns, and reports the
lines that are not rows of the table."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator
from typing import BinaryIO, TextIO

#: Key under which a row that cannot be read has the reason; no column has an empty name.
PROBLEM = ""
MOST_CELL = 131_072  # The most characters that the csv module takes.
MOST_LINE = 1 << 20
SEPARATORS = ",;\t|"
#: Columns that predictions read, and the measured columns.
COLUMNS = (
    "id",
    "model",
    "params_b",
    "layers",
    "hidden",
    "ffn_hidden",
    "heads",
    "kv_heads",
    "vocab",
    "experts",
    "topk",
    "moe_ffn",
    "seq_len",
    "gpu",
    "nodes",
    "num_gpus",
    "gpus_per_node",
    "interconnect",
    "framework",
    "task",
    "tp",
    "sp",
    "cp",
    "pp",
    "vpp",
    "pp_schedule",
    "dp",
    "ep",
    "zero_stage",
    "micro_batch",
    "global_batch",
    "recompute",
    "precision",
    "mem_kind",
    "notes",
    "source",
    "step_time_s",
    "tokens_per_s_per_gpu",
    "peak_mem_gib",
    "status",
)
#: Other names of these columns -> column, without units.
_ALIASES: dict[str, str] = {
    **dict.fromkeys(
        ("params", "parameters", "params_billion", "size_b", "model_size", "n_params"), "params_b"
    ),
    **dict.fromkeys(("model_name", "architecture"), "model"),
    **dict.fromkeys(("num_layers", "n_layers", "n_layer", "depth", "num_hidden_layers"), "layers"),
    **dict.fromkeys(("hidden_size", "d_model", "hidden_dim", "h", "n_embd"), "hidden"),
    **dict.fromkeys(
        ("ffn", "d_ff", "ffn_size", "intermediate_size", "ffn_hidden_size", "ffn_dim"), "ffn_hidden"
    ),
    **dict.fromkeys(
        ("num_heads", "n_heads", "n_head", "attention_heads", "num_attention_heads"), "heads"
    ),
    **dict.fromkeys(
        ("num_kv_heads", "n_kv_heads", "num_key_value_heads", "query_groups"), "kv_heads"
    ),
    **dict.fromkeys(("vocab_size", "vocabulary"), "vocab"),
    **dict.fromkeys(("num_experts", "n_experts"), "experts"),
    **dict.fromkeys(("top_k", "experts_per_token", "num_experts_per_tok"), "topk"),
    **dict.fromkeys(("moe_ffn_hidden", "expert_ffn", "moe_intermediate_size"), "moe_ffn"),
    **dict.fromkeys(
        ("seq", "sequence_length", "seq_length", "context", "context_length", "seqlen"), "seq_len"
    ),
    **dict.fromkeys(
        ("gpu_type", "gpu_name", "gpu_model", "accelerator", "device", "hardware"), "gpu"
    ),
    **dict.fromkeys(
        ("gpus", "n_gpus", "n_gpu", "ngpus", "world_size", "num_devices", "gpu_count"),
        "num_gpus",
    ),
    **dict.fromkeys(("num_nodes", "n_nodes", "nnodes", "node_count"), "nodes"),
    **dict.fromkeys(
        ("gpus/node", "gpus_a_node", "num_gpus_per_node", "nproc_per_node"), "gpus_per_node"
    ),
    **dict.fromkeys(("network", "fabric"), "interconnect"),
    **dict.fromkeys(("software", "trainer"), "framework"),
    **dict.fromkeys(
        ("tensor_parallel", "tp_size", "tensor_parallel_size", "tensor_model_parallel_size"), "tp"
    ),
    **dict.fromkeys(
        ("context_parallel", "cp_size", "context_parallel_size", "context_model_parallel_size"),
        "cp",
    ),
    **dict.fromkeys(
        ("pipeline_parallel", "pp_size", "pipeline_parallel_size", "pipeline_model_parallel_size"),
        "pp",
    ),
    **dict.fromkeys(("data_parallel", "dp_size"), "dp"),
    **dict.fromkeys(
        ("expert_parallel", "ep_size", "expert_parallel_size", "expert_model_parallel_size"), "ep"
    ),
    **dict.fromkeys(("sequence_parallel",), "sp"),
    **dict.fromkeys(("vp", "virtual_stages", "virtual_pipeline", "interleave"), "vpp"),
    **dict.fromkeys(("schedule", "pipeline_schedule"), "pp_schedule"),
    **dict.fromkeys(("zero", "sharding"), "zero_stage"),
    **dict.fromkeys(("mbs", "micro_batch_size", "microbatch", "batch_per_gpu"), "micro_batch"),
    **dict.fromkeys(("per_device_train_batch_size", "per_device_batch_size"), "micro_batch"),
    **dict.fromkeys(("gbs", "global_batch_size", "batch_size", "batch"), "global_batch"),
    **dict.fromkeys(
        ("recomputation", "activation_checkpointing", "checkpointing", "ac"), "recompute"
    ),
    **dict.fromkeys(("dtype", "data_type"), "precision"),
    **dict.fromkeys(("comment", "comments", "note", "remarks"), "notes"),
    **dict.fromkeys(
        ("step_time", "iteration_time", "iter_time", "step_seconds", "time_per_step"), "step_time_s"
    ),
    **dict.fromkeys(("peak_mem", "peak_memory", "memory"), "peak_mem_gib"),
    **dict.fromkeys(
        ("tokens_per_gpu_per_s", "tokens_per_second_per_gpu", "tok_s_gpu"), "tokens_per_s_per_gpu"
    ),
}
#: (measured column, another unit) -> factor to the column's own unit.
_UNITS = {("step_time_s", "ms"): 1e-3, ("step_time_s", "us"): 1e-6, ("step_time_s", "min"): 60.0}
_UNITS |= {
    ("peak_mem_gib", "mib"): 1 / 1024,
    ("peak_mem_gib", "mb"): 1 / 1024,
    ("peak_mem_gib", "bytes"): 2.0**-30,
}


class TableError(ValueError):
    """The error of a file that is not a table; its message names the row and the reason."""


def read_rows(file: BinaryIO) -> Iterator[dict[str, str]]:
    """Returns the rows below the first line, each as a dictionary by column.

    Raises TableError at once if the first line names no columns. A line that is not a row has the
    key `PROBLEM`. Bytes that are not UTF-8 become replacement characters.
    """
    stream = _decoded(file)
    first_line = stream.readline(MOST_LINE)
    while first_line.startswith("#"):
        first_line = stream.readline(MOST_LINE)
    if not first_line.strip():
        raise TableError(
            "row 1 is empty: it must name the columns" if first_line else "the file is empty"
        )
    if "\0" in first_line or first_line.startswith(("PK\x03\x04", "PAR1", "\x1f")):
        raise TableError("not a text file")
    separator = max(SEPARATORS, key=first_line.count)
    lines = csv.reader(_lines(first_line, stream), delimiter=separator)
    try:
        header = next(lines)
    except csv.Error as error:
        raise TableError(f"row 1: {error}") from None
    columns = columns_of(header)
    return _rows(lines, columns, len(header))


def _decoded(file: BinaryIO) -> TextIO:
    head = file.peek(4)[:4] if isinstance(file, io.BufferedReader) else b""
    encoding = "utf-16" if head.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    return io.TextIOWrapper(
        file,
        encoding=encoding,
        errors="replace",
        newline="",
    )


def _lines(first_line: str, stream: TextIO) -> Iterator[str]:
    """Yields lines of at most MOST_LINE characters. A longer line is cut, and the csv reader then
    refuses it because of its long cell."""
    yield first_line
    while line := stream.readline(MOST_LINE):
        yield line
        while len(line) == MOST_LINE and not line.endswith("\n"):
            line = stream.readline(MOST_LINE)


def columns_of(header: list[str]) -> list[tuple[str, float]]:
    """Returns (column, factor of its unit) for each cell of the first line, with an empty name for
    a column that is not read. Raises TableError if a column is repeated or no column describes a
    model."""
    normalized_names = [re.sub(r"[\s\-]+", "_", cell.strip().lower()) for cell in header]
    columns = [_column(name) for name in normalized_names]
    for index, (column, _) in enumerate(columns):  # A column's own name beats its aliases.
        if column and column != normalized_names[index] and column in normalized_names:
            columns[index] = ("", 1.0)
    repeated = [
        name
        for name, count in Counter(column for column, _ in columns if column).items()
        if count > 1
    ]
    if repeated:
        raise TableError(f"row 1: column {repeated[0]!r} stands there twice")
    read_columns = {column for column, _ in columns}
    if not ({"layers", "hidden"} <= read_columns or read_columns & {"model", "params_b"}):
        shown = ", ".join(cell.strip()[:20] for cell in header[:4])
        raise TableError(
            "row 1: no column says a model: want layers and hidden, model, or params_b; it has"
            f" {shown!r}"
        )
    return columns


def _column(name: str) -> tuple[str, float]:
    """Returns the column and the factor of a name: ("step_time_s", 0.001) for "step_time_(ms)" or
    "step_time_ms"."""
    if name in COLUMNS:
        return name, 1.0
    if name in _ALIASES:
        return _ALIASES[name], 1.0
    stem, _, unit = re.sub(r"_?[(\[]([^)\]]*)[)\]]_?$", r"_\1", name).rpartition("_")
    column = _ALIASES.get(stem, stem if stem in COLUMNS else "")
    for candidate in COLUMNS:
        if not column and candidate.startswith(f"{stem}_") and (candidate, unit) in _UNITS:
            column = candidate
    if not column:
        return "", 1.0
    return column, _UNITS.get((column, unit), 1.0)


def _rows(
    lines: Iterator[list[str]],
    columns: list[tuple[str, float]],
    width: int,
) -> Iterator[dict[str, str]]:
    scaled = [(column, factor) for column, factor in columns if factor != 1.0]
    names = [column for column, _ in columns]
    read_indices = [index for index, name in enumerate(names) if name]
    while True:
        try:
            cells = next(lines)
        except StopIteration:
            return
        except csv.Error as error:
            reason = f"a cell of more than {MOST_CELL:,} characters, or a quote that is not closed"
            yield {PROBLEM: reason if "field larger" in str(error) else str(error)}
            continue
        # Empty lines and the rule below the first line of a Markdown table are skipped.
        if not "".join(cells).strip(" |:-"):
            continue
        if len(cells) < width and "\n" in cells[-1]:
            row = {PROBLEM: f"a quote that is not closed: {cells[-1][:20]!r}..."}
        elif len(cells) > width and any(cell.strip() for cell in cells[width:]):
            row = {PROBLEM: f"{len(cells)} cells under {width} columns"}
        else:
            row = {names[index]: cells[index] for index in read_indices if index < len(cells)}
        for column, factor in scaled:
            row[column] = _times(row.get(column, ""), factor)
        yield row


def _times(cell: str, factor: float) -> str:
    try:
        return repr(float(cell) * factor)
    except ValueError:
        return cell
