"""The common ground of the subjects: one config of cpt, hence one model, text, stream and optimizer."""

import argparse
import os
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from hydra import compose, initialize_config_dir
from hydra.utils import get_object
from measuring import ROOT
from omegaconf import DictConfig, OmegaConf
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import cpt.core.config  # noqa: F401  (registers the resolvers)
from cpt.data.corpora import Corpora
from cpt.data.datamodule import DomainSequence
from cpt.data.sampling import Stream
from cpt.methods.base import ContinualModule
from cpt.optim.schedules import Progress
from cpt.training.assembly import make_method, make_sequence
from cpt.training.plan import make_plan
from cpt.training.pretraining import Base, make_base

ALWAYS = [
    "model=tiny_roberta",
    "model.vocabulary=8192",
    "model.mask_rate=0.15",
    "model.config.hidden_size=256",
    "model.config.intermediate_size=1024",
    "model.config.num_hidden_layers=4",
    "model.base.steps=1",
    "model.base.batch_size=8",
    "method=ncl",
    "order=[sympy]",
    "logger=csv",
    "trainer.accelerator=cpu",
    "trainer.checkpoint_every=1000000000",
]


@dataclass(frozen=True)
class Ground:
    """What cpt makes of a config, up to the point where it would train."""

    cfg: DictConfig
    start: Base
    module: ContinualModule
    data: DomainSequence

    @property
    def steps(self) -> int:
        return self.data.steps(self.data.domain)

    def stream(self) -> Stream:
        return self.loader().dataset

    def loader(self) -> torch.utils.data.DataLoader:
        """cpt's training batches without its trainer."""
        device = SimpleNamespace(root_device=torch.device("cpu"))
        self.data.trainer = SimpleNamespace(global_rank=0, world_size=1, global_step=0, strategy=device)
        return self.data.train_dataloader()

    def optimizer(self, model: torch.nn.Module) -> tuple[Optimizer, LambdaLR]:
        """The optimizer and schedule of the config, as one would write them without Hydra: what its partials
        check at every call is cpt's cost."""
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        others = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        optimizer, steps = plain(self.cfg.optim)(groups), self.steps
        schedule = plain(self.cfg.schedule)()
        return optimizer, LambdaLR(optimizer, lambda step: schedule(Progress.alone(step, steps=steps)))


def plain(cfg: DictConfig) -> partial:
    """A Python partial for a config of Hydra."""
    values = OmegaConf.to_container(cfg, resolve=True)
    return partial(
        get_object(values["_target_"]), **{k: v for k, v in values.items() if k[0] != "_" and k != "carry"}
    )


def ground(cache: str, *overrides: str) -> Ground:
    """Text, model and module, from the cache where they are there already."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("config", overrides=[*ALWAYS, f"cache_dir={cache}", *overrides])
    plan = make_plan(cfg)
    texts = Corpora.read(plan.source, plan.order, cache=Path(cfg.cache_dir))
    start = make_base(plan.model, texts, accelerator="cpu")
    module = make_method(plan, start).train()
    data = make_sequence(plan, texts, start, module)
    data.enter(next(iter(data)))
    return Ground(cfg, start, module, data)


def arguments(description: str) -> argparse.ArgumentParser:
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
