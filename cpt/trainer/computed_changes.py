"""The smallest change with which a run fits on a device: changes are tried in their order, those first that
leave the method and what it computes as they are."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from cpt.core.config import CONF
from cpt.core.exceptions import InvalidOptionError
from cpt.core.naming import CONFIG
from cpt.trainer.computed_memory import (
    STEP,
    Layout,
    Memory,
    count_own_rows,
    find_memory,
    find_peak_bytes,
    find_state_bytes,
    find_step_memory,
    is_divisible,
)
from cpt.trainer.computed_time import find_rates, find_seconds
from cpt.trainer.device_kinds import DeviceKind
from cpt.trainer.plan import Plan, check_conflicts, make_plan
from cpt.trainer.simulated_plan import SimulatedPlan

log = logging.getLogger(__name__)
MISSING = object()
# Changes of the method, its precision or its optimizer, as overrides; those that this version lacks are left
# out.
LARGE_CHANGES: Sequence[Mapping[str, str]] = (
    {},
    {"optim": "adamw_8bit"},
    {"trainer.precision": "bf16-true"},
    {"trainer.precision": "bf16-true", "optim": "adamw_8bit"},
    {"method": "lora"},
    {"method": "lora", "model.dtype": "bfloat16"},
    {"method": "lora", "model.quantization": "nf4"},
)


@dataclass(frozen=True)
class PlanChange:
    """Options with which a run fits, and its memory and time then."""

    overrides: tuple[str, ...]
    peak: int  # bytes
    seconds: Mapping[str, float | None]


class ChangeSearch:
    """Tries changes of a config on a kind of device. What was simulated serves all layouts."""

    def __init__(self, cfg: DictConfig, simulated: SimulatedPlan, kind: DeviceKind) -> None:
        self.cfg = cfg
        self.kind = kind
        self.simulations: dict[str, SimulatedPlan | None] = {str({}): simulated}

    def find(self, layout: Layout, *, limit: int) -> PlanChange | None:
        """The first change with which a process of the layout needs at most `limit` bytes; None where none
        does."""
        for large_change in LARGE_CHANGES:
            simulated = self.simulate(large_change)
            if simulated is None:
                continue
            layouts = list_layouts(simulated, layout)
            # The last layout needs the least memory, with micro-batches of one row: if it does not fit then,
            # no other one is simulated.
            if self.fit(simulated, divide_most(simulated.plan, layouts[-1]), limit=limit) is None:
                continue
            for changed_layout in layouts:
                fitting_layout = self.fit(simulated, changed_layout, limit=limit)
                if fitting_layout is not None:
                    overrides = [f"{key}={value}" for key, value in large_change.items()]
                    overrides.extend(name_differences(simulated.plan, layout, fitting_layout))
                    return PlanChange(
                        tuple(overrides),
                        peak=find_peak_bytes(find_memory(simulated, fitting_layout)),
                        seconds=find_seconds(simulated, fitting_layout, find_rates(simulated)),
                    )
        return None

    def simulate(self, change: Mapping[str, str]) -> SimulatedPlan | None:
        """The plan with a change; None where the config does not allow it."""
        key = str(dict(change))
        if key not in self.simulations:
            overrides = [f"{name}={value}" for name, value in change.items()]
            log.info("Computing whether it fits with %s", " ".join(overrides))
            try:
                self.simulations[key] = SimulatedPlan(change_plan(self.cfg, change), self.kind)
            except ValueError:
                self.simulations[key] = None
        return self.simulations[key]

    def fit(self, simulated: SimulatedPlan, layout: Layout, *, limit: int) -> Layout | None:
        """The layout with as many micro-batches, and as small batches of evaluation, as it takes to fit; None
        if it never does."""
        if find_state_bytes(simulated, layout) > limit:
            return None
        try:
            with_micro_batches = self.find_division(simulated, layout, limit=limit)
            if with_micro_batches is None:
                return None
            return find_first_fitting(
                list_evaluation_batches(with_micro_batches),
                lambda candidate: find_memory(simulated, candidate),
                limit=limit,
            )
        except ValueError:  # of a model that cannot be sharded
            return None

    def divide(self, simulated: SimulatedPlan, layout: Layout, *, limit: int) -> Layout:
        """The layout with as many micro-batches as it takes for a step to fit, or with a row each if it never
        does: what trainer.micro_batch=auto chooses."""
        divided = self.find_division(simulated, layout, limit=limit)
        if divided is None:
            *_, divided = list_divided_layouts(simulated.plan, layout)
        return divided

    def find_division(self, simulated: SimulatedPlan, layout: Layout, *, limit: int) -> Layout | None:
        """The layout with as many micro-batches as it takes for a step to fit; None if it never does."""
        return find_first_fitting(
            list_divided_layouts(simulated.plan, layout),
            lambda candidate: {STEP: find_step_memory(simulated, candidate)},
            limit=limit,
        )


def find_first_fitting(
    layouts: Iterator[Layout], find: Callable[[Layout], Memory], *, limit: int
) -> Layout | None:
    """The first layout whose memory is at most `limit` bytes; None if none is."""
    for layout in layouts:
        if find_peak_bytes(find(layout)) <= limit:
            return layout
    return None


def list_layouts(simulated: SimulatedPlan, layout: Layout) -> list[Layout]:
    """The layout as it is, and with checkpointing, sharding, or both."""
    layouts = [layout]
    if layout.strategy == "ddp" and can_be_sharded(simulated.plan):
        layouts.append(replace(layout, strategy="fsdp"))
    # Checkpointing is tried last: its recomputation takes time.
    if simulated.simulation.can_checkpoint and not layout.is_checkpointed:
        layouts.extend([replace(plain, is_checkpointed=True) for plain in layouts])
    return layouts


def can_be_sharded(plan: Plan) -> bool:
    """Whether the run could have strategy=fsdp."""
    try:
        check_conflicts(replace(plan, trainer=replace(plan.trainer, strategy="fsdp")))
    except ValueError:
        return False
    return True


def list_divided_layouts(plan: Plan, layout: Layout) -> Iterator[Layout]:
    """The layout with more and more micro-batches, down to a row each."""
    for accumulate in range(layout.accumulate, plan.budget.batch_size // layout.num_devices + 1):
        divided = replace(layout, accumulate=accumulate)
        if is_divisible(plan, divided):
            yield divided


def divide_most(plan: Plan, layout: Layout) -> Layout:
    """The layout with as many micro-batches as there are rows, and evaluation in single rows."""
    *_, most_divided = list_divided_layouts(plan, layout)
    return replace(most_divided, eval_batch_size=1)


def list_evaluation_batches(layout: Layout) -> Iterator[Layout]:
    """The layout with smaller and smaller batches of evaluation, down to a row."""
    batch_size = layout.eval_batch_size
    while batch_size >= 1:
        yield replace(layout, eval_batch_size=batch_size)
        batch_size //= 2


def name_differences(plan: Plan, before: Layout, after: Layout) -> list[str]:
    """The overrides that change one layout of a plan into another."""
    overrides = []
    if after.strategy != before.strategy:
        overrides.append(f"strategy={after.strategy}")
    if after.is_checkpointed and not before.is_checkpointed:
        overrides.append("trainer.gradient_checkpointing=true")
    if after.accumulate != before.accumulate and plan.trainer.micro_batch is not None:
        overrides.append(f"trainer.micro_batch={count_own_rows(plan, after)}")
    elif after.accumulate != before.accumulate:
        overrides.append(f"trainer.accumulate_grad_batches={after.accumulate}")
    if after.eval_batch_size != before.eval_batch_size:
        overrides.append(f"trainer.eval_batch_size={after.eval_batch_size}")
    return overrides


def change_plan(cfg: DictConfig, change: Mapping[str, str]) -> Plan:
    """The plan of a config with other choices of groups and other values. Raises ValueError for what the
    config does not have or allow."""
    groups = {key: choice for key, choice in change.items() if (CONF / key).is_dir()}
    for group, choice in groups.items():
        if not (CONF / group / f"{choice}.yaml").exists():
            raise InvalidOptionError(group, choice, allowed="what conf/ has")
    choices = compose_choices([f"{group}={choice}" for group, choice in groups.items()])
    changed = deepcopy(cfg)
    for group in groups:
        changed[group] = choices[group]
    for key, value in change.items():
        if key in groups:
            continue
        if OmegaConf.select(changed, key, default=MISSING) is MISSING:
            raise InvalidOptionError(key, value, allowed="options of this version")
        OmegaConf.update(changed, key, value)
    return make_plan(changed)


def compose_choices(overrides: Sequence[str]) -> DictConfig:
    """The default config with other choices. Hydra is initialized here if the program has not done it."""
    if GlobalHydra.instance().is_initialized():
        return compose(CONFIG, overrides=list(overrides))
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(CONFIG, overrides=list(overrides))
