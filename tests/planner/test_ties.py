"""Layouts that predictions cannot tell apart, and which of them is taken."""

from __future__ import annotations

from orchestrator.planner.search.auto import resolve_auto
from orchestrator.planner.search.ties import (
    EQUAL,
    IN_THREES,
    bytes_at_the_top,
    preferred_first,
    proven,
)
from orchestrator.verify import techniques

from . import configs, shapes


def answer(**train: object):
    config = configs.config(configs.cluster(8, 8), shapes.llama3_8b(), {"auto": True}, **train)
    return config, configs.search(config).run()


def test_equal_layouts_are_as_fast_as_the_fastest_and_the_taken_one_comes_first():
    _, tuned = answer(global_batch_samples=256)
    times = [costed.step_s for costed in tuned.equal]
    assert len(times) > 1 and max(times) <= tuned.front[0].step_s * (1 + EQUAL)
    assert tuned.front[0] in tuned.equal
    assert sorted(times[1:]) == times[1:]
    least = min(round(bytes_at_the_top(costed, "spine"), -9) for costed in tuned.equal)
    assert round(bytes_at_the_top(tuned.equal[0], "spine"), -9) <= least * 1.1 + 1e9


def test_auto_takes_what_tune_shows_first():
    config, tuned = answer(global_batch_samples=256)
    chosen, _ = resolve_auto(config, configs.search(config).context.cluster)
    assert (
        chosen.parallel == tuned.equal[0].config.parallel
        and chosen.train == tuned.equal[0].config.train
    )


def test_fewer_bytes_over_the_top_count_before_what_is_proven_and_time():
    _, tuned = answer(global_batch_samples=256)
    for costed in tuned.equal:
        assert preferred_first([costed], "spine") == [costed]
    first = preferred_first(tuned.equal, "spine")[0]
    for rival in tuned.equal:
        moved, least = (
            float(f"{bytes_at_the_top(costed, 'spine'):.2g}") for costed in (rival, first)
        )
        assert moved >= least
        if moved == least:
            assert proven(first.layout) or not proven(rival.layout)


def test_the_schedules_proven_in_threes_are_those_of_the_matrix():
    deep = {
        technique.parallel["schedule"]
        for technique in techniques.AXES["pipeline"]
        if technique.deep
    }
    assert deep == IN_THREES
