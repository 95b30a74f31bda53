"""Tensors that do not fit are listed, all of them, and tensor files are what other tools read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from simulated import engines, gather, pieces_of, scramble
from tiny import tiny_model, tiny_plan

from phalanx.checkpoint.folder import whole
from phalanx.checkpoint.manifest import MANIFEST, Manifest, Stored
from phalanx.checkpoint.match import check_tensors
from phalanx.checkpoint.parts import publish, write_part
from phalanx.checkpoint.reshard import _read_fully, read_pieces
from phalanx.checkpoint.store import opened
from phalanx.errors import CheckpointError, DamagedCheckpointError
from phalanx.plan.layout import Layout

MODEL = tiny_model(num_layers=1, hidden=32, head_dim=8, ffn=48, vocab=50)


def write(folder: Path, layout: Layout, **job):
    """A checkpoint of scrambled state; returns its folder and all ranks' pieces."""
    plan = tiny_plan(layout, MODEL, **job)
    every = pieces_of(engines(plan))
    scramble(every, 0)
    aside = folder / "aside"
    aside.mkdir()
    for rank, pieces in enumerate(every):
        write_part(aside, rank, 1, pieces)
    publish(aside, folder / "step-000001", plan, 1, {}, len(every))
    return folder / "step-000001", every


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_one_rank_writes_what_other_tools_load(tmp_path, precision):
    path, every = write(tmp_path, Layout(), precision=precision)
    truth = gather(every)
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        loaded = load_file(path / f"{kind}-00000.safetensors")
        assert loaded.keys() == {name for of, name in truth if of == kind}
        assert all(torch.equal(tensor, truth[kind, name]) for name, tensor in loaded.items())
        with safe_open(path / f"{kind}-00000.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt"}


def test_rectangles_are_addressed_by_name_and_slices(tmp_path):
    path, every = write(tmp_path, Layout(tensor=2))
    truth = gather(every)["weight", "model.layers.0.self_attn.o_proj.weight"]
    for rank, key in enumerate(["@0:32,0:16", "@0:32,16:32"]):
        loaded = load_file(path / f"weight-{rank:05d}.safetensors")
        part = loaded[f"model.layers.0.self_attn.o_proj.weight{key}"]
        assert torch.equal(part, truth[:, 16 * rank : 16 * rank + 16])
    assert "model.norm.weight" in load_file(path / "weight-00000.safetensors"), "whole tensors keep their plain name"
    assert "model.norm.weight" not in load_file(path / "weight-00001.safetensors"), "copies are written once"


def changed(manifest: Manifest, **by_name) -> Manifest:
    """`by_name`: a tensor's last two name parts, joined by "_" → what its entries become (None: left out)."""
    entries: list[Stored] = []
    for entry in manifest.tensors:
        key = "_".join(entry.name.split(".")[-2:])
        change = by_name.get(key, {}) if entry.kind == "weight" else {}
        entries += [] if change is None else [replace(entry, **change)]
    return replace(manifest, tensors=tuple(entries))


def test_all_that_does_not_fit_is_listed_at_once(tmp_path):
    path, every = write(tmp_path, Layout())
    manifest = changed(
        whole(path),
        norm_weight=None,
        up_proj_weight={"name": "model.layers.0.mlp.fc1.weight"},
        down_proj_weight={"shape": (32, 64)},
        o_proj_weight={"dtype": "F32"},
    )
    with pytest.raises(CheckpointError) as caught:
        check_tensors(manifest, tiny_plan(Layout(), MODEL), every[0], "here")
    assert sorted(problem.what for problem in caught.value.problems) == [
        "missing: weight of model.layers.0.mlp.up_proj.weight",
        "missing: weight of model.norm.weight",
        "unexpected: weight of model.layers.0.mlp.fc1.weight, which this run does not have",
        "wrong shape: weight of model.layers.0.mlp.down_proj.weight is [32, 64] in the checkpoint and [32, 48] here",
        "wrong type: weight of model.layers.0.self_attn.o_proj.weight is F32 in the checkpoint and F64 here "
        "(job.precision)",
    ]


def test_a_kind_of_state_that_is_missing_is_one_line(tmp_path):
    path, every = write(tmp_path, Layout())
    manifest = whole(path)

    def said(*kinds: str) -> list[str]:
        tensors = tuple(entry for entry in manifest.tensors if entry.kind in kinds)
        with pytest.raises(CheckpointError) as caught:
            check_tensors(replace(manifest, tensors=tensors), tiny_plan(Layout(), MODEL), every[0], "here")
        return [problem.what for problem in caught.value.problems]

    assert said("weight", "exp_avg") == ["missing: exp_avg_sq of all 12 tensors"]
    assert said("weight") == ["holds weights alone, nothing to go on from"]


def test_an_element_that_is_stored_nowhere_or_twice_is_no_load(tmp_path):
    path, every = write(tmp_path, Layout(tensor=2))
    manifest = whole(path)
    first = next(entry for entry in manifest.tensors if entry.name.endswith("o_proj.weight"))
    for tensors in (
        tuple(entry for entry in manifest.tensors if entry is not first),
        (*manifest.tensors, first),
    ):
        with pytest.raises(DamagedCheckpointError, match=r"o_proj.weight: \[0:32, 0:16\] is not stored exactly once"):
            read_pieces(path, replace(manifest, tensors=tensors), every[0])


def test_a_rank_reads_only_what_it_needs(tmp_path, monkeypatch):
    path, every = write(tmp_path, Layout(data=4, zero=1))
    needed = sum(piece.tensor.nbytes for piece in every[0])
    read = []
    monkeypatch.setattr(
        "phalanx.checkpoint.reshard._read_fully",
        lambda descriptor, data, offset, original=_read_fully: (
            read.append(len(data)) or original(descriptor, data, offset)
        ),
    )
    read_pieces(path, whole(path), every[0])
    assert needed <= sum(read) < 1.1 * needed


def test_checksums_can_be_left_out(tmp_path):
    path, every = write(tmp_path, Layout())
    file = path / "weight-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match="checksum"):
        read_pieces(path, whole(path), every[0])
    read_pieces(path, whole(path), every[0], check=False)


def test_a_changed_byte_anywhere_is_no_load(tmp_path):
    """In the manifest, the plan, a header or a tensor."""
    path, every = write(tmp_path, Layout(data=2, zero=1))

    @settings(max_examples=60)
    @given(st.data())
    def check(data):
        file = data.draw(st.sampled_from(sorted(path.iterdir())))
        content = file.read_bytes()
        at = data.draw(st.integers(0, len(content) - 1))
        changed = bytearray(content)
        changed[at] ^= data.draw(st.integers(1, 255))
        file.write_bytes(changed)
        with pytest.raises(DamagedCheckpointError, match=file.name):
            manifest, _ = opened(path)
            for pieces in every:
                read_pieces(path, manifest, pieces)
        file.write_bytes(content)

    check()


def test_the_manifest_stands_last(tmp_path):
    """Without it nothing is a checkpoint, so whatever else is written, or lost, before it does no harm."""
    path, _ = write(tmp_path, Layout(data=2, zero=1))
    newest = max(path.iterdir(), key=lambda file: file.stat().st_mtime_ns)
    assert newest.name == MANIFEST
    assert {file.name for file in path.iterdir()} == {*whole(path).files, MANIFEST}
