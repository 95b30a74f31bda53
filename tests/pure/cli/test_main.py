"""The command line: exit codes, help, and one clear error for everything that is wrong with the input."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import tiny_plan

from phalanx.__main__ import main as command
from phalanx.cli.commands import COMMANDS
from phalanx.cli.main import main, parser_of
from phalanx.data.tokens import TokenWriter
from phalanx.plan.layout import Layout
from phalanx.rundir import RunDir

RUN = """\
[model]
name = "tiny"
num_layers = 4
hidden = 64
num_heads = 4
num_kv_heads = 2
head_dim = 16
ffn = 128
vocab = 300
max_seq_len = 64
norm = "rmsnorm"
activation = "swiglu"
positions = "rope"
tied = false
[job]
global_batch = 8
seq_len = 64
num_steps = 3
precision = "fp32"
[data]
path = "tokens"
[layout]
tensor = 2
pipeline = 2
data = 1
"""
TORCHRUN = {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a run file and its data, and an environment in which nobody started us."""
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith("SLURM_") or name in (*TORCHRUN, "RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    Path("run.toml").write_text(RUN)
    with TokenWriter(Path("tokens"), "uint16") as writer:
        writer.add(range(300))
        writer.add([7] * 300)
        writer.end_document()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The complaint about wrong input, after which nothing was started or left behind."""
    before = sorted(Path().iterdir())
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("phalanx: ")
    assert "Traceback" not in captured.err
    assert sorted(Path().iterdir()) == before
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("trian run.toml", ["unknown command trian", "did you mean train?"]),
        ("--versoin", ["unknown option --versoin", "did you mean --version?"]),
        ("train", ["required: RUN_OR_PLAN", "usage: phalanx train"]),
        ("train run.toml --resum never", ["unknown argument --resum", "did you mean --resume?"]),
        ("train run.toml again.toml", ["unknown argument again.toml"]),
        ("demo", ["there is no examples/demo.toml here", "name a run file"]),
        ("train nothing.toml", ["nothing.toml", "run.toml"]),
        ("train nothing.json", ["nothing.json"]),
        ("train run.toml --resume step-9", ["there is no checkpoint step-9", "--resume"]),
        ("train run.toml --set job.glob_batch=4", ["job.glob_batch", "did you mean global_batch?"]),
        ("train run.toml --set job.seq_len=long", ["job.seq_len", "long", "whole number"]),
        ("train run.toml --set layout.tensor", ["--set layout.tensor"]),
        ("train run.toml --set layout.tensor=3", ["tensor 3", "4 query heads", "tensor = 1, 2 or 4"]),
        ("train run.toml --set layout.pipeline=5", ["pipeline 5", "4 layers"]),
        ("train run.toml --set job.global_batch=7 --set layout.micro_batch=2", ["micro-batch 2", "global batch 7"]),
        ("train run.toml --set job.seq_len=63 --set layout.sequence_parallel=true", ["sequence 63", "tensor 2"]),
        ("train run.toml --set layout.zero=7", ["layout.zero = 7", "one of 0, 1, 2, 3"]),
        ("train run.toml --set cluster.name=dgx-h101", ["dgx-h101", "did you mean dgx-h100?"]),
        ("train run.toml --set data.path=other", ["other"]),
        ("train run.toml --set data.validation_path=other", ["other.idx", "no such file"]),
        ("train run.toml --set data.path=one --set data.validation_path=two", ["one.idx", "two.idx"]),
        ("train run.toml --set data.validation_fraction=0.5", ["1 documents cannot be split at 0.5"]),
        ("train run.toml --set job.global_batch=64", ["samples", "one global batch"]),
        ("train run.toml --set data.text=*.txt", ["data.path", "data.text"]),
        ("train run.toml --run-dir run.toml", ["cannot write the run folder run.toml"]),
        ("plan run.toml --top 0", ["--top"]),
        ("verify run.toml --steps 0", ["--steps: 0 steps, not 1 or more", "usage: phalanx verify"]),
        ("verify run.toml --steps few", ["--steps: invalid count value: 'few'"]),
        ("run --ranks -1 script.py", ["--ranks: -1 processes, not 1 or more"]),
        ("generate . x --pipeline 0", ["--pipeline: 0 stages, not 1 or more"]),
        ("plan run.toml --html no/such/folder/a.html", ["--html: cannot write no/such/folder/a.html", "No such file"]),
        ("plan run.toml -o no/such/folder/a.json", ["--output: cannot write no/such/folder/a.json"]),
        ("plan run.toml -o /", ["--output: cannot write /"]),
        ("plan run.toml --set layout.stage_layers=[1]", ["stage_layers", "sum to 1", "4 layers"]),
    ],
)
def test_wrong_input_is_refused_in_words(capsys: pytest.CaptureFixture[str], arguments: str, words: list[str]):
    complaint = refused(capsys, *arguments.split())
    for word in words:
        assert word in complaint


def test_a_run_folder_is_no_checkpoint(capsys: pytest.CaptureFixture[str]):
    Path("old/checkpoints/step-000002").mkdir(parents=True)
    complaint = refused(capsys, "train", "run.toml", "--resume", "old")
    assert "--resume: old is the folder of a run" in complaint
    assert "one of old/checkpoints" in complaint


@pytest.mark.parametrize("resume", ["nowhere", "old", ""])
def test_a_checkpoint_to_go_on_from_is_looked_at_before_any_process_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, resume: str
):
    monkeypatch.setattr("phalanx.launch.local.start", None)
    Path("old").mkdir()
    Path("run.toml").write_text(f'{RUN}\n[checkpoint]\nresume = "{resume}"\n')
    complaint = refused(capsys, "train", "run.toml")
    assert f"run.toml:{len(RUN.splitlines()) + 3}: checkpoint.resume: {Path(resume).absolute()}" in complaint


def test_all_mistakes_at_once_with_their_lines(capsys: pytest.CaptureFixture[str]):
    Path("run.toml").write_text(RUN.replace("num_steps = 3", "num_step = 3").replace("tensor = 2", "tensor = '2'"))
    complaint = refused(capsys, "train", "run.toml")
    assert "problems" in complaint.splitlines()[0]
    assert "run.toml:18: " in complaint
    assert "run.toml:23: " in complaint


def test_legality_names_the_line(capsys: pytest.CaptureFixture[str]):
    Path("run.toml").write_text(RUN.replace("tensor = 2", "tensor = 3"))
    assert "run.toml:23: tensor 3 does not divide 4 query heads" in refused(capsys, "train", "run.toml")


def test_config_of_an_unknown_architecture(capsys: pytest.CaptureFixture[str]):
    Path("config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}))
    Path("run.toml").write_text('[model]\nhf = "config.json"\n[job]' + RUN.partition("[job]")[2])
    complaint = refused(capsys, "train", "run.toml")
    assert "mamba" in complaint.lower()
    assert "llama" in complaint.lower()


def test_plan_that_is_none(capsys: pytest.CaptureFixture[str]):
    Path("plan.json").write_text('{"format_version": 99}')
    assert "format version 99" in refused(capsys, "train", "plan.json")
    tiny_plan(Layout(tensor=2)).write(Path("plan.json"))
    assert "--set job.seed=2 cannot change a plan" in refused(capsys, "train", "plan.json", "--set", "job.seed=2")
    tiny_plan(Layout(tensor=3)).write(Path("plan.json"))
    assert "plan.json: layout.tensor: tensor 3 does not divide" in refused(capsys, "train", "plan.json")


@pytest.mark.parametrize(("processes", "start"), [(3, 4), (6, 4), (1, 4)])
def test_wrong_number_of_processes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, processes: int, start: int
):
    Path("run.toml").write_text(RUN.replace("data = 1\n", ""))
    Path("error.json").touch()  # where torchrun looks for what its processes failed of
    told = {"TORCHELASTIC_ERROR_FILE": "error.json"}
    for name, value in {**TORCHRUN, **told, "RANK": "0", "WORLD_SIZE": str(processes)}.items():
        monkeypatch.setenv(name, value)
    complaint = refused(capsys, "train", "run.toml")
    assert json.loads(Path("error.json").read_text())["message"]["message"] in complaint
    assert f"needs a multiple of 4 processes, got {processes}" in complaint
    assert f"torchrun --nproc-per-node {start} " in complaint


@pytest.mark.parametrize("processes", [2, 8])
def test_wrong_number_of_processes_for_a_layout_that_is_given_in_full(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, processes: int
):
    for name, value in {**TORCHRUN, "RANK": "0", "WORLD_SIZE": str(processes)}.items():
        monkeypatch.setenv(name, value)
    complaint = refused(capsys, "train", "run.toml")
    assert "processes" in complaint
    assert f"{processes}" in complaint
    assert "--nproc-per-node 4 " in complaint


def test_other_ranks_leave_the_word_to_the_first(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    for name, value in {**TORCHRUN, "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "run.toml"]) == 2
    assert capsys.readouterr().err == ""


def test_slurm_job_that_does_not_fit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    job = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    complaint = refused(capsys, "train", "run.toml")
    assert "Slurm started 1 task" in complaint
    assert "the layout needs 4" in complaint
    assert "#SBATCH --ntasks=4" in complaint


def test_port_that_is_taken(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        assert main(["train", "run.toml", "--run-dir", "here"]) == 2
    assert f"is in use by process {os.getpid()}" in capsys.readouterr().err


def test_port_that_rank_0_should_serve_on_is_taken(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        for name, value in {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "4"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        assert f"is in use by process {os.getpid()}" in refused(capsys, "train", "run.toml")


def test_folder_in_use(capsys: pytest.CaptureFixture[str]):
    with RunDir(Path("here")).lock():
        assert f"process {os.getpid()}" in refused(capsys, "train", "run.toml", "--run-dir", "here")
    assert not Path("here/plan.json").exists()


def test_help_and_version(capsys: pytest.CaptureFixture[str]):
    for arguments in ([], ["--help"]):
        assert main(arguments) == 0
        output = capsys.readouterr().out
        assert all(f"  {name} " in output for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("phalanx ")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], name: str):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: phalanx {name}")
    assert shown.endswith(f"examples:\n{COMMANDS[name].examples}\n")
    for example in COMMANDS[name].examples.splitlines():
        words = shlex.split(example)
        words = words[words.index("phalanx") :]
        assert words[1] == name
        parser_of(name).parse(words[2:])


def test_errors_of_ours_take_one_line_and_keep_the_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def broken(arguments: object) -> int:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("phalanx.cli.train.run", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["train", "run.toml"]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert "ZeroDivisionError: oh" in line
    log = Path(line.rpartition(" ")[2])
    assert "in broken" in log.read_text()


def test_neither_torch_nor_numpy_is_loaded_for_help():
    program = "import sys; from phalanx.cli.main import main; main(['--help']); print([*sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert "'phalanx.errors'" in result.stdout
    assert "'torch'" not in result.stdout
    assert "'numpy'" not in result.stdout


DRAW = "import sys; from phalanx.cli.main import main; sys.exit(main(['schedule', 'show', *sys.argv[1:]]))"


def test_reader_that_has_seen_enough_is_no_error():
    command = [sys.executable, "-c", DRAW, "--pipeline", "64", "--micro-batches", "512", "--json"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=buffered) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.wait() == 141
        assert process.stderr.read() == b""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error_and_no_file_takes_their_numbers(closed: str, tmp_path: Path):
    drawing = tmp_path / "a.svg"
    show = [sys.executable, "-c", DRAW, "--pipeline", "2", "--micro-batches", "2", "--svg", str(drawing)]
    subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", *show], check=True, stdout=subprocess.DEVNULL)
    text = drawing.read_text()
    assert text.startswith("<svg") and text.rstrip().endswith("</svg>")


def test_what_the_terminal_cannot_show_is_written_in_escapes():
    program = "import sys; from phalanx.cli.main import main; sys.exit(main(['--help']))"
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, env=ascii_only)
    assert b"usage: phalanx COMMAND \\u2026" in result.stdout


class _Interrupting:
    """Ctrl-C while a module is looked for."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "phalanx.cli.main":
            raise KeyboardInterrupt


def test_ctrl_c_while_the_command_is_still_loading_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delitem(sys.modules, "phalanx.cli.main")
    monkeypatch.setattr(sys, "meta_path", [_Interrupting(), *sys.meta_path])
    assert command() == 130
    assert capsys.readouterr().err == "phalanx: interrupted\n"


def test_what_is_installed_runs_the_command_that_is_ready_for_ctrl_c():
    scripts = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert f'phalanx = "{command.__module__}:{command.__name__}"' in scripts
