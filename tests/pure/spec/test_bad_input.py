"""What users write wrong: each mistake is named with its place, its value and what is legal, and all at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cli.main import main
from phalanx.errors import SpecError
from phalanx.spec.load import TABLES, load
from phalanx.spec.schema import nearest

GOOD = """\
[model]
name = "tiny"
[cluster]
name = "laptop"
[job]
global_batch = 8
seq_len = 32
num_steps = 4
[optimizer]
lr = 1e-3
[data]
path = "x"
[layout]
tensor = 2
[launch]
comm = "auto"
[checkpoint]
keep = 1
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def problems(path: Path, *overrides: str):
    with pytest.raises(SpecError) as caught:
        load(path, overrides)
    assert caught.value.exit_code == 2
    return caught.value.problems


# What is written in place of what, the line it stands on, and words that the one complaint must have.
TABLE = [
    # names
    ("tensor = 2", "tensro = 2", 14, "unknown key layout.tensro", "did you mean tensor?"),
    ("tensor = 2", "tensor_parallel = 2", 14, "unknown key layout.tensor_parallel", "did you mean tensor?"),
    ("tensor = 2", "TENSOR = 2", 14, "unknown key layout.TENSOR", "did you mean tensor?"),
    ("tensor = 2", "tp = 2", 14, "unknown key layout.tp", "did you mean tensor?"),
    ("tensor = 2", "pp_size = 2", 14, "unknown key layout.pp_size", "did you mean pipeline?"),
    ("tensor = 2", "qqq = 2", 14, "unknown key layout.qqq", "known: tensor, context, data"),
    ("[optimizer]", "[optimiser]", 9, "unknown table optimiser", "did you mean optimizer?"),
    ("[job]", "[job]\nlr = 1", 6, "unknown key job.lr", "lr belongs in [optimizer]"),
    ("[model]", "seed = 1\n[model]", 1, "unknown key seed", "seed belongs in [job]"),
    ('name = "tiny"', 'name = "llama3-8b"', 2, 'unknown model "llama3-8b"', "did you mean llama-3-8b?"),
    ('name = "laptop"', 'name = "dgx_h100"', 4, 'unknown cluster "dgx_h100"', "did you mean dgx-h100?"),
    ('name = "laptop"', 'name = "laptop"\ndevice = "H100"', 5, 'unknown device "H100"', "known: V100-SXM2"),
    ('name = "laptop"', 'name = "laptop"\ndevice = "a100"', 5, '"a100"', "mean A100-SXM4-40GB or A100-SXM4-80GB"),
    # what the device of an unknown cluster lacks is not told as missing
    ('name = "laptop"', 'name = "dgx-x"\ndevice.memory_bytes = "80 GiB"', 4, 'unknown cluster "dgx-x"', "known: dgx-1"),
    ('name = "tiny"', 'name = "tiny"\nhidden_size = 8', 3, "unknown key model.hidden_size", "did you mean hidden?"),
    ("[layout]", "[layout]\nname = 1", 14, "unknown key layout.name", "known: tensor"),
    ("[data]", "[data]\nfile = 4", 12, "unknown key data.file", "file belongs in [cluster]; [data] has path, text"),
    ("[job]", "[job]\nnum_nodes = 4", 6, "unknown key job.num_nodes", "num_nodes belongs in [cluster]"),
    ("[layout]", "[layout]\nnum_processes = 4", 14, "unknown key layout.num_processes", "known: tensor"),
    ('name = "tiny"', 'name = "tiny"\nname = "gpt2"', 3, "is not TOML", "stands above already: keep one"),
    ('name = "tiny"', 'name = "tiny"\n[model]', 3, "is not TOML", "stands above already: keep one"),
    # types
    ("tensor = 2", 'tensor = "2"', 14, 'layout.tensor = "2"', "a whole number, at least 1", "without quotes"),
    ("tensor = 2", "tensor = 2.0", 14, "layout.tensor = 2.0", "a whole number", "write 2"),
    ("tensor = 2", "tensor = true", 14, "layout.tensor = true", "a whole number"),
    ("tensor = 2", "tensor = [2]", 14, "layout.tensor = [2]", "a whole number"),
    ("tensor = 2", "stage_layers = 4", 14, "layout.stage_layers = 4", "a list, each a whole number, at least 0"),
    ("tensor = 2", "stage_layers = [2, -1]", 14, "layout.stage_layers = -1", "at least 0"),
    ("tensor = 2", "sequence_parallel = 1", 14, "layout.sequence_parallel = 1", "true or false"),
    ("lr = 1e-3", "betas = [0.9]", 10, "optimizer.betas = [0.9]", "a list of 2"),
    ("lr = 1e-3", 'lr = "1e-3"', 10, 'optimizer.lr = "1e-3"', "a finite number, above 0", "without quotes"),
    ('path = "x"', "path = 7", 12, "data.path = 7", "expected text", 'text needs quotes: "7"'),
    ('name = "tiny"', "name = 7", 2, "model.name = 7", "expected text"),
    ('name = "tiny"', "name = 1979-05-27", 2, "model.name", "expected text"),
    ("[layout]\ntensor = 2", "[[layout]]\ntensor = 2", 13, "expected a table"),
    ('[model]\nname = "tiny"', 'model = "tiny"', 1, 'model = "tiny": expected a table'),
    ('name = "tiny"', 'name = "tiny"\nrope_scaling = 8', 3, "model.rope_scaling = 8", "a table with kind, factor"),
    # values
    ("global_batch = 8", "global_batch = 0", 6, "job.global_batch = 0", "at least 1"),
    ("global_batch = 8", "global_batch = -8", 6, "job.global_batch = -8", "at least 1"),
    ("global_batch = 8", "global_batch = 99999999999999999999", 6, "job.global_batch", "less than 64 bits"),
    ("lr = 1e-3", "lr = nan", 10, "optimizer.lr = NaN", "a finite number"),
    ("lr = 1e-3", "lr = inf", 10, "optimizer.lr = Infinity", "a finite number"),
    ("lr = 1e-3", "lr = -1e-3", 10, "optimizer.lr = -0.001", "above 0"),
    ("lr = 1e-3", "betas = [0.9, 1.0]", 10, "optimizer.betas = 1.0", "below 1"),
    ("lr = 1e-3", "lr = 1e-3\nmin_lr = 0.1", 11, "optimizer.min_lr = 0.1", "above lr = 0.001"),
    ("lr = 1e-3", 'name = "adam"', 10, 'optimizer.name = "adam"', 'did you mean "adamw"?'),
    ("seq_len = 32", 'seq_len = 32\nprecision = "bfloat16"', 8, '"bfloat16"', 'did you mean "bf16"?'),
    ("seq_len = 32", 'seq_len = 32\nprecision = "int8"', 8, '"int8"', 'one of "fp32", "bf16", "fp16", "fp64"'),
    ("tensor = 2", "zero = 4", 14, "layout.zero = 4", "one of 0, 1, 2, 3"),
    ("tensor = 2", 'zero = "3"', 14, 'layout.zero = "3"', "without quotes: 3"),
    ("tensor = 2", 'tensor = "2 of them"', 14, 'layout.tensor = "2 of them"', "a number, without quotes"),
    ("tensor = 2", "zero = true", 14, "layout.zero = true", "one of 0, 1, 2, 3"),
    ('comm = "auto"', "comm_timeout_s = 0", 16, "launch.comm_timeout_s = 0", "above 0", '"30 s"'),
    ('comm = "auto"', "comm_timeout_s = 1e10", 16, "launch.comm_timeout_s = 10000000000.0", "at most 1,000,000"),
    ('comm = "auto"', 'comm_timeout_s = "30"', 16, '"30" has no unit', "s, min, h"),
    ("tensor = 2", 'bucket_bytes = "16 mb"', 14, 'unknown unit "mb"', "MB", "MiB"),
    # sizes that do not go together
    ('name = "tiny"', 'name = "tiny"\nhidden = 66', 3, "hidden = 66 does not divide by num_heads = 4", "head_dim"),
    ('name = "tiny"', 'name = "tiny"\nnum_heads = 3\nhead_dim = 8', 3, "num_heads = 3", "num_kv_heads = 2"),
    ('name = "tiny"', 'name = "tiny"\nnum_kv_heads = 3', 3, "num_heads = 4", "num_kv_heads = 3"),
    ('name = "tiny"', 'name = "tiny"\nhead_dim = 15', 3, "head_dim = 15 is odd", "rotary"),
    ('name = "tiny"', 'name = "gpt2"\nstyle = "llama"', 3, "model.style", "leave it out"),
    ('name = "tiny"', 'style = "lama"\nhidden = 8', 2, 'unknown style "lama"', "did you mean llama?"),
    ('name = "tiny"', 'style = ["llama"]\nhidden = 8', 2, 'unknown style ["llama"]', "llama, gpt2"),
    ('name = "tiny"\n', 'name = "tiny-gpt2"\nmax_seq_len = 16\n', 8, "seq_len = 32", "16 learned positions"),
    (
        'name = "tiny"',
        'name = "tiny-gpt2"\nrope_scaling = { kind = "linear", factor = 8 }',
        3,
        "rope_scaling with learned positions",
    ),
    (
        'name = "tiny"',
        'name = "llama-3.1-8b"\nrope_scaling.high_freq_factor = 0.5',
        3,
        "high_freq_factor = 0.5",
        "above 1",
    ),
    ('name = "tiny"', 'name = "llama-3.1-8b"\nrope_scaling.kind = "yarn"', 3, '"yarn"', 'one of "linear", "llama3"'),
    # clusters
    ('name = "laptop"', 'name = "laptop"\ndevice.memory_bytes = 80', 5, "memory_bytes = 80", '"80 GiB"', "1,048,576"),
    ('name = "laptop"', 'name = "laptop"\ndevice.memory_bytes = "80"', 5, '"80" has no unit', "GiB"),
    ('name = "laptop"', 'name = "laptop"\nintra_node.bytes_per_s = 25', 5, "bytes_per_s = 25", '"25 GB/s"'),
    ('name = "laptop"', 'name = "laptop"\ndevice.flops_per_s.fp8 = 312', 5, "fp8 = 312", '"312 TFLOP/s"'),
    ('name = "laptop"', 'name = "laptop"\nintra_node.efficiency = 1.5', 5, "efficiency = 1.5", "at most 1"),
    ('name = "laptop"', 'name = "laptop"\nnum_nodes = 0', 5, "cluster.num_nodes = 0", "at least 1"),
    ('name = "laptop"', 'name = "laptop"\nnodes = 2', 5, "unknown key cluster.nodes", "did you mean num_nodes?"),
    ('name = "laptop"', 'name = "dgx"\ndevice = "H200-SXM"', 4, 'unknown cluster "dgx"', "known: dgx-1-v100"),
    ('name = "laptop"', 'name = "laptop"\ndevice = 7', 5, "cluster.device = 7", "expected a table with name"),
    ('name = "laptop"', 'name = "laptop"\nfile = "c.toml"', 5, "both say which cluster", "leave one"),
    ('name = "laptop"', 'file = "c.toml"', 4, "c.toml does not exist", "run.toml"),
    ('name = "tiny"', 'hf = "c.json"', 2, "c.json does not exist", "no .json file"),
    ('name = "tiny"', 'name = "tiny"\nhf = "c.json"', 3, "both say which model", "leave one"),
]


