"""Monitoring evaluations: the losses on a few validation documents every few steps of a stage, when they
end it (early stopping), and what may observe them and act."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from cpt.core.exceptions import InvalidOptionError
from cpt.core.messages import count_noun
from cpt.core.randomness import key, permute
from cpt.core.schema import Natural, NonNegative, Options, Steps, config, option
from cpt.data.sources.base import GENERAL
from cpt.evaluation.divergence import Documents, Estimate, estimate_mean
from cpt.evaluation.metrics import Losses, compare_losses

if TYPE_CHECKING:  # a config is checked without torch
    from lightning import Trainer
    from torch import Tensor

# Losses on held-out chats, by names that no folder of text has: on the assistant's turns, and on the answers
# that the base has written.
CHAT = "held-out chats"
BASE_ANSWERS = "base's answers"
CHAT_LOSSES = (CHAT, BASE_ANSWERS)


@config
class MonitorOptions(Options):
    """What is evaluated during a stage, on validation text, and what ends its stage."""

    every: Steps | None = option("steps between monitoring evaluations; null: none")
    max_tokens: Steps = option("maximum number of tokens per text, the same sample at every evaluation")
    past: Natural = option("maximum number of earlier domains")
    general: bool = option("evaluate the general text as well")
    chats: bool = option("evaluate the held-out chats (`chats`) as well", default=False)
    stop: NonNegative | None = option(
        "end the stage if the loss on past or general text, or on chats, rose by more nats per token, with "
        "its whole interval; null: never"
    )
    patience: Steps | None = option("evaluations without improvement after which a stage ends")
    keep: Literal["last", "best"] = option(
        "weights at the end of a stage: the last, or those of the lowest loss on its own domain"
    )

    def __post_init__(self) -> None:
        if self.every is None:
            for name in ("stop", "patience", "keep"):
                value = getattr(self, name)
                if value not in (None, "last"):
                    raise InvalidOptionError(
                        name, value, reason="every=null monitors nothing", allowed="every=STEPS"
                    )
        if self.stop is not None and not self.past and not self.general and not self.chats:
            raise InvalidOptionError(
                "stop",
                self.stop,
                reason="past=0, general=false, chats=false leave no other text",
                allowed="past=1 or more, general=true, or chats=true",
            )

    @property
    def decides(self) -> bool:
        """Whether what is seen has a say in what is learned."""
        return self.stop is not None or self.patience is not None or self.keep == "best"

    def choose(self, stage_texts: Sequence[str], past_texts: Sequence[str], *, stage: str) -> list[str]:
        """The texts that are evaluated in a stage: its own, some of past domains, the general one."""
        num_past = min(self.past, len(past_texts))
        sample = permute(np.arange(num_past), len(past_texts), stream=key("monitor", stage))
        texts = [*stage_texts, *(past_texts[index] for index in sorted(sample))]
        if self.general:
            texts.append(GENERAL)
        return texts


@config
class ObserverConfig(Options):
    """What observes the monitoring evaluations of a run: the class that the config group `budget` chooses.
    It gives an observer to each stage."""

    is_active: ClassVar[bool] = True
    evaluations: ClassVar[int] = 1  # of a stage, where monitor.every is null
    weight_copies: ClassVar[int] = 0  # that a stage keeps in memory
    needs_divergence: ClassVar[bool] = False  # whether `on_divergence` is to be called
    counts_domains: ClassVar[bool] = False  # whether what it does depends on how many domains there are

    def check_conflicts(
        self,
        *,
        monitor: MonitorOptions,
        method: Any,
        method_name: str,
        has_branches: bool,
        is_sharded: bool,
    ) -> None:
        """Raises ValueError for a plan that this observer does not support; here it supports all. `method` is
        the class of the method; `has_branches`: the schedule decays each domain in a branch."""

    def open(self, run: Any, data: Any, domain: Any) -> MonitorObserver:
        """The observer of one stage, from the RunDir, the DomainSequence and the Domain."""
        return MonitorObserver()


@config
class NoObserver(ObserverConfig):
    """Nothing is observed: `budget=none`."""

    is_active: ClassVar[bool] = False


class MonitorObserver:
    """Observes the monitoring evaluations of one stage, in every process alike. Here: it does nothing."""

    texts: Sequence[str] = ()  # to be evaluated besides those of the monitor
    end_reason = ""  # why the stage is to end now; empty: it is not
    keeps_weights = False  # whether a stage that ends before its next evaluation has the weights of this one

    def on_evaluation(
        self,
        trainer: Trainer,
        module: Any,
        losses: Mapping[str, Tensor],
        measure: Callable[[], Mapping[str, Tensor]],
    ) -> Mapping[str, Tensor]:
        """Called at each evaluation, the first before the first step. It may change weights; `measure`
        evaluates again. Returns the losses of the weights it leaves."""
        return losses

    def on_divergence(self, step: int, divergences: Mapping[str, Documents]) -> None:
        """Called after `on_evaluation` with KL(base || model) on the texts of the stage's domain, by text and
        document, of the weights that it has left; in a run that measures the divergence."""

    def finish(self) -> None:
        """Called by the first process at the stage's end, before the method's own work."""

    def series(self, stage: str) -> dict[str, float]:
        """What loggers are given of the last evaluation."""
        return {}

    def record(self, steps: Sequence[int]) -> dict[str, Any]:
        """The entry `budget` of the stage in scores.json, from the steps of the evaluations. Its key
        `report`, if there is one, maps titles to texts: further columns of stages on the run page."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


