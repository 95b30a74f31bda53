"""One layout in full: sums are sums, formulas come out at what stands beside them, layers are where they are."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from planner_cases import CLUSTER, JOB, LLAMA

from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.planner.explain import explain
from phalanx.planner.messages import of_layer
from phalanx.planner.search import predict
from phalanx.planner.summary import summary
from phalanx.spec.job import JobSpec
from phalanx.units import parse_bytes, parse_seconds

MODEL = replace(LLAMA, num_layers=12)
TWO = replace(CLUSTER, num_nodes=2, devices_per_node=4)
LAYOUTS = {
    "cut": Layout(tensor=2, pipeline=2, data=2, zero=1, sequence_parallel=True, recompute="selective"),
    "v": Layout(pipeline=4, data=2, schedule="zb-v", virtual_stages=2, micro_batch=2),
    "chunks": Layout(pipeline=4, data=2, schedule="interleaved-1f1b", virtual_stages=3, recompute="full"),
    "some": Layout(pipeline=2, data=4, zero=1, recompute="full", recompute_every=2),
    "whole": Layout(data=8, zero=3, micro_batch=3),
}


def made(name: str) -> tuple[Plan, str]:
    job: JobSpec = replace(JOB, num_steps=1000)
    plan = predict(MODEL, job, TWO, LAYOUTS[name])
    return plan, explain(plan)


def size(text: str) -> float:
    """The value of sizes, numbers, products and sums, as formulas write them."""
    text = re.sub(r" while a layer is computed again", "", text)
    text = re.sub(r"([\d.]+ [KMG]?i?B)(?![\w/])", lambda found: str(parse_bytes(found[1])), text)
    return float(eval(text.replace("×", "*").replace(",", "")))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_formula_comes_out_at_its_result(name: str) -> None:
    plan, text = made(name)
    assert plan.prediction is not None
    line = summary(plan)
    found = {key: f"{key}{rest}" for key, rest in re.findall(r"^  ([^=\n]*?)( = .*)$", text.split("Formulas")[1], re.M)}

    def sides(start: str) -> tuple[str, str]:
        *_, filled, result = next(value for key, value in found.items() if key.startswith(start)).split(" = ")
        return filled, result

    filled, result = sides("activations of pipeline rank 0")
    held = plan.prediction.memory_bytes[0]["activations"]
    assert size(filled) == pytest.approx(size(result), rel=0.01) and size(result) == pytest.approx(held, rel=0.005)
    filled, result = sides("matrices of a layer")
    assert size(filled) == size(result)
    filled, result = sides("model FLOPs per token")
    assert size(filled) == pytest.approx(MODEL.flops_per_token(JOB.seq_len))
    filled, result = sides("tokens/s")
    assert size(filled.replace(" s", "")) == pytest.approx(line.tokens_per_s, rel=1e-3)
    assert size(result) == pytest.approx(line.tokens_per_s, abs=1)
    filled, result = sides("device-hours")
    assert size(filled.replace(" s", "")) == pytest.approx(line.device_hours, rel=1e-3)
    assert size(result.partition(", in ")[0]) == pytest.approx(line.device_hours, abs=1e-3)
    assert float(sides("MFU")[1].rstrip("%")) / 100 == pytest.approx(line.mfu, abs=0.001)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_listed_adds_up(name: str) -> None:
    plan, text = made(name)
    assert plan.prediction is not None
    ranks = re.findall(r"^  \d+: ([\d.]+ \w+) \((\d+) layers\): (.*)$", text, re.M)
    assert sum(int(layers) for _, layers, _ in ranks) == MODEL.num_layers
    for total, _, parts in ranks:
        sizes = [parse_bytes(part.split(" ", 1)[1]) for part in parts.split(", ")]
        assert sum(sizes) == pytest.approx(parse_bytes(total), rel=0.02)
    times = text.split("Time of a step: ")[1].split("\n\n")[0].splitlines()
    seconds = [parse_seconds(" ".join(each.split()[:2])) for each in times[1:]]
    assert sum(seconds) == pytest.approx(plan.prediction.step_s, rel=0.01) and min(seconds) > 0
    shares = [float(each.split()[2].rstrip("%")) for each in times[1:]]
    assert sum(shares) == pytest.approx(100, abs=0.4)


def test_a_layer_is_held_against_its_messages() -> None:
    plan, text = made("cut")
    section = text.split("Messages of one layer")[1].split("\n\n")[0]
    ratio = re.search(
        r"all: .*, ([\d.]+ \w+); its compute takes ([\d.]+ \w+): compute / communication ([\d.]+)", section
    )
    assert ratio, section
    messages = sum(row.seconds for row in of_layer(plan))
    assert parse_seconds(ratio[1]) == pytest.approx(messages, rel=0.01)
    assert parse_seconds(ratio[2]) / parse_seconds(ratio[1]) == pytest.approx(float(ratio[3]), rel=0.02)
    assert "Messages of one layer" not in made("v")[1]


def test_what_is_received_is_counted_by_its_sender() -> None:
    assert "× recv             the sender counts it" in made("v")[1] and " 0 B " not in made("v")[1]
