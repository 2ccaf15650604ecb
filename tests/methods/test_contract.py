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
from tests.support.method_fixtures import DROPOUT, NEED_EXAMPLES, ORDER, load_model_weights
from tests.support.task_fixtures import write_tasks

METHODS = sorted({path.stem for path in ROOT.glob("conf/method/*.yaml")} - NEED_EXAMPLES)
METHODS += sorted(HOOK_METHODS)
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
ON_ROWS = [f"{name} on rows" for name in IN_ROWS] + [f"{name} on causal rows" for name in IN_ROWS]
LEARNS_TASKS = [
    "ncl",
    "migu",
    "replay",
    "derpp",
    "kd",
    "lora",
    "ewc",
    "das",
    "hat",
    "olora",
    "adapter",
    "demix",
]
LEARNS_TASKS += ["lifelong_moe", "cpt_plugin", *sorted(NEED_EXAMPLES)]
AS_TASKS = [f"{name} on tasks" for name in LEARNS_TASKS]
SHARED_ROWS = [*ON_ROWS, *AS_TASKS]
FEW_SHARED = {"derpp on tasks", "sdft on tasks"}
OPTIONS = {
    "derpp": "method.buffer_size=16",
    "agem": "method.buffer_size=16",
    "lora": "method.lora_dropout=0",
    "olora": "method.lora_dropout=0",
    "replay": "method.mixture.general_ratio=0.25",
    "sdft": "method.max_new_tokens=8",
}


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
        method_words, _, family = case.partition(" on ")
        method, *options = method_words.split()
        mask = []
        if method != "migu" and method not in HOOK_METHODS and "mask=" not in method_words:
            mask = ["mask=migu"]
        few_steps = ["trainer.steps=2", "trainer.importance_samples=4"]
        if method != "replay":
            few_steps.append("replay=general")
        shared_rows = ["domains.packing=document_mask"]
        if method in OPTIONS:
            shared_rows.append(OPTIONS[method])
        rows = ["model.max_seq_length=48", *shared_rows]
        on_tasks = ["domains=tasks", "domains/template=bare", f"domains.root={tasks}", "answers=none"]

        build_config, case_options = {
            "": (small, DROPOUT),
            "causal": (small_gpt2, [*few_steps, *mask]),
            "both": (small_t5, [*UNTIED, *mask]),
            "tied": (small_t5, [*TIED, *mask]),
            "rows": (small, rows),
            "causal rows": (small_gpt2, rows),
            "tasks": (small_gpt2, [*on_tasks, "model.max_seq_length=64", *shared_rows]),
        }[family]
        return build_config(*overrides_for(method), ORDER, *case_options, *options, *overrides)

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


def read_scores(folder: Path) -> dict:
    return json.loads((folder / "scores.json").read_text())


WITH_EXAMPLES = [f"{name} on tasks" for name in sorted(NEED_EXAMPLES)]
ALL = [*METHODS, *(f"{name} on causal" for name in LEARNING), *ON_T5, *WITH_EXAMPLES]
FEW = KINDS | {"hat on causal", *WITH_EXAMPLES} | FEW_ON_T5


@pytest.mark.parametrize("case", run_few(ALL, FEW))
def test_two_domains_are_learned(case, uninterrupted):
    scores = read_scores(uninterrupted(case))
    method, _, family = case.partition(" on ")
    objective = {"": "masked", "causal": "causal", "tasks": "causal"}.get(family, "span")
    assert scores["run"]["finished"] and scores["run"]["objective"] == objective
    assert scores["domains"] == ["law", "food", "general"]
    learned = {"joint": ["joint"], "none": []}.get(method, ["law", "food"])
    assert scores["rows"] == ["base", *learned]
    for losses in scores["nll"]:
        assert all(isinstance(loss, float) and 0 < loss < 20 for loss in losses)
    is_changed = scores["nll"][-1] != scores["nll"][0]
    assert is_changed == (method != "none")


