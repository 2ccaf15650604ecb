"""`trainer.compile=auto`: where blocks are compiled, and what a run keeps of it."""

import logging

import pytest
import torch
from transformers import AutoConfig

from cpt.models.fast_kernels import COMPILE_OPTIONS
from cpt.models.units import find_blocks
from cpt.trainer import build
from cpt.trainer.auto import resolve_machine
from cpt.trainer.compile_choice import choose_compilation
from cpt.trainer.plan import make_plan
from tests.runs.reading import read_scores
from tests.support.decoders import build_decoder
from tests.support.method_fixtures import build_method_fixture

GPU = torch.device("cuda", 0)
LONG = "trainer.compile=auto trainer.steps=500 order=[law,food]"  # 1,000 steps


@pytest.fixture
def capability(monkeypatch):
    """The capability of a GPU that is only named."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("", ""),
        ("trainer.steps=null trainer.epochs=1", ""),  # how many steps is not known yet
        ("trainer.steps=null trainer.tokens=64000", ""),  # of 8 x 16 tokens
        ("domains.packing=document_mask", ""),
        ("trainer.steps=499", "none, the domains have 998 steps together, and it pays from 1,000 on"),
        ("trainer.steps=null trainer.tokens=63000", "none, the domains have 984 steps"),
        ("domains.packing=none", "none, batches are as wide as their longest sample"),
        (
            "mask=migu mask.migu.backend=backward mask.migu.apply_to=gradient",
            "none, a mask with backend=back",
        ),
    ],
)
def test_blocks_are_compiled_on_a_gpu_where_it_pays(options, reason, small, capability, caplog):
    caplog.set_level(logging.INFO)
    plan = make_plan(small(*LONG.split(), *options.split()))
    assert choose_compilation(plan, GPU, stored=None) is (not reason)
    (line,) = caplog.messages
    assert line.startswith(f"Compilation (trainer.compile=auto): {reason or 'each block'}")


def test_neither_a_cpu_nor_an_old_gpu_compiles(small, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    plan = make_plan(small(*LONG.split()))
    assert not choose_compilation(plan, torch.device("cpu"), stored=None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    assert not choose_compilation(plan, GPU, stored=None)
    assert (
        "none, the device is a cpu" in caplog.messages[0] and "none, the GPU is older" in caplog.messages[1]
    )


@pytest.mark.parametrize("option", ["true", "false"])
def test_what_is_set_is_no_choice(option, small, caplog):
    caplog.set_level(logging.INFO)
    plan = make_plan(small(f"trainer.compile={option}"))
    assert choose_compilation(plan, torch.device("cpu"), stored=None) is (option == "true")
    assert not caplog.messages


def test_a_resumed_run_keeps_its_choice(small, start, capability, tmp_path):
    cfg = small(*LONG.split(), "trainer.steps=1", "order=[law]")
    start(cfg, tmp_path / "run")
    assert read_scores(tmp_path / "run")["numerics"]["compile"] == "none"  # on a CPU

    plan = make_plan(small(*LONG.split()))
    for stored in ("none", "blocks"):
        machine = resolve_machine(
            plan,
            AutoConfig.for_model(**plan.model.config),
            device=GPU if stored == "none" else torch.device("cpu"),
            devices=1,
            strategy="auto",
            num_processes=1,
            stored_numerics={"precision": "32-true", "compile": stored},
            base_dtype=torch.float32,
        )
        assert machine.compiles_blocks is (stored == "blocks")
        assert machine.quick_dropout is False  # whose masks a compiled block does not draw; a GPU has none


@pytest.mark.filterwarnings("ignore")
def test_each_block_is_compiled_and_computes_the_same(small, monkeypatch):
    monkeypatch.setitem(COMPILE_OPTIONS, "backend", "eager")
    run = build_method_fixture(small("trainer.compile=true", "order=[law]"))
    blocks = [block for _, block in find_blocks(run.module.model)]
    assert all(block._compiled_call_impl is not None for block in blocks)
    plain = build_method_fixture(small("trainer.compile=auto", "order=[law]"))
    assert all(block._compiled_call_impl is None for _, block in find_blocks(plain.module.model))

    batch = run.batches()[0]
    compiled_loss = run.module.objective.sum_nll(run.module.model.eval(), batch)
    plain_loss = plain.module.objective.sum_nll(plain.module.model.eval(), batch)
    torch.testing.assert_close(compiled_loss, plain_loss)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["olmo2", "smollm3"])
def test_blocks_of_decoders_have_no_graph_break(kind):
    model = build_decoder(kind)
    _, block = find_blocks(model)[0]
    arguments = []
    options = {}

    def keep(module, positional, named):
        arguments.extend(positional)
        options.update(named)

    handle = block.register_forward_pre_hook(keep, with_kwargs=True)
    model(input_ids=torch.arange(3, 27).view(2, 12), use_cache=False)
    handle.remove()
    torch._dynamo.reset()
    explanation = torch._dynamo.explain(block)(*arguments, **options)
    assert explanation.graph_count == 1 and explanation.graph_break_count == 0


@pytest.mark.parametrize("shares", [True, False])
def test_flash_attention_is_tried_where_documents_share_rows(shares, small_gpt2, monkeypatch):
    trials = []
    monkeypatch.setattr(build, "uses_flash_attention", lambda model: True)
    monkeypatch.setattr(build, "try_lengths", lambda model, *, are_documents: trials.append(are_documents))
    packing = "document_mask" if shares else "concat"
    build_method_fixture(small_gpt2(f"domains.packing={packing}", "order=[law]"))
    assert trials == ([True] if shares else [])
