"""Folders of torch.distributed.checkpoint, as four FSDP ranks write models of transformers."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from families import family
from helpers import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from phalanx.checkpoint.hf import export
from phalanx.checkpoint.weights import open_weights
from phalanx.errors import CheckpointError, DamagedCheckpointError


def _write(rank: int, folder: Path, state: dict, num_ranks: int) -> None:
    """Save `state` as ranks do that each hold some rows of every tensor."""
    store = dist.FileStore(str(folder.with_name("store")), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    mesh = init_device_mesh("cpu", (num_ranks,))

    def cut(value):
        if isinstance(value, dict):
            return {name: cut(part) for name, part in value.items()}
        return distribute_tensor(value, mesh, [Shard(0)]) if isinstance(value, torch.Tensor) else value

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.save(cut(state), checkpoint_id=folder)
    dist.destroy_process_group()


def save(name: str, folder: Path, wrap, num_ranks: int = 3):
    """A model of a family in DCP format, its config.json beside it; returns the model."""
    model = family(name)
    run_ranks(num_ranks, _write, folder, wrap(dict(model.state_dict())), num_ranks)
    model.config.save_pretrained(folder)
    return model


WRAPPERS = {
    "as it is": lambda state: state,
    "with optimizer and step": lambda state: {
        "model": state,
        "optim": {"exp_avg": {"0": torch.ones(5)}},
        "step": 7,
    },
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_was_saved_is_read(name, wrapper, tmp_path):
    model = save(name, tmp_path / "dcp", WRAPPERS[wrapper])
    export(open_weights(tmp_path / "dcp"), tmp_path / "out")
    back = type(model).from_pretrained(tmp_path / "out")
    truth = dict(model.named_parameters())
    assert all(torch.equal(value, truth[key]) for key, value in back.named_parameters())


def test_damage_is_named(tmp_path):
    save("llama", tmp_path / "dcp", WRAPPERS["as it is"])
    file = tmp_path / "dcp" / "__1_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(DamagedCheckpointError, match=r"__1_0\.distcp: bytes .* cannot be read"):
        export(open_weights(tmp_path / "dcp"), tmp_path / "out")
    file.unlink()
    with pytest.raises(DamagedCheckpointError, match=r"__1_0\.distcp.*No such file"):
        export(open_weights(tmp_path / "dcp"), tmp_path / "out")
    metadata = tmp_path / "dcp" / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:100])
    with pytest.raises(DamagedCheckpointError, match="is not a description of tensors"):
        open_weights(tmp_path / "dcp")


def test_names_of_another_library_are_refused(tmp_path):
    rename = lambda state: {"tok_embeddings.weight": state["model.embed_tokens.weight"]}  # noqa: E731
    save("llama", tmp_path / "dcp", rename, num_ranks=1)
    with pytest.raises(CheckpointError, match=r"there are tok_embeddings\.weight"):
        open_weights(tmp_path / "dcp")


class _Code:
    def __reduce__(self):
        return os.system, ("exit 3",)


def test_no_code_is_run(tmp_path):
    save("llama", tmp_path / "dcp", WRAPPERS["as it is"], num_ranks=1)
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(_Code()))
    with pytest.raises(DamagedCheckpointError, match=r"it asks for posix\.system"):
        open_weights(tmp_path / "dcp")
