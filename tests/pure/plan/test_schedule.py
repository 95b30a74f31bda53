"""Schedules: what they promise holds over wide ranges, and the checker refuses what cannot run."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.plan import schedule_check
from phalanx.plan.schedule import SCHEDULES, Action, Schedule, Transfer, schedule
from phalanx.plan.schedule_check import (
    ScheduleError,
    _buffered_deadlock,
    _Gap,
    _out_of_order,
    _paired_deadlock,
    check,
)
from phalanx.plan.walk import walk

SIZES = {"pipeline": st.integers(1, 16), "num_micro_batches": st.integers(1, 40)}


def chunks(name):
    fewest, most = SCHEDULES[name].virtual_stages
    return st.integers(fewest, min(most, 4))


# Published seconds of the bubble (F 1, B 2, W 1), and from how many micro-batches on the form holds (equation 13).
# That of dualpipe-v, (p - 1)(F&B + B - 3W) = 2(p - 1), counts a forward beside a backward as one piece; listed one
# after the other, the first one's result is sent earlier and half of the bubble goes.
BUBBLES = {
    "gpipe": (lambda p: 3 * (p - 1), lambda p: 1),
    "1f1b": (lambda p: 3 * (p - 1), lambda p: 1),
    "interleaved-1f1b": (lambda p: 3 * (p - 1), lambda p: p),
    "breadth-first": (lambda p: 3 * (p - 1), lambda p: p),
    "zb-h1": (lambda p: p - 1, lambda p: p),
    "zb-v": (lambda p: 0, lambda p: 2 * p),
    "dualpipe-v": (lambda p: p - 1, lambda p: 2 * p),
}

# Outside that range: seconds of a step of at most p micro-batches, which is too few to fill the pipeline. The last of
# them follows the first through all stages and back; checked by hand for the smallest sizes.
FEW = {
    "interleaved-1f1b": lambda p, v, m: 3 * (v * p + m - 1),
    "breadth-first": lambda p, v, m: 3 * (v * p + m - 1),
    "zb-h1": lambda p, v, m: 2 * (p + m) - 1,
    "zb-v": lambda p, v, m: 4 * (p + m) - 2,
    "dualpipe-v": lambda p, v, m: 5 * p + 4 * m - 3,
}


@pytest.mark.parametrize("name", SCHEDULES)
@settings(deadline=None, max_examples=40)
@given(data=st.data(), **SIZES)
def test_every_schedule_can_run_and_has_its_bubble(name, data, pipeline, num_micro_batches):
    """Order, completeness, memory bound, first in first out and no deadlock by `check`; the bubble by `walk`."""
    virtual_stages = data.draw(chunks(name), label="virtual stages")
    made = schedule(name, pipeline, virtual_stages, num_micro_batches)
    check(made)
    walked, work = walk(made), 3 * num_micro_batches * virtual_stages
    bubble, fewest = BUBBLES[name]
    if num_micro_batches >= fewest(pipeline):
        expected = bubble(pipeline)
        assert walked.bubble == pytest.approx(expected / (work + expected), abs=1e-12)
    elif num_micro_batches <= pipeline:
        assert walked.step_s == FEW[name](pipeline, virtual_stages, num_micro_batches)
    else:
        assert walked.step_s < work + 3 * pipeline


@settings(deadline=None, max_examples=20)
@given(**SIZES)
def test_peak_live_is_the_stated_number(pipeline, num_micro_batches):
    """1F1B holds min(m, p - i) micro-batches on stage i, GPipe all of them, ZB-V 2p half ones on every stage."""
    p, m = pipeline, num_micro_batches
    assert check(schedule("1f1b", p, 1, m)).peak_live == tuple(min(m, p - i) for i in range(p))
    assert check(schedule("gpipe", p, 1, m)).peak_live == (m,) * p
    assert check(schedule("zb-h1", p, 1, m)).peak_live == (min(m, p),) * p
    if m >= 2 * p:
        assert check(schedule("zb-v", p, 2, m)).peak_live == (2 * p,) * p
        assert check(schedule("dualpipe-v", p, 2, m)).peak_live[-1] == 2 * p + 1
    if m % p == 0 and m > p:
        peaks = check(schedule("interleaved-1f1b", p, 3, m)).peak_live
        assert peaks == tuple(2 * (p - i - 1) + 2 * p + 1 for i in range(p))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
@settings(deadline=None, max_examples=30)
@given(**SIZES)
def test_one_chunk_schedules_receive_just_in_time(name, pipeline, num_micro_batches):
    assert check(schedule(name, pipeline, 1, num_micro_batches)).just_in_time


LETTERS = {"forward": "F", "backward": "B", "input_gradient": "I", "weight_gradient": "W"}


def drawn(made):
    """One line per coordinate; letters of chunk 1 are small."""
    letters = [[(LETTERS[act.kind], act) for act in actions] for actions in made.actions]
    return [
        " ".join(f"{letter.lower() if act.chunk else letter}{act.micro_batch}" for letter, act in line)
        for line in letters
    ]


GOLDEN = {
    ("gpipe", 2, 1, 3): ["F0 F1 F2 B0 B1 B2", "F0 F1 F2 B0 B1 B2"],
    ("1f1b", 3, 1, 4): ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"],
    ("interleaved-1f1b", 2, 2, 2): ["F0 F1 f0 f1 b0 b1 B0 B1", "F0 F1 f0 b0 f1 b1 B0 B1"],
    ("interleaved-1f1b", 2, 2, 3): ["F0 F1 F2 f0 f1 f2 b0 b1 b2 B0 B1 B2", "F0 F1 F2 f0 b0 f1 b1 f2 b2 B0 B1 B2"],
    ("breadth-first", 2, 2, 2): ["F0 F1 f0 f1 b0 b1 B0 B1", "F0 F1 f0 f1 b0 b1 B0 B1"],
    ("zb-h1", 2, 1, 3): ["F0 F1 I0 W0 F2 I1 W1 I2 W2", "F0 I0 F1 I1 W0 F2 I2 W1 W2"],
    ("zb-h1", 3, 1, 1): ["F0 I0 W0", "F0 I0 W0", "F0 I0 W0"],
    ("zb-v", 2, 2, 3): [
        "F0 F1 F2 f0 i0 w0 f1 i1 w1 I0 W0 f2 i2 w2 I1 W1 I2 W2",
        "F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 I1 W1 i2 w2 I2 W2",
    ],
    ("dualpipe-v", 2, 2, 4): [
        "F0 F1 F2 f0 i0 w0 f1 F3 b1 f2 B0 b2 f3 B1 b3 I2 W2 I3 W3",
        "F0 f0 F1 f1 F2 b0 f2 B0 F3 b1 f3 B1 b2 B2 i3 I3 w3 W3",
    ],
}


@pytest.mark.parametrize("sizes", GOLDEN, ids=str)
def test_golden_orders(sizes):
    """Checked by hand against the papers' figures, their rule applied to sizes that fit on a line."""
    assert drawn(schedule(*sizes)) == GOLDEN[sizes]


