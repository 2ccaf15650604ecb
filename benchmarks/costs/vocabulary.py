"""Seconds and memory of losses from logits in chunks over those from whole logits, by size of the vocabulary.

A small Llama is trained and evaluated on the same batch in turns, with logits in chunks
(cpt.models.chunked_head), with whole logits and, where it can, with torch's `linear_cross_entropy`. Its body
is small, so that the head and the loss are most of a step. Memory is measured for several numbers of scored
tokens. Times are CPU times, so that other programs on the machine count little."""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import LinearCrossEntropyOptions
from torch.nn.functional import linear_cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from cpt.core.memory import keep_freed_blocks, read_peak_bytes, reset_peak_bytes, trim_heap
from cpt.data.collate import Batch, label_batch
from cpt.models import chunked_head
from cpt.models.chunked_head import WeightedLoss, make_nll
from cpt.models.forward import kl_divergence, select_positions
from cpt.models.objectives import Causal

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/
from common.ground import make_parser
from common.measuring import compare_times, rotate, save, summarize_times, wait_until_quiet
from common.stage import prepare

WHOLE = 2**62  # logits that are computed at once, at most
LIMITS = {"chunks": chunked_head.MAX_LOGITS, "whole": WHOLE, "torch": WHOLE}
PARTS_OF_TOKENS = (0.5, 1.0, 2.0)  # for which the memory of chunks is measured
Loss = Callable[[LlamaForCausalLM, Batch], Tensor]


