"""The loss scale of fp16, without which small gradients would be rounded to zero: Micikevicius et al. 2018
(arXiv 1710.03740), section 3.2."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.spec.job import Precision

FIRST = 2.0**16
LARGEST = 2.0**24
STEPS_TO_GROW = 2000
"""Steps in a row whose gradients fit, after which twice the scale is tried."""


class LossScale:
    """What gradients are multiplied by while they are computed: `value`, 1 unless compute is fp16.

    It is a power of two, so that taking it out again rounds nothing, and the same on all ranks: each decides by the
    gradient norm of the whole model, which has the same bits everywhere.
    """

    def __init__(self, precision: Precision) -> None:
        self.value = FIRST if precision == "fp16" else 1.0
        self._grows = precision == "fp16"
        self._num_fitting = 0

    def fitted(self) -> None:
        """After a step whose gradients were finite: try a larger scale once so many were."""
        self._num_fitting += 1
        if self._grows and self._num_fitting >= STEPS_TO_GROW:
            self.value, self._num_fitting = min(2.0 * self.value, LARGEST), 0

    def lower(self) -> bool:
        """After a step whose gradients overflowed: halve the scale. False if there is none left to lower."""
        if self.value <= 1.0:
            return False
        self.value, self._num_fitting = self.value / 2.0, 0
        return True

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps of it."""
        return {"value": self.value, "num_fitting": self._num_fitting}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from `state`, which a run in the same precision kept."""
        self.value, self._num_fitting = state["value"], int(state["num_fitting"])