@pytest.mark.parametrize(("old", "new", "line", "words"), [(*row[:3], row[3:]) for row in TABLE])
def test_one_mistake_one_complaint(tmp_path, old, new, line, words):
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new, 1))
    (problem,) = problems(path)
    assert problem.where == f"{path}:{line}", str(problem)
    missing = [word for word in words if word not in str(problem)]
    assert not missing, str(problem)


def test_the_command_exits_with_2(tmp_path, capsys):
    path = write(tmp_path, GOOD.replace("tensor = 2", "tensro = 2"))
    assert main(["plan", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"phalanx: {path}:14: unknown key layout.tensro\n    → did you mean tensor?")
    assert captured.out == ""


def test_the_good_file_is_good(tmp_path):
    assert load(write(tmp_path, GOOD)).layout == {"tensor": 2}


def test_all_at_once(tmp_path):
    text = GOOD.replace("tensor = 2", "tensor = 0\nzero = 9\nsegment = 1").replace('"laptop"', '"lptop"')
    path = write(tmp_path, text.replace("seq_len = 32\n", "").replace('"auto"', "1"))
    found = problems(path, "optimizer.lr=fast", "job.sed=1", "nonsense")
    lines = [f"{path}:{line}" for line in (4, 5, 13, 14, 15, 17)]
    settings = ["--set optimizer.lr=fast", "--set job.sed=1", "--set nonsense"]
    assert [problem.where for problem in found] == [*sorted(settings), *lines], "in the order of the file"


@pytest.mark.parametrize(
    ("left_out", "where", "words"),
    [
        (
            "seq_len = 32\n",
            ":5",
            ["missing key job.seq_len", "write seq_len = … in [job]", "a whole number, at least 1"],
        ),
        ('[model]\nname = "tiny"\n', "", ["missing table [model]", 'name = "llama-3-8b"']),
    ],
)
def test_missing(tmp_path, left_out, where, words):
    path = write(tmp_path, GOOD.replace(left_out, ""))
    (problem,) = problems(path)
    assert problem.where == f"{path}{where}"
    assert all(word in str(problem) for word in words), str(problem)


def test_an_empty_file_says_all_that_it_needs(tmp_path):
    found = problems(write(tmp_path, ""))
    assert [problem.what for problem in found] == [
        "missing table [model]",
        "missing key job.global_batch",
        "missing key job.seq_len",
        "missing key job.num_steps",
    ]


def test_own_sizes_half_given(tmp_path):
    path = write(tmp_path, GOOD.replace('name = "tiny"', "hidden = 64\nnum_layers = 2"))
    assert [problem.what for problem in problems(path)] == ["missing key model.num_heads", "missing key model.vocab"]


def test_own_numbers_half_given(tmp_path):
    """Nothing of this machine is put in place of what is missing of another."""
    path = write(tmp_path, GOOD.replace('name = "laptop"', 'num_nodes = 2\ndevice = "H200-SXM"'))
    assert [problem.what for problem in problems(path)] == [
        f"missing key cluster.{name}" for name in ("devices_per_node", "intra_node", "inter_node")
    ]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("layout.tensro=2", ["unknown key layout.tensro", "did you mean tensor?"]),
        ("layout.tensor=two", ['layout.tensor = "two"', "a whole number"]),
        ("layout.tensor=-1", ["layout.tensor = -1", "at least 1"]),
        ("layuot.tensor=2", ["unknown table layuot", "did you mean layout?"]),
        ("tensor=2", ["unknown key tensor", "tensor belongs in [layout]"]),
        ("model.name=tinny", ['unknown model "tinny"', "did you mean tiny"]),
        ("layout", ["is not table.key=value"]),
    ],
)
def test_bad_overrides_name_themselves(tmp_path, setting, words):
    (problem,) = problems(write(tmp_path, GOOD), setting)
    assert problem.where == f"--set {setting}"
    assert all(word in str(problem) for word in words), str(problem)


