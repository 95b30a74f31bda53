"""What only a GPU can show: `python benchmarks/gpu_check.py`, on a machine with one NVIDIA GPU, in less than 8 minutes.

    tests        those in tests/gpu
    ranks        4 ranks that share the GPU, over Gloo and the host's memory, against one: losses of 5 steps
    speed        model FLOPs of a 1B-parameter Llama (seq 4096, bf16) against the matrix products that this GPU sustains

Prints a table; the exit code is 1 if a check fails, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from here import LLAMA, plan_here
from rich.console import Console
from rich.table import Table

from phalanx.plan.comm import Comm, Group, Work
from phalanx.plan.groups import groups
from phalanx.plan.layout import Layout
from phalanx.spec.job import JobSpec
from phalanx.trainer.comm import DONE, GroupComm, SoloComm
from phalanx.trainer.engine import Engine
from phalanx.trainer.recorder import Recorder
from phalanx.trainer.world import connect

SMALL = replace(LLAMA, name="small", num_kv_heads=4, max_seq_len=128, tied=True)
LAYOUTS = (
    Layout(tensor=2, data=2, zero=1, sequence_parallel=True),
    Layout(pipeline=2, data=2, zero=3),
    Layout(tensor=2, pipeline=2, recompute="full"),
)
LARGE = replace(  # the sizes of Llama 3.2 1B
    LLAMA,
    name="llama-1b",
    num_layers=16,
    hidden=2048,
    num_heads=32,
    head_dim=64,
    ffn=8192,
    vocab=128_256,
    max_seq_len=4096,
    rope_theta=500_000.0,
    tied=True,
)
SEQ_LEN, AIM, TOLERANCE = 4096, 0.55, 1e-4


class OverHost:
    """A Comm for tensors of a GPU whose members talk through the host's memory: each call is complete when it returns.

    A receive is the exception, which its schedule posts ahead: it is complete when it is waited for."""

    def __init__(self, comm: GroupComm) -> None:
        self._comm = comm
        self.group, self.index, self.size = comm.group, comm.index, comm.size

    def all_reduce(self, tensors: Any, *, purpose: str, op: Any = "sum", async_op: bool = False) -> Work:
        """See `Comm`."""
        return self._in_place(tensors, lambda held: self._comm.all_reduce(held, purpose=purpose, op=op))

    def broadcast(self, tensors: Any, *, root: int, purpose: str, async_op: bool = False) -> Work:
        """See `Comm`."""
        return self._in_place(tensors, lambda held: self._comm.broadcast(held, root=root, purpose=purpose))

    def all_gather(self, tensors: Any, *, out: Any, purpose: str, async_op: bool = False) -> Work:
        """See `Comm`."""
        return self._into(tensors, out, lambda held, got: self._comm.all_gather(held, out=got, purpose=purpose))

    def reduce_scatter(self, tensors: Any, *, out: Any, purpose: str, async_op: bool = False) -> Work:
        """See `Comm`."""
        return self._into(tensors, out, lambda held, got: self._comm.reduce_scatter(held, out=got, purpose=purpose))

    def send(self, tensor: Any, *, to: int, channel: int, purpose: str, async_op: bool = False) -> Work:
        """See `Comm`."""
        return self._comm.send(tensor.cpu(), to=to, channel=channel, purpose=purpose, async_op=True)

    def recv(self, tensor: Any, *, source: int, channel: int, purpose: str, async_op: bool = False) -> Work:
        """See `Comm`."""
        held = torch.empty_like(tensor, device="cpu")
        work = self._comm.recv(held, source=source, channel=channel, purpose=purpose, async_op=True)
        return _Copied(work, tensor, held)

    def _in_place(self, tensors: Any, call: Callable[[list[Any]], Work]) -> Work:
        tensors = _listed(tensors)
        held = [tensor.to("cpu", copy=True) for tensor in tensors]
        call(held).wait()
        return _copy_back(held, tensors)

    def _into(self, tensors: Any, out: Any, call: Callable[[list[Any], list[Any]], Work]) -> Work:
        out = _listed(out)
        got = [torch.empty_like(tensor, device="cpu") for tensor in out]
        call([tensor.to("cpu", copy=True) for tensor in _listed(tensors)], got).wait()
        return _copy_back(got, out)


class _Copied:
    def __init__(self, work: Work, tensor: Any, held: Any) -> None:
        self._work, self._tensor, self._held = work, tensor, held

    def wait(self) -> None:
        self._work.wait()
        self._tensor.copy_(self._held)


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _copy_back(held: list[Any], tensors: list[Any]) -> Work:
    for tensor, values in zip(tensors, held, strict=True):
        tensor.copy_(values)
    return DONE


def losses(rank: int, layout: Layout, folder: str, device: str, num_steps: int = 5) -> list[float]:
    """Loss and gradient norm of each step of one rank of `layout`, on `device`."""
    torch.set_num_threads(1)
    plan = plan_here(SMALL, JobSpec(global_batch=8, seq_len=128, num_steps=100, precision="fp32"), layout)
    comms: dict[str, GroupComm] = {}
    if layout.num_ranks > 1:
        store = dist.FileStore(f"{folder}/store", layout.num_ranks)
        comms, _ = connect(
            groups(SMALL, layout),
            rank=rank,
            num_ranks=layout.num_ranks,
            store=store,
            recorder=Recorder(),
            timeout_s=100,
            shared_memory=False,
        )

    def comm(name: str) -> Comm:
        return OverHost(comms[name]) if name in comms else SoloComm(Group(name=name, ranks=(rank,)))  # type: ignore[return-value]

    engine, found = Engine(plan, layout.coord(rank), comm, torch.device(device)), list[float]()
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, SMALL.vocab, (8, 129), generator=generator)[list(engine.positions)].to(device)
        batches = engine.micro_batches(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), 8 * 128, step)
        loss = engine.forward_backward(batches)
        engine.synchronize()
        total, norm, _ = engine.totals(loss)
        engine.update(1e-3, min(1.0, 1.0 / norm))
        found += [total, norm]
    for left in comms.values():
        left.close()
    return found


def compare(layout: Layout, device: str) -> float:
    """The largest relative difference of losses and norms between `layout` and one rank."""
    context = multiprocessing.get_context("spawn")  # a process that has used a GPU cannot be forked
    with TemporaryDirectory() as folder, context.Pool(layout.num_ranks) as pool:
        arguments = [(rank, layout, folder, device) for rank in range(layout.num_ranks)]
        several = pool.starmap_async(losses, arguments, chunksize=1).get(timeout=150)
    alone = losses(0, Layout(), "", device)
    return max(abs(a - b) / abs(b) for found in several for a, b in zip(found, alone, strict=True))


def matmul_flops_per_s(size: int = 8192, repeats: int = 30) -> float:
    """What square bf16 products of this size sustain on the GPU."""
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    seconds = timed(lambda: left @ right, repeats)
    return 2 * size**3 / seconds


def timed(call: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call on the GPU, after 3 to warm up."""
    for _ in range(3):
        call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1e3


