"""The course of a run without its engines: when there is trouble, and which batch a step learns from."""

import math
from statistics import median

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dstrain.engine.recovery import _LEAST_LOSSES, WINDOW, Divergence, parse_recovery_state
from dstrain.engine.updates import Flag
from dstrain.recipe import ConfigError, Faults


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5), st.integers(0, 9))
def test_skipped_steps_are_counted_and_bounded(steps, most, before):
    """Oracle: the number of Falses; the first of more than `most` Falses in a row is trouble."""
    course = Divergence(Faults(max_skipped=most))
    course.state = parse_recovery_state({"skipped": before})
    in_a_row, total = 0, before
    for done, applied in enumerate(steps, 1):
        in_a_row, total = (0, total) if applied else (in_a_row + 1, total + 1)
        trouble = course.record_step(done, [Flag(True), Flag(applied)], {})
        assert (course.state.skipped, course.state.in_a_row) == (total, in_a_row)
        assert (trouble is not None) == (in_a_row > most)
        if trouble:
            assert (
                trouble.startswith(f"{most + 1} steps in a row")
                and course.find_step_before_trouble(done) == done - most - 1
            )
            return


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.0625, 8, width=32), min_size=1, max_size=2 * WINDOW), st.sampled_from([1.5, 3.0, 20.0]))
def test_a_loss_above_the_running_median(losses, spike):
    """Oracle: statistics.median of the last WINDOW losses; without faults.spike nothing is kept."""
    course, silent = Divergence(Faults(spike=spike)), Divergence()
    for done, loss in enumerate(losses, 1):
        window = losses[max(0, done - 1 - WINDOW) : done - 1]
        above = len(window) >= _LEAST_LOSSES and loss > spike * median(window)
        each = {"net": [torch.tensor(loss - 0.03125), torch.tensor(loss + 0.03125)]}
        assert silent.record_step(done, [Flag(True)], each) is None and silent.state.losses == {}
        if abs(loss - spike * median(window or [0])) < 1e-3:
            return  # rounding of the mean decides
        assert course.record_step(done, [Flag(True)], each) is None and (course.state.high is not None) == above
        if above:  # the next step tells
            assert course.record_step(done + 1, [Flag(True)], each).startswith(f"step {done}: net's loss")
            assert course.find_step_before_trouble(done + 1) == done - 1 and len(course.state.losses["net"]) == len(
                window
            )
            return


def test_small_losses_have_a_median_too():
    """Oracle: by hand: a thousandth, and then ten times as much, which is above 3 x the median."""
    course = Divergence(Faults(spike=3))
    for done in range(1, _LEAST_LOSSES + 2):
        course.record_step(done, [Flag(True)], {"net": [torch.tensor(1e-3 if done <= _LEAST_LOSSES else 1e-2)]})
    assert course.state.high is not None


@pytest.mark.parametrize("most, trouble", [(2, False), (1, True)])
def test_the_last_step_of_a_run_is_looked_at_once(most, trouble):
    """Oracle: by hand: two skipped steps in a row are trouble where one is the most, and not where two are."""
    course = Divergence(Faults(max_skipped=most))
    course.record_step(1, [Flag(False)], {})
    assert (course.record_step(2, [Flag(False)], {}, last=True) is not None) == trouble


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([1.0, 1.5, 40.0, math.inf]), st.booleans(), st.booleans()), max_size=60))
def test_to_look_or_to_resume_changes_nothing(steps):
    """Oracle: a course whose state nobody looks at: the same trouble at the same step, and the
    same state in the end.
    """
    faults = Faults(spike=20, max_skipped=2)
    alone, course = Divergence(faults), Divergence(faults)
    for done, (loss, looks, resumes) in enumerate([(1.0, False, False)] * _LEAST_LOSSES + steps, 1):
        each = {"net": [torch.tensor(loss)]}
        applied = [Flag(torch.tensor(float(loss < math.inf)))]
        trouble = alone.record_step(done, applied, each, done == _LEAST_LOSSES + len(steps))
        assert course.record_step(done, applied, each, done == _LEAST_LOSSES + len(steps)) == trouble
        if trouble:
            assert course.find_step_before_trouble(done) == alone.find_step_before_trouble(done)
            return
        assert not looks or course.state.has_no_trouble == (loss in (1.0, 1.5))
        if resumes:
            course, saved = Divergence(faults), course.state.model_dump()
            course.state = parse_recovery_state(saved)
    assert course.state == alone.state


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_the_data_never_go_back(events):
    """Oracle: a counter: each step learns from the batch after the last, however often the run has gone back."""
    course, done, batch, saved = Divergence(), 0, 0, {0: Divergence().state.model_dump()}
    for event in events:
        assert done + course.num_dropped == batch
        done, batch = done + 1, batch + 1
        if event == 1:
            saved[done] = course.state.model_dump()
        if event == 2:  # trouble: the newest one
            step = max(saved)
            course.record_rollback(done, step, saved[step])
            done = step
        if event == 3 and len(saved) > 1:  # and the one before it
            saved.pop(max(saved))
            course.record_rollback(done, max(saved), saved[max(saved)])
            done = max(saved)
    assert (
        course.num_rollbacks == len(course.state.rollbacks)
        and parse_recovery_state(course.state.model_dump()) == course.state
    )


@pytest.mark.parametrize(
    "saved",
    [
        [],
        {"shift": "x"},
        {"shift": -1},
        {"rollbacks": [[1]]},
        {"losses": {"net": ["a"]}},
        {"losses": []},
        {"skipped": None},
        3,
        None,
    ],
)
def test_a_malformed_course_is_refused(saved):
    """Oracle: ConfigError, and no other."""
    with pytest.raises(ConfigError, match="course is malformed"):
        parse_recovery_state(saved)
