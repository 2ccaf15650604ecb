"""Every method keeps its promises on models of encoder and decoder: T5 as v1.0 has it, and gated with a head
of its own as v1.1; `tests.methods.test_contract` has the other promises."""

import json
from itertools import product

import numpy as np
import peft
import pytest
import torch
import transformers

import cpt.adapters.export
from cpt.models.loading import is_tied
from cpt.trainer import loop
from tests.methods.test_contract import LEARNING, KilledError, Killer, bits
from tests.support.endtask_fixtures import write_task
from tests.support.making import ORDER, made
from tests.support.seams import SEAMS, chosen

pytestmark = pytest.mark.slow

NO_T5 = {"growing"}  # a block that is appended, as the test's method does, has positions of its own
METHODS = [name for name in LEARNING if name not in NO_T5]
FORMS = {
    "tied": ["model.config.feed_forward_proj=relu"],
    "untied": ["model.config.feed_forward_proj=gated-gelu", "+model.config.tie_word_embeddings=false"],
}
DROPOUT = ["model.config.dropout_rate=0.1"]
# A head of its own is the harder form. One method of each kind of state; the others are kept in the campaign.
FEW = [("ncl", "tied"), ("hat", "tied")]
FEW += [(name, "untied") for name in ("das", "demix", "derpp", "ewc", "hat", "kd", "olora", "prompt")]
ON_FORMS = [
    pytest.param(*each, marks=[] if each in FEW else pytest.mark.campaign) for each in product(METHODS, FORMS)
]


@pytest.fixture
def config(small_t5):
    """A run of a method on a form of T5, under MIGU's mask too."""

    def build(method: str, form: str):
        mask = [] if method in ("migu", *SEAMS) else ["mask=migu"]
        return small_t5(*chosen(method), *mask, ORDER, *DROPOUT, *FORMS[form], "trainer.steps=4")

    return build


