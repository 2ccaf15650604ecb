"""Every method keeps the same promises, on masked and causal models, those of two stacks, in shared rows."""

import hashlib
import json
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers

import cpt.adapters.export
from cpt.models.loading import is_tied
from cpt.trainer.checkpoint import load_stage
from cpt.trainer.lightning import make_trainer
from cpt.trainer.run_dir import RunDir
from tests.conftest import ROOT
from tests.support import method_fixtures
from tests.support.campaign import run_few
from tests.support.hook_methods import HOOK_METHODS, overrides_for
from tests.support.kill_callback import KilledError, Killer
from tests.support.method_fixtures import DROPOUT, ORDER, load_model_weights
from tests.support.task_fixtures import write_tasks

METHODS = sorted(path.stem for path in ROOT.glob("conf/method/*.yaml")) + sorted(HOOK_METHODS)
LEARNING = [name for name in METHODS if name != "none"]
# One method of each kind of state; of promises that cost whole runs, the others are kept in the campaign.
KINDS = {"das", "demix", "derpp", "hat", "lifelong_moe", "ncl", "olora", "sapt"}
KILLED = KINDS - {"sapt", "lifelong_moe"}
WATCHED = ["monitor.every=4", "monitor.max_tokens=64"]
# T5 as v1.0 has it, and gated with a head of its own as v1.1, the harder form.
TIED = ["model.config.feed_forward_proj=relu", "model.config.dropout_rate=0.1", "trainer.steps=4"]
UNTIED = ["model.config.feed_forward_proj=gated-gelu", *TIED[1:], "+model.config.tie_word_embeddings=false"]
ON_T5 = [f"{name} on both" for name in LEARNING] + ["ncl on tied", "hat on tied"]
FEW_ON_T5 = {"das on both", "prompt on both"}
# Documents or examples that share rows, isolated from each other.
IN_ROWS = ["ncl", "das", "derpp", "replay", "agem", "migu", "kd", "demix", "lora"]
AS_TASKS = ["ncl", "migu", "replay", "derpp", "kd", "lora", "ewc", "das", "hat", "olora", "adapter", "demix"]
AS_TASKS = [f"{name} on tasks" for name in [*AS_TASKS, "lifelong_moe", "cpt_plugin"]]
SHARED_ROWS = [f"{name} on {rows}" for name in IN_ROWS for rows in ("rows", "causal rows")] + AS_TASKS
FEW_SHARED = {"das on rows", "derpp on tasks"}
OPTIONS = dict.fromkeys(("derpp", "agem"), "method.buffer_size=16")
OPTIONS |= dict.fromkeys(("lora", "olora"), "method.lora_dropout=0")
OPTIONS["replay"] = "method.mixture.general_ratio=0.25"


def bits(folder: Path) -> str:
    stages = sorted((folder / "stages").glob("*.pt"))
    state = load_stage(stages[-1]) if stages else {}
    scores = json.loads((folder / "scores.json").read_text())
    hashed = hashlib.sha256(json.dumps([scores["nll"], scores["metrics"]]).encode())
    for name, value in sorted(state.items()):
        hashed.update(name.encode() + value.numpy().tobytes())
    return hashed.hexdigest()


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"), ("law", "food"), train=80, test=20, size=(1, 8))


@pytest.fixture
def config(small, small_gpt2, small_t5, tasks):
    def build(case: str, *overrides: str):
        told, _, family = case.partition(" on ")
        method, *options = told.split()
        mask = (
            ["mask=migu"] if method != "migu" and method not in HOOK_METHODS and "mask=" not in told else []
        )
        few = ["trainer.steps=2", "trainer.importance_samples=4", *["replay=general"] * (method != "replay")]
        own = [OPTIONS[method]] if method in OPTIONS else []
        rows = ["domains.packing=document_mask", "model.max_seq_length=48", *own]
        on_tasks = ["domains=tasks", "domains/template=bare", f"domains.root={tasks}", "answers=none"]
        on_tasks += ["domains.packing=document_mask", "model.max_seq_length=64", *own]
        build, given = {
            "": (small, DROPOUT),
            "causal": (small_gpt2, [*few, *mask]),
            "both": (small_t5, [*UNTIED, *mask]),
            "tied": (small_t5, [*TIED, *mask]),
            "rows": (small, rows),
            "causal rows": (small_gpt2, rows),
            "tasks": (small_gpt2, on_tasks),
        }[family]
        return build(*overrides_for(method), ORDER, *given, *options, *overrides)

    return build


