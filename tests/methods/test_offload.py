"""Less memory and less time with what every method computes: weights that rest in the host's memory."""

import pytest
import torch

from cpt.models import fast_kernels
from tests.methods.test_contract import LEARNING, bits, read_scores
from tests.support.campaign import run_few
from tests.support.hook_methods import overrides_for
from tests.support.kill_callback import KilledError, Killer
from tests.support.method_fixtures import DROPOUT, ORDER

OFFLOAD, AGAIN = "trainer.offload_method_state=true", "trainer.gradient_checkpointing=true"
# Methods with options that keep something of weights.
KEPT = """ewc|ewc estimator=batch merge=decay|l2|l2 towards=base|kd|ema|dga|one|wise_ft|demix|hat|progprompt
demix experts=adapter|adapter per_domain=true|lora per_domain=true|prompt num_virtual_tokens=3|olora|sapt
cpt_plugin|hat form=adapter|prompt num_virtual_tokens=3 per_domain=false|peft per_domain=true|lifelong_moe|mas
si|recadam|reptile|osf
merge|merge rule=fisher start=previous|merge rule=ties start=base|merge_lora
ncl optim.state_across_domains=moments|ncl lr_scheduler=wsd lr_scheduler.decay=0.5""".replace(
    "\n", "|"
).split("|")


def options_of(kind: str) -> list[str]:
    method, *options = kind.split()
    plain = [option if "." in option or method == "ncl" else f"method.{option}" for option in options]
    return [f"method={method}", *plain, ORDER]


@pytest.mark.parametrize("kind", run_few(KEPT, ["demix"]))
def test_what_rests_elsewhere_has_the_same_bits(kind, small, start, killing, tmp_path):
    options = [*options_of(kind), *DROPOUT]
    start(small(*options), tmp_path / "plain")
    for name, first, second in (("on", [], [OFFLOAD]), ("back", [OFFLOAD], [])):
        killing(Killer(step=3, domain="food"))
        with pytest.raises(KilledError):
            start(small(*options, *first), tmp_path / name)
        killing(None)
        start(small(*options, *second), tmp_path / name)
        assert bits(tmp_path / name) == bits(tmp_path / "plain"), name


@pytest.mark.parametrize("method", run_few(LEARNING, ["das"]))
def test_activations_that_are_computed_again_give_the_same_bits(method, small, start, tmp_path):
    for name, options in {"kept": [], "again": [AGAIN]}.items():
        start(small(*overrides_for(method), ORDER, *DROPOUT, *options), tmp_path / name)
    assert bits(tmp_path / "kept") == bits(tmp_path / "again")
    stored, recomputed = (read_scores(tmp_path / name) for name in ("kept", "again"))
    assert recomputed["flops"][-1] > stored["flops"][-1]  # they are indeed


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of dynamo itself
@pytest.mark.parametrize("method", run_few(LEARNING, []))
def test_compiled_blocks_compute_what_blocks_do(method, small, start, tmp_path, monkeypatch):
    monkeypatch.setitem(fast_kernels.COMPILE_OPTIONS, "backend", "eager")  # traced, and run as it was
    variants = {"plain": "trainer.quick_dropout=false", "compiled": "trainer.compile=true"}
    for name, option in variants.items():
        torch._dynamo.reset()
        start(small(*overrides_for(method), ORDER, *DROPOUT, "trainer.steps=3", option), tmp_path / name)
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    plain, compiled = (torch.tensor(read_scores(tmp_path / name)["nll"]) for name in ("plain", "compiled"))
    torch.testing.assert_close(plain, compiled, rtol=1e-5, atol=1e-5)
