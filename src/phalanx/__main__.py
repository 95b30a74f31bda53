"""The command `phalanx`, also as `python -m phalanx`. Loading it takes a moment, in which Ctrl-C is met, too."""

import sys


def main() -> int:
    """Load and run the command; returns its exit code."""
    try:
        from phalanx.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("phalanx: interrupted\n")
        return 130  # 128 + SIGINT


if __name__ == "__main__":
    sys.exit(main())
