"""`trainer.match=ncl`: the steps that take the operations of ncl."""

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

from cpt.core.exceptions import DamagedFileError, InvalidOptionError
from cpt.core.processes import is_one_of_several
from cpt.core.schema import Options
from cpt.core.sections import Choice
from cpt.data.corpora import Corpora
from cpt.data.options import Budget
from cpt.data.replay import NO_REPLAY
from cpt.trainer.auto import Machine
from cpt.trainer.base_model import Base
from cpt.trainer.build import build_data, build_method
from cpt.trainer.plan import Plan
from cpt.trainer.profiling import extend_profiles, profile_run

log = logging.getLogger(__name__)


@dataclass
class Operations:
    """Floating-point operations of all domains, over all processes."""

    in_steps: float = 0.0
    around_domains: float = 0.0  # importances


def match_operations(plan: Plan, machine: Machine, corpora: Corpora, base: Base, *, stored: Path) -> Plan:
    """The plan with as many steps (epochs, tokens) as take, over all domains, the operations of ncl with the
    configured ones. A run that has started keeps the number in its `stored` file.

    The scale is (O_ncl - A) / O for O operations in the method's steps and A around them. Raises ValueError
    if that leaves no step, or if several processes start at once."""
    if plan.trainer.match is None:
        return plan
    unit, configured_size = plan.budget.option
    if stored.exists():
        return with_budget(plan, unit, read_stored_size(stored, unit))
    if is_one_of_several():
        raise InvalidOptionError(
            "trainer.match",
            "ncl",
            context="with torchrun or srun",
            reason="one process counts operations",
            allowed=f"trainer.{unit}=N, the N that plan=true logs",
        )

    # The reference is the same run without method, masks, replay and weights of tokens.
    ncl = Choice("cpt.methods.ncl.NCL", Options())
    if plan.method == ncl and plan.masks == () and plan.replay == NO_REPLAY and plan.loss is None:
        return plan

    plain_plan = replace(plan, method=ncl, masks=(), replay=NO_REPLAY, loss=None)
    reference = count_operations(plain_plan, machine, corpora, base)
    operations = count_operations(plan, machine, corpora, base)
    if not operations.in_steps:
        return plan

    # What a method does around domains does not depend on the steps, so they pay for it.
    scaled_size = (reference.in_steps - operations.around_domains) / operations.in_steps * configured_size
    size: int | float = round(scaled_size) if unit == "steps" else float(f"{scaled_size:.6g}")
    if size <= 0:
        raise InvalidOptionError(
            "trainer.match",
            "ncl",
            reason=(
                f"ncl takes {reference.in_steps:.3g} operations, "
                f"the importances of {plan.names['method']} {operations.around_domains:.3g}"
            ),
            allowed=f"null, more trainer.{unit}, fewer trainer.importance_samples",
        )

    comparison = "as given" if size == configured_size else f"not {configured_size}"
    log.info(
        "Matching the %.3g operations of ncl: trainer.%s=%s, %s", reference.in_steps, unit, size, comparison
    )
    return with_budget(plan, unit, size)


def with_budget(plan: Plan, unit: str, size: float) -> Plan:
    """The plan with another number of steps, epochs or tokens."""
    budget = Budget(
        steps=int(size) if unit == "steps" else None,
        epochs=size if unit == "epochs" else None,
        tokens=size if unit == "tokens" else None,
        batch_size=plan.budget.batch_size,
    )
    return replace(plan, budget=budget)


def read_stored_size(path: Path, unit: str) -> float:
    """The number that a run has stored. Raises ValueError for a damaged file."""
    try:
        return json.loads(path.read_text())[unit]
    except (ValueError, KeyError, TypeError):
        raise DamagedFileError(path, remedy="restore it from a backup, or delete it to count again") from None


def count_operations(plan: Plan, machine: Machine, corpora: Corpora, base: Base) -> Operations:
    """The operations of a plan, from profiles of its first stages."""
    module = build_method(plan, machine, base)
    data = build_data(plan, machine, corpora, base, module)
    profiles = profile_run(plan, machine, corpora, base, module, data)
    stage_profiles = extend_profiles(profiles, len(data))[1:]  # without that of the base, the first

    operations = Operations()
    for stage, profile in zip(data, stage_profiles, strict=True):
        operations.in_steps += data.steps(stage) * machine.world_size * profile.flops["step"]
        around_domain = profile.flops["before"] + profile.flops["after"]
        operations.around_domains += machine.world_size * around_domain
    return operations
