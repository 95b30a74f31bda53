"""verify_module: hold the training of a module of one's own against the module alone, loss and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phalanx.errors import CheckFailed
from phalanx.plan.module import ModulePlan
from phalanx.studies.compare import TOLERANCES, Finding, gradient_finding, relative_error


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleVerdict:
    """The outcome: the loss over the processes and alone, and all comparisons: loss and gradient norm, then
    every gradient, the worst first."""

    losses: tuple[float, float]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing differs by more than it may."""
        return all(finding.ok for finding in self.findings)

    def check(self) -> None:
        """Raises CheckFailed, with what differs most, if anything does by more than it may."""
        if not self.ok:
            raise CheckFailed(str(self))

    def __str__(self) -> str:
        """Both losses and the number of comparisons, or what differs most."""
        wrong = [finding for finding in self.findings if not finding.ok]
        if not wrong:
            ours, alone = self.losses
            return f"loss {ours:.6g}, alone {alone:.6g}; all {len(self.findings):,} comparisons agree"
        lines = [f"{each.check} {each.name}: {each.error:.1e}, allowed {each.tolerance:.0e}" for each in wrong[:8]]
        more = f"\nand {len(wrong) - 8} more" if len(wrong) > 8 else ""
        return "the layout does not compute what one process does\n" + "\n".join(lines) + more


def verify_module(make: Callable[[], Any], loss: Any, batch: Any, plan: ModulePlan, **options: Any) -> ModuleVerdict:
    """Run the first step of the module that `make` builds, on `batch`, a global batch that all ranks hold: over this
    run's processes, and alone in torch on rank 0. Every rank calls this and gets the verdict. `options` are those of
    `phalanx.prepare`; tolerances are those of `phalanx verify`.

    The module alone takes the whole batch at once, so that a mean of means over micro-batches shows; one with batch
    norms takes the layout's micro-batches. Dropout is switched off.
    """
    from phalanx.own.alone import compare_alone

    found = compare_alone(make, loss, batch, plan, **options)
    allowed = TOLERANCES[plan.job.precision]
    everywhere = "all ranks together"
    totals = [
        Finding(
            check=check,
            name="step 1",
            error=relative_error(ours, alone),
            tolerance=allowed.total,
            where=everywhere,
        )
        for check, (ours, alone) in (("loss", found.loss), ("gradient norm", found.norm))
    ]
    gradients = [
        gradient_finding(name, distance, own, found.norm[1], allowed, everywhere)
        for name, (distance, own) in found.gradients.items()
    ]
    gradients.sort(key=lambda finding: -finding.severity)
    return ModuleVerdict(losses=found.loss, findings=(*totals, *gradients))
