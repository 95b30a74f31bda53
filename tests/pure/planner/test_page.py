"""The page of a search: complete, needs nothing else, and no label is cut off."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest
from planner_cases import CLUSTER, JOB, LLAMA

from phalanx.plan.layout import Layout
from phalanx.planner.charts import formation
from phalanx.planner.page import page
from phalanx.planner.search import predict, search

SPACE = "{http://www.w3.org/2000/svg}"
LETTER = 6.0
"""Pixels of a letter at 11 px, on average."""

CASES: dict[str, dict[str, Any]] = {
    "1f1b": {"pipeline": 2},
    "chunks": {"pipeline": 2, "schedule": "interleaved-1f1b", "virtual_stages": 3, "micro_batch": 1},
    "v": {"pipeline": 4, "schedule": "zb-v"},
    "data": {"tensor": 1, "pipeline": 1},
}


@pytest.fixture(scope="module", params=CASES)
def text(request: pytest.FixtureRequest) -> str:
    two = replace(CLUSTER, num_nodes=2, devices_per_node=4)
    model = replace(LLAMA, num_layers=12)
    return page(search(model, JOB, two, CASES[request.param], top=3))


def test_it_has_all_that_the_terminal_has_and_the_drawings(text: str) -> None:
    assert text.startswith("<!doctype html>")
    headings = re.findall(r"<h2>(.*?)</h2>", text)
    assert headings[:2] == ["Layouts", "Why the first"] and headings[-1] == "The first in full"
    for name in ("Time of a step", "Memory", "Formation", "Pipeline", "Time against memory"):
        assert name in headings
    assert text.count("<svg") == (4 if "one stage: nothing waits" in text else 5)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_no_label_is_cut_off(text: str) -> None:
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        root = ElementTree.fromstring(drawing)
        width, height = float(root.get("width", "0")), float(root.get("height", "0"))
        assert root.get("viewBox") == f"0 0 {width:.0f} {height:.0f}"
        for label in root.iter(f"{SPACE}text"):
            x, y = float(label.get("x", "0")), float(label.get("y", "0"))
            long = LETTER * len(label.text or "")
            left = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[label.get("text-anchor", "start")] * long
            assert left >= 0 and left + long <= width and 8 <= y <= height, label.text


def test_row_names_end_before_their_row_begins(text: str) -> None:
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        root = ElementTree.fromstring(drawing)
        names = [label.text or "" for label in root.iter(f"{SPACE}text") if (label.text or "").startswith("stage")]
        if names:
            first = min(float(box.get("x", "0")) for box in root.iter(f"{SPACE}rect"))
            assert LETTER * max(map(len, names)) <= first


def test_nodes_that_differ_in_the_data_axis_alone_share_a_row() -> None:
    cluster = replace(CLUSTER, num_nodes=4, devices_per_node=4)
    drawn = formation(predict(LLAMA, JOB, cluster, Layout(pipeline=2, data=4, tensor=2)))
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", drawn)
    assert [label for label in labels if label.startswith("node")] == ["nodes 0 to 1", "nodes 2 to 3"]
    assert [label for label in labels if "data" in label] == ["pipeline 0, data 0 to 3", "pipeline 1, data 0 to 3"]
    one = formation(predict(LLAMA, JOB, cluster, Layout(pipeline=2, data=1, tensor=2)))
    assert "node 0" in one and "pipeline 0 to 1, data 0" in one and one.count("<rect") == 4