@pytest.mark.parametrize(("method", "form"), ON_FORMS)
def test_two_domains_are_learned_and_a_killed_run_ends_with_the_same_bits(
    method, form, config, start, tmp_path, monkeypatch
):
    """Killed once after a checkpoint in the last domain; the exported model is loaded."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    start(config(method, form), whole)
    scores = json.loads((whole / "scores.json").read_text())
    trainer, last = loop.make_trainer, "joint" if method == "joint" else "food"

    def deadly(options, *, callbacks=(), **others):
        extra = [Killer(step=3, domain=last)] if callbacks else []
        return trainer(options, callbacks=[*callbacks, *extra], **others)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "make_trainer", deadly)
        with pytest.raises(KilledError):
            start(config(method, form), killed)
    start(config(method, form), killed)
    assert bits(killed) == bits(whole)
    assert scores["run"]["finished"] and scores["run"]["objective"] == "span"
    assert scores["conditions"]["scored"] == "hidden tokens, neither sentinels nor the end"
    assert all(0 < loss < 20 for row in scores["nll"] for loss in row)
    assert scores["nll"][-1] != scores["nll"][0]
    monkeypatch.chdir(whole)
    check_export(config(method, form), whole, loading=scores["loading"], tied=form == "tied")


def check_export(cfg, folder, *, loading: str, tied: bool) -> None:
    """The model that is loaded as the run says gives the logits of the one that was learned."""
    run = made(cfg)
    for domain in run.data:
        run.module.expand_to(domain)
    run.module.load_state_dict(torch.load(next((folder / "stages").iterdir()), weights_only=True))
    run.module.activate(len(run.data) - 1)
    names = {"transformers": transformers, "cpt": cpt, "peft": peft}
    loaded, wanted = eval(loading, names).eval(), run.module.model_for(len(run.data) - 1).eval()
    assert is_tied(loaded) == is_tied(wanted) == tied
    text = next(iter(run.data.held_out.values()))
    ids = torch.as_tensor(text.ids(np.arange(4)))
    given = {"input_ids": ids, "decoder_input_ids": ids[:, :5]}
    with torch.no_grad():
        torch.testing.assert_close(loaded(**given).logits, wanted(**given).logits)


@pytest.mark.parametrize("method", ["das", "derpp", "hat", "olora", "prompt"])
def test_it_learns_in_16_bits(method, config, start, tmp_path):
    """Where T5 keeps a map of each feed-forward network in 32 bits."""
    cfg = config(method, "untied")
    cfg.trainer.steps, cfg.trainer.probe_samples, cfg.trainer.precision = 1, 4, "bf16-true"
    start(cfg, tmp_path)
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["run"]["finished"] and all(0 < loss < 20 for row in scores["nll"] for loss in row)


@pytest.mark.parametrize("method", ["das", "demix", "dga", "hat", "lora", "prompt"])
def test_probes_and_evaluation_leave_no_trace(method, config):
    run = made(config(method, "tied"))
    module, options = run.module, run.plan.trainer.lightning
    before = {name: value.clone() for name, value in module.state_dict().items()}
    rows = []
    for _ in range(2):
        loop.make_trainer(options, label="").validate(module, datamodule=run.data, verbose=False)
        rows.append([(nll.clone(), count.clone()) for nll, count in module.row().values()])
    for (nll, count), (again, counted) in zip(*rows, strict=True):
        assert torch.equal(nll, again) and torch.equal(count, counted)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "choices",
    [
        "method=lora method.exported=peft",
        "method=olora method.stored=pairs",
        "method=adapter method.per_domain=true method.placement=pfeiffer",
        "method=hat method.form=adapter",
        "method=demix method.experts=adapter routing@method.routing=posterior",
        "method=kd method.distilled=hidden mask=migu mask.migu.acts_on=update",
        "method=derpp method.matched=logits replay=general freeze.embeddings=true freeze.layers=1",
        "method=das method.units=[heads,neurons,outputs,tokens] method.contrast_text=corrupted",
        pytest.param(
            "method=sapt method.key=cosine method.query=encoder replay=past", marks=pytest.mark.campaign
        ),
        pytest.param("method=progprompt method.residual=4", marks=pytest.mark.campaign),
    ],
)
def test_what_a_method_may_be_told(choices, small_t5, start, tmp_path, monkeypatch):
    cfg = small_t5(*choices.split(), ORDER, *DROPOUT, *FORMS["untied"], "trainer.steps=3")
    start(cfg, tmp_path)
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["run"]["finished"] and scores["nll"][-1] != scores["nll"][0]
    monkeypatch.chdir(tmp_path)
    check_export(cfg, tmp_path, loading=scores["loading"], tied=False)


@pytest.mark.parametrize("choices", ["hat", "cpt_plugin", "demix", "prompt", "lora method.per_domain=true"])
def test_what_is_known_of_a_learned_domain_stays_bit_for_bit(choices, small_t5, start, tmp_path):
    method, *more = choices.split()
    strong = ["optim.lr=0.05", "optim.weight_decay=0.3", "trainer.steps=3"]
    start(small_t5(f"method={method}", *more, ORDER, *DROPOUT, *strong), tmp_path)
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["nll"][1][0] == scores["nll"][2][0] != scores["nll"][0][0]


@pytest.mark.parametrize("method", ["ncl", "prompt", "hat", "adapter"])
def test_end_tasks_are_learned_on_the_encoder(method, small_t5, start, tmp_path):
    for domain in ("law", "food"):
        write_task(tmp_path, domain)
    tasks = ["endtask=texts", f"endtask.root={tmp_path}", "endtask.epochs=1", "endtask.seeds=[0]"]
    start(small_t5(f"method={method}", ORDER, "trainer.steps=2", *tasks), tmp_path / "run")
    scores = json.loads((tmp_path / "run" / "scores.json").read_text())
    found = scores["endtasks"]["scores"]["accuracy"]
    assert all(0 <= value <= 1 for task in found[-1] for value in task)


def test_the_matrix_is_of_hidden_tokens_alone(config, start, tmp_path):
    """And all of the target is learned from, sentinels and ends with it."""
    cfg = config("ncl", "tied")
    start(cfg, tmp_path)
    scores, run = json.loads((tmp_path / "scores.json").read_text()), made(cfg)
    lengths = [text.row_lengths for text in run.data.held_out.values()]
    hidden = [[max(1, round(0.15 * n)) if n > 1 else 0 for n in each.tolist()] for each in lengths]
    assert scores["scored"] == [sum(each) for each in hidden]
    assert scores["tokens"] == [int(each.sum()) for each in lengths]
    loop.make_trainer(run.plan.trainer.lightning, label="").validate(run.module, datamodule=run.data)
    assert [int(count.sum()) for _, count in run.module.row().values()] == scores["scored"]
    sentinels = torch.from_numpy(run.module.objective.sentinels)
    assert not any(torch.isin(batch["targets"], sentinels).any() for batch in run.data.val_dataloader())
    run.learn(0)
    for batch in [*run.probe(), *run.batches(2)]:
        assert torch.isin(batch["targets"], sentinels).sum() == len(batch["input_ids"])
        assert len(batch["positions"]) == batch["decoder_input_ids"].numel()
