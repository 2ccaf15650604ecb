"""What of the updates of 32 bits arrives in weights in bfloat16, by optimizer, rate and rounding.

    python benchmarks/studies/rounding.py

A small GPT-2 of random weights is trained for some steps at a constant rate, in 32-true and in bf16-true
from the same start. Of the movements u in bfloat16 and v in 32 bits: the projection u v / v v, their cosine,
and the share of weights that have moved."""

import json
import logging
import sys
from pathlib import Path

import torch
from torch import Tensor

from cpt.optim.nan_guard import NanGuard
from cpt.trainer.lightning import make_trainer

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/
from common.ground import Workload, build_workload
from common.ground import make_parser as common_arguments
from common.measuring import RESULTS

MODEL = [
    "model.vocab_size=2048",
    "model.config.n_embd=64",
    "model.config.n_layer=2",
    "model.config.n_head=2",
    "model.max_seq_length=32",
    "trainer.batch_size=8",
    "lr_scheduler=constant",
]
RATES = (1e-5, 1e-6)
OPTIMIZERS = {
    "adamw": [],
    "adamw_8bit": ["optim=adamw_8bit"],
    "muon": ["optim=muon"],
    "adafactor": ["optim=adafactor"],
    "sgd": ["optim=sgd", "optim.momentum=0.9"],
}
# Of AdamW's rate: Adafactor's is relative to the weights, and a gradient is smaller than a step of Adam.
RATE_FACTORS = {"adafactor": 50.0, "sgd": 10.0}


def collect_weights(workload: Workload) -> Tensor:
    """All weights as one vector in 32 bits."""
    return torch.cat([weight.detach().float().flatten() for weight in workload.module.model.parameters()])


def measure_movement(cache: str, *options: str, steps: int) -> Tensor:
    """How far the weights move, from a start that bfloat16 has."""
    workload = build_workload(cache, *MODEL, f"trainer.steps={steps}", *options, shape="gpt2")
    for weight in workload.module.model.parameters():
        weight.data.copy_(weight.data.bfloat16())
    start = collect_weights(workload)
    workload.module.activate(0)
    trainer = make_trainer(
        workload.machine.lightning_arguments(workload.plan.trainer),
        label="rounding",
        steps=steps,
        callbacks=[NanGuard()],
    )
    trainer.fit(workload.module, datamodule=workload.data)
    return collect_weights(workload) - start


def compare(movement: Tensor, expected: Tensor) -> dict[str, float]:
    product = torch.dot(movement.double(), expected.double())
    return {
        "projection": float(product / expected.double().square().sum()),
        "cosine": float(product / movement.double().norm() / expected.double().norm()),
        "moved": float((movement != 0).double().mean()),
    }


def main() -> None:
    parser = common_arguments(__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--optimizers", nargs="*", default=list(OPTIMIZERS))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.disable(logging.WARNING)

    results = {}
    for name in options.optimizers:
        for rate in RATES:
            choice = [*OPTIMIZERS[name], f"optim.lr={rate * RATE_FACTORS.get(name, 1.0)}"]
            expected = measure_movement(
                options.cache, *choice, "trainer.precision=32-true", steps=options.steps
            )
            for rounding in ("stochastic", "nearest"):
                bf16 = ["trainer.precision=bf16-true", f"optim.rounding={rounding}"]
                movement = measure_movement(options.cache, *choice, *bf16, steps=options.steps)
                label = f"{name}, {rate:g}, {rounding}"
                results[label] = compare(movement, expected)
                print(label, json.dumps(results[label]), flush=True)
    Path(options.out or RESULTS / "rounding.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
