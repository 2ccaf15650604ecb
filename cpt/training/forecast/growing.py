"""Stages that are not tried, of a method whose model grows from stage to stage: what grows with it."""

from __future__ import annotations

from dataclasses import replace

from cpt.adapters.bank import in_memory
from cpt.data.datamodule import Domain
from cpt.methods.base import ContinualModule
from cpt.training.costs import stored_beside, trained_parameters
from cpt.training.forecast.live import bytes_of
from cpt.training.forecast.watching import Phase, Tried, file_size


def grows(module: ContinualModule) -> bool:
    """Whether stages have shapes of their own."""
    return type(module).shape is not ContinualModule.shape


def outgrow(module: ContinualModule, stage: Domain, last: Tried) -> Tried:
    """What a stage needs, from what the one before did: the module takes its shape, and what is kept and
    trained is counted. Gradients, the optimizer's state and operations grow with the weights that are
    trained, and all else stays."""
    weights, everything = bytes_of(in_memory(module.model)), bytes_of(in_memory(module))
    module.enter(stage)
    trained = trained_parameters(module)
    times = trained / max(1, last.trained)
    parts = last.parts | {
        name: round(times * last.parts[name]) for name in ("gradients", "optimizer") if name in last.parts
    }
    more = bytes_of(in_memory(module.model)) - weights
    beside = bytes_of(in_memory(module)) - everything - more
    parts |= {"weights": parts["weights"] + more, "state": parts["state"] + beside}
    grown, state = sum(parts.values()) - sum(last.parts.values()), module.state_dict()
    return replace(
        last,
        parts=parts,
        trained=trained,
        stored=stored_beside(module, state),
        state=file_size(state),
        peak=last.peak + grown,
        held=last.held + grown,
        scoring_peak=last.scoring_peak + more + beside,
        **{name: scaled(getattr(last, name), times) for name in ("step", "seen", "unseen")},
    )


def scaled(phase: Phase, times: float) -> Phase:
    """A phase of so many times the operations."""
    return replace(phase, flops=round(times * phase.flops))
