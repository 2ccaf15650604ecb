"""How attention is computed fastest on a CPU: torch's own and eager, in 32 and in 16 bits, forward and
backward, in turns.

    python benchmarks/costs/attention.py

`trainer.attn_implementation=auto` rests on it: eager in 16 bits, of rows of up to 512 tokens."""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/
from common.measuring import RESULTS, compare_times, save, wait_until_quiet

SHAPES = [
    (32, 4, 64, 32),
    (16, 4, 128, 64),
    (8, 12, 256, 64),
    (4, 12, 384, 64),
    (4, 12, 512, 64),
    (2, 12, 1024, 64),
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DROPOUT = (0.0, 0.1)


def attend_eagerly(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    """As transformers has it."""
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    weights = scores.softmax(-1, dtype=torch.float32).to(query)
    return functional.dropout(weights, dropout) @ value


def attend_by_sdpa(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout)


KINDS: dict[str, Callable[..., Tensor]] = {"sdpa": attend_by_sdpa, "eager": attend_eagerly}


def time_pass(kind: str, heads: list[Tensor], dropout: float, *, calls: int) -> float:
    """Seconds of a pass forward and backward."""
    start_time = time.process_time()
    for _ in range(calls):
        inputs = [tensor.detach().requires_grad_() for tensor in heads]
        KINDS[kind](*inputs, dropout).sum().backward()
    return (time.process_time() - start_time) / calls


def measure(shape: tuple[int, int, int, int], dropout: float, *, rounds: int) -> dict[str, dict]:
    batch, num_heads, length, width = shape
    inputs = [torch.randn(batch, length, num_heads, width).transpose(1, 2) for _ in range(3)]
    subjects = list(product(DTYPES, KINDS))
    seconds: dict[tuple[str, str], list[float]] = {subject: [] for subject in subjects}
    calls = max(1, int(2e7 / (batch * num_heads * length**2)))
    heads = {}
    for name, dtype in DTYPES.items():
        heads[name] = [tensor.to(dtype) for tensor in inputs]

    for turn in range(rounds + 1):
        for dtype, kind in subjects:
            pass_seconds = time_pass(kind, heads[dtype], dropout, calls=calls)
            if turn > 0:
                seconds[dtype, kind].append(pass_seconds)

    results = {}
    for dtype in DTYPES:
        results[dtype] = {"sdpa over eager": compare_times(seconds[dtype, "eager"], seconds[dtype, "sdpa"])}
        for kind in KINDS:
            results[dtype][f"{kind}_ms"] = 1000 * statistics.median(seconds[dtype, kind])
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--patience", type=float, default=300, help="seconds to wait for a quiet machine")
    parser.add_argument("--out", default=str(RESULTS / "attention.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    waited = wait_until_quiet(options.patience)
    results = {}
    for shape in SHAPES:
        for dropout in DROPOUT:
            name = f"{shape[0]} x {shape[1]} heads x {shape[2]} tokens x {shape[3]}, dropout {dropout}"
            results[name] = measure(shape, dropout, rounds=options.rounds)
            ratios = {
                dtype: f"{figures['sdpa over eager']['median']:.2f}"
                for dtype, figures in results[name].items()
            }
            print(name, ratios, flush=True)
    save("attention", {"threads": options.threads, "waited": waited, "found": results}, out=options.out)


if __name__ == "__main__":
    main()
