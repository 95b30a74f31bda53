"""Why a run failed: from what the ranks said, what the agent saw and the last communication records to one report.

The cause is the earliest failure that does not itself blame a peer: when a rank dies, the others fail within
milliseconds with "connection closed", often before the dead one is noticed, and those errors are consequences.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from phalanx.errors import RunError
from phalanx.plan.layout import Layout
from phalanx.rundir import RunDir, write_whole
from phalanx.units import format_bytes
from phalanx.watch.events import in_words, read_ring
from phalanx.watch.outcomes import Ending, Outcome, read_endings, signal_in_words
from phalanx.watch.ranks import ranks_in_words

_NUM_LAST_LINES = 12
_NUM_LAST_RECORDS = 16
_LINE_CHARACTERS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """One thing that went wrong, on one rank or equally on several: `ranks` in the order in which it happened, `coord`
    and everything else of the first.

    `what` says it in words that follow the rank's name, `place` is a line of the user's code or empty. `for_users`: a
    message that needs no evidence beside it. `time_s` is Unix time.
    """

    ranks: tuple[int, ...]
    coord: str
    host: str
    what: str
    place: str
    for_users: bool
    blames_peer: bool
    exit_code: int
    time_s: float
    peak_memory_bytes: int
    log: str
    last_lines: tuple[str, ...]

    @property
    def who(self) -> str:
        """As `rank 2 (pipeline 1 data 0 tensor 0)` or `ranks 0-3`."""
        if len(self.ranks) == 1:
            return f"rank {self.ranks[0]} ({self.coord})"
        return f"ranks {ranks_in_words(sorted(self.ranks))}"

    def __str__(self) -> str:
        """All that is known, for the report."""
        indented = self.what.replace("\n", "\n  ")
        lines = [f"{self.who} on {self.host} {indented}"]
        lines += [f"  at           {self.place}"] if self.place else []
        lines += [f"  peak memory  {format_bytes(self.peak_memory_bytes)}"] if self.peak_memory_bytes else []
        lines += [f"  log          {self.log}"]
        return "\n".join(lines + [f"    | {line}" for line in self.last_lines])


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a run failed. `causes` and `consequences`, each earliest first; `agent` is what happened to the agent itself,
    if that is why; `last_records` says in words where every rank last was."""

    causes: tuple[RankFailure, ...]
    consequences: tuple[RankFailure, ...]
    agent: str
    last_records: tuple[str, ...]
    exit_code: int

    def __str__(self) -> str:
        """The report. It ends with the first cause once more, since a terminal shows the end."""
        if self.causes and self.causes[0].exit_code == 2:
            return self.causes[0].what
        lines = [f"Run failed: {self.agent}"] if self.agent else ["Run failed", *map(str, self.causes)]
        if self.consequences:
            lines += ["As a consequence"]
            lines += [f"  {other.who} {_shortened(other.what)}" for other in self.consequences]
        if self.last_records:
            lines += ["Last records", *(f"  {record}" for record in self.last_records[:_NUM_LAST_RECORDS])]
            more = len(self.last_records) - _NUM_LAST_RECORDS
            lines += [f"  and {more} more in failure.json"] if more > 0 else []
        if self.causes:
            first = self.causes[0]
            place = f", {first.place}" if first.place else ""
            lines += [f"First: {first.who} on {first.host} {_shortened(first.what)}{place}", f"  log {first.log}"]
        return "\n".join(lines)


def collect(layout: Layout, run_dir: RunDir, *, agent_exit_code: int) -> Failure:
    """Read what a failed run left in its folder. `agent_exit_code` is negative if a signal killed the agent."""
    endings = read_endings(run_dir.endings)
    if endings is None:
        how = f"ended with exit code {agent_exit_code}; its message stands above"
        if agent_exit_code < 0:
            how = f"was killed by {signal_in_words(-agent_exit_code)}"
        return Failure(
            causes=(),
            consequences=(),
            agent=f"the agent that watches the ranks {how}",
            last_records=_last_records(layout, run_dir),
            exit_code=3,
        )
    return explain(layout, run_dir, endings)


