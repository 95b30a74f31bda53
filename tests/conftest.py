"""Settings for all tests."""

import os

from hypothesis import HealthCheck, settings

# No example has a time limit of its own (machines are shared); each test has one. CI draws the same ones every time.
settings.register_profile(
    "phalanx", deadline=None, derandomize="CI" in os.environ, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("phalanx")
