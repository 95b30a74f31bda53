"""One report of a failed run whose ranks torchrun or srun started: no agent saw them end, so they tell each other,
through the run folder, and the first of them speaks for all."""

from __future__ import annotations

import time

from phalanx.launch import supervise
from phalanx.plan.layout import Layout
from phalanx.rundir import RunDir
from phalanx.watch.outcomes import Ending, Outcome

GRACE_S = 2.0
_LOOK_AGAIN_S = 0.05


def report(layout: Layout, run_dir: RunDir, rank: int) -> str:
    """What rank `rank`, which failed and has said why in the run folder, is to say for all of them; empty if another
    one is to. Waits up to GRACE_S for the others: when one fails, all of them do within moments, unless they were
    killed."""
    deadline = time.monotonic() + GRACE_S
    said = _said(layout, run_dir)
    while len(said) < layout.num_ranks and time.monotonic() < deadline:
        time.sleep(_LOOK_AGAIN_S)
        said = _said(layout, run_dir)
    if rank > min((other for other, outcome in said.items() if outcome.error), default=rank):
        return ""
    failure = supervise.explain(layout, run_dir, _endings(layout, said))
    supervise.write(failure, run_dir)
    return str(failure)


def _said(layout: Layout, run_dir: RunDir) -> dict[int, Outcome]:
    outcomes = {rank: Outcome.read(run_dir.outcome(rank)) for rank in range(layout.num_ranks)}
    return {rank: outcome for rank, outcome in outcomes.items() if outcome}


def _endings(layout: Layout, said: dict[int, Outcome]) -> list[Ending]:
    """As an agent would have seen them. A rank that says nothing is suspected only if all others blame their peers."""
    suspect = all(outcome.error.blames_peer for outcome in said.values() if outcome.error)
    return [
        Ending(
            rank=rank,
            host=said[rank].host if rank in said else "its host",
            exit_code=said[rank].exit_code if rank in said else None,
            signal=None,
            by_agent=False,
            time_s=said[rank].time_s if rank in said else time.time(),
            peak_memory_bytes=0,
        )
        for rank in range(layout.num_ranks)
        if suspect or rank in said
    ]
