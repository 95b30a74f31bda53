"""`python -m phalanx`: the command `phalanx` where it is not on the path."""

from __future__ import annotations

import sys

from phalanx.cli.main import main

sys.exit(main())
