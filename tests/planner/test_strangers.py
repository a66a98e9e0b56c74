"""Public runs that no parameter was fitted to (docs/strangers.md): every row is answered, near what
was measured."""

from __future__ import annotations

import csv
from pathlib import Path

from orchestrator.accuracy.predict.predict import predict
from orchestrator.accuracy.predict.score import MEAN, score

TABLE = Path(__file__).with_name("strangers.csv")


def test_strangers_tables_are_answered_as_well_as_docs_say():
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    predictions = list(predict(rows))
    assert [
        prediction.status for prediction in predictions if prediction.status not in ("ok", "oom")
    ] == []
    unread = [
        prediction.assumed
        for prediction in predictions
        if "is not known" in prediction.assumed or "unknown, taken" in prediction.assumed
    ]
    assert not unread, "every GPU and every software has a name that is read"
    accuracy = score(rows, predictions)
    time, memory = (
        {error.group: error for error in errors} for errors in (accuracy.time, accuracy.memory)
    )
    assert time[MEAN].mean < 0.15 and time["all"].mean < 0.125
    named = ("megascale_baseline", "flagperf_paddle", "internevo", "nemotron4_340b", "swiss_ai")
    assert max(time[name].mean for name in named) < 0.09
    assert memory[MEAN].mean < 0.15 and time["all"].inside95 > 0.85
    assert (
        sum(many for (is_, predicted_fit), many in accuracy.fits.items() if is_ != predicted_fit)
        <= 4
    )
    by_name = {ranking.group: ranking for ranking in accuracy.order}
    alps = [
        prediction.step_time_s or 0.0
        for prediction in predictions
        if prediction.id.startswith("swiss_ai")
    ]
    assert alps[2] < alps[1] < alps[0], (
        "a pair of four GPUs without a switch has a third of the links"
    )
    assert by_name["flagperf_megatron"].spearman > 0.8 and by_name["flagperf_megatron"].regret == 0
