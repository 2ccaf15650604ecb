"""How a run steps, where the config leaves it open: checkpoints, precision, attention."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from cpt.core.processes import count_cores
from cpt.optim.nan_guard import NanGuard
from cpt.trainer import auto, check_model, log_settings
from cpt.trainer.auto import choose_devices, choose_num_workers, choose_precision
from cpt.trainer.plan import make_plan
from cpt.trainer.step_checkpoint import StepCheckpoint
from tests.runs.reading import read_scores
from tests.support.method_fixtures import build_method_fixture

ONE = "order=[law]"


@pytest.mark.parametrize(
    ("checkpoint_every_n_steps", "ends", "saved_steps"),
    [(4, None, [4, 8, 10]), (100, 3, [3])],  # of a stage that ends early
)
def test_the_state_is_kept_as_often_as_asked_for_and_after_the_last_step(
    checkpoint_every_n_steps, ends, saved_steps, tmp_path
):
    guard = NanGuard()
    steps = []
    saving = StepCheckpoint(tmp_path / "state", interval=checkpoint_every_n_steps, guard=guard)
    trainer = SimpleNamespace(global_step=0, max_steps=10, should_stop=False)
    trainer.save_checkpoint = lambda path: steps.append(trainer.global_step)
    module = SimpleNamespace(parameters=lambda: [])
    saving.on_train_start(trainer, module)
    for step in range(1, 1 + (ends or 10)):
        trainer.global_step = step
        trainer.should_stop = step == ends
        saving.on_train_batch_end(trainer, module)
    assert steps == saved_steps


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_float16_makes_every_step_whose_gradient_is_finite(scale):
    guard = NanGuard()
    scaler = SimpleNamespace(get_scale=lambda: scale)
    trainer = SimpleNamespace(precision_plugin=SimpleNamespace(scaler=scaler), global_step=3)
    trainer.datamodule = SimpleNamespace(domain=SimpleNamespace(name="law"))
    guard.add_losses({"lm": torch.tensor(2.0)})
    assert guard.allows(trainer, torch.tensor(0.25))

    # The scaler skips the step and halves its scale, which ends where no scale helps.
    guard.add_losses({"lm": torch.tensor(2.0)})
    if scale < 1:
        with pytest.raises(ValueError, match="norm of the gradient is inf at step 3 of law, at every scale"):
            guard.allows(trainer, torch.tensor(torch.inf))
    else:
        assert not guard.allows(trainer, torch.tensor(torch.inf))


@pytest.mark.parametrize(
    ("device", "bf16", "stored", "chosen"),
    [
        ("cuda", True, None, "bf16-mixed"),
        ("cuda", False, None, "32-true"),
        ("cpu", True, None, "32-true"),
        ("cpu", True, "bf16-mixed", "bf16-mixed"),  # of a resumed run
    ],
)
def test_precision_auto_is_by_capability(device, bf16, stored, chosen, small, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: bf16)
    plan = make_plan(small("trainer.precision=auto"))
    config = AutoConfig.for_model(**plan.model.config)
    precision = choose_precision(plan.trainer, config, torch.device(device), stored_precision=stored)
    assert precision == chosen


@pytest.mark.parametrize("precision", ["16-mixed", "16"])
def test_a_cpu_uses_bf16_instead_of_fp16_with_a_log_line(precision, small, caplog):
    plan = make_plan(small(f"trainer.precision={precision}"))
    config = AutoConfig.for_model(**plan.model.config)
    with caplog.at_level("WARNING", logger="cpt"):
        on_cpu = choose_precision(plan.trainer, config, torch.device("cpu"), stored_precision=None)
    assert on_cpu == "bf16-mixed" and "in place of 16" in caplog.text
    on_gpu = choose_precision(plan.trainer, config, torch.device("cuda"), stored_precision=None)
    assert on_gpu == plan.trainer.precision


@pytest.mark.parametrize(
    ("capabilities", "is_slow"),
    [
        ({"architecture": "x86_64", "avx512_f": False}, True),
        ({"architecture": "x86_64", "avx512_f": True}, False),
        ({"architecture": "aarch64"}, False),
    ],
)
def test_a_cpu_that_emulates_bf16_is_logged(capabilities, is_slow, small, caplog, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    config = AutoConfig.for_model(**make_plan(small()).model.config)
    for precision, device in (("bf16-mixed", "cpu"), ("32-true", "cpu"), ("bf16-mixed", "cuda")):
        caplog.clear()
        options = make_plan(small(f"trainer.precision={precision}")).trainer
        with caplog.at_level("WARNING", logger="cpt"):
            choose_precision(options, config, torch.device(device), stored_precision=None)
        is_named = "bf16-mixed is slow on this CPU" in caplog.text
        assert is_named == (is_slow and precision == "bf16-mixed" and device == "cpu")


def test_updates_that_bf16_weights_lose_are_named_before_training(small, caplog):
    lines = {}
    for rate in ("1e-7", "1e-3"):
        precision = ["trainer.precision=bf16-true", "optim.rounding=nearest"]
        run = build_method_fixture(small(f"optim.lr={rate}", *precision, "order=[law]"))
        with caplog.at_level("WARNING", logger="cpt"):
            log_settings.warn_of_lost_updates(run.plan, run.module, precision="bf16-true")
        lines[rate] = caplog.messages[-1]
    shares = {rate: int(line.partition("for ")[2].split()[0]) for rate, line in lines.items()}
    assert shares["1e-7"] > 90 and shares["1e-3"] < 50 and "optim.rounding=stochastic" in lines["1e-3"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "is_trained"),
    [
        ("method=ncl", True),
        ("method=ncl freeze.embeddings=true", False),
        ("method=lora", False),
        ("method=lora method.embeddings=true", False),
        ("method=prompt", False),
        ("method=lora method.modules_to_save=[embeddings]", True),
        # A copy of peft's, to which the head is not tied.
        ("method=peft method.tuner=dora +method.arguments.modules_to_save=[wte]", False),
        ("method=peft method.tuner=dora +method.arguments.trainable_token_indices={wte:[5]}", True),
    ],
)
def test_rows_of_new_tokens_that_a_method_does_not_train_are_named(options, is_trained, small_gpt2, caplog):
    run = build_method_fixture(small_gpt2("order=[law]", *options.split()))
    model = run.plan.model
    for option, changed in (
        ("model.resize=true", replace(model, resize=True)),
        ("model.tokenizer=x", replace(model, tokenizer="x")),
    ):
        with caplog.at_level("WARNING", logger="cpt"):
            log_settings.warn_of_untrained_rows(replace(run.plan, model=changed), run.module)
        assert (f"Rows of new tokens ({option})" in caplog.text) is not is_trained


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            "method=ncl freeze.embeddings=true",
            "in embedding.*: freeze.embeddings=false trainable=null does",
        ),
        (
            "method=ncl trainable=attention",
            "in embedding.*: freeze.embeddings=false trainable=null does",
        ),
        ("method=demix", "in embedding.*: a method that trains all weights does"),
        (
            "method=lora method.embeddings=true freeze.embeddings=true",
            "in embedding.*: method.modules_to_save=.*, with freeze.embeddings=false trainable=null",
        ),
        (
            "method=lora method.embeddings=true",
            "in head are .*: method.modules_to_save=.* trains them [^,]*$",
        ),
    ],
)
def test_what_freezes_the_rows_of_new_tokens_is_named(options, line, small_gpt2, caplog):
    untied = ["+model.config.tie_word_embeddings=false"]
    run = build_method_fixture(small_gpt2("order=[law]", *untied, *options.split()))
    plan = replace(run.plan, model=replace(run.plan.model, resize=True))
    log_settings.warn_of_untrained_rows(plan, run.module)
    assert re.search(line, caplog.messages[-1])


@pytest.mark.parametrize(
    ("gpus", "batch", "parts", "chosen"),
    [
        (0, 8, 1, (1, "auto", 0)),
        (1, 8, 1, (1, "auto", 2)),
        (8, 8, 1, (8, "ddp", 1)),
        (6, 8, 2, (4, "ddp", 2)),
    ],
)
def test_strategy_auto_takes_gpus_that_share_a_batch_evenly(gpus, batch, parts, chosen, small, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(auto, "count_cores", lambda: 16)
    batches = (f"trainer.batch_size={batch}", f"trainer.accumulate_grad_batches={parts}")
    options = make_plan(small(*batches)).trainer
    devices, strategy = choose_devices(options)
    assert (devices, strategy, choose_num_workers(options, devices)) == chosen
    assert choose_devices(make_plan(small(*batches, "strategy=single")).trainer) == (1, "auto")


def test_a_cpu_in_16_bits_trains_with_eager_attention_and_the_scores_say_it(
    small, start, tmp_path, monkeypatch
):
    start(small(ONE, "trainer.steps=1"), tmp_path / "base")  # pre-trains the base, before sdpa is replaced
    # The trial of the model comes before `auto` is resolved: it has the default of the model.
    monkeypatch.setattr(check_model, "try_model", lambda *arguments, **options: None)
    torch_attention = torch.nn.functional.scaled_dot_product_attention

    def attend(*arguments, **options):
        assert not torch.is_grad_enabled()  # the exported model is loaded with its own default
        return torch_attention(*arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    start(small("trainer.precision=bf16-mixed", ONE), tmp_path / "run")
    numerics = read_scores(tmp_path / "run")["numerics"]
    assert numerics.pop("device") in (f"{count_cores()} CPU cores", "1 CPU core")
    assert numerics == {"precision": "bf16-mixed", "attention": "eager"}
