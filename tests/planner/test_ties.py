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
    _, found = answer(global_batch_samples=256)
    times = [one.step_s for one in found.equal]
    assert len(times) > 1 and max(times) <= found.front[0].step_s * (1 + EQUAL)
    assert found.front[0] in found.equal
    assert sorted(times[1:]) == times[1:]
    least = min(round(bytes_at_the_top(one, "spine"), -9) for one in found.equal)
    assert round(bytes_at_the_top(found.equal[0], "spine"), -9) <= least * 1.1 + 1e9


def test_auto_takes_what_tune_shows_first():
    config, found = answer(global_batch_samples=256)
    taken, _ = resolve_auto(config, configs.search(config).context.cluster)
    assert (
        taken.parallel == found.equal[0].config.parallel
        and taken.train == found.equal[0].config.train
    )


def test_fewer_bytes_over_the_top_count_before_what_is_proven_and_time():
    _, found = answer(global_batch_samples=256)
    for one in found.equal:
        assert preferred_first([one], "spine") == [one]
    first = preferred_first(found.equal, "spine")[0]
    for other in found.equal:
        moved, least = (float(f"{bytes_at_the_top(one, 'spine'):.2g}") for one in (other, first))
        assert moved >= least
        if moved == least:
            assert proven(first.layout) or not proven(other.layout)


def test_the_schedules_proven_in_threes_are_those_of_the_matrix():
    deep = {one.parallel["schedule"] for one in techniques.AXES["pipeline"] if one.deep}
    assert deep == IN_THREES