@dataclass
class MonitorRecord:
    """The evaluations of a stage, as in scores.json: their steps, and by text the losses, nats per token, and
    the 95 % intervals of the rise since the first."""

    steps: list[int] = field(default_factory=list)
    nll: dict[str, list[float]] = field(default_factory=dict)
    rise: dict[str, list[list[float]]] = field(default_factory=dict)
    ended: str = ""  # why the stage ended before its last step
    kept: int | None = None  # with keep=best: the step whose weights it ended with
    # By text of the stage's domain: KL(base || model), where the divergence is measured.
    divergence: dict[str, list[Estimate]] = field(default_factory=dict)

    def add(self, step: int, initial_losses: Losses, losses: Losses) -> None:
        """Adds an evaluation; `initial_losses` are those of the first one."""
        self.steps.append(step)
        for change in compare_losses(list(losses), initial_losses, losses):
            self.nll.setdefault(change.text, []).append(change.after)
            self.rise.setdefault(change.text, []).append([change.low, change.high])

    def add_divergences(self, divergences: Mapping[str, Documents]) -> None:
        """Adds the divergences of the evaluation that was added last."""
        for text, documents in divergences.items():
            self.divergence.setdefault(text, []).append(estimate_mean([documents]))

    def since_best(self, stage_texts: Sequence[str]) -> int:
        """How many evaluations ago the mean loss of the stage's own texts was lowest."""
        losses = np.mean([self.nll[text] for text in stage_texts], axis=0)
        if np.isnan(losses).all():  # of the few tokens that are drawn, none is scored
            return 0
        best = int(np.argmin(np.nan_to_num(losses, nan=np.inf)))
        return len(losses) - 1 - best

    def why_stop(self, options: MonitorOptions, *, stage_texts: Sequence[str]) -> str:
        """Why the stage is to end now, in words; empty if it is not."""
        if options.stop is not None:
            for text, bounds in self.rise.items():
                low, high = bounds[-1]
                if text not in stage_texts and low > options.stop:
                    return f"{text} has risen by {low:.3f} to {high:.3f} nats (monitor.stop={options.stop:g})"

        num_evaluations = self.since_best(stage_texts)
        if options.patience is not None and num_evaluations >= options.patience:
            return (
                f"{count_noun(num_evaluations, 'evaluation')} without a lower loss on its own text "
                f"(monitor.patience={options.patience})"
            )
        return ""
