"""Settings for all tests."""

import os

from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded: tests run many processes on few cores

# No example has a time limit of its own (machines are shared); each test has one. CI draws the same ones every time.
settings.register_profile(
    "phalanx", deadline=None, derandomize="CI" in os.environ, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("phalanx")
