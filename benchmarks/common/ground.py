"""The common ground of the subjects: one config of cpt, hence one model, text, stream and optimizer."""

import argparse
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import transformers
from common.measuring import ROOT
from datasets import Dataset
from hydra import compose, initialize_config_dir
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoConfig

import cpt.core.naming  # noqa: F401  (registers the resolvers)
from cpt.data.collate import UNSCORED, Batch, place_labels
from cpt.data.corpora import Corpora
from cpt.data.datamodule import DomainSequence
from cpt.data.sampler import TrainStream
from cpt.methods.base import ContinualMethod
from cpt.optim.schedulers import Progress
from cpt.trainer.auto import Machine, choose_devices, resolve_machine
from cpt.trainer.base_dtype import choose_base_dtype
from cpt.trainer.base_model import Base, make_base
from cpt.trainer.build import build_data, build_method
from cpt.trainer.plan import Plan, make_plan

FRESH_MODEL = ["model.vocab_size=8192", "model.pretraining.steps=1", "model.pretraining.batch_size=8"]
SHAPES: dict[str, list[str]] = {
    "given": [],  # the overrides choose the model
    "roberta": [
        "model=tiny_roberta",
        *FRESH_MODEL,
        "model.mlm_probability=0.15",
        "model.config.hidden_size=256",
        "model.config.intermediate_size=1024",
        "model.config.num_hidden_layers=4",
    ],
    "t5": [
        "model=tiny_t5",
        *FRESH_MODEL,
        "model.mlm_probability=0.15",
        "model.mean_span=3",
        "model.config.d_model=256",
        "model.config.d_kv=64",
        "model.config.d_ff=1024",
        "model.config.num_layers=4",
        "model.config.num_decoder_layers=4",
    ],
    "gpt2": [
        "model=tiny_gpt2",
        *FRESH_MODEL,
        "model.config.n_embd=256",
        "model.config.n_layer=4",
        "model.config.n_head=4",
    ],
}
DROPOUT = {
    "roberta": ["model.config.hidden_dropout_prob", "model.config.attention_probs_dropout_prob"],
    "t5": ["model.config.dropout_rate"],
    "gpt2": ["model.config.embd_pdrop", "model.config.attn_pdrop", "model.config.resid_pdrop"],
}
ALWAYS = [
    "method=ncl",
    "order=[sympy]",
    "logger=csv",
    "trainer.accelerator=cpu",
    "trainer.checkpoint_every_n_steps=1000000000",
    "trainer.quick_dropout=false",  # measured by name where it is on
]


@dataclass(frozen=True)
class Workload:
    """What cpt makes of a config, up to the point where it would train."""

    plan: Plan
    machine: Machine
    start: Base
    module: ContinualMethod
    data: DomainSequence

    @property
    def steps(self) -> int:
        return self.data.steps(self.data.domain)

    def stream(self) -> TrainStream:
        return self.loader().dataset

    def loader(self) -> torch.utils.data.DataLoader:
        """cpt's training batches without its trainer."""
        device = SimpleNamespace(root_device=torch.device("cpu"))
        self.data.trainer = SimpleNamespace(global_rank=0, world_size=1, global_step=0, strategy=device)
        return self.data.train_dataloader()

    def input_ids(self) -> Dataset:
        """The rows of the text that is trained on, in its order, with a column `input_ids`."""
        text = self.stream().texts[0]
        return Dataset.from_dict({"input_ids": text.rows.ids(np.arange(len(text))).split()})

    def optimizer(self, model: torch.nn.Module) -> tuple[Optimizer, LambdaLR]:
        """The optimizer and schedule of the plan, for all parameters of a model."""
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        vectors = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = self.plan.optim.load()(groups, **self.plan.optim.arguments)

        schedule = self.plan.lr_scheduler
        steps = self.steps
        return optimizer, LambdaLR(
            optimizer, lambda step: schedule(Progress.in_single_domain(step, steps=steps))
        )


def build_workload(cache: str, *overrides: str, shape: str = "roberta") -> Workload:
    """Text, model and module, from the cache where they are there already."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("config", overrides=[*SHAPES[shape], *ALWAYS, f"cache_dir={cache}", *overrides])
    plan = make_plan(cfg)
    texts = Corpora.read(plan.source, plan.order, cache=Path(cfg.cache_dir))
    start = make_base(plan.model, texts, accelerator="cpu")

    device = torch.device("cuda" if plan.trainer.accelerator == "gpu" else "cpu")
    config = AutoConfig.from_pretrained(start.checkpoint)
    devices, strategy = choose_devices(plan.trainer)
    machine = resolve_machine(
        plan,
        config,
        device=device,
        devices=devices,
        strategy=strategy,
        num_processes=1,
        stored_numerics={},
        base_dtype=choose_base_dtype(plan, config),
    )

    module = build_method(plan, machine, start).train()
    data = build_data(plan, machine, texts, start, module)
    data.enter(next(iter(data)))
    return Workload(plan, machine, start, module, data)


def make_labels(module: ContinualMethod, batch: Batch) -> torch.Tensor:
    """Labels [B, L] for the loss of transformers, which moves those of a causal model by one itself."""
    labels = place_labels(batch)
    if module.objective.causal:
        labels = labels.roll(1, dims=1)
        labels[:, 0] = UNSCORED
    return labels


def format_accelerator(device: str) -> str:
    """The override that puts a run on a device."""
    return "trainer.accelerator=" + {"cpu": "cpu", "cuda": "gpu"}[device]


def make_parser(description: str) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    cache = Path(os.environ.get("XDG_CACHE_HOME", tempfile.gettempdir())) / "cpt-benchmarks"
    parser.add_argument("--cache", default=str(cache), help="folder of the tokenised text and the model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for a quiet machine")
    parser.add_argument("--out", help="JSON file to write; default: benchmarks/results/")
    return parser