WHOLE: dict[str, Path] = {}  # the folders of uninterrupted runs, by case


@pytest.fixture
def uninterrupted(config, start, tmp_path_factory):
    def run(case: str) -> Path:
        if case not in WHOLE:
            WHOLE[case] = tmp_path_factory.mktemp("whole")
            start(config(case), WHOLE[case])
        return WHOLE[case]

    return run


def told(folder: Path) -> dict:
    return json.loads((folder / "scores.json").read_text())


ALL = [*METHODS, *(f"{name} on causal" for name in LEARNING), *ON_T5]
FEW = KINDS | {"hat on causal"} | FEW_ON_T5


@pytest.mark.parametrize("case", run_few(ALL, FEW))
def test_two_domains_are_learned(case, uninterrupted):
    scores = told(uninterrupted(case))
    objective = {"": "masked", "causal": "causal"}.get(case.partition(" on ")[2], "span")
    assert scores["run"]["finished"] and scores["run"]["objective"] == objective
    assert scores["domains"] == ["law", "food", "general"]
    learned = {"joint": ["joint"], "none": []}.get(case.partition(" on ")[0], ["law", "food"])
    assert scores["rows"] == ["base", *learned]
    assert all(isinstance(loss, float) and 0 < loss < 20 for row in scores["nll"] for loss in row)
    assert (scores["nll"][-1] != scores["nll"][0]) == (case in METHODS and case != "none" or " on " in case)


@pytest.mark.parametrize("method", run_few(METHODS, {*KINDS, "none", "companions"}))
def test_every_text_is_scored_by_known_parts(method, uninterrupted):
    scores = told(uninterrupted(method))
    if any(scores["modules"]):
        assert all(shares == {"base": 1.0} for shares in scores["modules"][0].values())
        for row in scores["modules"]:
            assert set(row) == set(scores["domains"])
            assert all(sum(shares.values()) == pytest.approx(1, abs=0.01) for shares in row.values())
            assert {part for shares in row.values() for part in shares} <= {"base", "law", "food"}
    learned = [name for name in scores["domains"] if name in scores["rows"]]
    own = [scores["modules"][-1].get(name) == {name: 1.0} for name in learned]
    assert scores["needs_domain"] == (any(scores["modules"]) and all(own))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("case", run_few([*LEARNING, *ON_T5], KINDS | FEW_ON_T5))
def test_the_exported_model_is_that_of_the_last_domain(case, uninterrupted, config, monkeypatch):
    run, folder = method_fixtures.build_method_fixture(config(case)), uninterrupted(case)
    module, data = run.module, run.data
    for domain in data:
        module.expand_to(domain)
    module.load_state_dict(load_stage(next((folder / "stages").glob("*.pt"))))
    module.activate(len(data) - 1)
    monkeypatch.chdir(folder)
    loading = told(folder)["loading"]
    names = {"transformers": transformers, "cpt": cpt, "peft": peft}
    loaded, wanted = eval(loading, names).eval(), module.model_for(len(data) - 1).eval()
    ids = torch.as_tensor(next(iter(data.held_out.values())).ids(np.arange(4)))
    given = {"input_ids": ids} | ({"decoder_input_ids": ids[:, :5]} if case in ON_T5 else {})
    if " on " in case:
        assert is_tied(loaded) == is_tied(wanted) == ("tied" in case)
    else:
        gates = {name for name, _ in wanted.named_parameters() if name.endswith("_gate.e")}  # closed for good
        assert {name for name, each in wanted.named_parameters() if not each.requires_grad} <= gates
    with torch.no_grad():
        torch.testing.assert_close(loaded(**given).logits, wanted(**given).logits)


