"""What training did to other text during each stage, from the monitoring evaluations in scores.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isnan
from typing import Any

import numpy as np

from cpt.data.sources.base import GENERAL
from cpt.evaluation.monitor import CHAT_LOSSES
from cpt.evaluation.scores import Scores


@dataclass(frozen=True)
class MonitoredStage:
    """The evaluations of validation texts during one stage."""

    name: str
    steps: np.ndarray  # [evaluation]
    changes: Mapping[str, np.ndarray]  # by text [evaluation], nats since the first one; nan: not finite
    # Of the general text and of chats [evaluation, 2]: 95 % intervals of the change.
    intervals: Mapping[str, np.ndarray]
    kept_evaluation: int  # index of that of the weights that the stage kept: the last, or the best
    reason_ended: str  # why it ended early; empty if it did not

    @property
    def own_texts(self) -> list[str]:
        """The domain's own text; all but the general text and chats, where a stage has several domains."""
        if self.name in self.changes:
            return [self.name]
        return [text for text in self.changes if text not in (GENERAL, *CHAT_LOSSES)]

    def change(self, text: str) -> float:
        """The change of a text at the weights that were kept."""
        return float(self.changes[text][self.kept_evaluation])

    def find_most_risen(self) -> str:
        """The past text whose loss rose most; empty without one."""
        past_texts = sorted(self.changes.keys() - {*self.own_texts, GENERAL, *CHAT_LOSSES})
        measured = [text for text in past_texts if not isnan(self.change(text))]
        return max(measured, key=self.change, default="")


def read_monitor(scores: Scores) -> list[MonitoredStage]:
    """The stages that were monitored."""
    stages = []
    for name, stage in scores.monitor.items():
        changes = {}
        for text, values in stage["nll"].items():
            losses = np.array(values, float)
            changes[text] = losses - losses[0]
        intervals = {}
        for text in (GENERAL, *CHAT_LOSSES):
            if text in changes:
                intervals[text] = np.array(stage["rise"][text], float)
        stages.append(
            MonitoredStage(
                name=name,
                steps=np.array(stage["steps"]),
                changes=changes,
                intervals=intervals,
                kept_evaluation=find_evaluation(stage, stage.get("kept")),
                reason_ended=stage["ended"],
            )
        )
    return stages


def find_evaluation(stage: Mapping[str, Any], step: int | None) -> int:
    """The index of the evaluation at a step; -1, the last, without one."""
    return stage["steps"].index(step) if step in stage["steps"] else -1
