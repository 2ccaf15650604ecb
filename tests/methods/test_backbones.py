"""What methods hand over to an end task can be fine-tuned, and leaves the learner as it was."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cpt.data.corpora import Corpora
from cpt.evaluation import finetune as classifier
from cpt.evaluation.finetune_tasks import plan_endtasks
from cpt.models.forward import reader
from cpt.trainer.base_model import make_base
from cpt.trainer.evaluators import FinetuneEvaluator
from cpt.trainer.plan import make_plan
from cpt.trainer.run_dir import RunDir
from tests.support import making
from tests.support.campaign import run_few
from tests.support.endtask_fixtures import QUICK, options, write_task
from tests.support.making import ORDER

CASES = [  # a method with its options, and perhaps a family
    *("ncl mask=migu", "das", "lora method.per_domain=true", "adapter", "demix", "hat", "cpt_plugin"),
    *("prompt method.tokens=4", "ncl on both", "prompt on both", "hat on both", "adapter on both"),
    *("lifelong_moe", "progprompt method.tokens=4", "moelora", "sapt", "elle"),
]
FEW = [*CASES[1:2], *CASES[4:9]]


def learner_state(module):
    flags = [p.requires_grad for p in module.parameters()], [part.training for part in module.modules()]
    grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    values = making.clones(module.state_dict()) | grads | {"random": torch.get_rng_state()}
    return values, flags


def end_tasks(cfg, root, module, folder):
    """What measures the end tasks after the first stage of a module."""
    plan = make_plan(cfg)
    texts = Corpora.read(plan.source, plan.order, cache=Path(cfg.cache_dir))
    start = make_base(plan.model, texts, accelerator="cpu")
    given = options("texts", root=root, **{**QUICK, "seeds": [3], "epochs": 1})
    stages = SimpleNamespace(domains=[SimpleNamespace(name="law", parts=("law",))], places={"law": 0})
    data = type("Stages", (SimpleNamespace,), {"__len__": lambda self: 1})(**vars(stages))
    planned = plan_endtasks(given, None, plan.order)
    return FinetuneEvaluator(planned, start.tokenizer, place=RunDir(folder), module=module, data=data)


@pytest.mark.parametrize("case", run_few(CASES, FEW))
def test_a_backbone_learns_and_the_learner_is_untouched(case, small, small_t5, tmp_path, monkeypatch):
    kept, whole, (chosen, _, family) = [], classifier.predict, case.partition(" on ")
    monkeypatch.setattr(classifier, "predict", lambda made, *rest: kept.append(made) or whole(made, *rest))
    write_task(tmp_path / "tasks", "law", train=20)
    cfg = (small_t5 if family else small)(*f"method={chosen}".split(), ORDER, "trainer.steps=2")
    given = making.made(cfg)
    given.learn(0)
    given.module.train()
    first = next(given.module.model.parameters())
    first.grad = torch.ones_like(first)
    before, handed_on = learner_state(given.module), given.module.model_for(0)
    end_tasks(cfg, tmp_path / "tasks", given.module, tmp_path).measure(1, torch.device("cpu"))
    after = learner_state(given.module)
    assert making.same(before[0], after[0]) and before[1] == after[1]
    assert (tmp_path / "endtasks" / "001-law" / "law-3.parquet").exists()
    learned, old = (dict(each.named_parameters()) for each in (kept[0].body, reader(handed_on)))
    moved = {name for name, value in learned.items() if not torch.equal(value, old[name])}
    # A closed gate leaves weights of zeros, which stay: an end task does not bring its units back.
    assert old.keys() == learned.keys()
    assert not {name for name in old.keys() - moved if old[name].any() and not name.endswith("_gate.e")}
    assert {name for name in old if name.endswith("_gate.e")} <= old.keys() - moved