COMPOSITIONS = [
    *("demix routing@method.routing=posterior replay=general", "lora mask=migu replay=past", "das mask=migu"),
    *("ewc mask=migu mask.migu.apply_to=frozen", "replay mask=migu mask.migu.apply_to=update"),
    *("adapter method.per_domain=true mask=migu mask.migu.apply_to=update", "agem method.constraints=each"),
    *("hat method.form=adapter mask=migu", "derpp replay=general freeze.layers=1"),
    "sapt method.key=cosine method.query=encoder mask=migu replay=past",
]
FEW_KILLED = {*KILLED, "prompt on both", COMPOSITIONS[1], *FEW_SHARED}


@pytest.mark.parametrize("case", run_few([*LEARNING, *ON_T5, *COMPOSITIONS, *SHARED_ROWS], FEW_KILLED))
def test_killed_and_started_again_it_ends_with_the_same_bits(
    case, uninterrupted, killing, config, start, tmp_path
):
    last = "joint" if case.startswith("joint") else "food"
    for step in (3,) if " " in case else (1, 3, 6):
        killing(Killer(step=step, domain=last))
        with pytest.raises(KilledError):
            start(config(case, *WATCHED), tmp_path)
    killing(None)
    start(config(case, *WATCHED), tmp_path)
    assert last in told(tmp_path)["monitor"]
    assert bits(tmp_path) == bits(uninterrupted(case))


IN_16_BITS = [*LEARNING, *(f"{name} on both" for name in ("das", "derpp", "hat", "olora", "prompt"))]


@pytest.mark.parametrize("case", run_few(AS_TASKS, FEW_SHARED))
def test_examples_that_share_rows_are_scored_as_in_padded_ones(case, config, start, uninterrupted, tmp_path):
    start(config(case, "domains.packing=none"), tmp_path)
    one, other = told(uninterrupted(case)), told(tmp_path)
    assert one["nll"][0] == other["nll"][0] and one["scored"] == other["scored"]
    assert one["nll"][-1] != one["nll"][0]
    if not case.startswith("das"):  # its dropout at each step is drawn for other rows
        np.testing.assert_allclose(one["nll"], other["nll"], rtol=1e-5)


@pytest.mark.parametrize("precision", run_few(["bf16-mixed", "bf16-true"], ["bf16-true"]))
@pytest.mark.parametrize("case", run_few(IN_16_BITS, {"das", "prompt on both"}))
def test_it_learns_in_16_bits(case, precision, config, start, tmp_path):
    few = ["trainer.steps=1", "trainer.importance_samples=4", f"trainer.precision={precision}"]
    start(config(case, *few, *["mask=migu"] * (" on " not in case)), tmp_path)
    scores = told(tmp_path)
    assert scores["run"]["finished"] and all(0 < loss < 20 for row in scores["nll"] for loss in row)


@pytest.mark.parametrize("method", run_few(METHODS, {"derpp"}))
@pytest.mark.parametrize("moment", run_few(["save_documents", "cleanup"], ["save_documents"]))
def test_killed_between_domains_it_ends_with_the_same_bits(
    method, moment, uninterrupted, monkeypatch, config, start, tmp_path
):
    rows, commit = told(uninterrupted(method))["rows"], getattr(RunDir, moment)
    for number in range(len(rows)):

        def dying(folder, row, *args, at=number, **kwargs):
            """A step of a commit that is carried out and then kills, for one row."""
            commit(folder, row, *args, **kwargs)
            if row == at:
                raise KilledError

        with monkeypatch.context() as patched, pytest.raises(KilledError):
            patched.setattr(RunDir, moment, dying)
            start(config(method), tmp_path)
    start(config(method), tmp_path)
    assert told(tmp_path)["rows"] == rows and bits(tmp_path) == bits(uninterrupted(method))


