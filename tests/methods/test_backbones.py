"""What methods hand over to an end task can be fine-tuned, and leaves the learner as it was."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cpt.data.corpora import Corpora
from cpt.evaluation import finetune as classifier
from cpt.evaluation.finetune_tasks import plan_endtasks
from cpt.models.forward import body
from cpt.trainer.base_model import make_base
from cpt.trainer.evaluators import FinetuneEvaluator
from cpt.trainer.plan import make_plan
from cpt.trainer.run_dir import RunDir
from tests.support import making
from tests.support.campaign import run_few
from tests.support.endtask_fixtures import QUICK, options, write_task
from tests.support.making import ORDER


def learner_state(module):
    values = {name: value.clone() for name, value in module.state_dict(keep_vars=True).items()}
    grads = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    flags = [p.requires_grad for p in module.parameters()], [part.training for part in module.modules()]
    return values, grads, flags, torch.get_rng_state()


METHODS = {
    "ncl": ["mask=migu"],
    "das": [],
    "lora": ["method.per_domain=true"],
    "adapter": [],
    "demix": [],
    "lifelong_moe": [],
    "hat": [],
    "cpt_plugin": [],
    "prompt": ["method.tokens=4"],
    "progprompt": ["method.tokens=4"],
    "moelora": [],
    "sapt": [],
    "elle": [],
}
FEW = {*METHODS} - {"progprompt", "moelora", "sapt", "elle", "lifelong_moe"}


@pytest.fixture(scope="module")
def tasks_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("tasks")
    write_task(root, "law", train=20)
    return root


def end_tasks(cfg, root, module, folder):
    """What measures the end tasks after the first stage of a module."""
    plan = make_plan(cfg)
    start = make_base(
        plan.model, Corpora.read(plan.source, plan.order, cache=Path(cfg.cache_dir)), accelerator="cpu"
    )
    given = options("texts", root=root, **{**QUICK, "seeds": [3], "epochs": 1})
    stages = SimpleNamespace(domains=[SimpleNamespace(name="law", parts=("law",))], places={"law": 0})
    data = type("Stages", (SimpleNamespace,), {"__len__": lambda self: 1})(**vars(stages))
    planned = plan_endtasks(given, None, plan.order)
    return FinetuneEvaluator(planned, start.tokenizer, place=RunDir(folder), module=module, data=data)


@pytest.mark.parametrize("method", run_few(METHODS, FEW))
def test_a_backbone_learns_and_the_learner_is_untouched(method, small, tasks_root, tmp_path, monkeypatch):
    kept, whole = [], classifier.predict
    monkeypatch.setattr(classifier, "predict", lambda made, *rest: kept.append(made) or whole(made, *rest))
    cfg = small(f"method={method}", ORDER, "trainer.steps=2", *METHODS[method])
    given = making.made(cfg)
    given.learn(0)
    given.module.train()
    first = next(given.module.model.parameters())
    first.grad = torch.ones_like(first)
    before, handed_on = learner_state(given.module), given.module.model_for(0)
    end_tasks(cfg, tasks_root, given.module, tmp_path).measure(1, torch.device("cpu"))
    after = learner_state(given.module)
    assert before[0].keys() == after[0].keys()
    assert all(torch.equal(value, after[0][name]) for name, value in before[0].items())
    assert before[2] == after[2]
    assert torch.equal(before[3], after[3])
    for one, other in zip(before[1], after[1], strict=True):
        assert one is other is None or torch.equal(one, other)
    assert (tmp_path / "endtasks" / "001-law" / "law-3.parquet").exists()
    learned = dict(kept[0].body.named_parameters())
    old = dict(body(handed_on).named_parameters())
    moved = {name for name, value in learned.items() if not torch.equal(value, old[name])}
    assert old.keys() == learned.keys()
    # A closed gate leaves weights of zeros, which stay: an end task does not bring its units back.
    unmoved = {name for name in old.keys() - moved if old[name].any() and not name.endswith("_gate.e")}
    assert not unmoved
    if method == "hat":
        assert {name for name in old if name.endswith("_gate.e")} <= old.keys() - moved