def explain(layout: Layout, run_dir: RunDir, endings: Iterable[Ending]) -> Failure:
    """The same from how the ranks ended."""
    found = [failure for ending in endings if (failure := _failure(layout, run_dir, ending))]
    failures = _fold(sorted(found, key=lambda failure: failure.time_s))
    causes = [failure for failure in failures if not failure.blames_peer] or failures[:1]
    return Failure(
        causes=tuple(causes),
        consequences=tuple(failure for failure in failures if failure not in causes),
        agent="",
        last_records=_last_records(layout, run_dir),
        exit_code=causes[0].exit_code,
    )


def write(failure: Failure, run_dir: RunDir) -> None:
    """Leave the report in the run folder, for people and for programs."""
    write_whole(run_dir.failure_text, f"{failure}\n")
    write_whole(run_dir.failure_json, json.dumps(asdict(failure), indent=1) + "\n")


def _failure(layout: Layout, run_dir: RunDir, ending: Ending) -> RankFailure | None:
    """What went wrong on one rank; None if it finished, or was ended because another had failed."""
    outcome = Outcome.read(run_dir.outcome(ending.rank))
    error = outcome.error if outcome else None
    if error is None and (ending.by_agent or (outcome and ending.exit_code == 0)):
        return None
    what = str(ending)
    if error:
        what = (
            error.text.removeprefix(f"rank {ending.rank}: ")
            if error.for_users
            else f"raised {error.kind}: {error.text}"
        )
    return RankFailure(
        ranks=(ending.rank,),
        coord=str(layout.coord(ending.rank)),
        host=ending.host,
        what=what,
        place=f"{error.file}:{error.line} in {error.function}" if error and not error.for_users else "",
        for_users=error.for_users if error else False,
        blames_peer=error.blames_peer if error else False,
        exit_code=error.exit_code if error else 3,
        time_s=outcome.time_s if outcome and error else ending.time_s,
        peak_memory_bytes=ending.peak_memory_bytes,
        log=str(run_dir.log(ending.rank)),
        last_lines=_last_lines(run_dir, ending.rank),
    )


def _shortened(text: str) -> str:
    """One line of it; the rest stands in the log."""
    line = text.partition("\n")[0]
    return line if len(line) <= _LINE_CHARACTERS else f"{line[:_LINE_CHARACTERS]}…"


def _fold(failures: Iterable[RankFailure]) -> list[RankFailure]:
    """The same error on several ranks becomes one, told by the first of them. Errors are the same if they are of one
    kind and from one line, whatever numbers they name, or if they say the same."""
    folded: dict[tuple[str, str], RankFailure] = {}
    for failure in failures:
        key = (failure.what.partition(":")[0] if failure.place else failure.what, failure.place)
        first = folded.get(key)
        folded[key] = replace(first, ranks=(*first.ranks, *failure.ranks)) if first else failure
    return list(folded.values())


def _last_lines(run_dir: RunDir, rank: int) -> tuple[str, ...]:
    log = run_dir.log(rank)
    if not log.exists():
        return ()
    return tuple(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_NUM_LAST_LINES:])


def _last_records(layout: Layout, run_dir: RunDir) -> tuple[str, ...]:
    """Of each rank: its last communication record and, if it still lived when all were ended, its Python line."""
    records = []
    for rank in range(layout.num_ranks):
        record = ""
        if run_dir.ring(rank).exists():
            try:
                record = in_words(read_ring(run_dir.ring(rank)))
            except RunError as error:
                record = f"rank {rank}: {error}"
        line = _innermost_line(run_dir, rank)
        if line:
            record = f"{record or f'rank {rank}'}; at {line}"
        records += [record] if record else []
    return tuple(records)


def _innermost_line(run_dir: RunDir, rank: int) -> str:
    """Where the main thread was when the rank wrote its stacks; "" if it wrote none."""
    path = run_dir.stack(rank)
    if not path.exists():
        return ""
    # faulthandler lists threads from the newest to the main one, and frames from the innermost.
    threads = path.read_text(encoding="utf-8", errors="replace").split("\n\n")
    frames = [line.strip() for line in threads[-1].splitlines() if line.strip().startswith("File ")]
    return frames[0].removeprefix("File ").replace('"', "") if frames else ""
