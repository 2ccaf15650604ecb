"""Plans that are computed without weights and texts: memory and time by number of devices, what makes a run fit,
and what is refused."""

import dataclasses
import itertools
import json
import logging

import pytest

from cpt.trainer import computed_plan, computed_time, device_kinds, micro_batch
from cpt.trainer.computed_changes import ChangeSearch, change_plan, divide_most, list_layouts
from cpt.trainer.computed_memory import (
    BUCKETS,
    GATHERED,
    find_memory,
    find_peak_bytes,
    find_state_bytes,
    make_layout,
)
from cpt.trainer.computed_time import Rates
from cpt.trainer.device_kinds import GPUS
from cpt.trainer.plan import make_plan
from cpt.trainer.simulated_plan import MEASURED_PLAN, SimulatedPlan
from tests.conftest import ROOT
from tests.support.campaign import run_few
from tests.support.method_fixtures import NEED_EXAMPLES
from tests.support.simulated import write_config

METHODS = sorted(path.stem for path in (ROOT / "conf" / "method").glob("*.yaml"))
NEED_VALUES = {"derpp", "elle", "lifelong_moe"}
OPTIONS = ["domains=installed_docs", "model=hf", "model.max_seq_length=32", "logger=none", "plan=json"]
OPTIONS += ["trainer.batch_size=8", "trainer.eval_batch_size=4", "trainer.importance_samples=4"]


@pytest.fixture
def config_only(composed, tmp_path):
    folder = write_config(tmp_path / "model")
    cache = f"cache_dir={tmp_path / 'cache'}"

    def compose(*overrides):
        return composed(*OPTIONS, cache, f"model.name_or_path={folder}", *overrides)

    return compose


@pytest.fixture
def computed(config_only, capsys, tmp_path):
    """What plan=json prints."""
    from cpt.train import train

    def compute(*overrides):
        capsys.readouterr()
        train(config_only("plan_device=h100", *overrides), run_dir=tmp_path / "run")
        return json.loads(capsys.readouterr().out)

    return compute


def group_by_devices(cost):
    return {estimate["devices"]: estimate for estimate in cost["estimates"]}


def test_a_folder_with_a_config_alone_is_enough(computed, tmp_path):
    cost = computed("strategy=fsdp", "method=ncl")
    assert cost["figures"] == "computed" and cost["cause"] == "plan_device=h100"
    assert cost["precision"] == "bf16-mixed" and cost["stages"] == 3
    assert not (tmp_path / "run").exists()

    estimates = group_by_devices(cost)
    assert [*estimates] == [1, 2, 4, 8]  # strategy=fsdp has two devices by default
    step = estimates[1]["memory"]["step"]
    assert step["weights"] == pytest.approx(4 * cost["parameters"], rel=0.01)
    assert step["optimizer state"] == pytest.approx(8 * cost["parameters"], rel=0.01)
    sharded_step = estimates[4]["memory"]["step"]
    for use in ("weights", "optimizer state"):
        assert sharded_step[use] == pytest.approx(step[use] / 4, rel=0.01)
    assert sharded_step[GATHERED] > 0 and GATHERED not in step
    assert estimates[8]["micro_batch"] == 1 and estimates[8]["strategy"] == "fsdp"
    for estimate in cost["estimates"]:
        peaks = [sum(by_use.values()) for by_use in estimate["memory"].values()]
        assert estimate["peak"] == max(peaks)
        assert estimate["free"] == 80 * 10**9 - estimate["peak"]


