"""Schedules: what they promise holds over wide ranges, and the checker refuses what cannot run."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.plan.schedule import SCHEDULES, Action, schedule
from phalanx.plan.schedule_check import ScheduleError, check
from phalanx.plan.walk import walk

ONE_CHUNK = [name for name, family in SCHEDULES.items() if family.virtual_stages[0] == 1]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@settings(deadline=None)
@given(pipeline=st.integers(1, 16), num_micro_batches=st.integers(1, 40))
def test_bubble_is_the_closed_form(name, pipeline, num_micro_batches):
    """(p - 1) / (m + p - 1): SC21 section 2.2, for any number of micro-batches."""
    made = schedule(name, pipeline, 1, num_micro_batches)
    assert check(made).rendezvous
    assert walk(made).bubble == pytest.approx((pipeline - 1) / (num_micro_batches + pipeline - 1), abs=1e-12)


@given(pipeline=st.integers(1, 16), num_micro_batches=st.integers(1, 40))
def test_peak_live_of_1f1b_and_gpipe(pipeline, num_micro_batches):
    """1F1B holds min(m, p - i) micro-batches on stage i, GPipe all of them."""
    assert check(schedule("1f1b", pipeline, 1, num_micro_batches)).peak_live == tuple(
        min(num_micro_batches, pipeline - i) for i in range(pipeline)
    )
    assert check(schedule("gpipe", pipeline, 1, num_micro_batches)).peak_live == (num_micro_batches,) * pipeline


def test_one_process_is_forward_and_backward_in_turn():
    actions = schedule("1f1b", 1, 1, 2).actions[0]
    assert [(act.kind, act.micro_batch) for act in actions] == [
        ("forward", 0),
        ("backward", 0),
        ("forward", 1),
        ("backward", 1),
    ]


def test_transfers_name_the_neighbours():
    made = schedule("1f1b", 3, 1, 1)
    forward, backward = Action(kind="forward", micro_batch=0), Action(kind="backward", micro_batch=0)
    assert made.needs(0, forward) is None
    assert made.gives(2, forward) is None
    assert made.gives(0, backward) is None
    into_1 = made.needs(1, forward)
    assert into_1 == made.gives(0, forward)
    assert (into_1.source, into_1.destination, into_1.channel, into_1.stage) == (0, 1, 0, 1)
    back_into_1 = made.needs(1, backward)
    assert back_into_1 == made.gives(2, backward)
    assert (back_into_1.source, back_into_1.destination, back_into_1.channel, back_into_1.stage) == (2, 1, 1, 1)


def test_gradients_are_final_after_the_last_action_that_adds():
    made = schedule("gpipe", 2, 1, 3)
    assert made.last_to_add(0) == {0: Action(kind="backward", micro_batch=0)}


def _replaced(made, coordinate, actions):
    changed = list(made.actions)
    changed[coordinate] = tuple(actions)
    return replace(made, actions=tuple(changed))


def _swapped(actions, i, j):
    actions = list(actions)
    actions[i], actions[j] = actions[j], actions[i]
    return actions


BROKEN = {
    "dropped": (lambda acts: acts[:-1], "0 backward"),
    "doubled": (lambda acts: (*acts, acts[-1]), "2 backward"),
    "of another micro-batch": (lambda acts: (*acts, Action(kind="forward", micro_batch=9)), "does not exist"),
    "half a backward": (
        lambda acts: (*acts[:-1], Action(kind="input_gradient", micro_batch=acts[-1].micro_batch)),
        "1 input gradient, 0 weight gradient",
    ),
    "backward before forward": (lambda acts: acts[::-1], "comes before its forward"),
    "swapped forwards": (lambda acts: _swapped(acts, 0, 1), "is sent as"),
    "too many ahead": (lambda acts: sorted(acts, key=lambda act: act.kind == "backward"), "live activations, bound"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_schedules_are_refused(fault):
    break_it, reason = BROKEN[fault]
    made = schedule("1f1b", 4, 1, 6)
    check(made)
    with pytest.raises(ScheduleError, match=reason):
        check(_replaced(made, 1, break_it(made.actions[1])))


def test_wrong_placement_is_refused():
    made = schedule("1f1b", 2, 1, 2)
    with pytest.raises(ScheduleError, match="placement"):
        check(replace(made, placement=((0, 0), (0, 0))))


def test_a_deadlocking_order_is_refused():
    """Stage 0 waits for a gradient before it sends the forward that stage 1 wants first."""
    made = schedule("1f1b", 2, 1, 2)
    late = [made.actions[0][i] for i in (0, 2, 1, 3)]
    assert [act.kind for act in late] == ["forward", "backward", "forward", "backward"]
    both_first = sorted(made.actions[1], key=lambda act: act.kind == "backward")
    stuck = replace(made, name="ours", actions=(tuple(late), tuple(both_first)))
    with pytest.raises(ScheduleError, match=r"deadlock.*coordinate 0 waits to receive gradient of micro-batch 0"):
        check(stuck)
