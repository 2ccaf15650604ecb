"""The arms of the sweep: ways of learning that trade what is learned against what is forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

REFERENCE = "ncl"
NAMES = (  # the first ones stay where a budget is small
    *(REFERENCE, "replay-5", "lr-1/4", "replay-25", "lora", "ewc", "kd", "lr-1/2", "freeze"),
    *("ewc-strong", "replay-1"),
)
MEANINGS = {
    REFERENCE: "nothing beside learning on",
    "replay-1": "1 % of each batch is past and general text",
    "replay-5": "5 % of each batch is past and general text",
    "replay-25": "25 % of each batch is past and general text",
    "lr-1/4": "a quarter of the learning rate",
    "lr-1/2": "half of the learning rate",
    "freeze": "the lower half of the blocks stays",
    "lora": "low-rank pairs beside a frozen model",
    "kd": "the model before the domain teaches",
    "ewc": "weights are pulled back by their Fisher",
    "ewc-strong": "the same, a hundred times as strong",
}
WORK = {"kd": 1.4, "ewc": 1.2, "ewc-strong": 1.2}  # about: a step's time, of that of the reference
STRENGTH = 5000  # ContinualLM's, and what the runs behind docs/advise.md had


@dataclass(frozen=True)
class Setting:
    """What arms are made of: a model's own rate and blocks, and how many domains are learned."""

    rate: float
    blocks: int
    domains: int


def overrides(arm: str, setting: Setting) -> list[str]:
    """What an arm sets beyond the defaults. Raises ValueError for an arm that there is not."""
    kind, _, value = arm.partition("-")
    match kind:
        case "ncl":
            return []
        case "replay" if value in ("1", "5", "25"):
            return mix(int(value) / 100, domains=setting.domains)
        case "lr" if value in ("1/4", "1/2"):
            return [f"model.lr={setting.rate / int(value[-1]):g}"]
        case "freeze":
            return [f"freeze.layers={max(1, setting.blocks // 2)}"]
        case "lora" | "kd":
            return [f"method={arm}"]
        case "ewc" if value in ("", "strong"):
            return ["method=ewc", f"method.strength={100 * STRENGTH if value else STRENGTH}"]
    raise ValueError(f"--arms {arm}; allowed: {', '.join(NAMES)}")


def mix(share: float, *, domains: int) -> list[str]:
    """Half of the replayed share is past domains' text, half general; of a single domain all is general."""
    past = share / 2 if domains > 1 else 0.0
    return ["replay=past", f"replay.past={past:g}", f"replay.general={share - past:g}"]


def choose_arms(asked_for: str | None) -> list[str]:
    """The arms by name, the reference first. Raises ValueError for one that there is not, or for fewer than
    two."""
    if asked_for is None:
        return list(NAMES)
    names = asked_for.split(",")
    for name in names:
        overrides(name, Setting(rate=1, blocks=2, domains=2))
    chosen = list(dict.fromkeys([REFERENCE, *names]))
    if len(chosen) < 2:
        raise ValueError(f"--arms {asked_for}; allowed: one or more beside {REFERENCE}, with commas")
    return chosen


def work(arms: Sequence[str]) -> float:
    """The time of a step of all arms together, of that of the reference."""
    return sum(WORK.get(arm, 1.0) for arm in arms)