@st.composite
def random_schedules(draw):
    """Any order in which every action comes after what it needs, with stages placed anyhow."""
    pipeline, virtual_stages, m = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    slots = [(p, chunk) for chunk in range(virtual_stages) for p in range(pipeline)]
    places = tuple(draw(st.permutations(slots)))
    made = Schedule(
        name="random",
        pipeline=pipeline,
        virtual_stages=virtual_stages,
        num_micro_batches=m,
        placement=places,
        actions=(),
    )
    last = made.num_stages - 1
    split = draw(st.booleans())
    needs = {}
    for stage, i in itertools.product(range(last + 1), range(m)):
        gradient = "input_gradient" if split else "backward"
        needs["forward", stage, i] = [("forward", stage - 1, i)] if stage else []
        needs[gradient, stage, i] = [(gradient, stage + 1, i) if stage < last else ("forward", stage, i)]
        if split:
            needs["weight_gradient", stage, i] = [(gradient, stage, i)]
    random, done = draw(st.randoms(use_true_random=False)), {}
    while len(done) < len(needs):
        done[random.choice([key for key in needs if key not in done and all(n in done for n in needs[key])])] = True
    actions = [[] for _ in range(pipeline)]
    for kind, stage, i in done:
        coordinate, chunk = places[stage]
        actions[coordinate].append(Action(kind=kind, micro_batch=i, chunk=chunk))
    return replace(made, actions=tuple(map(tuple, actions)))


@settings(deadline=None)
@given(made=random_schedules())
def test_any_order_that_respects_dependencies_can_run(made):
    """The proof lets it pass, and a walk comes to the end of every coordinate's work."""
    check(made)
    times = walk(made)
    assert [len(ends) for ends in times.ends_s] == [len(actions) for actions in made.actions]


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
    assert made.last_to_add(0) == {0: Action(kind="backward", micro_batch=2)}


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
    with pytest.raises(ScheduleError, match="waits for itself: gradient of micro-batch 0 for stage 0"):
        check(stuck)


def stuck(*coordinates):
    """Why calls cannot all be completed. For each coordinate, its gaps between actions, each of words: "s01" and "r01"
    are the send and the receive of message 1 on channel 0, from whoever sends it to the other of two coordinates."""

    def calls(place, gap, kind):
        ends = (place, 1 - place) if kind == "s" else (1 - place, place)
        return tuple(
            Transfer(source=ends[0], destination=ends[1], channel=int(word[1]), micro_batch=int(word[2]), stage=1)
            for word in gap.split()
            if word[0] == kind
        )

    gaps = [[_Gap(calls(at, gap, "s"), calls(at, gap, "r")) for gap in own] for at, own in enumerate(coordinates)]
    return [proof(gaps) for proof in (_out_of_order, _buffered_deadlock, _paired_deadlock)]


@pytest.mark.parametrize(
    ("coordinates", "fails"),
    [
        ([["s01", "r11"], ["r01", "s11"]], []),
        ([["s01 s02"], ["r02 r01"]], [0]),  # the second is received first
        ([["s01 s02 r11 r12"], ["s11 s12 r01 r02"]], [1]),  # both wait for room for their second message
        ([["s01", "r11"], ["s11", "r01"]], [2]),  # both wait for the other to receive
    ],
    ids=["in turn", "out of order", "buffers full", "paired"],
)
def test_each_way_to_get_stuck_has_a_proof_of_its_own(coordinates, fails):
    reasons = stuck(*coordinates)
    assert [index for index, reason in enumerate(reasons) if reason] == fails


@pytest.mark.parametrize("way", ["_out_of_order", "_buffered_deadlock", "_paired_deadlock"])
def test_a_schedule_that_gets_stuck_in_any_of_them_is_refused(way, monkeypatch):
    monkeypatch.setattr(schedule_check, way, lambda gaps: f"{way} says no")
    with pytest.raises(ScheduleError, match=f"1f1b: {way} says no"):
        check(schedule("1f1b", 2, 1, 2))


def test_swapped_forwards_cannot_be_received_just_in_time():
    """Order of use is not that of sending: whoever receives only what it needs next would take the wrong message."""
    made = schedule("1f1b", 4, 1, 6)
    swapped = _replaced(made, 1, _swapped(made.actions[1], 0, 1))
    assert not check(swapped).just_in_time
