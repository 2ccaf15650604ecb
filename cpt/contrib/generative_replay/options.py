"""Options of `replay=generated`, checked without torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from cpt.core.schema import BelowOne, Count, Natural, Positive, PositiveShare, Steps, Text, config, option
from cpt.data.replay import ReplayConfig, ReplaySource, exact


@config
class GeneratedReplay(ReplayConfig):
    """Text that the model writes before a stage, of each past domain, in place of that domain's own."""

    generates: ClassVar[bool] = True

    max_tokens: Steps | None = option(
        "tokens written of each past domain before a stage; null: as many as it replays"
    )
    drop: BelowOne = option("share of the tokens written to leave out: texts of the highest perplexity")
    prefix: Natural = option("tokens of real text that each text continues; 0: none is kept")
    starts: Count = option("such prefixes that are kept of a domain, from its probe")
    prompt: Text | None = option("text before each, which is not replayed; {domain}: the domain's name")
    forms: BelowOne = option(
        "of domains of examples: share of the batch in which the domain's own are learned as a whole, with "
        "their questions, so that the model can write some later"
    )
    temperature: Positive = option("of sampling: logits are divided by it")
    top_p: PositiveShare = option("of sampling: probability of the likeliest tokens")
    batch_size: Count = option("texts that a process writes at once")

    def conflicts(
        self, *, examples: bool, chats: bool, length: int, batch_size: int, sharded: bool
    ) -> Iterator[str]:
        new = batch_size * (1 - exact(self.past_ratio) - exact(self.forms))
        prompt = self.prompt or "{domain}"
        found = {
            f"replay.prefix={self.prefix}, which leaves nothing to write of model.max_seq_length={length}; "
            "allowed: fewer": self.prefix >= length and not examples,
            f"replay.prompt={prompt} does not say of which domain an example is to be written; "
            "allowed: null, or a text with {domain}": examples and "{domain}" not in prompt,
            f"replay.general_ratio={self.general_ratio} with replay=generated and domains of examples, which "
            "are no text; allowed: 0": examples and self.general_ratio,
            f"replay.past_ratio={self.past_ratio} and replay.forms={self.forms}, which leaves {float(new):g} "
            f"new samples in a batch of trainer.batch_size={batch_size}; allowed: 1 or more": (
                examples and new < 1 and (not self.adds or new <= 0)
            ),
            "replay=generated does not go with chats, which no model learns to write; "
            "allowed: replay=past": chats,
            "replay=generated needs the whole model, of which strategy=fsdp leaves each process a shard; "
            "allowed: strategy=single, ddp": sharded,
        }
        return (message for message, holds in found.items() if holds)

    def check_objective(self, objective: str, *, model: str, examples: bool) -> None:
        if objective != "causal" and not examples:
            fills = "masks" if objective == "masked" else "spans"
            told = f"replay=generated asks a model to write text, and {model} fills {fills}"
            raise ValueError(f"{told}; allowed: replay=past, or a causal model like model=tiny_gpt2")

    def open_source(self, folder: Path, *, corpora: Any, **run: Any) -> ReplaySource:
        from cpt.contrib.generative_replay import writer  # loads torch

        kind = writer.TextWriter if corpora.encoding is None else writer.ExampleWriter
        return kind(self, folder, corpora=corpora, **run)
