"""The whole training of a module, by Trainer and by the example scripts."""

from __future__ import annotations

import difflib
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from own_modules import BATCH, cross_entropy, images, module_plan, small
from torch.utils.data import Dataset

import phalanx
from phalanx.cli.main import main
from phalanx.errors import DataError
from phalanx.own.trainer import Trainer
from phalanx.plan.layout import Layout
from phalanx.spec.job import CheckpointSpec
from phalanx.trainer.stop import STOP_SIGNALS
from phalanx.watch import metrics

EXAMPLES = Path(__file__).parents[2] / "examples" / "own"


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """A run with a folder takes requests to stop; the tests' process shall not."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Samples(Dataset):
    """The images one by one."""

    def __init__(self) -> None:
        self.inputs, self.labels = images(size=13)

    def __len__(self) -> int:
        return 13

    def __getitem__(self, number: int) -> Any:
        return self.inputs[number], self.labels[number]


def losses(data: Any, **options: Any) -> list[float]:
    plan = options.pop("plan", module_plan(Layout(micro_batch=4), num_steps=4))
    trainer, found = Trainer(small(), cross_entropy, data, plan, **options), []
    trainer.run(lambda record: found.append(record.loss))
    trainer.step.close()
    return found


def test_data_come_in_an_order_of_their_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Tensors, a Dataset, other micro-batches, and a run that was interrupted: the same losses."""
    expected = losses(images(size=13))
    assert losses(Samples()) == expected
    assert losses(Samples(), plan=module_plan(Layout(micro_batch=1), num_steps=4)) == pytest.approx(expected, rel=1e-4)
    plan = module_plan(Layout(micro_batch=4), num_steps=2, checkpoint=CheckpointSpec(keep=1))
    begun = losses(Samples(), plan=plan, run_dir=tmp_path)
    plan = replace(plan, job=replace(plan.job, num_steps=4))
    assert begun + losses(Samples(), plan=plan, run_dir=tmp_path) == expected
    kept = metrics.read(tmp_path / "metrics.jsonl")
    assert [record.loss for record in kept] == expected and kept[0].tokens_per_s > 0
    assert "step 4/4" in capfd.readouterr().out
    state = phalanx.module_weights(tmp_path / "checkpoints" / "step-000004")
    module = small()
    module.load_state_dict(state)
    assert not module.head.weight.equal(small().head.weight)


def test_a_request_to_stop_saves_and_ends(tmp_path: Path) -> None:
    trainer = Trainer(
        small(), cross_entropy, Samples(), module_plan(Layout(micro_batch=4), num_steps=9), run_dir=tmp_path
    )
    with pytest.raises(SystemExit) as ended:
        trainer.run(lambda record: signal.raise_signal(signal.SIGTERM) if record.step == 2 else None)
    trainer.step.world.close()
    assert ended.value.code == 75
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000003"]


ASKED = """
import signal, torch, phalanx
job = phalanx.JobSpec(global_batch=2, seq_len=1, num_steps=9, precision="fp32")
plan = phalanx.ModulePlan(job=job, layout=phalanx.Layout(micro_batch=2))
step = phalanx.prepare(torch.nn.Linear(2, 2), plan, run_dir="run")
signal.raise_signal(signal.SIGTERM)
while True:
    step.forward_backward([torch.ones(2, 2)], lambda output, batch: output.mean())
    step.update()
"""


def test_a_loop_of_ones_own_that_is_asked_to_stop_ends_without_a_traceback(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", ASKED], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (75, "")
    assert ended.stdout.endswith(
        "stopped after step 1 as asked, with everything saved; the same command goes on from there\n"
    )


def test_no_samples_are_refused() -> None:
    with pytest.raises(DataError, match="0, 8"):
        Trainer(small(), cross_entropy, (torch.zeros(0), torch.zeros(BATCH)), module_plan(Layout()))


def test_a_single_number_among_the_data_is_refused() -> None:
    with pytest.raises(DataError, match=r"1 of the data's tensors hold one number \(0\.5\), not samples"):
        Trainer(small(), cross_entropy, {"x": torch.zeros(8, 2), "weight": torch.tensor(0.5)}, module_plan(Layout()))


def test_a_plain_script_becomes_parallel_in_ten_lines() -> None:
    plain, parallel = ((EXAMPLES / name).read_text().splitlines()[2:] for name in ("plain.py", "parallel.py"))
    changed = [line for line in difflib.ndiff(plain, parallel) if line.startswith("+ ") and line.strip("+ ")]
    assert len(changed) <= 10, changed
    document = (EXAMPLES.parents[1] / "docs" / "own-models.md").read_text()
    for script in (plain, parallel):
        assert "\n".join(script) in document


def test_the_example_learns_digits_on_four_processes(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--ranks", "4", str(EXAMPLES / "parallel.py")]) == 0
    (line,) = capfd.readouterr().out.splitlines()
    assert float(line.split()[1]) > 0.97


def test_a_rank_that_fails_ends_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(60)\n")
    start = f"script._GRACE_S = 0.2; sys.exit(script.start_script(2, [{str(script)!r}]))"
    program = f"import sys; from phalanx.launch import script; {start}"
    assert subprocess.run([sys.executable, "-c", program], timeout=30).returncode == 7
    assert main(["run", "--ranks", "2", "missing.py"]) == 2
    assert "there is no script missing.py" in capfd.readouterr().err


@pytest.mark.parametrize(("times", "answer", "code"), [(1, "sys.exit(75)", 75), (2, "None", 137)])
def test_ctrl_c_asks_ranks_to_stop_and_the_second_ends_them(times: int, answer: str, code: int, tmp_path: Path) -> None:
    script = tmp_path / "asked.py"
    script.write_text(
        "import os, signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: {answer})\n"
        f"for _ in range({times}):\n    os.kill(os.getppid(), signal.SIGINT)\n    time.sleep(0.5)\n"
        "time.sleep(60)\n"
    )
    program = (
        f"import sys; from phalanx.launch.script import start_script; sys.exit(start_script(1, [{str(script)!r}]))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=30).returncode == code
