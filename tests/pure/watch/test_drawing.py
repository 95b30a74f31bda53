"""Drawings of schedules: to scale, within the terminal, readable without colours, well-formed as SVG."""

from xml.etree import ElementTree

import pytest

from phalanx.plan.schedule import SCHEDULES, schedule
from phalanx.plan.walk import Walk, walk
from phalanx.watch.drawing import ROW, Drawing, facts, legend, lines, svg


def drawn(name, pipeline, virtual_stages, num_micro_batches, width):
    made = schedule(name, pipeline, virtual_stages, num_micro_batches)
    return [line.plain.rstrip() for line in lines(made, [Drawing(walk=walk(made))], width)]


def test_1f1b_to_scale():
    assert drawn("1f1b", 2, 1, 3, width=32) == [
        "stage 0 F0F1    B0  F2B1    B2",
        "stage 1   F0B0  F1B1  F2B2",
    ]


def test_odd_chunks_have_small_letters():
    assert drawn("zb-v", 2, 2, 1, width=36) == [
        "stages 0, 3 F0    f0i0w0    I0W0",
        "stages 1, 2   F0f0    i0w0I0W0",
    ]


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("name", SCHEDULES)
def test_lines_fit_the_terminal(name, width):
    made = drawn(name, 4, SCHEDULES[name].virtual_stages[0], 30, width)
    assert len(made) == 4
    assert max(map(len, made)) <= width
    assert max(map(len, made)) > width / 3


def test_facts_and_legend():
    made = schedule("1f1b", 4, 1, 8)
    assert facts(made, walk(made)) == "bubble 27.3%; most micro-batches whose activations are held: 4, 3, 2, 1"
    assert legend(made) == "F forward, B backward"
    made = schedule("zb-v", 2, 2, 4)
    assert facts(made, walk(made)) == (
        "bubble 0.0%; most micro-batches whose activations are held (of one of 2 chunks): 4, 4"
    )
    assert legend(made) == "F forward, I input gradient, W weight gradient, small letters: odd chunks"


def test_svg_has_every_action_once():
    made = schedule("zb-h1", 3, 1, 4)
    root = ElementTree.fromstring(svg(made, [Drawing(walk=walk(made))]))
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sorted(titles) == sorted(str(action) for actions in made.actions for action in actions)


def two():
    """A schedule in predicted seconds, and twice as slow."""
    made = schedule("1f1b", 2, 1, 2)
    times = walk(made, lambda stage, action: 0.1 + 0.1 * stage)
    slow = [tuple(tuple(2 * time for time in row) for row in rows) for rows in (times.starts_s, times.ends_s)]
    measured = Walk(starts_s=slow[0], ends_s=slow[1])
    return made, [Drawing(walk=times, name="predicted"), Drawing(walk=measured, name="measured in step 8")]


def test_two_walks_stand_above_each_other_to_one_scale():
    made, drawings = two()
    assert [line.plain.rstrip() for line in lines(made, drawings, 48)] == [
        "predicted: 1 s, bubble 40.0%",
        "stage 0 F0F1      B0      B1",
        "stage 1   F0  B0  F1  B1",
        "measured in step 8: 2 s, bubble 40.0%",
        "stage 0 F0  F1              B0              B1",
        "stage 1     F0      B0      F1      B1",
    ]


def test_svg_of_two_has_one_scale_and_the_seconds():
    made, drawings = two()
    root = ElementTree.fromstring(svg(made, drawings))
    space = "{http://www.w3.org/2000/svg}"
    titles = [element.text for element in root.iter(f"{space}title")]
    assert "forward of micro-batch 0 on chunk 0, 100 ms" in titles
    assert "forward of micro-batch 0 on chunk 0, 200 ms" in titles
    widths = [float(element.get("width")) for element in root.iter(f"{space}rect") if element.get("height") == str(ROW)]
    assert widths[8] == pytest.approx(2 * widths[0], rel=0.01)
    tops = [float(element.get("y")) for element in root.iter(f"{space}rect") if element.get("height") == str(ROW)]
    assert min(tops[8:]) > max(tops[:8])
