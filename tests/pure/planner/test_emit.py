"""A Plan as the settings of other frameworks: they parse, their sizes are the plan's, and what has no counterpart is
refused. Names were read from the frameworks' sources (planner/frameworks.toml says of which version)."""

from __future__ import annotations

import ast
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import InputError, LayoutError
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.planner.emit import WRITERS, emit, emit_first
from phalanx.planner.engine import profiles
from phalanx.planner.frameworks import framework, frameworks
from phalanx.spec import clusters, models
from phalanx.spec.job import JobSpec

MIGRATE = (Path(__file__).parents[3] / "docs" / "migrate.md").read_text(encoding="utf-8")
JOB = JobSpec(global_batch=64, seq_len=4096, num_steps=100)
LLAMA = models.named("llama-3.1-8b")


def plan(model: Any = LLAMA, job: JobSpec = JOB, **layout: Any) -> Plan:
    return Plan(model=model, cluster=clusters.named("dgx-h100", num_nodes=2), job=job, layout=Layout(**layout))


def emitted(name: str, chosen: Plan) -> str:
    return emit(chosen, name, framework(name).engines[0]).text


def flags(chosen: Plan) -> dict[str, str | bool]:
    """Flags of Megatron-LM as a shell and argparse read them."""
    found: dict[str, str | bool] = {}
    flag = ""
    for word in shlex.split(emitted("megatron-lm", chosen)):
        if word.startswith("--"):
            flag, found[word] = word, True
        else:
            assert found[flag] is True, f"{flag} has two values"
            found[flag] = word
    return found


def overrides(chosen: Plan) -> dict[str, str]:
    """Overrides of a NeMo recipe."""
    return dict(word.split("=", 1) for word in shlex.split(emitted("nemo", chosen)))


def assignments(chosen: Plan) -> dict[str, Any]:
    """What the function for torchtitan sets; expressions that are no literals as text."""
    (function,) = (node for node in ast.parse(emitted("torchtitan", chosen)).body if isinstance(node, ast.FunctionDef))
    found: dict[str, Any] = {}
    for node in function.body:
        if isinstance(node, ast.Assign):
            name = ast.unparse(node.targets[0]).removeprefix("config.")
            found[name] = ast.unparse(node.value) if isinstance(node.value, ast.Call) else ast.literal_eval(node.value)
    return found


def yaml(chosen: Plan) -> dict[str, Any]:
    """Accelerate's YAML, which is `key: value` in two levels; values as YAML has them."""
    found: dict[str, Any] = {}
    here = found
    for line in emitted("accelerate", chosen).splitlines():
        indent, key, value = re.fullmatch(r"( {2})?(\w+):(?: (\S+))?", line).groups()  # type: ignore[union-attr]
        here = here if indent else found
        if value is None:
            here = found[key] = {}
        else:
            here[key] = json.loads(value) if re.fullmatch(r'\d+|true|false|".*"', value) else value
    return found


LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "megatron-lm": [
        {"data": 16, "zero": 1},
        {"data": 16, "zero": 3, "zero_group": 8, "recompute": "full"},
        {"tensor": 2, "pipeline": 4, "data": 2, "zero": 1, "sequence_parallel": True, "recompute": "selective"},
        {"pipeline": 2, "virtual_stages": 2, "schedule": "interleaved-1f1b", "data": 8, "outermost": "data"},
        {"context": 2, "tensor": 8, "micro_batch": 4},
    ],
    "nemo": [
        {"data": 16, "zero": 1, "zero_group": 4},
        {"tensor": 8, "pipeline": 2, "sequence_parallel": True, "recompute": "full", "recompute_layers": (8, 8)},
        {"pipeline": 4, "virtual_stages": 2, "schedule": "interleaved-1f1b", "data": 4, "micro_batch": 2},
    ],
    "torchtitan": [
        {"data": 16},
        {"data": 16, "zero": 3, "zero_group": 8, "recompute": "selective"},
        {"data": 2, "zero": 2, "tensor": 2, "pipeline": 4, "schedule": "1f1b", "micro_batch": 2},
        {"pipeline": 8, "virtual_stages": 2, "schedule": "zb-v", "data": 2, "context": 1},
        {"context": 4, "tensor": 4, "sequence_parallel": True, "recompute": "full"},
    ],
    "deepspeed": [
        {"data": 16, "zero": 3, "micro_batch": 2},
        {"data": 16, "zero": 3, "zero_group": 8},
        {"data": 4, "zero": 1, "pipeline": 4},
        {"data": 8, "zero": 2, "tensor": 2, "recompute": "full"},
    ],
    "accelerate": [
        {"data": 16},
        {"data": 16, "zero": 2, "micro_batch": 2},
        {"data": 16, "zero": 3, "zero_group": 8, "recompute": "full"},
        {"data": 4, "zero": 3, "tensor": 4},
    ],
}
EVERY = [(name, layout) for name, layouts in LAYOUTS.items() for layout in layouts]