def test_chats_of_a_source_need_no_tokenizer(computed, tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("{}")
    sources = f"replay.sources={{chat: {{path: {path}, format: messages, ratio: 0.25}}}}"
    assert computed("replay=sources", sources)["stages"] == 3


def test_ddp_has_whole_weights_and_buckets(computed):
    estimates = group_by_devices(computed("method=ncl"))
    step = estimates[1]["memory"]["step"]
    assert estimates[4]["strategy"] == "ddp"
    assert estimates[4]["memory"]["step"]["weights"] == step["weights"]
    assert estimates[4]["memory"]["step"][BUCKETS] == pytest.approx(step["weights"], rel=0.01)
    assert BUCKETS not in step and estimates[4]["host"] == 4 * estimates[1]["host"]


def test_time_is_operations_over_a_share_of_the_peak(computed):
    short, long = (computed(f"trainer.steps={steps}", "method=ncl") for steps in (10, 20))
    device = short["device"]
    assert device["peak_flops"] == 989.4e12 and device["share"] == 0.2  # of a small model
    seconds = [estimate["seconds"] for estimate in short["estimates"]]
    assert seconds[0]["training"] == pytest.approx(3 * 10 * seconds[0]["step"])
    assert seconds[1]["step"] == pytest.approx(seconds[0]["step"] / 4)
    assert long["estimates"][0]["seconds"]["training"] == pytest.approx(2 * seconds[0]["training"])

    # 6 operations per parameter and token, and attention; embeddings are no products.
    flops = seconds[0]["step"] * device["peak_flops"] * device["share"]
    products = short["parameters"] - 331 * 32
    assert flops == pytest.approx(6 * products * 8 * 32, rel=0.2)

    tokens = computed("trainer.steps=null", f"trainer.tokens={32 * 8 * 10}", "method=ncl")
    assert tokens["steps_per_stage"] == 10
    epochs = computed("trainer.steps=null", "trainer.epochs=1", "method=ncl")
    assert epochs["steps_per_stage"] is None
    assert epochs["estimates"][0]["seconds"]["training"] is None


def test_micro_batches_take_less_memory_and_as_much_time(computed):
    single, divided = (
        computed("method=ncl", f"trainer.accumulate_grad_batches={number}")["estimates"][0]
        for number in (1, 8)
    )
    assert divided["micro_batch"] == 1
    activations = [estimate["memory"]["step"]["activations and rest"] for estimate in (single, divided)]
    assert activations[1] < activations[0]
    assert divided["seconds"]["step"] == pytest.approx(single["seconds"]["step"], rel=0.01)


def test_an_automatic_micro_batch_leaves_as_much_memory_free_as_a_run_does(computed, monkeypatch):
    auto = ["method=ncl", *LONG, "trainer.micro_batch=auto", "trainer.eval_batch_size=1"]
    (single, *_) = computed(*auto)["estimates"]
    assert single["micro_batch"] == 8
    step_bytes = sum(single["memory"]["step"].values())

    # All samples of a step fit into the memory, and not into its share.
    with_memory(monkeypatch, step_bytes / 0.95)
    cost = computed(*auto)
    assert cost["estimates"][0]["micro_batch"] == 4 and cost["estimates"][0]["free"] > 0
    with_memory(monkeypatch, step_bytes / 0.89)
    assert computed(*auto)["estimates"][0]["micro_batch"] == 8


def test_the_share_is_smaller_where_no_micro_batch_is_tried():
    assert micro_batch.find_share("fsdp") == micro_batch.COMPUTED_SHARE < micro_batch.find_share("ddp")


def test_the_rank_of_lora_decides_what_is_trained(computed):
    cost = computed("method=lora", "method.r=4", "method.target_modules=[q_proj]")
    assert cost["trained_parameters"] == 2 * 4 * (32 + 32)
    assert cost["estimates"][0]["memory"]["step"]["optimizer state"] == pytest.approx(
        8 * cost["trained_parameters"], rel=0.01
    )


def test_modules_of_each_domain_add_up(computed):
    state_bytes = []
    for order in ("[sympy]", "0"):
        cost = computed("method=lora", "method.per_domain=true", f"order={order}")
        state_bytes.append(cost["estimates"][0]["memory"]["step"]["method state"])
    two_domains = 2 * 4 * cost["trained_parameters"]
    assert state_bytes[1] - state_bytes[0] == two_domains


METHODS_OF_EACH_KIND = ["ncl", "elle", "das", "agem", "none", "progprompt", "block_expansion"]


@pytest.mark.parametrize("method", run_few(METHODS, METHODS_OF_EACH_KIND))
def test_every_method_is_computed_or_refused_by_name(computed, method):
    if method in NEED_EXAMPLES:
        message = (
            f"^method={method} is invalid for a plan that is computed: .* Allowed: {MEASURED_PLAN}; or an"
        )
        with pytest.raises(ValueError, match=message):
            computed(f"method={method}")
        return
    if method in NEED_VALUES:
        message = (
            f"^method={method} is invalid for a computed plan of a llama: .* Allowed: {MEASURED_PLAN}; or"
        )
        with pytest.raises(ValueError, match=message):
            computed(f"method={method}")
        return
    cost = computed(f"method={method}")
    assert all(estimate["peak"] > 0 for estimate in cost["estimates"])
    assert (cost["trained_parameters"] == 0) == (method == "none")
    is_complete = not any("before or after a domain" in entry for entry in cost["not_included"])
    assert is_complete == (method not in ("agem", "das", "demix", "dga"))


def test_a_folder_with_a_config_alone_takes_chats_as_well(config_only, tmp_path, capsys):
    from cpt.train import train

    path = write_chats(tmp_path / "chats") / "a" / "train.jsonl"
    options = ["method=ncl", "replay=sources"]
    options.append(f"replay.sources={{chat: {{path: {path}, format: messages, ratio: 0.1}}}}")
    train(config_only(*options), run_dir=tmp_path / "run")
    assert json.loads(capsys.readouterr().out)["estimates"]


@pytest.mark.parametrize("kind", ["masked", "span", "gpt2", "document_mask", "chats"])
def test_other_models_and_data(composed, kind, tmp_path, capsys):
    from cpt.train import train

    choices = {
        "masked": ["model=tiny_modernbert", "method=ncl"],
        "span": ["model=tiny_t5", "method=ncl"],
        "gpt2": ["model=tiny_gpt2", "method=ncl"],
        "document_mask": ["model=tiny_gpt2", "method=ncl", "domains.packing=document_mask"],
        "chats": ["model=tiny_gpt2", "domains=instructions", f"domains.root={write_chats(tmp_path / 'c')}"],
    }
    options = [*OPTIONS, *choices[kind], "plan_device=4090", f"cache_dir={tmp_path / 'cache'}"]
    options.remove("model=hf")
    train(composed(*options), run_dir=tmp_path / "run")
    cost = json.loads(capsys.readouterr().out)
    assert cost["device"]["memory"] == 24 * 10**9 and cost["estimates"][0]["free"] > 0


def write_chats(folder):
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
        (folder / name / "train.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    return folder


# What fits.


def with_memory(monkeypatch, num_bytes):
    kind = dataclasses.replace(GPUS["h100"], memory=int(num_bytes))
    monkeypatch.setitem(GPUS, "h100", kind)
    return kind


LONG = ["model.max_seq_length=256"]  # activations are most of the memory
SHORT = ["model.max_seq_length=16"]  # weights and their state are


@pytest.fixture
def search(config_only):
    """What finds changes of a config, and its layout on a number of devices."""

    def make(*overrides, num_devices=1):
        cfg = config_only("plan_device=h100", *overrides)
        simulated = SimulatedPlan(make_plan(cfg), GPUS["h100"])
        return ChangeSearch(cfg, simulated, GPUS["h100"]), make_layout(simulated.plan, num_devices)

    return make


def find_least(changes, layout, change=None, **of_layout):
    """The peak in rows of their own, with a change and other choices of the layout."""
    simulated = changes.simulate(change or {})
    smallest = dataclasses.replace(divide_most(simulated.plan, layout), **of_layout)
    return find_peak_bytes(find_memory(simulated, smallest))


def test_the_smallest_change_is_named(search, config_only):
    changes, layout = search(*LONG)
    plain = find_least(changes, layout)
    checkpointed = find_least(changes, layout, is_checkpointed=True)
    assert changes.find(layout, limit=plain).overrides[0] == "trainer.accumulate_grad_batches=8"
    limit = (plain + checkpointed) / 2
    change = changes.find(layout, limit=limit)
    assert change.overrides[0] == "trainer.gradient_checkpointing=true" and change.peak <= limit

    # With the named options the plan says the same.
    changed = make_plan(config_only("plan_device=h100", *LONG, *change.overrides))
    simulated = SimulatedPlan(changed, GPUS["h100"])
    assert find_peak_bytes(find_memory(simulated, make_layout(changed, 1))) == change.peak


def test_the_divergence_adds_the_weights_that_training_changes_to_an_evaluation(config_only):
    num_bytes = {}
    for method in ("ncl", "lora"):
        plan = make_plan(config_only("plan_device=h100", f"method={method}", "divergence=base"))
        simulated = SimulatedPlan(plan, GPUS["h100"])
        memory = find_memory(simulated, make_layout(plan, 1))
        num_bytes[method] = memory["evaluation"]["weights of the base"]
        assert "weights of the base" not in memory["step"]
        assert num_bytes[method] == 4 * simulated.num_trained
    assert num_bytes["lora"] < num_bytes["ncl"] / 2
    plain = make_plan(config_only("plan_device=h100"))
    memory = find_memory(SimulatedPlan(plain, GPUS["h100"]), make_layout(plain, 1))
    assert "weights of the base" not in memory["evaluation"]


def test_the_method_is_changed_last(search, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("cpt.optim.rounded_optimizer.MAX_COPIED", 1000)  # of so small a model
    changes, layout = search(*SHORT)
    halved = {"trainer.precision": "bf16-true", "optim": "adamw_8bit"}
    peaks = []
    for change in ({}, {"optim": "adamw_8bit"}, halved, {"method": "lora"}):
        peaks.append(find_least(changes, layout, change, is_checkpointed=True))
    assert peaks == sorted(peaks, reverse=True)
    first_named = []
    for larger, smaller in itertools.pairwise(peaks):
        first_named.append(changes.find(layout, limit=(larger + smaller) / 2).overrides[0])
    assert first_named == ["optim=adamw_8bit", "trainer.precision=bf16-true", "method=lora"]
    assert changes.find(layout, limit=peaks[-1] / 4) is None
    assert caplog.records[0].message == "Computing whether it fits with optim=adamw_8bit"


def test_sharding_is_named_where_it_helps_and_is_possible(search, tmp_path):
    deep = [*SHORT, f"model.name_or_path={write_config(tmp_path / 'deep', num_hidden_layers=16)}"]
    changes, layout = search(*deep, num_devices=8)
    peaks = []
    for strategy in ("ddp", "fsdp"):
        peaks.append(find_least(changes, layout, is_checkpointed=True, strategy=strategy))
    assert "strategy=fsdp" in changes.find(layout, limit=sum(peaks) / 2).overrides
    with_best_weights, _ = search(*deep, "monitor.keep=best", "monitor.every=1")
    assert "fsdp" not in {entry.strategy for entry in list_layouts(with_best_weights.simulate({}), layout)}


def test_what_does_not_fit_at_its_least_is_not_simulated_further(search, monkeypatch):
    monkeypatch.setattr("cpt.trainer.computed_changes.LARGE_CHANGES", [{}])
    changes, layout = search(*SHORT)
    simulated = changes.simulate({})
    assert changes.find(layout, limit=1) is None and len(simulated.steps) == 0
    state_bytes = find_state_bytes(simulated, layout)
    assert changes.find(layout, limit=state_bytes + 1) is None and len(simulated.steps) == 1


def test_a_change_that_the_config_does_not_allow_is_left_out(config_only):
    cfg = config_only("plan_device=h100")
    assert change_plan(cfg, {"method": "lora"}).names["method"] == "lora"
    for change in ({"optim": "no_such"}, {"model.no_such": "1"}, {"trainer.precision": "no_such"}):
        with pytest.raises(ValueError, match=r"is invalid"):
            change_plan(cfg, change)


# When it is computed, and what is refused.


def test_weights_that_are_not_here_or_do_not_fit_are_computed(config_only, capsys, tmp_path, monkeypatch):
    from cpt.train import train

    train(config_only("method=ncl"), run_dir=tmp_path / "run")
    cost = json.loads(capsys.readouterr().out)
    assert cost["cause"].endswith("model has no weights")
    assert cost["device"]["name"] == "CPU of this machine" and cost["precision"] == "32-true"
    assert [*group_by_devices(cost)] == [1]

    plan = make_plan(config_only("method=ncl"))
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    assert computed_plan.why_computed(plan) == ""
    kind = dataclasses.replace(computed_plan.choose_kind(plan), memory=10**5)
    monkeypatch.setattr(computed_plan, "choose_kind", lambda plan: kind)
    assert computed_plan.why_computed(plan).startswith("weights, gradients and optimizer state are 0.")


def test_processes_of_a_cpu_share_its_memory(computed, monkeypatch):
    estimates = group_by_devices(computed("plan_device=cpu", "strategy=ddp", "method=ncl"))
    assert [*estimates] == [1, 2]
    cost = computed("plan_device=cpu", "method=ncl")
    memory = cost["device"]["memory"]
    assert estimates[2]["free"] + estimates[2]["peak"] < memory // 2  # Python and libraries
    (estimate,) = cost["estimates"]
    assert cost["process"] > 10**8
    assert estimate["free"] == memory - estimate["peak"] - cost["process"] - estimate["holes"]


def test_holes_of_the_heap_are_half_of_the_activations_of_a_cpu(computed):
    (plain,) = computed("plan_device=cpu", "method=ncl")["estimates"]
    assert plain["holes"] == plain["memory"]["step"][computed_plan.ACTIVATIONS] // 2 > 0
    (checkpointed,) = computed("plan_device=cpu", "trainer.gradient_checkpointing=true")["estimates"]
    assert checkpointed["holes"] == 0
    assert all(estimate["holes"] == 0 for estimate in computed("plan_device=h100")["estimates"])


def test_the_plan_of_a_cpu_says_at_which_rates_it_was_computed(config_only, capsys, tmp_path, monkeypatch):
    from cpt.train import train

    rates = Rates({"float32": 90e9}, num_bytes=12e9, num_dequantized=3e9)
    monkeypatch.setattr(computed_time, "measure_cpu_once", lambda **options: rates)
    train(config_only("plan=true", "plan_device=cpu", "method=ncl"), run_dir=tmp_path / "run")
    text = capsys.readouterr().out
    assert "updates and casts of weights at 90 GFLOP/s in float32, 12 GB/s of bytes moved" in text
    assert "timed on this CPU when the plan was made" in text and "Python and libraries" in text


def test_the_table_says_that_it_is_computed(config_only, capsys, caplog, tmp_path, monkeypatch):
    caplog.set_level(logging.INFO)
    from cpt.train import train

    with_memory(monkeypatch, 10**6)
    train(config_only("plan=true", "plan_device=h100", "method=ncl"), run_dir=tmp_path / "run")
    text = capsys.readouterr().out
    assert "Computed plan (plan_device=h100): method=ncl" in text and "Computed, not measured" in text
    assert "8 x ddp" in text and "too much" in text and "fits with" in text
    assert "0 B" not in "\n".join(line for line in text.splitlines() if line.startswith("method state"))
    (start,) = [record.message for record in caplog.records if "Computing" in record.message]
    assert start.startswith("Computing what ") and "with method ncl needs on NVIDIA H100" in start


WRONG = {
    "plan_device=h1000": r"^plan_device=h1000 is invalid. Did you mean h100\? Allowed: null or h100, h200, a100, ",
    "plan=false plan_device=h100": r"^plan_device=h100 is invalid with plan=false. Allowed: null; or plan=true",
    "method=lora method.target_modules=[no_such]": r"no_such",
    "model.max_seq_length=257": r"^model.max_seq_length=257 is invalid. Allowed: 2 to 256, the positions",
    "model.objective=masked": r"^model.objective=masked is invalid for a llama LlamaForCausalLM",
    "optim.betas=[0.9,0.99,0.999]": r"^optim.betas",
}


@pytest.mark.parametrize("overrides", WRONG)
def test_wrong_options_are_refused_with_one_line(computed, overrides, caplog):
    caplog.set_level(logging.ERROR)
    with pytest.raises(ValueError, match=WRONG[overrides]) as refusal:
        computed(*overrides.split())
    assert "\n" not in str(refusal.value)


NEED_BLOCKS = {
    "freeze.layers=1": "freeze.layers=1",
    "freeze.embeddings=true": "freeze.embeddings=true",
    "strategy=fsdp": "strategy=fsdp",
    "method=hat": "method=hat is invalid for a mamba",
}


@pytest.mark.parametrize("overrides", NEED_BLOCKS)
def test_an_option_that_needs_blocks_is_named_where_a_model_has_none(computed, tmp_path, overrides):
    sizes = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "state_size": 4}
    folder = write_config(tmp_path / "mamba", **sizes)
    with pytest.raises(ValueError, match=f"^{NEED_BLOCKS[overrides]}.*: no transformer blocks .* Allowed: "):
        computed(f"model.name_or_path={folder}", "method=ewc", *overrides.split())


@pytest.mark.parametrize("missing", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_configuration_without_sizes_is_refused(computed, tmp_path, missing):
    folder = write_config(tmp_path / "incomplete", left_out=missing)
    message = rf"^model.name_or_path={folder} is invalid: the configuration of a llama lacks {missing}. "
    with pytest.raises(ValueError, match=message):
        computed(f"model.name_or_path={folder}")


def test_a_model_of_a_config_on_the_command_line(composed, tmp_path, capsys):
    from cpt.train import train

    sizes = "{model_type: llama, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4}"
    options = [*OPTIONS, "model.name_or_path=null", "model.vocab_size=300", "plan_device=h100", "method=ncl"]
    train(composed(*options, f"model.config={sizes}"), run_dir=tmp_path / "run")
    assert json.loads(capsys.readouterr().out)["model_type"] == "llama"


def test_a_gpu_is_shown_with_its_memory_once():
    assert (
        computed_plan.format_device({"name": GPUS["l4"].description, "memory": 24 * 10**9})
        == "NVIDIA L4, 24 GB"
    )
    assert computed_plan.format_device({"name": "a CPU", "memory": 8 * 10**9}) == "a CPU, 8,000 MB"


def test_device_kinds_are_those_of_their_data_sheets():
    for kind in GPUS.values():
        assert kind.source and kind.memory % 10**9 == 0
        assert kind.peak_flops["bfloat16"] > kind.peak_flops["float32"]
    assert set(device_kinds.KIND_NAMES) == {*GPUS, "cpu"}