def sum_loss(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """The loss of a training step of most methods."""
    return Causal().sum_nll(model, batch)


def sum_losses_by_position(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """The loss of importances, which need that of each position."""
    return Causal().nll(model, batch).sum()


def distill(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """The loss of `kd`. The teacher has the same weights, the term a gradient of 0, in the same time."""
    objective = Causal()
    with torch.no_grad():
        teacher, _ = objective.keep_logits(model, batch)

    def divergence(logits: Tensor, positions: slice) -> Tensor:
        return kl_divergence(teacher.select(positions), logits)

    losses = {"lm": WeightedLoss(make_nll(batch)), "kd": WeightedLoss(divergence)}
    sums, _ = objective.sum_losses(model, batch, losses)
    return sums["lm"] + sums["kd"]


def compare_passes(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """The KL term of `das` and `dga` between two passes, here the first and second half of the batch."""

    def compare(logits: Tensor, positions: slice) -> Tensor:
        return kl_divergence(*logits.chunk(2))

    value, _ = Causal().run(model, batch, lambda logits: logits.values(compare, passes=2))
    return value.sum()


def replay(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """The loss of `derpp`: the hidden states at the scored positions are matched as well."""
    sums, hidden = Causal().sum_losses(model, batch, {"lm": WeightedLoss(make_nll(batch))})
    return sums["lm"] + select_positions(hidden, batch["positions"]).square().mean()


def sum_loss_of_torch(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    hidden = model.model(input_ids=batch["input_ids"]).last_hidden_state
    return linear_cross_entropy(
        select_positions(hidden, batch["positions"]),
        model.lm_head.weight,
        batch["targets"],
        reduction="sum",
        options=LinearCrossEntropyOptions(),
    )


@dataclass(frozen=True)
class Pass:
    """What is measured: a loss, with its backward pass unless it is only evaluated."""

    loss: Loss
    is_trained: bool = True
    has_frozen_head: bool = False
    has_torch: bool = False  # whether torch's function computes it
    share: float = 1.0  # of the tokens: whole logits of several models are as large as those of one


PASSES = {
    "train": Pass(sum_loss, has_torch=True),
    "train, frozen head": Pass(sum_loss, has_frozen_head=True),
    "train, loss by position": Pass(sum_losses_by_position),
    "evaluate": Pass(sum_losses_by_position, is_trained=False),
    "kd": Pass(distill, share=0.5),
    "KL of two passes": Pass(compare_passes, share=0.5),
    "derpp": Pass(replay),
}


def build_model(vocabulary: int, width: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=1,
        num_attention_heads=width // 64,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def make_batch(vocabulary: int, tokens: int) -> Batch:
    ids = torch.randint(vocabulary, (max(1, tokens // 512), min(tokens, 512)))
    return label_batch(ids, ids.roll(-1, 1), torch.ones_like(ids).bool())


def run_pass(model: LlamaForCausalLM, batch: Batch, name: str, *, kind: str, is_16_bit: bool) -> float:
    """Makes a pass; gives its loss by token."""
    measured = PASSES[name]
    chunked_head.MAX_LOGITS = LIMITS[kind]
    model.lm_head.weight.requires_grad_(not measured.has_frozen_head)
    model.zero_grad()
    compute = sum_loss_of_torch if kind == "torch" else measured.loss
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=is_16_bit),
        torch.set_grad_enabled(measured.is_trained),
    ):
        loss = compute(model, batch) / len(batch["positions"])
    if measured.is_trained:
        loss.backward()
    return float(loss.detach())


def measure(options: Any, vocabulary: int, name: str) -> dict[str, Any]:
    """The peaks of a pass and its rounds, in turns; in a process of its own, whose heap has no holes yet."""
    keep_freed_blocks()  # as a run does
    torch.set_num_threads(options.threads)
    model = build_model(vocabulary, options.width)
    num_tokens = int(options.tokens * PASSES[name].share)
    measure_peak_of = partial(measure_peak, model, name, vocabulary=vocabulary, options=options)
    chunk_peaks = {}
    for part in PARTS_OF_TOKENS:
        part_tokens = int(num_tokens * part)
        chunk_peaks[part_tokens] = measure_peak_of(kind="chunks", tokens=part_tokens)

    kinds = ["chunks", "whole"]
    if PASSES[name].has_torch:
        kinds.append("torch")
    peaks = {kind: measure_peak_of(kind=kind, tokens=num_tokens) for kind in kinds}
    batch = make_batch(vocabulary, num_tokens)
    rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for turn in range(options.rounds):
        for kind in rotate(kinds, turn):
            wall_start = time.perf_counter()
            cpu_start = time.process_time()
            loss = run_pass(model, batch, name, kind=kind, is_16_bit=options.bf16)
            cpu = time.process_time() - cpu_start
            rounds[kind].append({"cpu": cpu, "wall": time.perf_counter() - wall_start, "loss": loss})

    seconds = {}
    losses = {}
    for kind, records in rounds.items():
        seconds[kind] = [record["cpu"] for record in records]
        losses[kind] = records[0]["loss"]
    ratios = {}
    for kind in kinds[1:]:
        ratios[f"{kind}_over_chunks"] = compare_times(seconds["chunks"], seconds[kind])
    return {
        **ratios,
        "seconds": {kind: summarize_times(times) for kind, times in seconds.items()},
        "losses": losses,
        "tokens": num_tokens,
        "peak_bytes": peaks,
        "peak_bytes_of_chunks_by_tokens": chunk_peaks,
        "rounds": rounds,
    }


def measure_peak(
    model: LlamaForCausalLM, name: str, *, kind: str, tokens: int, vocabulary: int, options: Any
) -> int:
    """Bytes that a pass adds to what the process holds."""
    batch = make_batch(vocabulary, tokens)
    device = torch.device("cpu")
    model.zero_grad()
    trim_heap()
    reset_peak_bytes(device)
    bytes_before = read_peak_bytes(device)
    run_pass(model, batch, name, kind=kind, is_16_bit=options.bf16)
    return read_peak_bytes(device) - bytes_before


def main() -> None:
    parser = make_parser("Seconds and memory of logits in chunks over whole logits.")
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[32_000, 151_936])
    parser.add_argument("--tokens", type=int, default=5_120, help="that are scored")
    parser.add_argument("--width", type=int, default=256, help="features of the hidden states")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--passes", nargs="+", default=list(PASSES), choices=PASSES)
    parser.add_argument("--bf16", action="store_true", help="bf16-mixed instead of 32 bits")
    options = parser.parse_args()
    prepare(options.threads)
    results = {}
    for vocabulary in options.vocabulary:
        for name in options.passes:
            wait_until_quiet(options.patience)
            with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
                result = pool.submit(measure, options, vocabulary, name).result()
            results[f"{vocabulary}, {name}"] = result
            print(vocabulary, name, result["whole_over_chunks"]["median"], result["peak_bytes"], flush=True)

    settings = {key: value for key, value in vars(options).items() if key not in ("cache", "out")}
    file = "vocabulary_bf16" if options.bf16 else "vocabulary"
    save(file, {"options": settings, "results": results}, out=options.out)


if __name__ == "__main__":
    main()
