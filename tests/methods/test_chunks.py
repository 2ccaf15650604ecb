"""No method makes a tensor of all logits of a batch where these are computed in chunks."""

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cpt.core.config import identity
from cpt.models import chunked_head
from cpt.models.chunked_head import count_loss_bytes
from tests.support.method_fixtures import build_method_fixture

VOCABULARY = 300
ROWS = 32  # positions of a chunk; as many as features, so that no transposed weight has more
METHODS = {
    "ncl": [],
    "ewc": [],
    "kd": [],
    "derpp": [],
    "dga": ["method.proxy_dropout=0.1"],
    "lifelong_moe": [],
}


class LogitRows(TorchDispatchMode):
    """Records the most rows of a tensor [..., VOCABULARY] that an operation makes."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        outputs = output if isinstance(output, tuple | list) else [output]
        for tensor in outputs:
            if isinstance(tensor, Tensor) and tensor.ndim and tensor.shape[-1] == VOCABULARY:
                self.most = max(self.most, tensor.numel() // VOCABULARY)
        return output


def count_logit_rows(run) -> int:
    """The most positions whose logits are one tensor in training two domains and in evaluation."""
    with LogitRows() as logits:
        run.learn(0)
        run.learn(1)
        [batch] = run.batches()
        run.module.nll(batch, 0)
    assert len(batch["positions"]) > 3 * ROWS
    return logits.most


@pytest.mark.parametrize("method", METHODS)
def test_logits_of_a_batch_are_never_one_tensor(method, small_gpt2, monkeypatch):
    monkeypatch.setattr(chunked_head, "MAX_LOGITS", ROWS * VOCABULARY)
    run = build_method_fixture(small_gpt2(f"method={method}", "trainer.steps=2", *METHODS[method]))
    assert count_logit_rows(run) <= ROWS


def test_the_limit_is_an_option_which_losses_do_not_depend_on(small_gpt2):
    limit = f"model.max_logits={ROWS * VOCABULARY}"
    run_in_chunks = build_method_fixture(small_gpt2("method=ncl", "trainer.steps=2", limit))
    run_in_full = build_method_fixture(small_gpt2("method=ncl", "trainer.steps=2"))
    assert count_logit_rows(run_in_chunks) <= ROWS < count_logit_rows(run_in_full) // 3
    [batch] = run_in_full.batches()
    losses = [run.module.nll(batch, 0)[0].sum().item() for run in (run_in_chunks, run_in_full)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)

    # The plan counts what is computed at once; without the option a run is the one that it was.
    model = run_in_full.module.model
    assert count_loss_bytes(model, 1000, max_logits=ROWS * VOCABULARY) == 12 * ROWS * VOCABULARY
    assert count_loss_bytes(model, 1000, max_logits=None) == 12 * 1000 * VOCABULARY
    settings = identity(run_in_full.plan.settings)
    assert "model.max_logits" not in settings and identity(run_in_chunks.plan.settings) != settings


def test_only_where_logits_are_stored_are_they_whole(small_gpt2, monkeypatch):
    monkeypatch.setattr(chunked_head, "MAX_LOGITS", ROWS * VOCABULARY)
    run = build_method_fixture(small_gpt2("method=derpp", "method.matched=logits", "trainer.steps=2"))
    assert count_logit_rows(run) > 3 * ROWS
