"""What `phalanx measure` finds is a cluster that a run file can name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from threads import run_threads

from phalanx.plan.comm import Comm
from phalanx.planner.engine import engine
from phalanx.spec import clusters
from phalanx.spec.cluster_file import as_toml
from phalanx.spec.document import read
from phalanx.spec.schema import Checker
from phalanx.trainer import measure, measure_links
from phalanx.trainer.measure_links import Here, cluster_table, median

CPU = torch.device("cpu")


def test_passes_of_kernels_are_those_of_the_planner() -> None:
    """The planner multiplies by what a measurement divided out."""
    assert engine().elementwise_passes == measure.EAGER_PASSES


def test_every_figure_of_a_device_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measure, "_BUDGET_S", 0.003)
    monkeypatch.setattr(measure_links, "SIZES", (4096, 65536))
    figures = {"name": "here", "memory_bytes": 2**30, **measure.device_figures(CPU)}
    assert figures["flops_per_s"].keys() == measure.DTYPES.keys()
    assert min(figures["flops_per_s"].values()) > 1e8
    here = Here(rank=0, machines=((0, 1),), device=CPU)
    table = run_threads(2, lambda comm: cluster_table(here, figures, {"world": comm, "node": comm}))[0]
    path = tmp_path / "cluster.toml"
    path.write_text(as_toml(table))
    check = Checker(read(path))
    cluster = clusters.build(check, check.document.table, ())
    check.finish()
    assert cluster is not None
    assert (cluster.num_nodes, cluster.devices_per_node) == (1, 2)
    assert cluster.intra_node.busbw[-1][0] == 65536
    assert "device.memory_efficiency" in cluster.sources


def test_machines_that_talk_have_a_link_and_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_links, "SIZES", (4096, 65536))
    figures = {"name": "here", "memory_bytes": 2**30}

    def table(comm: Comm) -> dict[str, Any]:
        here = Here(rank=comm.index, machines=((0,), (1,)), device=CPU)
        return cluster_table(here, figures, {"world": comm, "across": comm})

    found = run_threads(2, table)[0]
    assert (found["num_nodes"], found["devices_per_node"], found["nics_per_node"]) == (2, 1, 1)
    assert found["inter_node"]["bytes_per_s"] > 1e6
    assert "inter_node.latency_s" in found["sources"]


def test_products_find_a_peak_and_what_halves_it() -> None:
    rates = {depth: 1e12 * depth / (depth + 64) for depth in (32, 64, 128, 512)}
    assert measure.peak_and_half_depth(rates) == (pytest.approx(1e12), pytest.approx(64))
    assert measure.peak_and_half_depth({32: 2e12, 64: 1.9e12, 128: 1.8e12}) == (2e12, 0.0)


def test_ranks_agree_on_the_median() -> None:
    own = [{"a": i, "b": [float(i), 2.0], "c": {"d": 10 * i}, "name": "x"} for i in (1, 2, 9)]
    assert median(own) == {"a": 2, "b": [2.0, 2.0], "c": {"d": 20}, "name": "x"}
