"""Runs whose frozen base stays in the 16 bits of its checkpoint: the bits of one in 32 bits, also when killed
and extended, in two processes and sharded."""

import pytest
import torch

from tests.runs.reading import assert_same_bits, command, start_and_kill
from tests.runs.test_distributed import DDP, launch
from tests.runs.test_extension import assert_same_runs
from tests.support.quantized_models import SMALL_HF
from tests.support.stored_checkpoints import write_checkpoint

pytestmark = pytest.mark.slow
WIDE = "model.dtype=float32"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("stored"), dtype=torch.bfloat16)


@pytest.fixture
def config(composed, corpora, cache, checkpoint):
    texts = ["domains=texts", f"domains.root={corpora}", f"cache_dir={cache}"]

    def compose(*overrides: str):
        base = f"model.name_or_path={checkpoint}"
        return composed(*texts, *SMALL_HF, base, "method=lora", "trainer.steps=4", *overrides)

    return compose


def test_a_killed_run_has_the_bits_of_one_in_32_bits_also_where_the_type_changes(
    config, start, killing, tmp_path
):
    options = ["order=[law]", "trainer.gradient_checkpointing=true", "domains.packing=document_mask"]
    start(config(*options, WIDE), tmp_path / "wide")
    start_and_kill(start, killing, config(*options), tmp_path / "killed", step=3, domain="law")
    start(config(*options), tmp_path / "killed")
    assert_same_bits(tmp_path / "killed", tmp_path / "wide")


def test_domains_are_added_as_from_the_beginning(config, start, tmp_path):
    start(config("order=[law]"), tmp_path / "one")
    start(config("order=[law,food]", f"extend={tmp_path / 'one'}"), tmp_path / "extended")
    start(config("order=[law,food]", WIDE), tmp_path / "whole")
    assert_same_runs(tmp_path / "extended", tmp_path / "whole")


@pytest.mark.campaign
@pytest.mark.parametrize("devices", [[*DDP, "trainer.devices=2"], ["strategy=fsdp", "trainer.devices=2"]])
def test_two_processes_train_what_they_do_in_32_bits(devices, corpora, cache, checkpoint, tmp_path):
    options = command(corpora, cache, "trainer.accelerator=cpu", *SMALL_HF, "method=lora", *devices)
    options += [f"model.name_or_path={checkpoint}", "trainer.steps=2"]
    for name, changes in {"narrow": [], "wide": [WIDE]}.items():
        (tmp_path / name).mkdir()
        log = tmp_path / name / "out" / "log"
        assert launch(tmp_path / name, tmp_path / name / "out", *options, *changes) == 0, log.read_text()
    assert_same_bits(tmp_path / "narrow/run", tmp_path / "wide/run")
