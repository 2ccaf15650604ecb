"""What a method keeps beside the model is counted once, whatever it is called; what it computes, too."""

import subprocess
import sys

import pytest
import torch
from lightning import LightningModule
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode
from transformers import RobertaConfig, RobertaForMaskedLM
from transformers.initialization import no_init_weights

from cpt.core.allocations import KnownValues
from cpt.data.collate import label_batch
from cpt.models import chunked_head
from cpt.models.objectives import Causal, Masked
from cpt.models.without_storage import without_storage
from cpt.trainer.check_model import PlaceholderTokenizer
from cpt.trainer.costs import (
    CPU_ATTENTION_COUNTS,
    CostMonitor,
    OperationCounter,
    count_added_state_bytes,
    count_stored_bytes,
    find_original_names,
)
from cpt.trainer.lightning import make_trainer
from tests.conftest import ROOT
from tests.support.mixtures import build_mixture

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def test_what_is_attached_and_what_is_kept_counts_once_and_the_models_own_weights_do_not():
    method = nn.Module()
    method.model = RobertaForMaskedLM(RobertaConfig(vocab_size=50, max_position_embeddings=20, **SIZES))
    model_names = find_original_names(method.model)
    assert (
        count_stored_bytes(method.state_dict(), model_names)
        == count_added_state_bytes(method, method.state_dict())
        == 0
    )
    method.model.roberta.add_module("adapter", nn.Linear(16, 4))
    method.register_buffer("copy", torch.zeros(10))
    method.register_buffer("again", method.copy)
    method.register_buffer("passing", torch.zeros(99), persistent=False)
    assert count_stored_bytes(method.state_dict(), model_names) == 4 * (16 * 4 + 4 + 10)
    assert count_added_state_bytes(method, method.state_dict()) == 4 * (16 * 4 + 4 + 10 + 99)