def sizes(name: str, chosen: Plan) -> tuple[int, int, int, int]:
    """What a framework reads: ranks of the data axis, of all others, sequences of a micro-batch, micro-batches."""
    ranks, found = chosen.layout.num_ranks, None
    if name == "megatron-lm":
        found = flags(chosen)
        kinds = ("tensor-model-parallel", "pipeline-model-parallel", "context-parallel")
        rest, micro = [int(found[f"--{kind}-size"]) for kind in kinds], int(found["--micro-batch-size"])
        batch = int(found["--global-batch-size"])
    elif name == "nemo":
        found = overrides(chosen)
        kinds = ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")
        rest = [int(found[f"trainer.strategy.{kind}_size"]) for kind in kinds]
        micro, batch = int(found["data.micro_batch_size"]), int(found["data.global_batch_size"])
        assert int(found["trainer.num_nodes"]) * int(found["trainer.devices"]) == ranks
    elif name == "torchtitan":
        found = assignments(chosen)
        rest = [found[f"parallelism.{kind}_parallel_degree"] for kind in ("tensor", "pipeline", "context")]
        data = found["parallelism.data_parallel_replicate_degree"] * found["parallelism.data_parallel_shard_degree"]
        tokens = found["training.num_tokens_per_microbatch_per_dp_rank"]
        micro, batch = tokens // JOB.seq_len, found["training.num_tokens_per_train_step"] // JOB.seq_len
        assert data * rest[0] * rest[1] * rest[2] == ranks
    elif name == "deepspeed":
        found = json.loads(emitted("deepspeed", chosen))
        rest = [found.get("tensor_parallel", {}).get("autotp_size", 1), chosen.layout.pipeline]
        micro, batch = found["train_micro_batch_size_per_gpu"], found["train_batch_size"]
        assert batch == micro * found["gradient_accumulation_steps"] * ranks // (rest[0] * rest[1])
    else:
        found = yaml(chosen)
        parts = found.get("parallelism_config", {})
        rest = [parts.get(f"parallelism_config_{axis}_size", 1) for axis in ("tp", "cp")]
        micro, batch = chosen.layout.micro_batch, chosen.job.global_batch
        assert found["num_processes"] == ranks
        if parts:
            replicas, shards = (parts[f"parallelism_config_dp_{kind}_size"] for kind in ("replicate", "shard"))
            assert replicas * shards * rest[0] * rest[1] == ranks
    product = 1
    for size in rest:
        product *= size
    assert ranks % product == 0 and batch % (micro * ranks // product) == 0
    return ranks // product, product, micro, batch * product // (micro * ranks)


@pytest.mark.parametrize(("name", "layout"), EVERY)
def test_sizes_and_batch_are_those_of_the_plan(name: str, layout: dict[str, Any]) -> None:
    chosen = plan(**layout)
    cut = chosen.layout
    rest = cut.tensor * cut.context * cut.pipeline
    assert sizes(name, chosen) == (cut.data, rest, cut.micro_batch, cut.num_micro_batches(JOB.global_batch))


def test_megatron_flags_say_model_and_layout() -> None:
    layout = {"tensor": 2, "pipeline": 4, "data": 2, "zero": 1, "sequence_parallel": True, "recompute": "full"}
    found = flags(plan(**layout))
    given = {
        "--num-layers": "32",
        "--hidden-size": "4096",
        "--num-query-groups": "8",
        "--ffn-hidden-size": "14336",
        "--normalization": "RMSNorm",
        "--rotary-base": "500000",
        "--rope-scaling-factor": "8",
        "--recompute-method": "uniform",
        "--recompute-num-layers": "1",
    }
    assert given.items() <= found.items()
    on = "bf16 swiglu sequence-parallel use-distributed-optimizer overlap-grad-reduce overlap-param-gather"
    on += " untie-embeddings-and-output-weights disable-bias-linear group-query-attention use-rope-scaling"
    assert all(found[f"--{flag}"] is True for flag in on.split())
    assert flags(plan(context=2, pipeline=8))["--overlap-grad-reduce"] is True  # gradients are summed over it as well
    off = "--use-tp-pp-dp-mapping --grad-reduce-in-bf16 --use-megatron-fsdp --pipeline-model-parallel-layout"
    assert not found.keys() & set(off.split())


def test_numbers_are_written_in_full() -> None:
    """As many digits as tell them from their neighbours, and no point behind whole ones."""
    std = 2304**-0.5 / 3
    given = flags(plan(replace(LLAMA, init_std=std, norm_eps=1e-6)))
    assert float(given["--init-method-std"]) == std and given["--norm-epsilon"] == "1e-06"
    assert given["--rope-scaling-factor"] == "8"


def test_a_gpt2_and_a_mixture_say_what_differs() -> None:
    gpt2 = models.named("gpt2")
    found = flags(plan(gpt2, replace(JOB, seq_len=1024, precision="fp16"), data=16))
    assert found["--position-embedding-type"] == "learned_absolute" and found["--normalization"] == "LayerNorm"
    assert found["--fp16"] is True and found["--accumulate-allreduce-grads-in-fp32"] is True
    assert not found.keys() & {"--disable-bias-linear", "--swiglu", "--untie-embeddings-and-output-weights", "--bf16"}
    mixtral = flags(plan(models.named("mixtral-8x7b"), data=16, zero=1, expert_group=4))
    assert (mixtral["--num-experts"], mixtral["--moe-router-topk"]) == ("8", "2")
    assert mixtral["--expert-model-parallel-size"] == "4"


def unrolled(text: str) -> list[str]:
    """Stages of a --pipeline-model-parallel-layout, with t*3 written out as Megatron-LM does."""
    return re.sub(r"(.)\*(\d+)", lambda match: match[1] * int(match[2]), text).split("|")


@pytest.mark.parametrize(
    ("layout", "engine"),
    [
        ({"pipeline": 4, "data": 4, "stage_layers": (7, 9, 9, 7)}, "megatron-core-2024"),
        ({"pipeline": 2, "data": 8, "stage_layers": (32, 0)}, "megatron-core-2024"),
        ({"pipeline": 4, "data": 4}, "phalanx"),  # balanced by cost: the head weighs more than a layer
        ({"pipeline": 3, "data": 4}, "megatron-core-2024"),  # 32 layers in three stages
    ],
)
def test_uneven_stages_are_spelled_out(layout: dict[str, Any], engine: str) -> None:
    text = emit(plan(**layout), "megatron-lm", engine).text
    (line,) = (line for line in text.splitlines() if line.startswith("--pipeline-model-parallel-layout"))
    stages = unrolled(shlex.split(line)[1])
    counts = [stage.count("t") for stage in stages]
    assert len(stages) == layout["pipeline"] and sum(counts) == LLAMA.num_layers and len(set(counts)) > 1
    assert stages[0].startswith("E") and stages[-1].endswith("L") and counts == list(layout.get("stage_layers", counts))
    assert "--num-virtual-stages-per-pipeline-rank" not in text


def test_torchtitan_gets_every_module_once_in_order() -> None:
    found = assignments(plan(pipeline=4, virtual_stages=2, schedule="interleaved-1f1b", data=4))
    parts = found["parallelism.module_fqns_per_model_part"]
    names = ["tok_embeddings", *(f"layers.{i}" for i in range(32)), "norm", "lm_head"]
    assert len(parts) == 8 and [name for part in parts for name in part] == names
    assert found["parallelism.pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert found["parallelism.num_pp_microbatches"] == 16 and found["training.disable_cuda_graphs"] is True


def test_torchtitan_names_a_model_that_it_brings() -> None:
    assert assignments(plan(data=16))["config"] == "llama3_8b()"
    alone = emit(
        plan(replace(LLAMA, num_layers=16, name="half"), data=16, recompute="full"), "torchtitan", "torchtitan"
    )
    assert "def planned(config: Trainer.Config)" in alone.text
    assert "config.activation_checkpoint = FullAC.Config()" in alone.text and "import FullAC" in alone.text
    assert any("brings no half" in remark for remark in alone.remarks)


def test_hybrid_sharding_is_replicas_and_shards() -> None:
    chosen = plan(data=16, zero=3, zero_group=8)
    assert flags(chosen)["--num-distributed-optimizer-instances"] == "2"
    assert json.loads(emitted("deepspeed", chosen))["zero_optimization"]["mics_shard_size"] == 8
    found = yaml(chosen)["parallelism_config"]
    assert found["parallelism_config_dp_replicate_size"] == 2 and found["parallelism_config_dp_shard_size"] == 8
    assert assignments(chosen)["parallelism.data_parallel_replicate_degree"] == 2


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("megatron-lm", {"pipeline": 4, "data": 4, "virtual_stages": 2, "schedule": "zb-v"}, "layout.schedule"),
    ("megatron-lm", {"data": 16, "reduce": "powersgd"}, "layout.reduce"),
    ("megatron-lm", {"data": 16, "recompute": "full", "recompute_every": 2}, "layout.recompute_every"),
    ("megatron-lm", {"tensor": 8, "data": 2, "tensor_overlap_chunks": 2}, "layout.tensor_overlap_chunks"),
    ("nemo", {"data": 16, "zero": 3}, "layout.zero"),
    ("nemo", {"tensor": 16}, "layout.tensor"),
    ("torchtitan", {"data": 16, "zero": 1}, "layout.zero"),
    ("torchtitan", {"data": 16, "zero": 3, "reduce": "bf16"}, "layout.reduce"),
    ("torchtitan", {"pipeline": 4, "data": 4, "schedule": "zb-h1"}, "layout.schedule"),
    ("torchtitan", {"pipeline": 4, "data": 4, "outermost": "data"}, "layout.outermost"),
    ("deepspeed", {"pipeline": 4, "data": 4, "virtual_stages": 2, "schedule": "zb-v"}, "layout.schedule"),
    ("deepspeed", {"pipeline": 4, "data": 4, "zero": 2}, "layout.zero"),
    ("deepspeed", {"pipeline": 4, "tensor": 4}, "layout.pipeline"),
    ("deepspeed", {"tensor": 16}, "layout.tensor"),
    ("deepspeed", {"tensor": 4, "data": 4, "sequence_parallel": True}, "layout.sequence_parallel"),
    ("deepspeed", {"data": 16, "zero": 1, "zero_group": 4}, "layout.zero_group"),
    ("accelerate", {"pipeline": 4, "data": 4}, "layout.pipeline"),
    ("accelerate", {"tensor": 4, "data": 4}, "layout.zero"),
    ("accelerate", {"data": 16, "zero": 3, "overlap": False}, "layout.overlap"),
    ("accelerate", {"data": 16, "zero": 3, "recompute": "full", "recompute_layers": (4,)}, "layout.recompute_layers"),
]


@pytest.mark.parametrize(("name", "layout", "where"), REFUSED)
def test_what_has_no_counterpart_is_refused(name: str, layout: dict[str, Any], where: str) -> None:
    with pytest.raises(LayoutError) as raised:
        emitted(name, plan(**layout))
    assert [problem.where for problem in raised.value.problems] == [where]
    assert framework(name).title in raised.value.problems[0].what and raised.value.problems[0].instead


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_what_changes_nothing_is_not_refused(name: str) -> None:
    """A tensor, pipeline or data axis of one rank makes options of theirs idle."""
    idle = {"schedule": "gpipe", "sequence_parallel": True, "tensor_overlap_chunks": 2, "outermost": "data"}
    assert emitted(name, plan(**idle, zero=1, reduce="bf16")) == emitted(name, plan())


def test_precisions_that_a_framework_lacks_are_refused() -> None:
    for name in WRITERS:
        with pytest.raises(LayoutError, match=r"job\.precision: .* has no counterpart of precision = \"fp64\""):
            emitted(name, plan(job=replace(JOB, precision="fp64"), data=16))


def test_remarks_say_what_the_settings_do_not_hold() -> None:
    priced = emit(plan(data=16, zero=3), "megatron-lm", "phalanx").remarks
    assert any("--engine megatron-core-2024" in remark for remark in priced)
    assert not any("--engine" in remark for remark in emit(plan(data=16), "megatron-lm", "megatron-core-2024").remarks)
    tuned = emit(plan(tensor=8, data=2, sequence_parallel=True), "nemo", "nemo-2024").remarks
    assert any("tp_comm_overlap=True" in remark for remark in tuned)
    pipeline = emit(plan(pipeline=4, data=4, recompute="full"), "deepspeed", "deepspeed").remarks
    assert any("PipelineModule(layers, num_stages=4)" in remark and "8, 8, 8, 8" in remark for remark in pipeline)
    assert any("recompute every layer" in remark for remark in pipeline)
    assert any("context axis" in remark for remark in emit(plan(context=16), "torchtitan", "torchtitan").remarks)
    script = emit(plan(data=16, zero=3, micro_batch=2), "accelerate", "fsdp").remarks
    assert any("gradient_accumulation_steps=2" in remark and "2 × 4096" in remark for remark in script)


def test_the_first_that_can_be_expressed_is_named_beside_what_cannot() -> None:
    plans = [plan(pipeline=4, data=4), plan(pipeline=2, data=8), plan(data=16, zero=3), plan(data=16)]
    with pytest.raises(LayoutError) as raised:
        emit_first(plans, "accelerate", "fsdp")
    first, last = raised.value.problems
    assert first.where == "layout.pipeline" and last.what.startswith("number 3 of 4 is the first that Accelerate can")
    assert last.instead == "--set layout.data=16 --set layout.pipeline=1 --set layout.zero=3"
    assert emit_first(plans[2:], "accelerate", "fsdp") == emit(plans[2], "accelerate", "fsdp")
    with pytest.raises(LayoutError) as raised:
        emit_first(plans[:2], "accelerate", "fsdp")
    assert len(raised.value.problems) == 1
    with pytest.raises(LayoutError) as raised:
        emit_first(plans[:2], "accelerate", "phalanx")
    assert raised.value.problems[-1].what.startswith("Accelerate can express none of the 2 best layouts of engine phal")
    assert raised.value.problems[-1].instead == "--engine fsdp"


def test_every_framework_has_a_writer_and_profiles() -> None:
    assert frameworks().keys() == WRITERS.keys()
    assert {name for entry in frameworks().values() for name in entry.engines} <= profiles().keys()
    with pytest.raises(InputError, match="did you mean megatron-lm"):
        framework("megatron")


def rows(section: str) -> list[tuple[str, str]]:
    """Rows of a table of docs/migrate.md whose two columns name as many settings: theirs, and ours with its table."""
    text = MIGRATE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    found = []
    for theirs, ours in re.findall(r"^\| (`.*?) \| (.*?) \|$", text, re.MULTILINE):
        left, right = re.findall(r"`([^`]+)`", theirs), re.findall(r"`([^`]+)`", ours)
        heads, tables = left[0].split("."), right[0].split(".")[0] if right else ""
        left = [name if name.startswith("--") or "." in name else ".".join([*heads[:-1], name]) for name in left]
        right = [name if name.split(".")[0] == tables else f"{tables}.{name}" for name in right]
        if len(left) == len(right):
            found += list(zip(left, right, strict=True))
    return found


@pytest.mark.parametrize(
    ("section", "name", "read"),
    [
        ("Megatron-LM", "megatron-lm", flags),
        ("NeMo", "nemo", overrides),
        ("torchtitan", "torchtitan", assignments),
    ],
)
def test_docs_migrate_translates_back_to_the_plan(section: str, name: str, read: Any) -> None:
    """Whatever number the settings hold under a name of the table is what the plan has under ours."""
    compared = set()
    for layout in LAYOUTS[name]:
        chosen = plan(**layout)
        found = read(chosen)
        for theirs, ours in rows(section):
            table, _, key = ours.partition(".")
            value = getattr(getattr(chosen, table, None), key, None)
            if isinstance(value, int) and not isinstance(value, bool) and re.fullmatch(r"\d+", str(found.get(theirs))):
                assert int(found[theirs]) == value, (theirs, ours)
                compared.add(ours)
    assert {"layout.tensor", "layout.pipeline", "layout.context", "job.num_steps"} <= compared


def test_docs_migrate_names_every_setting() -> None:
    """In the section of its framework, whole or, after a name of the same table, by its last word."""
    every = [name for flag in framework("megatron-lm").flags.values() for name in flag.split()]
    for section, names in {"Megatron-LM": every, "torchtitan": framework("torchtitan").copied}.items():
        text = MIGRATE.split(f"\n## {section}\n")[1].split("\n## ")[0]
        words = set(re.findall(r"[\w.-]+", text))
        missing = [name for name in names if not {name, name.split(".")[-1]} & words]
        assert not missing, missing