@pytest.mark.parametrize("method", run_few(METHODS, {*KINDS, "none", "companions"}))
def test_every_text_is_scored_by_known_parts(method, uninterrupted):
    scores = read_scores(uninterrupted(method))
    if any(scores["modules"]):
        assert all(shares == {"base": 1.0} for shares in scores["modules"][0].values())
        for row in scores["modules"]:
            assert set(row) == set(scores["domains"])
            for shares in row.values():
                assert sum(shares.values()) == pytest.approx(1, abs=0.01)
                assert set(shares) <= {"base", "law", "food"}
    learned = [name for name in scores["domains"] if name in scores["rows"]]
    scored_by_own_part = [scores["modules"][-1].get(name) == {name: 1.0} for name in learned]
    assert scores["needs_domain"] == (any(scores["modules"]) and all(scored_by_own_part))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "case", run_few([*LEARNING, *ON_T5, *WITH_EXAMPLES], KINDS | FEW_ON_T5 | {*WITH_EXAMPLES})
)
def test_the_exported_model_is_that_of_the_last_domain(case, uninterrupted, config, monkeypatch):
    run = method_fixtures.build_method_fixture(config(case))
    folder = uninterrupted(case)
    module = run.module
    data = run.data
    for domain in data:
        module.expand_to(domain)
    module.load_state_dict(load_stage(next((folder / "stages").glob("*.pt"))))
    module.activate(len(data) - 1)

    monkeypatch.chdir(folder)
    loading = read_scores(folder)["loading"]
    loaded = eval(loading, {"transformers": transformers, "cpt": cpt, "peft": peft}).eval()
    expected = module.model_for(len(data) - 1).eval()
    if case in ON_T5:
        assert is_tied(loaded) == is_tied(expected) == ("tied" in case)
    else:
        frozen = {name for name, parameter in expected.named_parameters() if not parameter.requires_grad}
        assert all(name.endswith("_gate.e") for name in frozen)  # closed for good

    ids = torch.as_tensor(next(iter(data.held_out.values())).ids(np.arange(4)))
    model_inputs = {"input_ids": ids}
    if case in ON_T5:
        model_inputs["decoder_input_ids"] = ids[:, :5]
    with torch.no_grad():
        torch.testing.assert_close(loaded(**model_inputs).logits, expected(**model_inputs).logits)


COMPOSITIONS = [
    "demix routing@method.routing=posterior replay=general",
    "lora mask=migu replay=past",
    "das mask=migu",
    "ewc mask=migu mask.migu.apply_to=frozen",
    "replay mask=migu mask.migu.apply_to=update",
    "adapter method.per_domain=true mask=migu mask.migu.apply_to=update",
    "agem method.constraints=each",
    "hat method.form=adapter mask=migu",
    "derpp replay=general freeze.layers=1",
    "lora method.protected_rank=4 method.per_domain=true mask=migu",
    "sapt method.key=cosine method.query=encoder mask=migu replay=past",
]
FEW_KILLED = {*KILLED, "prompt on both", COMPOSITIONS[1], *FEW_SHARED}


@pytest.mark.parametrize("case", run_few([*LEARNING, *ON_T5, *COMPOSITIONS, *SHARED_ROWS], FEW_KILLED))
def test_killed_and_started_again_it_ends_with_the_same_bits(
    case, uninterrupted, killing, config, start, tmp_path
):
    last = "joint" if case.startswith("joint") else "food"
    # Before the first checkpoint of a domain, between two and in the last step. What of these a run continues
    # from is the same with all methods: a plain one and one with importances show it.
    steps = [1, 3, 6] if case in ("ncl", "das") else [3]
    for step in steps:
        killing(Killer(step=step, domain=last))
        with pytest.raises(KilledError):
            start(config(case, *WATCHED), tmp_path)
    killing(None)
    start(config(case, *WATCHED), tmp_path)
    assert last in read_scores(tmp_path)["monitor"]
    assert bits(tmp_path) == bits(uninterrupted(case))


IN_16_BITS = [*LEARNING, *(f"{name} on both" for name in ("das", "derpp", "hat", "olora", "prompt"))]
IN_16_BITS += WITH_EXAMPLES


@pytest.mark.parametrize("case", run_few(AS_TASKS, FEW_SHARED))
def test_examples_that_share_rows_are_scored_as_in_padded_ones(case, config, start, uninterrupted, tmp_path):
    start(config(case, "domains.packing=none"), tmp_path)
    packed = read_scores(uninterrupted(case))
    padded = read_scores(tmp_path)
    assert packed["nll"][0] == padded["nll"][0] and packed["scored"] == padded["scored"]
    assert packed["nll"][-1] != packed["nll"][0]
    if not case.startswith("das"):  # its dropout at each step is drawn for other rows
        np.testing.assert_allclose(packed["nll"], padded["nll"], rtol=1e-5)


@pytest.mark.parametrize("precision", run_few(["bf16-mixed", "bf16-true"], ["bf16-true"]))
@pytest.mark.parametrize("case", run_few(IN_16_BITS, {"das", "prompt on both"}))
def test_it_learns_in_16_bits(case, precision, config, start, tmp_path):
    options = ["trainer.steps=1", "trainer.importance_samples=4", f"trainer.precision={precision}"]
    if " on " not in case:
        options.append("mask=migu")
    start(config(case, *options), tmp_path)
    scores = read_scores(tmp_path)
    assert scores["run"]["finished"]
    for losses in scores["nll"]:
        assert all(0 < loss < 20 for loss in losses)


