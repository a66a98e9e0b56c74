"""Files of rows: separators, headers, encodings, and lines that are not rows."""

from __future__ import annotations

import io
import json

import pytest

from orchestrator.accuracy.predict.predict import predict
from orchestrator.accuracy.predict.table import PROBLEM, TableError, read_rows
from orchestrator.cli.main import main


def rows_of(content: str | bytes) -> list[dict[str, str]]:
    raw = content if isinstance(content, bytes) else content.encode()
    return list(read_rows(io.BufferedReader(io.BytesIO(raw))))


@pytest.mark.parametrize(
    "content",
    [
        "model,layers\nLlama-2-7b,32\n",
        "\ufeffModel, Layers \r\nLlama-2-7b,32\r\n",
        "model;num_layers\nLlama-2-7b;32\n",
        "model\tLAYERS\nLlama-2-7b\t32",
        "model,layers,,remarks of mine\nLlama-2-7b,32,,x\n\n",
        "model,layers\nLlama-2-7b,32\n".encode("utf-16"),
        "# my runs\n#\nmodel_name,num_hidden_layers\nLlama-2-7b,32\n",
        "|model|layers|\n|---|:--:|\n|Llama-2-7b|32|\n",
    ],
)
def test_ways_to_write_the_same_table(content):
    assert rows_of(content) == [{"model": "Llama-2-7b", "layers": "32"}]


def test_names_of_other_software():
    header = (
        "architecture,nnodes,nproc_per_node,tensor-model-parallel-size,pipeline model parallel"
        " size,iter_time (ms)"
    )
    (row,) = rows_of(f"{header},per_device_train_batch_size\ngpt2,4,8,2,1,1500,3\n")
    expected_cells = {
        "model": "gpt2",
        "nodes": "4",
        "gpus_per_node": "8",
        "tp": "2",
        "pp": "1",
        "micro_batch": "3",
    }
    assert row == expected_cells | {"step_time_s": "1.5"}


def test_units_in_the_first_line():
    (row,) = rows_of("model,step time (ms),Peak_Mem_MiB,seq-len\ngpt2,1500,2048,1024\n")
    assert (row["step_time_s"], row["peak_mem_gib"], row["seq_len"]) == ("1.5", "2.0", "1024")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file is empty"),
        ("\n\n", "row 1 is empty"),
        ("1,2,3\n4,5,6\n", "row 1: no column says a model"),
        ("layers,heads\n2,2\n", "want layers and hidden, model, or params_b"),
        ("model,tp,TP\na,1,2\n", "row 1: column 'tp' stands there twice"),
        (b"PK\x03\x04\x00", "not a text file"),
        (b"a\x00b\n", "not a text file"),
    ],
)
def test_files_that_are_not_tables(content, message):
    with pytest.raises(TableError, match=message):
        rows_of(content)


def test_lines_that_are_not_rows_are_named_and_the_rest_go_on():
    huge = "x" * 3_000_000
    content = f"model,layers\ngpt2,12\n{huge},1\ngpt2,12,7,8\ngpt2\ngpt2,\x00\ngp\xff,12\n".encode(
        "latin-1"
    )
    rows = rows_of(content)
    assert [PROBLEM in row for row in rows] == [False, True, True, False, False, False]
    statuses = [prediction.status for prediction in predict(rows)]
    assert "row 2: a cell of more than 131,072 characters" in statuses[1]
    assert "row 3: 4 cells under 2 columns" in statuses[2]
    assert statuses[3] == "ok" and "row 5: layers='\\x00' is not a number" in statuses[4]


def test_a_quote_that_is_not_closed_is_no_model():
    (row,) = rows_of('model,gpu,num_gpus\n"gpt2,A100,1\ngpt2,A100,8\n')
    assert "a quote that is not closed" in row[PROBLEM]


def test_measured_cells_that_cannot_be_are_named_and_left_out_of_the_score(tmp_path, capsys):
    times = ["1", "1000 ms", "1,0", "-1", "0", "1e9", "fast", "inf"]
    table = tmp_path / "runs.csv"
    table.write_text(
        "".join(
            [
                "id;model;gpu;num_gpus;step_time_s\n",
                *(f"a-{i};gpt2;A100;1;{s}\n" for i, s in enumerate(times)),
            ]
        )
    )
    assert main(["predict", "--table", str(table), "--score", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["time"][0]["rows"] == 3
    lines = [line for line in err.splitlines() if "left out of the score" in line]
    for number, line in zip(range(4, 9), lines, strict=True):
        assert f"row {number} (a-{number - 1}): step_time_s=" in line


def test_a_bad_table_ends_with_a_line_and_its_exit_code(tmp_path, capsys):
    table = tmp_path / "in.csv"
    out = tmp_path / "out.csv"
    table.write_text("a,b\n1,2\n")
    assert main(["predict", "--table", str(table), "--out", str(out)]) == 65
    assert "row 1: no column says a model" in capsys.readouterr().err and not list(
        tmp_path.glob("*out*")
    )
