"""Plans that are simulated: of small models in folders with a configuration alone."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from cpt.trainer.computed_model import (
    find_quantization,
    make_computed_machine,
    make_computed_objective,
    read_computed_config,
)
from cpt.trainer.plan import make_plan
from cpt.trainer.simulation import Simulation

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 331,
    "hidden_size": 32,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def write_config(folder: Path, *, left_out: str = "", **changes: Any) -> Path:
    """A folder with the configuration of a model alone; one of its fields may be left out."""
    folder.mkdir(exist_ok=True)
    fields = LLAMA | changes
    fields.pop(left_out, None)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def simulate(cfg: DictConfig, *, is_gpu: bool = False) -> Simulation:
    """The simulation of a config, after the start of its first stage."""
    plan = make_plan(cfg)
    config = read_computed_config(plan)
    objective_name, objective = make_computed_objective(plan, config)
    machine = make_computed_machine(plan, config, is_gpu=is_gpu)
    simulation = Simulation(
        plan,
        machine,
        config,
        objective,
        objective_name,
        is_gpu=is_gpu,
        quantization=find_quantization(plan),
    )
    simulation.start_stage()
    return simulation


def with_storage(monkeypatch: Any) -> None:
    """Has simulations compute real tensors from now on."""
    monkeypatch.setattr("cpt.trainer.simulation.FakeTensorMode", lambda allow_non_fake_inputs: nullcontext())
    monkeypatch.setattr("cpt.trainer.simulation.without_storage", lambda mode, is_gpu: nullcontext())
