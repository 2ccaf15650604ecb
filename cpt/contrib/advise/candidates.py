"""What is asked and what is tried: texts, the model or its small sibling, and the arms of the sweep, ways of
training that trade what is learned against what is forgotten."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModel

from cpt.core.config import CONF
from cpt.core.errors import reason
from cpt.core.naming import quote
from cpt.models.loading import configuration, objective_name

REFERENCE = "ncl"
WORK = {"kd": 1.4, "ewc": 1.2, "ewc-strong": 1.2}  # about: a step's time, of that of the reference
STRENGTH = 5000  # of EWC, as in ContinualLM and in the runs of docs/advise.md


@dataclass(frozen=True)
class Setting:
    """What arms are made of: a model's own rate and blocks, and how many domains are learned."""

    rate: float
    blocks: int
    domains: int


def list_arms(setting: Setting) -> dict[str, tuple[str, list[str]]]:
    """By arm its meaning and what it sets beyond the defaults; the first stay where a budget is small."""

    def replay(share: float) -> tuple[str, list[str]]:
        past = share / 2 if setting.domains > 1 else 0.0  # the rest is general text
        ratios = [f"replay.past_ratio={past:g}", f"replay.general_ratio={share - past:g}"]
        return f"{100 * share:g} % of each batch is past and general text", ["replay=past", *ratios]

    pulled, rate = "weights are pulled back by their Fisher", setting.rate
    ewc = ["method=ewc", f"method.strength={STRENGTH}"]
    return {
        REFERENCE: ("plain further training", []),
        "replay-5": replay(0.05),
        "lr-1/4": ("a quarter of the learning rate", [f"model.lr={rate / 4:g}"]),
        "replay-25": replay(0.25),
        "lora": ("LoRA adapters in a frozen model", ["method=lora"]),
        "ewc": (pulled, ewc),
        "kd": ("the model before the domain teaches", ["method=kd"]),
        "lr-1/2": ("half of the learning rate", [f"model.lr={rate / 2:g}"]),
        "freeze": ("the lower half of the blocks stays", [f"freeze.layers={max(1, setting.blocks // 2)}"]),
        "ewc-strong": ("the same, a hundred times as strong", [ewc[0], f"method.strength={100 * STRENGTH}"]),
        "replay-1": replay(0.01),
    }


def choose_arms(asked_for: str | None) -> list[str]:
    """The arms by name, the reference first. Raises ValueError for an unknown one, or for fewer than two."""
    known = [*list_arms(Setting(rate=1, blocks=2, domains=2))]
    if asked_for is None:
        return known
    if unknown := [name for name in asked_for.split(",") if name not in known]:
        raise ValueError(f"--arms {unknown[0]} is invalid. Allowed: {', '.join(known)}")
    chosen = list(dict.fromkeys([REFERENCE, *asked_for.split(",")]))
    if len(chosen) < 2:
        allowed = f"one or more in addition to {REFERENCE}, with commas"
        raise ValueError(f"--arms {asked_for} is invalid. Allowed: {allowed}")
    return chosen


def work(arms: Sequence[str]) -> float:
    """The time of a step of all arms together, of that of the reference."""
    return sum(WORK.get(arm, 1.0) for arm in arms)


SMALL = 30_000_000  # parameters up to which a checkpoint is tried itself
MOST_DOMAINS = 6
OWN = (  # what advise sets itself
    *("method", "replay", "model", "seed", "name", "trainer.steps", "trainer.epochs", "trainer.tokens"),
    *("freeze.layers", "save_all_stages", "eval.rows", "eval.columns", "plan", "init_from"),
    *("domains.root", "endtask"),
)
TINY = {"masked": "tiny_roberta", "causal": "tiny_gpt2", "span": "tiny_t5"}
OF_TYPE = {"modernbert": "tiny_modernbert", "roberta": "tiny_roberta", "gpt2": "tiny_gpt2", "t5": "tiny_t5"}
# Of a sibling, by the names that most families have for them.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 514}


@dataclass(frozen=True)
class Model:
    """Overrides of what is tried and of what is meant, and what they differ in."""

    tried: tuple[str, ...]
    real: tuple[str, ...]
    blocks: int | None = None  # of the real one, if it differs
    gap: str = ""  # what is not known of the real one

    @property
    def is_itself(self) -> bool:
        return self.tried == self.real


def find_texts(folder: Path, given: Sequence[str]) -> list[str]:
    """The overrides that read a folder: its sub-folders are domains, or those of its `corpora`. Raises
    ValueError where there is no folder."""
    if not folder.is_dir():
        told = f"{folder} is invalid: there is no such folder"
        raise ValueError(f"{told}. Allowed: a folder of folders of text, as domains.root")
    root = f"domains.root={quote(str(folder))}"
    if any(each.startswith("domains=") for each in given):
        return [root]
    inner = ["domains.folder=corpora"] * (folder / "corpora").is_dir()
    return ["domains=texts", root, *inner]


def check_overrides(given: Iterable[str]) -> None:
    """Raises ValueError for an override of what advise sets."""
    for each in given:
        key, sign, _ = each.lstrip("+~").partition("=")
        if not sign:
            raise ValueError(f"{each} is invalid: it is no override. Allowed: key=value, as of python run.py")
        if key in OWN or key.startswith("hydra"):
            raise ValueError(f"{each} is invalid: advise sets {key} itself. Allowed: other options of conf/")


def find_model(given: str) -> Model:
    """A tiny model of conf/model, a small checkpoint itself, or the sibling of a larger one. Raises
    ValueError for any other."""
    names = sorted(path.stem for path in (CONF / "model").glob("tiny_*.yaml"))
    chosen = "tiny_modernbert" if given == "tiny" else given
    if chosen in names:
        return Model((f"model={chosen}",), (f"model={chosen}",))
    try:
        config = configuration(given)
    except ValueError as error:
        allowed = f"tiny, {', '.join(names)}, a checkpoint"
        raise ValueError(f"--model {given} is invalid: {reason(error)}. Allowed: {allowed}") from error
    real = ("model=hf", f"model.name_or_path={quote(given)}")
    with torch.device("meta"):
        size = sum(each.numel() for each in AutoModel.from_config(config).parameters())
    if size <= SMALL:
        return Model(real, real)
    told = f"{given} has {size / 1e6:.0f} M parameters: what was tried is a sibling of about 1 M, made and "
    told += "pre-trained here; how much of the trade, and which strength, carries over is not known"
    objective = objective_name("auto", config)
    sibling = [f"model={OF_TYPE.get(config.model_type, TINY[objective])}"]
    if config.model_type not in OF_TYPE and objective != "span":  # a small model of the same family
        known = {name: size for name, size in SIZES.items() if getattr(config, name, None) is not None}
        sizes = {config.attribute_map.get(name, name): size for name, size in known.items()}
        family = {"model_type": config.model_type, **sizes}
        shown = ", ".join(f"{name}: {size}" for name, size in family.items())
        sibling += ["~model.config", f"+model.config={{{shown}}}"]
    return Model(tuple(sibling), real, config.num_hidden_layers, told)


def choose_domains(order: Sequence[str]) -> list[str]:
    """At most MOST_DOMAINS of them, evenly spaced, in their order."""
    count = min(len(order), MOST_DOMAINS)
    return [order[place * len(order) // count] for place in range(count)]