def step_s(*, compile_segments: bool, micro_batch: int = 4, num_micro_batches: int = 2) -> tuple[float, float, int]:
    """Seconds of a training step of the large model, its model FLOPs, and the peak bytes of GPU memory."""
    batch = micro_batch * num_micro_batches
    layout = Layout(micro_batch=micro_batch, recompute="selective")
    job = JobSpec(global_batch=batch, seq_len=SEQ_LEN, num_steps=100, precision="bf16", compile=compile_segments)
    plan = plan_here(LARGE, job, layout)
    torch.cuda.reset_peak_memory_stats()
    engine = Engine(
        plan,
        layout.coord(0),
        lambda name: SoloComm(Group(name=name, ranks=(0,))),
        torch.device("cuda"),
    )
    tokens = torch.randint(0, LARGE.vocab, (batch, SEQ_LEN), device="cuda")
    batches = engine.micro_batches(tokens, tokens, batch * SEQ_LEN, 0)

    def step() -> None:
        loss = engine.forward_backward(batches)
        engine.synchronize()
        _, norm, _ = engine.totals(loss)
        engine.update(1e-5, min(1.0, 1.0 / norm))

    seconds = timed(step, 6)
    return seconds, LARGE.flops_per_token(SEQ_LEN) * batch * SEQ_LEN, torch.cuda.max_memory_allocated()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write(
            "gpu_check: torch sees no GPU here (torch.cuda.is_available() is False); nothing was checked\n"
        )
        return 2
    began_s = time.monotonic()
    table, ok = Table("check", "result", "", title=torch.cuda.get_device_name()), True

    def row(name: str, result: str, fine: bool) -> None:
        nonlocal ok
        ok = ok and fine
        table.add_row(name, result, "ok" if fine else "NOT OK")

    tests = Path(__file__).resolve().parents[1] / "tests" / "gpu"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(tests)], timeout=150, capture_output=True, text=True
    )
    row("tests/gpu", (run.stdout.strip().splitlines() or ["no output"])[-1], run.returncode == 0)
    for layout in LAYOUTS:
        error = compare(layout, "cuda")
        row(f"{layout} against one rank", f"{error:.1e} (at most {TOLERANCE:.0e})", error <= TOLERANCE)
    ceiling = matmul_flops_per_s()
    row("bf16 products of 8192", f"{ceiling / 1e12:.0f} TFLOP/s", True)
    for compile_segments in (False, True):
        seconds, flops, peak = step_s(compile_segments=compile_segments)
        share = flops / seconds / ceiling
        words = (
            f"{seconds * 1e3:.0f} ms, {flops / seconds / 1e12:.0f} TFLOP/s, {share:.1%} of it, {peak / 2**30:.0f} GiB"
        )
        row(f"{LARGE.name}, seq {SEQ_LEN}" + (", compiled" if compile_segments else ""), words, share >= AIM)
        torch.cuda.empty_cache()
    Console().print(table, f"{time.monotonic() - began_s:.0f} s")
    if run.returncode:
        sys.stdout.write(run.stdout)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
