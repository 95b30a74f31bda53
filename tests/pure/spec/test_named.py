"""Named models, devices and clusters: complete, sourced, and equal to the figures they cite."""

from __future__ import annotations

import pytest

from phalanx.errors import SpecError
from phalanx.spec import clusters, models
from phalanx.spec.schema import required


def test_models_have_sources():
    assert all(row["source"] for row in models._named().values())


@pytest.mark.parametrize("name", models.names())
def test_models_are_sound(name):
    model = models.named(name)
    assert model.name == name
    assert model.q_rows == model.hidden or name == "qwen3-0.6b", "heads wider than their share"
    assert model.num_heads % model.num_kv_heads == 0


def test_unknown_model():
    with pytest.raises(SpecError) as caught:
        models.named("gpt2-larg")
    assert "did you mean gpt2-large?" in str(caught.value)


def test_unknown_cluster():
    with pytest.raises(SpecError) as caught:
        clusters.named("dgx-h10")
    assert "did you mean dgx-h100?" in str(caught.value)


@pytest.mark.parametrize("name", clusters.names())
def test_every_figure_has_a_source(name):
    cluster = clusters.named(name, num_nodes=2)
    assert (cluster.name, cluster.num_nodes) == (name, 2)
    figures = {"device.memory_bytes", "device.memory_bytes_per_s", "device.flops_per_s"}
    figures |= {f"{link}.{figure}" for link in ("intra_node", "inter_node") for figure in ("latency_s", "bytes_per_s")}
    table = clusters.table(name)
    for part in ("device", "intra_node", "inter_node"):
        structure = {"name", "mesh", "matmul_tile"}
        figures |= {f"{part}.{figure}" for figure in table[part] if figure not in structure}
    missing = figures - set(cluster.sources)
    assert not missing
    stray = set(cluster.sources) - figures - {"nics_per_node"}
    assert not stray, "a source for a figure that is not there"


def test_device_figures():
    """The headline figures, as the vendors' sheets print them (dense)."""
    peaks = {
        "V100-SXM2": ("fp16", 125e12),
        "A100-SXM4-80GB": ("bf16", 312e12),
        "H100-SXM5-80GB": ("bf16", 989e12),
        "H200-SXM": ("bf16", 989e12),
        "B200-SXM": ("bf16", 2250e12),
        "MI300X": ("bf16", 1307.4e12),
    }
    for device, (precision, flops) in peaks.items():
        assert clusters._known()["devices"][device]["flops_per_s"][precision] == f"{flops / 1e12:g} TFLOP/s"
    assert set(peaks) <= set(clusters.device_names())


def test_nodes():
    sizes = {"dgx-2-v100": 16, "dgx-a100": 8, "dgx-h100": 8, "dgx-h200": 8, "dgx-b200": 8, "mi300x": 8}
    assert {name: clusters.named(name).devices_per_node for name in sizes} == sizes
    assert clusters.named("dgx-a100").device.memory_bytes == pytest.approx(79.15 * 2**30, rel=1e-9)
    assert clusters.named("dgx-1-v100").nics_per_node == 4


def test_measured_curves_rise():
    for name in clusters.names():
        link = clusters.named(name).intra_node
        for curve in (link.busbw, link.switch_busbw):
            assert list(curve) == sorted(curve), f"sizes of {name} in order"
            assert all(1e8 < rate < 2e12 for _, rate in curve)


def test_this_machine():
    two, four = clusters.table("local", 2), clusters.table("local", 4)
    assert two["device"]["memory_bytes"] == pytest.approx(2 * four["device"]["memory_bytes"], abs=2)
    assert set(required(clusters.ClusterSpec)) <= set(two)
    assert clusters.named("local").num_devices == clusters.num_cores()


def test_processes_that_share_a_core_share_its_speed(monkeypatch):
    monkeypatch.setattr(clusters, "num_cores", lambda: 2)
    alone, shared = clusters.table("local", 2), clusters.table("local", 8)
    assert shared["device"]["flops_per_s"]["fp32"] == alone["device"]["flops_per_s"]["fp32"] / 4