@pytest.mark.parametrize("method", run_few(METHODS, {"derpp"}))
@pytest.mark.parametrize("moment", run_few(["save_documents", "cleanup"], ["save_documents"]))
def test_killed_between_domains_it_ends_with_the_same_bits(
    method, moment, uninterrupted, monkeypatch, config, start, tmp_path
):
    rows = read_scores(uninterrupted(method))["rows"]
    commit = getattr(RunDir, moment)
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
    assert read_scores(tmp_path)["rows"] == rows and bits(tmp_path) == bits(uninterrupted(method))


@pytest.mark.parametrize("case", run_few([*METHODS, "prompt on tied"], KINDS | {"kd", "prompt on tied"}))
def test_probes_and_evaluation_leave_no_trace(case, config):
    run = method_fixtures.build_method_fixture(config(case))
    module = run.module

    def modes_and_hooks():
        modes = [part.training for part in module.modules()]
        num_hooks = sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())
        return modes, num_hooks

    state_before = method_fixtures.clone_tensors(module.state_dict())
    modes_and_hooks_before = modes_and_hooks()
    evaluations = []
    for _ in range(2):
        trainer = make_trainer(run.machine.lightning_arguments(run.plan.trainer), label="")
        trainer.validate(module, datamodule=run.data, verbose=False)
        evaluations.append([])
        for nll, count in module.document_losses().values():
            evaluations[-1] += [nll.clone(), count.clone()]
    assert all(torch.equal(*pair) for pair in zip(*evaluations, strict=True))
    assert method_fixtures.equal_tensors(state_before, module.state_dict())
    assert modes_and_hooks() == modes_and_hooks_before
    assert all(parameter.grad is None for parameter in module.parameters())

    # A part is activated for good: to activate it again changes nothing.
    for domain in run.data:
        module.activate(domain.index)
        parameters = dict(module.named_parameters())
        weights = method_fixtures.clone_tensors(parameters)
        trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
        module.activate(domain.index)
        parameters = dict(module.named_parameters())
        assert method_fixtures.equal_tensors(weights, parameters)
        assert trained == {name for name, parameter in parameters.items() if parameter.requires_grad}


DAS = "contrast=0 general_importance=null domain_importance=false"
NEUTRAL = {  # what a method is compared with, what makes it that, and what does not; options of the method
    "das": ("ncl", DAS, "contrast=1"),
    "das frozen": ("ncl", f"{DAS} apply_to=frozen", "domain_importance=true"),
    "derpp": ("ncl", "buffer_size=20 alpha=0 beta=0", "beta=0.5"),
    "ema": ("ncl", "decay=0", "decay=0.5"),
    "elle": ("ncl", "neurons=1 layers=0 recovery=0 prompt=0", "prompt=1"),
    "ewc": ("ncl", "strength=0", "strength=5000"),
    "hat": ("ncl", "units=[] shared_parameters=trained", "units=[neurons]"),
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
    "osf": ("ncl", "protected_share=0 growth=0", "protected_share=0.5"),
    "recadam": ("ncl", "strength=0 annealed=false", "strength=1"),
    "replay": ("ncl", "mixture.past_ratio=0", "mixture.past_ratio=0.5"),
    "reptile": ("ncl", "share=1", "share=0.5"),
    "sdft on tasks": ("ncl", "strength=0", "strength=0.5"),
    "si": ("ncl", "strength=0", "strength=1"),
    "wise_ft": ("ncl", "previous=0", "previous=0.5"),
}


@pytest.fixture
def end(uninterrupted):
    """The weights at the end of a run of a method with options of it, at a high rate of pairs."""

    def run(method: str, options: str = "", family: str = ""):
        words = [method, *(f"method.{option}" for option in options.split())]
        if "lora" in method:
            words.append("optim.lr=0.05")
        if family:
            words += ["on", family]
        return load_model_weights(uninterrupted(" ".join(words)))

    return run


@pytest.mark.parametrize("case", run_few(NEUTRAL, {"das", "derpp", "olora", "sdft on tasks"}))
def test_at_neutral_strength_it_is_the_plain_method_bit_for_bit(case, end):
    plain, neutral, strong = NEUTRAL[case]
    words, _, family = case.partition(" on ")
    method = words.partition(" ")[0]
    expected = end(plain, family=family)
    for options, is_plain in ((neutral, True), (f"{neutral} {strong}", False)):
        weights = end(method, options, family)
        assert expected.keys() <= weights.keys()
        is_equal = all(torch.equal(weight, weights[name]) for name, weight in expected.items())
        assert is_equal == is_plain, options
