"""The `phalanx` command: finds the sub-command, and turns errors into text and exit codes.

Exit codes: 0 done; 1 a check ran to its end and says no; 2 wrong input, found before any process starts; 3 a run
failed, or we did; 128 + n ended by signal n. Each command is a module with `add_arguments(parser)` and
`run(arguments)`, loaded only when it is called; neither torch nor numpy is loaded here.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from phalanx.cli.commands import COMMANDS
from phalanx.errors import InputError, PhalanxError
from phalanx.spec.schema import nearest

_OF_A_NAME = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM)
"""What is wrong with a file that the user named, wherever it was first looked at."""


class _Help(argparse.HelpFormatter):
    """Fills paragraphs, and leaves examples in the lines that they are written in."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:"):
            return text
        return super()._fill_text(text, width, indent)


class Parser(argparse.ArgumentParser):
    """A parser that raises InputError instead of ending the process, knows the nearest option, and takes no short
    forms of options, which would change their meaning when options are added."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})
        self.register("type", Path, _path)

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found wrong as InputError."""
        raise InputError(message, instead=self.format_usage().strip())

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse all of `arguments`. Raises InputError, with the nearest option for one that does not exist."""
        found, unknown = self.parse_known_args(arguments)
        if unknown:
            word = unknown[0].partition("=")[0]
            options = [option for action in self._actions for option in action.option_strings]
            known = options if word.startswith("-") else ()
            raise InputError(f"unknown argument {word}", instead=_instead(word, known, self.prog))
        return found


def _path(text: str) -> Path:
    """What options take as a path. An empty one would be the current folder, which nobody means."""
    if not text:
        raise argparse.ArgumentTypeError("is empty, not a path")
    return Path(text)


def _instead(word: str, known: Iterable[str], command: str) -> str:
    """What to write instead of `word`."""
    near = nearest(word, known)
    return (f"did you mean {near}? " if near else "") + f"{command} --help shows what there is"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    _ready_streams()
    try:
        return _run(sys.argv[1:] if arguments is None else arguments)
    except PhalanxError as error:
        problems = error.problems if isinstance(error, InputError) else ()
        count = f"{len(problems)} problems\n" if len(problems) > 1 else ""
        sys.stderr.write(f"phalanx: {count}{error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("phalanx: interrupted\n")
        return 128 + signal.SIGINT
    except BrokenPipeError:  # whoever read our output has seen enough; the interpreter must not complain at its end
        _drop_output()
        return 128 + signal.SIGPIPE
    except Exception as error:  # noqa: BLE001 (told in one line, kept in full)
        if reason := _unwritten(error):
            _drop_output()
            sys.stderr.write(f"phalanx: the output cannot be written: {reason}\n")
            return 3
        if isinstance(error, OSError) and error.errno in _OF_A_NAME and error.filename is not None:
            sys.stderr.write(f"phalanx: {error.filename}: {error.strerror}; details in {_log(error)}\n")
            return 2
        sys.stderr.write(f"phalanx: an error of ours: {type(error).__name__}: {error}; details in {_log(error)}\n")
        return 3


def _drop_output() -> None:
    """Let what is still to be written to the standard output go, so that the interpreter does not fail at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unwritten(error: Exception) -> str:
    """Why the standard output takes nothing ("No space left on device"), if that may be what `error` means; else ""."""
    if not isinstance(error, OSError) or error.filename is not None:
        return ""
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except io.UnsupportedOperation:  # it is no file
        return ""
    except OSError as failed:
        return failed.strerror or str(failed)
    return ""


def _ready_streams() -> None:
    """Where a standard stream is closed, open nothing in its place, so that no file of ours gets its number; and write
    what the terminal's encoding lacks in escapes."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, number)
            if nothing != number:
                os.close(nothing)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 (open to the end)
        elif number and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _run(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(_help())
        return 0
    if arguments[0] == "--version":
        from importlib.metadata import version  # slow to load, and wanted here alone

        sys.stdout.write(f"phalanx {version('phalanx')}\n")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        raise InputError(
            f"unknown {kind} {name}", instead=_instead(name, [*COMMANDS, "--help", "--version"], "phalanx")
        )
    exit_code = int(importlib.import_module(f"phalanx.cli.{name}").run(parser_of(name).parse(rest)))
    sys.stdout.flush()  # so that a reader that is gone is noticed here
    return exit_code


def parser_of(name: str) -> Parser:
    """What reads the arguments of a command."""
    command = importlib.import_module(f"phalanx.cli.{name}")
    examples = f"examples:\n{COMMANDS[name].examples}"
    parser = Parser(prog=f"phalanx {name}", description=command.__doc__, epilog=examples, formatter_class=_Help)
    command.add_arguments(parser)
    return parser


def _help() -> str:
    lines = [f"  {name:<12}{command.what}" for name, command in COMMANDS.items()]
    usage = "usage: phalanx COMMAND …, phalanx COMMAND --help (with examples), phalanx --version"
    return "\n".join([usage, "", *lines, ""])


def _log(error: Exception) -> str:
    """Keep the traceback out of the way, but keep it. Returns the file's path."""
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile("w", prefix="phalanx-error-", suffix=".log", delete=False) as file:
        file.write("".join(traceback.format_exception(type(error), error, error.__traceback__)))
    return file.name
