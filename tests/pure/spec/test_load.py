"""Run files into specs: what is taken, what is completed, and where it stands."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import get_type_hints

import pytest

from phalanx.errors import SpecError
from phalanx.plan.layout import AXES, Layout
from phalanx.spec import clusters, load, models
from phalanx.spec.job import CheckpointSpec, DataSet, JobSpec, OptimizerSpec
from phalanx.spec.model import RopeScaling
from phalanx.spec.schema import hints

JOB = "[job]\nglobal_batch = 8\nseq_len = 32\nnum_steps = 4\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_whole_run_file(tmp_path):
    text = """
    [model]
    name = "llama-3-8b"
    [cluster]
    name = "dgx-h100"
    num_nodes = 4
    [job]
    global_batch = 512
    seq_len = 4096
    num_steps = 1000
    precision = "bf16"
    seed = 7
    [optimizer]
    name = "adamw"
    lr = 3e-4
    betas = [0.9, 0.99]
    [data]
    path = "data/train"
    [layout]
    tensor = 4
    pipeline = 2
    micro_batch = 1
    schedule = "1f1b"
    zero = 1
    recompute = "selective"
    stage_layers = [15, 17]
    bucket_bytes = "8 MiB"
    [checkpoint]
    every_steps = 100
    keep = 2
    [launch]
    comm = "gloo"
    comm_timeout_s = "2 min"
    """
    run = load.load(write(tmp_path, text))
    assert run.model == models.named("llama-3-8b")
    assert run.cluster == clusters.named("dgx-h100", num_nodes=4)
    assert run.job == JobSpec(
        global_batch=512,
        seq_len=4096,
        num_steps=1000,
        precision="bf16",
        seed=7,
        optimizer=OptimizerSpec(betas=(0.9, 0.99)),
        data=dataclasses.replace(run.job.data, path=str(tmp_path / "data" / "train")),
        checkpoint=CheckpointSpec(every_steps=100, keep=2),
        comm="gloo",
        comm_timeout_s=120.0,
    )
    assert run.layout == {
        "tensor": 4,
        "pipeline": 2,
        "micro_batch": 1,
        "schedule": "1f1b",
        "zero": 1,
        "recompute": "selective",
        "stage_layers": (15, 17),
        "bucket_bytes": 8 * 2**20,
    }
    assert Layout(**run.layout).num_ranks == 8


def test_places(tmp_path):
    path = write(tmp_path, f'[model]\nname = "tiny"\n{JOB}[layout]\ntensor = 2\n')
    run = load.load(path, ["layout.pipeline=2", "job.seed=3"])
    assert run.where("layout.tensor") == f"{path}:8"
    assert run.where("layout.pipeline") == "--set layout.pipeline=2"
    assert run.where("layout.zero") == f"{path}:7"
    assert run.where("job.seed") == "--set job.seed=3"
    assert run.where("model.num_heads") == f"{path}:1"
    assert run.where("cluster.num_nodes") == str(path)


def test_layout_keys_are_those_of_layout():
    plain = {"LayoutKeys": get_type_hints(load.LayoutKeys), "Layout": get_type_hints(Layout)}
    assert list(plain["LayoutKeys"]) == sorted(plain["Layout"], key=list(plain["LayoutKeys"]).index)
    wider = {"zero", "recompute", "reduce", "stage_layers", "recompute_layers"}  # Literal or bounded, never None
    assert all(plain["LayoutKeys"][key] == plain["Layout"][key] for key in set(plain["Layout"]) - wider)


def test_axes_are_those_of_layout():
    assert sorted(load.AXES) == sorted(AXES)


def test_every_field_of_the_specs_has_a_key():
    job = {"global_batch", "seq_len", "num_steps", "precision", "seed", "label_smoothing", "z_loss"}
    job |= {"compile", "on_non_finite", "check_copies_every_steps", "log_every_steps"}
    assert set(load.TABLES["job"]) == job
    assert set(load.TABLES["launch"]) == {"comm", "comm_timeout_s"}
    tables = {"optimizer", "data", "checkpoint"}
    assert set(hints(JobSpec)) == job | tables | set(load.TABLES["launch"])
    assert set(load.TABLES) == {"model", "cluster", "job", "layout", "launch"} | tables


def test_values_that_just_agree_are_taken(tmp_path):
    """A rate that does not fall, and a sequence as long as the positions that a model learns."""
    path = write(tmp_path, f'[model]\nname = "gpt2"\n{JOB}[optimizer]\nlr = 1e-3\nmin_lr = 1e-3\n')
    run = load.load(path, ["job.seq_len=1024"])
    assert run.job.optimizer.min_lr == run.job.optimizer.lr and run.job.seq_len == run.model.max_seq_len
    with pytest.raises(SpecError, match="longer than the model's 1024 learned positions"):
        load.load(path, ["job.seq_len=1025"])


class TestPaths:
    def test_in_the_file_they_start_from_its_folder(self, tmp_path, monkeypatch):
        path = write(tmp_path, f'[model]\nname = "tiny"\n{JOB}[data]\npath = "a/../b"\ntext = "/x/*.txt"\n')
        monkeypatch.chdir("/")
        data = load.load(path).job.data
        assert (data.path, data.text) == (str(tmp_path / "b"), "/x/*.txt")

    def test_of_mixed_sets_and_of_validation(self, tmp_path):
        sets = 'sets = [{path = "a", weight = 2}, {path = "/b"}]\nvalidation_path = "v"'
        data = load.load(write(tmp_path, f'[model]\nname = "tiny"\n{JOB}[data]\n{sets}\n')).job.data
        assert data.sets == (DataSet(path=str(tmp_path / "a"), weight=2.0), DataSet(path="/b"))
        assert data.validation_path == str(tmp_path / "v")

    @pytest.mark.parametrize(
        ("keys", "words"),
        [
            ('path = "a"\nsets = [{path = "b"}]', "data.path beside data.sets"),
            ('text = "a"\nsets = [{path = "b"}]', "data.text beside data.sets"),
            ('path = "a"\nvalidation_path = "b"\nvalidation_fraction = 0.1', "both data.validation_path and"),
            ('path = "a"\nvalidate_every_steps = 5', "data.validate_every_steps = 5 with nothing to validate on"),
            ('sets = [{path = "b", weight = 0}]', "data.sets.weight = 0: expected a finite number, above 0"),
        ],
    )
    def test_of_data_that_contradict_each_other(self, tmp_path, keys, words):
        with pytest.raises(SpecError) as caught:
            load.load(write(tmp_path, f'[model]\nname = "tiny"\n{JOB}[data]\n{keys}\n'))
        assert words in str(caught.value)

    def test_in_an_override_they_start_from_here(self, tmp_path, monkeypatch):
        path = write(tmp_path, f'[model]\nname = "tiny"\n{JOB}')
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        data = load.load(path, ["data.path=x"]).job.data
        assert data.path == str(tmp_path / "here" / "x")

    def test_a_checkpoint_to_resume_from(self, tmp_path):
        path = write(tmp_path, f'[model]\nname = "tiny"\n{JOB}[checkpoint]\nresume = "runs/1"\n')
        assert load.load(path).job.checkpoint.resume == str(tmp_path / "runs" / "1")
        for word in ("auto", "never"):
            assert load.load(path, [f"checkpoint.resume={word}"]).job.checkpoint.resume == word
        path = write(tmp_path, f'[model]\nname = "tiny"\n{JOB}[checkpoint]\ninit_from = "weights"\n')
        assert load.load(path).job.checkpoint.init_from == str(tmp_path / "weights")

    def test_home_is_expanded(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", "/home/someone")
        path = write(tmp_path, f'[model]\nname = "tiny"\n{JOB}[data]\npath = "~/x"\n')
        assert load.load(path).job.data.path == "/home/someone/x"


class TestModel:
    def build(self, folder, keys, *overrides):
        return load.load(write(folder, f"[model]\n{keys}\n{JOB}"), overrides).model

    def test_named_with_other_sizes(self, tmp_path):
        model = self.build(tmp_path, 'name = "llama-3-8b"\nnum_layers = 4\nhidden = 1024')
        expected = dataclasses.replace(models.named("llama-3-8b"), num_layers=4, hidden=1024, head_dim=32)
        assert model == expected

    def test_own_sizes_in_llama_style(self, tmp_path):
        model = self.build(tmp_path, "num_layers = 2\nhidden = 4096\nnum_heads = 32\nvocab = 100")
        assert (model.name, model.num_kv_heads, model.head_dim, model.ffn) == ("custom", 32, 128, 11008)
        assert (model.norm, model.activation, model.positions, model.tied) == ("rmsnorm", "swiglu", "rope", False)
        assert model.max_seq_len == 32

    def test_own_sizes_in_gpt2_style(self, tmp_path):
        keys = 'name = "mine"\nstyle = "gpt2"\nnum_layers = 2\nhidden = 64\nnum_heads = 4\nvocab = 100\ntied = false'
        model = self.build(tmp_path, keys)
        assert (model.name, model.ffn, model.qkv_bias, model.bias, model.tied) == ("mine", 256, True, True, False)
        assert (model.norm, model.activation, model.positions) == ("layernorm", "gelu_tanh", "learned")

    def test_rope_scaling_as_a_table(self, tmp_path):
        model = self.build(tmp_path, 'name = "tiny"\nrope_scaling = { kind = "linear", factor = 4 }')
        assert model.rope_scaling == RopeScaling(kind="linear", factor=4.0)
        model = self.build(tmp_path, 'name = "llama-3.1-8b"', "model.rope_scaling.factor=4")
        assert model.rope_scaling == RopeScaling(kind="llama3", factor=4.0)

    def test_hugging_face_folder(self, tmp_path):
        keys = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        keys |= {"num_attention_heads": 4, "vocab_size": 250, "max_position_embeddings": 64}
        (tmp_path / "hub").mkdir()
        (tmp_path / "hub" / "config.json").write_text(json.dumps(keys))
        model = self.build(tmp_path, 'hf = "hub"\nnum_layers = 3')
        assert (model.name, model.num_layers, model.hidden, model.head_dim) == ("hub", 3, 64, 16)
        assert self.build(tmp_path, 'hf = "hub/config.json"\nname = "mine"').name == "mine"


class TestCluster:
    def build(self, folder, text):
        return load.load(write(folder, f'[model]\nname = "tiny"\n{JOB}{text}')).cluster

    def test_named_with_one_other_figure(self, tmp_path):
        cluster = self.build(tmp_path, '[cluster]\nname = "dgx-a100"\n[cluster.device]\nmemory_bytes = "40 GiB"')
        known = clusters.named("dgx-a100")
        assert cluster.device == dataclasses.replace(known.device, memory_bytes=40 * 2**30)
        assert cluster.inter_node == known.inter_node

    def test_named_with_another_device(self, tmp_path):
        cluster = self.build(tmp_path, '[cluster]\nname = "dgx-a100"\ndevice = "H200-SXM"')
        assert cluster.device == clusters.named("dgx-h200").device
        assert cluster.sources["device.memory_bytes"] == clusters.named("dgx-h200").sources["device.memory_bytes"]

    def test_numbers(self, tmp_path):
        text = """[cluster]
        devices_per_node = 4
        device = { memory_bytes = "16 GiB", memory_bytes_per_s = "100 GB/s", flops_per_s = { bf16 = "1 TFLOP/s" } }
        intra_node = { latency_s = "5 us", bytes_per_s = "10 GB/s" }
        """
        cluster = self.build(tmp_path, text)
        assert (cluster.name, cluster.num_nodes, cluster.device.flops_per_s) == ("custom", 1, {"bf16": 1e12})
        assert cluster.inter_node.bytes_per_s == cluster.intra_node.bytes_per_s == 10e9
        assert cluster.intra_node.latency_s == 5e-6

    def test_file(self, tmp_path):
        (tmp_path / "cluster.toml").write_text(
            'name = "ours"\nnum_nodes = 2\ndevices_per_node = 4\ndevice = "H200-SXM"\n'
            'intra_node = { latency_s = "5 us", bytes_per_s = "10 GB/s" }\n'
            'inter_node = { name = "ib", latency_s = "5 us", bytes_per_s = "1 GB/s" }\n'
        )
        cluster = self.build(tmp_path, '[cluster]\nfile = "cluster.toml"\nnum_nodes = 3')
        assert (cluster.name, cluster.num_nodes, cluster.inter_node.name) == ("ours", 3, "ib")
        assert cluster.device.name == "H200-SXM"

    @pytest.mark.parametrize(
        ("layout", "cores", "devices"),
        [
            ("", 4, 4),
            ("tensor = 2", 6, 6),
            ("tensor = 4", 6, 4),
            ("tensor = 2\npipeline = 2\ndata = 2", 2, 8),
            ("data = 1", 6, 1),
            ("tensor = 3\npipeline = 2", 2, 6),
        ],
    )
    def test_this_machine_has_what_the_layout_needs(self, tmp_path, monkeypatch, layout, cores, devices):
        monkeypatch.setattr(clusters, "num_cores", lambda: cores)
        cluster = self.build(tmp_path, f"[layout]\n{layout}")
        assert (cluster.name, cluster.num_nodes, cluster.devices_per_node) == ("local", 1, devices)

    def test_this_machine_with_less_memory(self, tmp_path):
        path = write(tmp_path, f'[model]\nname = "tiny"\n{JOB}[layout]\ntensor = 2\ndata = 4\n')
        cluster = load.load(path, ['cluster.device.memory_bytes="40 MiB"']).cluster
        assert (cluster.name, cluster.num_devices, cluster.device.memory_bytes) == ("local", 8, 40 * 2**20)
        assert load.load(path, ["cluster.devices_per_node=16"]).cluster.num_devices == 16

    def test_this_machine_by_name_with_more_devices(self, tmp_path):
        cluster = self.build(tmp_path, '[cluster]\nname = "local"\ndevices_per_node = 3')
        assert (cluster.name, cluster.devices_per_node) == ("local", 3)