@pytest.mark.parametrize("case", run_few([*METHODS, "prompt on tied"], KINDS | {"kd", "prompt on tied"}))
def test_probes_and_evaluation_leave_no_trace(case, config):
    run, rows = method_fixtures.build_method_fixture(config(case)), []
    module = run.module

    def traces():
        hooks = sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in module.modules())
        return [each.training for each in module.modules()], hooks

    before, first = method_fixtures.clone_tensors(module.state_dict()), traces()
    for _ in range(2):
        trainer = make_trainer(run.machine.lightning_arguments(run.plan.trainer), label="")
        trainer.validate(module, datamodule=run.data, verbose=False)
        rows.append([each.clone() for pair in module.document_losses().values() for each in pair])
    assert all(torch.equal(*each) for each in zip(*rows, strict=True))
    assert method_fixtures.equal_tensors(before, module.state_dict()) and traces() == first
    assert all(parameter.grad is None for parameter in module.parameters())
    for domain in run.data:
        seen = []
        for _ in range(2):
            module.activate(domain.index)
            named = dict(module.named_parameters())
            seen.append(
                (
                    method_fixtures.clone_tensors(named),
                    {name for name, each in named.items() if each.requires_grad},
                )
            )
        assert method_fixtures.equal_tensors(seen[0][0], seen[1][0]) and seen[0][1] == seen[1][1]


DAS = "contrast=0 general=null domains=false"
NEUTRAL = {  # what a method is compared with, what makes it that, and what does not; options of the method
    "das": ("ncl", DAS, "contrast=1"),
    "das frozen": ("ncl", f"{DAS} apply_to=frozen", "domains=true"),
    "derpp": ("ncl", "buffer_size=20 alpha=0 beta=0", "beta=0.5"),
    "ema": ("ncl", "decay=0", "decay=0.5"),
    "elle": ("ncl", "neurons=1 layers=0 recovery=0 prompt=0", "prompt=1"),
    "ewc": ("ncl", "strength=0", "strength=5000"),
    "hat": ("ncl", "units=[] shared=trained", "units=[neurons]"),
    "kd": ("ncl", "strength=0", "strength=1"),
    "merge": ("ncl", "rule=task_arithmetic start=merged scale=1", "scale=0.5"),
    "merge slerp": ("ncl", "rule=slerp share=1", "share=0.5"),
    "lifelong_moe": ("ncl", "num_experts=0 strength=0 balance=0 dense=trained", "strength=1"),
    "mas": ("ncl", "strength=0", "strength=1"),
    "migu": ("ncl", "mask.threshold=0", "mask.threshold=0.7"),
    "migu by mass": ("ncl", "mask.threshold=null mask.top_p=1", "mask.top_p=0.5"),
    "moelora": ("lora", "num_experts=1", "num_experts=2"),
    "nlora": ("inclora", "strength=0", "strength=1"),
    "olora": ("inclora", "strength=0", "strength=1"),
    "osf": ("ncl", "protected=0 growth=0", "protected=0.5"),
    "recadam": ("ncl", "strength=0 annealed=false", "strength=1"),
    "replay": ("ncl", "mixture.past_ratio=0", "mixture.past_ratio=0.5"),
    "reptile": ("ncl", "share=1", "share=0.5"),
    "si": ("ncl", "strength=0", "strength=1"),
    "wise_ft": ("ncl", "previous=0", "previous=0.5"),
}


@pytest.fixture
def end(uninterrupted):
    """The weights at the end of a run of a method with options of it, at a high rate of pairs."""

    def run(method: str, options: str = ""):
        words = [f"method.{each}" for each in options.split()] + ["optim.lr=0.05"] * ("lora" in method)
        return load_model_weights(uninterrupted(" ".join([method, *words])))

    return run


@pytest.mark.parametrize("case", run_few(NEUTRAL, {"das", "derpp", "olora"}))
def test_at_neutral_strength_it_is_the_plain_method_bit_for_bit(case, end):
    plain, neutral, strong = NEUTRAL[case]
    expected = end(plain)
    for options, equal in ((neutral, True), (f"{neutral} {strong}", False)):
        found = end(case.partition(" ")[0], options)
        assert expected.keys() <= found.keys()
        assert all(torch.equal(value, found[name]) for name, value in expected.items()) == equal, options