def test_a_mistake_in_a_cluster_file_has_that_files_line(tmp_path):
    other = tmp_path / "cluster.toml"
    other.write_text('devices_per_node = 0\ndevice = "H200-SXM"\n[intra_node]\nlatency = 1\nbytes_per_s = "1 GB/s"\n')
    found = problems(write(tmp_path, GOOD.replace('name = "laptop"', 'file = "cluster.toml"')))
    assert [(problem.where, problem.what.split(":")[0]) for problem in found] == [
        (f"{other}:1", "cluster.devices_per_node = 0"),
        (f"{other}:3", "missing key cluster.intra_node.latency_s"),
        (f"{other}:4", "unknown key cluster.intra_node.latency"),
    ]


def test_a_cluster_file_that_is_not_toml(tmp_path):
    (tmp_path / "cluster.toml").write_text("devices_per_node =\n")
    (problem,) = problems(write(tmp_path, GOOD.replace('name = "laptop"', 'file = "cluster.toml"')))
    assert problem.where == f"{tmp_path / 'cluster.toml'}:1"


KEYS = st.one_of(
    st.sampled_from([f"{table}.{key}" for table, keys in TABLES.items() for key in keys]),
    st.sampled_from(
        ["model", "cluster.device.memory_bytes", "model.rope_scaling.kind", "cluster.sources.x", "x", "job.x"]
    ),
)
TEXTS = st.sampled_from(
    ["0", "-1", "7", "3", "1e3", "nan", "inf", "true", '""', '"x"', '"1 GiB"', '"dgx-a100"', '"gpt2"', "[]", "[1, 2]",
     "[0.9]", "{}", "{ kind = 1 }", '{ kind = "linear", factor = 2 }', "1979-05-27", "[[1], {}]", "9999999999999999999",
     '"H200-SXM"', "/", "~qqq/x"]
)  # fmt: skip


@given(st.lists(st.tuples(KEYS, TEXTS), min_size=1, max_size=4))
def test_whatever_is_written_is_taken_or_refused(tmp_path_factory, settings):
    """No input gets past the checks into an error of ours; what is refused has its place, a word on each mistake."""
    path = write(tmp_path_factory.mktemp("run"), GOOD)
    taken, mistakes = None, []
    try:
        taken = load(path, [f"{key}={text}" for key, text in settings])
    except SpecError as error:
        mistakes = error.problems
    assert bool(taken) != bool(mistakes)
    assert all(mistake.where and mistake.what for mistake in mistakes)


def test_of_names_that_are_equally_near_none_is_suggested():
    assert nearest("fp16", ["fp32", "bf16", "fp64"]) == ""
    assert nearest("fp31", ["fp32", "bf16", "fp64"]) == "fp32"
