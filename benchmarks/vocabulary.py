"""Seconds and memory of a step with logits in chunks over one with whole logits, by size of the vocabulary.

A small Llama is trained and evaluated on the same batch in turns, with logits in chunks
(cpt.models.chunked_head) and whole. Its body is small, so that the head and the loss are most of a step.
Times are those of the processor, so that other programs on the machine count little."""

import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from ground import make_parser
from measuring import compare_times, rotate, save, summarize_times, wait_until_quiet
from stage import prepare
from transformers import LlamaConfig, LlamaForCausalLM

from cpt.core.memory import forget_peak, give_back, keep_free, peak
from cpt.data.collate import Batch, label_batch
from cpt.models import chunked_head
from cpt.models.objectives import Causal

WHOLE = 2**62  # logits that are computed at once, at most
LIMITS = {"chunks": chunked_head.MAX_LOGITS, "whole": WHOLE}
PASSES = ("train", "train, frozen head", "evaluate")


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


def run_pass(model: LlamaForCausalLM, batch: Batch, name: str, *, limit: int, is_16_bit: bool) -> float:
    """Makes a pass; gives its loss."""
    chunked_head.MAX_LOGITS = limit
    model.lm_head.weight.requires_grad_(name != "train, frozen head")
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_16_bit):
        if name == "evaluate":
            with torch.no_grad():
                return float(Causal().nll(model, batch).mean())
        loss = Causal().sum_nll(model, batch) / len(batch["positions"])
    loss.backward()
    return float(loss.detach())


def measure(options: Any, vocabulary: int, name: str) -> dict[str, Any]:
    """The peaks of a pass and its rounds, in turns; in a process of its own, whose heap has no holes yet."""
    keep_free()  # as a run does
    torch.set_num_threads(options.threads)
    model = build_model(vocabulary, options.width)
    batch = make_batch(vocabulary, options.tokens)
    peak_bytes = {}
    for kind, limit in LIMITS.items():
        peak_bytes[kind] = measure_peak(model, batch, name, limit=limit, options=options)
    rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in LIMITS}
    for turn in range(options.rounds):
        for kind in rotate(list(LIMITS), turn):
            wall_start = time.perf_counter()
            cpu_start = time.process_time()
            loss = run_pass(model, batch, name, limit=LIMITS[kind], is_16_bit=options.bf16)
            cpu = time.process_time() - cpu_start
            rounds[kind].append({"cpu": cpu, "wall": time.perf_counter() - wall_start, "loss": loss})

    seconds = {}
    losses = {}
    for kind, records in rounds.items():
        seconds[kind] = [record["cpu"] for record in records]
        losses[kind] = records[0]["loss"]
    return {
        "whole_over_chunks": compare_times(seconds["chunks"], seconds["whole"]),
        "seconds": {kind: summarize_times(times) for kind, times in seconds.items()},
        "losses": losses,
        "peak_bytes": peak_bytes,
        "rounds": rounds,
    }


def measure_peak(model: LlamaForCausalLM, batch: Batch, name: str, *, limit: int, options: Any) -> int:
    """Bytes that a pass adds to what the process holds."""
    processor = torch.device("cpu")
    give_back()
    forget_peak(processor)
    before = peak(processor)
    run_pass(model, batch, name, limit=limit, is_16_bit=options.bf16)
    return peak(processor) - before


def main() -> None:
    parser = make_parser("Seconds and memory of logits in chunks over whole logits.")
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[32_000, 151_936])
    parser.add_argument("--tokens", type=int, default=5_120, help="that are scored")
    parser.add_argument("--width", type=int, default=256, help="features of the hidden states")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bf16", action="store_true", help="bf16-mixed instead of 32 bits")
    options = parser.parse_args()
    prepare(options.threads)
    results = {}
    for vocabulary in options.vocabulary:
        for name in PASSES:
            wait_until_quiet(options.patience)
            with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
                result = pool.submit(measure, options, vocabulary, name).result()
            results[f"{vocabulary}, {name}"] = result
            print(vocabulary, name, result["whole_over_chunks"], result["peak_bytes"], flush=True)

    settings = {key: value for key, value in vars(options).items() if key not in ("cache", "out")}
    file = "vocabulary_bf16" if options.bf16 else "vocabulary"
    save(file, {"options": settings, "results": results}, out=options.out)


if __name__ == "__main__":
    main()
