"""What the tests of single methods share: a method's module and its data as a run makes them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from omegaconf import DictConfig
from torch import Tensor

from cpt.data.collate import Batch
from cpt.data.corpora import Corpora
from cpt.data.datamodule import DomainSequence
from cpt.data.sampler import TrainStream
from cpt.methods.base import ContinualMethod
from cpt.trainer import build, stage
from cpt.trainer.auto import Machine
from cpt.trainer.base_model import make_base
from cpt.trainer.checkpoint import load_stage
from cpt.trainer.plan import Plan, make_plan

ORDER = "order=[law,food]"
NEED_EXAMPLES = {"sdft"}  # methods of conf/ that train on questions with answers alone
DROPOUT = [f"+model.config.{name}_dropout=0.1" for name in ("attention", "mlp", "embedding")]


@dataclass
class MethodFixture:
    module: ContinualMethod
    data: DomainSequence
    plan: Plan
    machine: Machine

    def learn(self, number: int, *callbacks: Callback) -> None:
        domain = self.data.domains[number]
        self.data.enter(domain)
        self.module.setup_stage(domain)
        self.module.train()
        trainer = stage.make_trainer(
            self.machine.lightning_arguments(self.plan.trainer),
            label="",
            steps=self.data.steps(domain),
            callbacks=[Callback(), *callbacks],
        )
        trainer.fit(self.module, datamodule=self.data)

    def batches(self, count: int = 1, *, text: str = "law", accumulate: int = 1) -> list[Batch]:
        stream = TrainStream(
            {text: self.data.train[text]},
            objective=self.data.objective,
            accumulate=accumulate,
            seed=0,
            batch_size=8,
            steps=[4],
            rank=0,
            world=1,
        )
        return [stream[number] for number in range(count)]

    def importance_batches(self) -> list[Batch]:
        return list(self.data.importance_batches())

    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.module.model.named_parameters()}


def build_method_fixture(cfg: DictConfig, *, base_dtype: torch.dtype = torch.float32) -> MethodFixture:
    plan = make_plan(cfg)
    texts = Corpora.read(plan.source, plan.order, cache=Path(cfg.cache_dir))
    start = make_base(plan.model, texts, accelerator="cpu")
    machine = one_process(plan, base_dtype=base_dtype)
    module = build.build_method(plan, machine, start)
    return MethodFixture(module, build.build_data(plan, machine, texts, start, module), plan, machine)


def one_process(plan: Plan, *, base_dtype: torch.dtype = torch.float32) -> Machine:
    """The machine of a run on a CPU whose config leaves nothing to `auto` that its tests need."""
    return Machine(
        device=torch.device("cpu"),
        num_processes=1,
        world_size=1,
        devices=plan.trainer.devices,
        strategy=plan.trainer.strategy,
        num_workers=0,
        precision=plan.trainer.precision,
        attn_implementation=plan.trainer.attn_implementation,
        quick_dropout=False,
        base_dtype=base_dtype,
        compiles_blocks=plan.trainer.compile is True,
    )


def clone_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def equal_tensors(tensors: dict[str, Tensor], other_tensors: dict[str, Tensor]) -> bool:
    if tensors.keys() != other_tensors.keys():
        return False
    return all(torch.equal(tensor, other_tensors[name]) for name, tensor in tensors.items())


def assert_close(
    tensors: dict[str, Tensor], other_tensors: dict[str, Tensor], *, rtol: float = 1e-5, atol: float = 1e-7
) -> None:
    assert tensors.keys() == other_tensors.keys()
    for name, value in tensors.items():
        torch.testing.assert_close(
            value.double(), other_tensors[name].double(), rtol=rtol, atol=atol, msg=name
        )


def assert_unchosen_rows_are_unchanged(run: MethodFixture, start: Mapping[str, Tensor]) -> None:
    """Of the weights that the run's only mask, MIGU, covers, the rows that it has never chosen have the bits
    that they had at the start."""
    [mask] = run.module.masks
    is_unchosen = mask.chosen == 0
    assert is_unchosen.any() and not is_unchosen.all()
    names = {weight: name for name, weight in run.module.model.named_parameters()}
    for layer, rows in zip(mask.projections, mask.row_slices, strict=True):
        is_changed = layer.weight.detach() != start[names[layer.weight]]
        masked_rows = is_unchosen[rows].nonzero().flatten()
        assert not is_changed.index_select(layer.axis, masked_rows).any()


def train_and_load(start: Callable[..., Any], cfg: DictConfig, folder: Path) -> dict[str, Tensor]:
    start(cfg, folder)
    return load_model_weights(folder)


def load_model_weights(folder: Path) -> dict[str, Tensor]:
    state = load_stage(sorted((folder / "stages").glob("*.pt"))[-1])
    return {name: value for name, value in state.items() if name.startswith("model.")}


def count_state_bytes_outside_model(module: ContinualMethod) -> int:
    return sum(v.nbytes for name, v in module.state_dict().items() if not name.startswith("model."))


def count_state_bytes(module: ContinualMethod) -> int:
    return sum(value.nbytes for value in module.state_dict().values())


class StepRecorder(Callback):
    def __init__(self, note: Callable[[Any], Any]) -> None:
        self.note, self.seen = note, []

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.seen.append((trainer.global_step, self.note(module)))
