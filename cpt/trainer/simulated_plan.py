"""A plan whose method is simulated on a kind of device, by the passes that a computed plan asks for."""

import logging
from collections.abc import Callable
from functools import cached_property
from typing import TypeVar

from cpt.core.errors import find_reason
from cpt.core.exceptions import InvalidOptionError
from cpt.trainer.base_dtype import check_base_dtype
from cpt.trainer.check_model import naming_method
from cpt.trainer.computed_model import (
    find_quantization,
    make_computed_machine,
    make_computed_objective,
    read_computed_config,
)
from cpt.trainer.device_kinds import DeviceKind
from cpt.trainer.plan import Plan
from cpt.trainer.simulation import METHOD_STATE, WEIGHTS, GatheredBytes, Pass, Simulation, StateBytes

log = logging.getLogger(__name__)
Result = TypeVar("Result")
MEASURED_PLAN = "plan=true without plan_device, with the weights and texts"  # what is allowed instead


class SimulatedPlan:
    """The method of a plan on a kind of device. Passes are recorded when they are first asked for.

    Raises ValueError for a plan that cannot be run, or whose method depends on values."""

    def __init__(self, plan: Plan, kind: DeviceKind) -> None:
        self.plan = plan
        self.kind = kind
        self.config = read_computed_config(plan)
        self.objective_name, self.objective = make_computed_objective(plan, self.config)
        self.quantization = find_quantization(plan)
        self.machine = make_computed_machine(plan, self.config, is_gpu=kind.is_gpu)
        self.simulation = self.simulate(self.start_simulation)
        self.stages = self.simulation.stages
        self.state = self.simulation.count_state()
        self.num_parameters = self.simulation.count_parameters()
        self.num_trained = self.simulation.count_trained()
        # Recorded passes. Those of a step by whether activations are checkpointed, whether it has several
        # micro-batches, and whether logits are in chunks; the others by the last of these alone.
        self.steps: dict[tuple[bool, bool, bool], list[Pass]] = {}
        self.evaluations: dict[bool, Pass | None] = {}
        self.around: dict[bool, list[Pass | None]] = {}

    def start_simulation(self) -> Simulation:
        """The method at its first stage."""
        simulation = Simulation(
            self.plan,
            self.machine,
            self.config,
            self.objective,
            self.objective_name,
            is_gpu=self.kind.is_gpu,
            quantization=self.quantization,
        )
        check_base_dtype(self.plan, simulation.method)
        if simulation.stages:
            simulation.start_stage()
        return simulation

    def simulate(self, run: Callable[[], Result]) -> Result:
        """What a part of the simulation returns. Raises ValueError for layers that the method does not know,
        and where it depends on values."""
        try:
            with naming_method(self.plan, self.config):
                return run()
        except ValueError:
            raise
        except Exception as error:  # of a class that branches on values, which are not there
            log.debug("The simulation failed", exc_info=error)
            raise InvalidOptionError(
                "method",
                self.plan.names["method"],
                context=f"for a computed plan of a {self.config.model_type}",
                reason=f"what it computes depends on weights or text ({find_reason(error)})",
                allowed=f"{MEASURED_PLAN}; or another method",
            ) from error

    def try_to_record(self, record: Callable[..., Pass], *, is_chunked: bool) -> Pass | None:
        """A pass that a plan can do without; None where it depends on values."""
        try:
            return record(is_chunked=is_chunked)
        except Exception as error:  # of a class that branches on values, which are not there
            log.debug("A pass could not be simulated", exc_info=error)
            return None

    def find_steps(self, num_rows: int, *, is_checkpointed: bool, num_micro_batches: int) -> list[Pass]:
        """The passes of the steps of one period, after which a method repeats what it computes: the last
        micro-batch and the update of each step."""
        is_chunked = self.simulation.is_chunked(num_rows)
        key = (is_checkpointed, num_micro_batches > 1, is_chunked)
        if key not in self.steps:
            self.simulation.set_checkpointing(is_checkpointed)
            self.simulation.set_micro_batches(num_micro_batches)
            self.steps[key] = self.simulate(lambda: self.simulation.record_step(is_chunked=is_chunked))
        return self.steps[key]

    def find_evaluation(self, num_rows: int) -> Pass | None:
        """The pass of a batch of held-out text; None where it depends on values."""
        is_chunked = self.simulation.is_chunked(num_rows)
        if is_chunked not in self.evaluations:
            self.evaluations[is_chunked] = self.try_to_record(
                self.simulation.record_evaluation, is_chunked=is_chunked
            )
        return self.evaluations[is_chunked]

    def find_around(self, num_rows: int) -> list[Pass | None]:
        """The method's work before and after a stage on a batch of importance samples, each None where it
        depends on values; nothing of a method without stages."""
        if not self.stages:
            return []
        is_chunked = self.simulation.is_chunked(num_rows)
        if is_chunked not in self.around:
            self.simulation.set_checkpointing(self.plan.trainer.gradient_checkpointing)
            self.around[is_chunked] = [
                self.try_to_record(self.simulation.record_start, is_chunked=is_chunked),
                self.try_to_record(self.simulation.record_end, is_chunked=is_chunked),
            ]
        return self.around[is_chunked]

    @cached_property
    def gathered(self) -> GatheredBytes:
        """What FSDP gathers. Raises ValueError for a model without blocks."""
        return self.simulation.count_gathered()

    @cached_property
    def growth(self) -> dict[str, StateBytes]:
        """The bytes between two steps that each further stage adds, by use."""
        if not self.simulation.may_grow:
            return {}
        # In another simulation, as this one stays at its first stage.
        second_simulation = self.simulate(self.start_simulation)
        _, work_after_stage = self.find_around(1)
        if work_after_stage is not None:  # else it depends on values, and cannot be done here either
            self.simulate(second_simulation.end_stage)
        second_state = self.simulate(second_simulation.enter_second_stage)

        # The second stage less the first.
        return {use: second_state[use].plus(self.state[use], times=-1) for use in (WEIGHTS, METHOD_STATE)}

    def find_last_state(self) -> dict[str, StateBytes]:
        """The bytes between two steps of the last stage, by use."""
        state = dict(self.state)
        for use, increment in self.growth.items():
            state[use] = state[use].plus(increment, times=len(self.stages) - 1)
        return state