class Two(nn.Module):
    """Products of known sizes: [B, 6] x [6, 4], attention over [B, 1, 4, 2]."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4, bias=False)

    def forward(self, x):
        heads = self.linear(x).view(-1, 1, 2, 2)
        return functional.scaled_dot_product_attention(heads, heads, heads).sum()


class Counted(LightningModule):
    period = 1  # as of a method
    settled = 0

    def __init__(self, passes):
        super().__init__()
        self.net = Two()
        self.passes = passes

    def train_dataloader(self):
        mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
        batch = {"input_ids": torch.ones(2, 6), "attention_mask": mask}
        return DataLoader([batch, {"input_ids": torch.ones(2, 6)}] * 4, batch_size=None)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def on_train_start(self):
        for _ in range(self.passes["before"]):
            self.net(torch.ones(2, 6))

    def training_step(self, batch):
        return sum(self.net(batch["input_ids"]) for _ in range(self.passes["step"]))

    def on_fit_end(self):
        for _ in range(self.passes["after"]):
            self.net(torch.ones(2, 6)).backward()


FORWARD = 2 * 2 * 6 * 4 + 2 * 2 * (2 * 2 * 2 * 2)  # the linear map; two products of attention, batch 2
# The map's weight has a gradient, its input has none; attention: five products, and its scores once more.
BACKWARD = 2 * 2 * 6 * 4 + 2 * 5 * (2 * 2 * 2 * 2)
ONE = FORWARD + BACKWARD


def measure_costs(*, steps=3, accumulate=1, **passes):
    compute = CostMonitor()
    module = Counted({"before": 0, "step": 1, "after": 0} | passes)
    options = {"accelerator": "cpu", "accumulate_grad_batches": accumulate}
    trainer = make_trainer(options, label="", steps=steps, callbacks=[compute])
    trainer.fit(module)
    return compute.stage_costs(trainer)


@pytest.mark.parametrize(
    ("passes", "flops"),
    [
        ({}, 3 * ONE),
        ({"step": 2}, 3 * 2 * ONE),
        ({"before": 2}, 3 * ONE + 2 * FORWARD),
        ({"after": 3}, 3 * ONE + 3 * ONE),
        ({"accumulate": 2}, 3 * 2 * ONE),
    ],
)
def test_operations_are_counted_forward_backward_and_in_what_a_method_does_besides(passes, flops):
    stage_costs = measure_costs(**passes)
    assert stage_costs.flops == flops
    assert stage_costs.tokens_read == (3 * (10 + 12) if "accumulate" in passes else 10 + 12 + 10)


@pytest.mark.parametrize("inference", [False, True])
def test_it_counts_what_torchs_counter_counts(inference):
    sizes = {"vocab_size": 50, "max_position_embeddings": 20, **SIZES}
    model = RobertaForMaskedLM(RobertaConfig(**sizes)).eval()
    ids = torch.randint(5, 50, (3, 8))
    with (
        FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION_COUNTS) as expected,
        OperationCounter() as counter,
    ):
        with torch.inference_mode(inference):  # composite kernels arrive whole
            loss = model(ids, labels=ids).loss
        if not inference:
            loss.backward()
    assert counter.total == expected.get_total_flops() > 10**5


def test_the_mean_over_a_period_of_different_steps_is_counted(monkeypatch):
    def alternating(self, batch):
        passes = 3 if self.trainer.global_step % 2 == 0 else 1
        return sum(self.net(batch["input_ids"]) for _ in range(passes))

    monkeypatch.setattr(Counted, "training_step", alternating)
    assert measure_costs(steps=4).flops == 4 * 3 * ONE
    monkeypatch.setattr(Counted, "period", 2)
    assert measure_costs(steps=4).flops == 4 * 2 * ONE
    assert measure_costs(steps=1).flops == 3 * ONE


def test_an_unusual_first_step_is_not_extrapolated(monkeypatch):
    def growing(self, batch):
        return sum(self.net(batch["input_ids"]) for _ in range(min(self.trainer.global_step, 1) + 1))

    monkeypatch.setattr(Counted, "training_step", growing)
    monkeypatch.setattr(Counted, "settled", 1)
    assert measure_costs(steps=4).flops == 4 * 2 * ONE
    assert measure_costs(steps=4, before=2).flops == 4 * 2 * ONE + 2 * FORWARD
    assert measure_costs(steps=1).flops == ONE


WORKERS = """
import sys, torch
from torch.utils.data import DataLoader
from cpt.data.loader_processes import start_loader_process
loader = DataLoader([torch.tensor(each) for each in range(8)], batch_size=None, num_workers=2,
                    worker_init_fn=start_loader_process)
sys.kept = iter(loader)  # alive until the interpreter is gone, as an error's traceback keeps it
next(sys.kept)
"""


def test_a_process_ends_although_its_loaders_processes_are_alive():
    assert subprocess.run([sys.executable, "-c", WORKERS], timeout=60, cwd=ROOT).returncode == 0


def test_logits_in_chunks_take_the_operations_of_whole_ones(monkeypatch):
    counts = []
    for max_logits in (2**30, 50 * 10):
        monkeypatch.setattr(chunked_head, "MAX_LOGITS", max_logits)
        model = RobertaForMaskedLM(RobertaConfig(vocab_size=50, max_position_embeddings=40, **SIZES))
        ids = torch.arange(64).view(2, 32) % 50
        batch = label_batch(ids, ids, torch.ones_like(ids).bool())
        with OperationCounter() as counter:
            Masked(PlaceholderTokenizer(50), rate=0.15).sum_nll(model, batch).backward()
        counts.append(counter.total)
    assert counts[0] == counts[1]


def test_experts_take_the_operations_of_those_that_a_token_chooses():
    """Without storage they are counted as in a real step, where experts get as many tokens as they get."""
    batch = label_batch(torch.arange(40).view(2, 20), torch.arange(40).view(2, 20), torch.ones(2, 20).bool())
    model = build_mixture("qwen3_moe")
    with OperationCounter() as real_counter:
        Causal().sum_nll(model, batch).backward()

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with without_storage(mode, is_gpu=False), no_init_weights():
        model = type(model)(model.config)
    with without_storage(mode, is_gpu=False), OperationCounter() as counter, KnownValues():
        Causal().sum_nll(model, batch).backward()
    assert counter.total == real_counter.total > 0
