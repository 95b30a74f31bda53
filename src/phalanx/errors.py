"""Everything that Phalanx raises for its users.

    PhalanxError               exit code
    ├── InputError                 2     what the user wrote cannot work; raised before any process starts
    │   ├── SpecError                    a run file, a named model or cluster, a config.json
    │   ├── LayoutError                  a layout that these sizes or devices do not allow
    │   ├── DataError                    token files, tokenizers
    │   └── CheckpointError              a checkpoint that is missing or of another model
    │       └── DamagedCheckpointError   … or not whole: an older one may still serve
    ├── CheckFailed                1     a check ran to its end and says no
    ├── Stopped                   75     a run was asked to stop, and did so with its state saved
    └── RunError                   3     a run failed
        └── CommError                    a collective failed or ran into its time limit

An error is part of the product: it says what is wrong, which value, which line of which file, and what to write
instead. `assert` is for our own mistakes, never for the user's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


class PhalanxError(Exception):
    """Base of all errors meant for users; `exit_code` is what the command line returns."""

    exit_code = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One mistake: what is wrong, where it stands, and what to write instead."""

    what: str
    where: str = ""
    instead: str = ""

    def __str__(self) -> str:
        where = f"{self.where}: " if self.where else ""
        instead = f"\n    → {self.instead}" if self.instead else ""
        return f"{where}{self.what}{instead}"


class InputError(PhalanxError):
    """What the user wrote cannot work. Holds every mistake found, so that one run shows them all."""

    exit_code = 2

    def __init__(self, problems: str | Problem | Iterable[Problem], *, where: str = "", instead: str = "") -> None:
        if isinstance(problems, str):
            problems = Problem(what=problems, where=where, instead=instead)
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[InputError], tuple[tuple[Problem, ...]]]:
        """Errors pass between processes whole."""
        return type(self), (self.problems,)


class SpecError(InputError):
    """A run file, a named model or cluster, or a config.json is wrong."""


class LayoutError(InputError):
    """A layout that these sizes or devices do not allow."""


class DataError(InputError):
    """Token files or tokenizers that are missing, damaged or do not fit the model."""


class CheckpointError(InputError):
    """A checkpoint that is missing, damaged or belongs to another model."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that is unfinished, cut, changed or unreadable; an older one may still serve."""


class CheckFailed(PhalanxError):
    """A check ran to its end and says no."""

    exit_code = 1


class Stopped(PhalanxError, SystemExit):
    """A run was asked to stop, and did so with its state saved: to be continued (the exit code is EX_TEMPFAIL).

    A program that does not catch it ends with that code and without a traceback: nothing went wrong.
    """

    exit_code = code = 75


class RunError(PhalanxError):
    """A run failed after it had started."""


class CommError(RunError):
    """A collective failed, or did not end within its time limit."""
