"""What moves inside what is protected: by hand, in a run, and of released forms beside ours."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from cpt.gradient_masks.base import GradientMask
from cpt.trainer.callbacks import protected_shares
from tests.runs.reading import killed, told_by
from tests.support.making import ORDER

FEW = [ORDER, "trainer.steps=6", "trainer.importance_samples=8", "optim.weight_decay=0.1"]


class Half(GradientMask):
    """Protects the first of two rows."""

    static = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(apply_to="update")
        self.weight = [model.weight]

    def factors(self):
        return iter([(self.weight[0], torch.tensor([[0.0], [1.0]]))])


def test_it_is_the_share_of_the_squared_way():
    model = nn.Linear(3, 2, bias=False)
    method = SimpleNamespace(model=model, protected_subspace=Half(model).protected_subspace)
    began = {"weight": method.model.weight.detach().clone()}
    with torch.no_grad():
        method.model.weight += torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 2.0]])
    leak, random = protected_shares(method, began, seed=0)
    assert leak == pytest.approx(1 / 9)
    assert 0.1 < random < 0.9
    assert protected_shares(method, {"weight": method.model.weight.detach().clone()}, seed=0) == []


SOFT = "method=das method.units=[heads,neurons,outputs,tokens] method.contrast=0 method.normalize=rank"


@pytest.mark.parametrize("method", [SOFT, "method=osf"], ids=["das", "osf"])
def test_what_acts_on_the_step_leaks_nothing_and_released_forms_do(method, start, killing, small, tmp_path):
    """Whether a run was killed or not."""
    given = [*FEW, *method.split()]
    killed(start, killing, small(*given), tmp_path / "ours", step=4, domain="food")
    start(small(*given), tmp_path / "ours")
    start(small(*given, "method.apply_to=gradient"), tmp_path / "theirs")
    ours, theirs = (told_by(tmp_path / name)["protected_movement"] for name in ("ours", "theirs"))
    for (leak, random), (more, alike) in zip(ours[1:], theirs[1:], strict=True):
        assert leak < 1e-3 and more > max(100 * leak, 1e-2)
        assert random == pytest.approx(alike, rel=0.5) and random > 0.02


def test_what_protects_nothing_for_a_whole_domain_has_none_and_ewc_once_it_knows_what_matters(
    start, small, tmp_path
):
    start(small(*FEW, "mask=migu", "trainer.steps=1"), tmp_path / "migu")
    assert told_by(tmp_path / "migu")["protected_movement"] == [[], [], []]
    start(small(*FEW, "method=ewc"), tmp_path / "ewc")
    base, first, second = told_by(tmp_path / "ewc")["protected_movement"]
    assert base == first == []
    assert 0 < second[0] < 1 and second[1] == pytest.approx(0.05, abs=0.02)
