"""Kill a run at random moments of its saves and let it go on, again and again: `python benchmarks/kills.py --kills 50`.

The run saves after every step. Each life ends by kill -9 a random while after a save began: of the command and all
ranks, or of one rank. What the last life leaves behind, weights, moments and the losses of all steps, must be bit for
bit what a run leaves that nobody disturbed; the exit code is 1 if it is not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from safetensors.torch import load_file

from phalanx.checkpoint.folder import find
from phalanx.rundir import RunDir

RUN = """\
[model]
name = "tiny"
vocab = 512
[job]
global_batch = 8
seq_len = 64
num_steps = {num_steps}
precision = "fp32"
[data]
text = "python-stdlib"
[checkpoint]
every_steps = 1
[layout]
data = 2
zero = 1
"""


def start(run_file: Path, run_dir: Path) -> subprocess.Popen[bytes]:
    """`phalanx train` in a process group of its own, from whatever the run folder holds."""
    command = [sys.executable, "-m", "phalanx", "train", run_file.name, "--run-dir", str(run_dir)]
    log = (run_dir.parent / f"{run_dir.name}.log").open("ab")
    with log:
        return subprocess.Popen(command, cwd=run_file.parent, stdout=log, stderr=log, start_new_session=True)


def ranks_of(run: subprocess.Popen[bytes]) -> list[int]:
    """Process ids of all descendants of a run's command."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended since
        children.setdefault(int(fields[1]), []).append(int(status.parent.name))
    found, ahead = [], [run.pid]
    while ahead:
        found += children.get(pid := ahead.pop(), [])
        ahead += children.get(pid, [])
    return found


def kill_during_a_save(run: subprocess.Popen[bytes], folder: Path, draw: random.Random) -> bool:
    """Wait for a few saves to begin, then kill at a random moment. False if the run ended before."""
    for _ in range(draw.randint(1, 4)):
        before = set(folder.glob("*.tmp-*"))
        while not set(folder.glob("*.tmp-*")) - before:
            if run.poll() is not None:
                return False
            time.sleep(0.001)
    time.sleep(draw.uniform(0, 0.1))
    victims = ranks_of(run)
    if draw.random() < 0.5 and victims:
        victims = [victims[-1]]
    else:
        victims.append(run.pid)
    for victim in victims:
        with suppress(ProcessLookupError):  # it may have ended since
            os.kill(victim, signal.SIGKILL)
    run.wait()
    return True


def state_of(run_dir: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint, by file and name."""
    found = find(RunDir(run_dir).checkpoints)
    assert found is not None, f"{run_dir} holds no checkpoint"
    files = sorted(found.path.rglob("*.safetensors"))
    return {f"{file.name}: {name}": tensor for file in files for name, tensor in load_file(file).items()}


def losses_of(run_dir: Path) -> dict[int, float]:
    """Loss by step; a step that was taken twice counts as the last life took it, and must not differ from the first."""
    losses: dict[int, float] = {}
    for line in RunDir(run_dir).metrics.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        assert losses.setdefault(record["step"], record["loss"]) == record["loss"], f"step {record['step']} differs"
    return losses


def main() -> int:
    """Run, kill, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw, console = random.Random(given.seed), Console(stderr=True)
    with TemporaryDirectory() as name:
        folder = Path(name)
        run_file = folder / "run.toml"
        run_file.write_text(RUN.format(num_steps=8 * given.kills), encoding="utf-8")
        straight, killed = folder / "straight", folder / "killed"
        assert start(run_file, straight).wait() == 0, (folder / "straight.log").read_text()
        for number in range(given.kills):
            with console.status(f"kill {number + 1} of {given.kills}"):
                if not kill_during_a_save(start(run_file, killed), RunDir(killed).checkpoints, draw):
                    print((folder / "killed.log").read_text()[-3000:])
                    print(f"the run ended by itself before kill {number + 1}")
                    return 1
        left = find(RunDir(killed).checkpoints)
        last_life = start(run_file, killed)
        if last_life.wait() != 0:
            print((folder / "killed.log").read_text()[-3000:])
            return 1
        expected, found = state_of(straight), state_of(killed)
        same = expected.keys() == found.keys() and all(torch.equal(expected[key], found[key]) for key in expected)
        same = same and losses_of(straight) == losses_of(killed)
        print(
            f"{given.kills} kills, the last with step {left.step if left else 0} whole; state and losses of all steps"
        )
        print(f"{'equal' if same else 'differ from'} those of an undisturbed run: {len(expected)} tensors")
        return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
