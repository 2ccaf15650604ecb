"""Options of `replay=generated`, checked without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from cpt.core.exceptions import InvalidOptionError
from cpt.core.schema import BelowOne, Count, Natural, Positive, PositiveShare, Steps, Text, config, option
from cpt.data.replay import ReplayConfig, ReplaySource, to_fraction


@config
class GeneratedReplay(ReplayConfig):
    """Text that the model writes before a stage, of each past domain, in place of that domain's own."""

    is_generated: ClassVar[bool] = True

    max_tokens: Steps | None = option("tokens generated per past domain and stage; null: as many as replayed")
    drop: BelowOne = option("share of generated tokens to discard: the texts of highest perplexity")
    prefix: Natural = option("tokens of real text that each generated text continues; 0: none are stored")
    starts: Count = option("prefixes stored per domain, from its importance samples")
    prompt: Text | None = option("prompt before each generated text, not replayed; {domain}: its name")
    forms: BelowOne = option(
        "share of the supervised examples whose questions are trained too, so that the model can "
        "generate examples later"
    )
    temperature: Positive = option("sampling temperature")
    top_p: PositiveShare = option("nucleus sampling: cumulative probability of the likeliest tokens")
    batch_size: Count = option("texts that a process generates at once")

    def check_conflicts(
        self,
        *,
        has_examples: bool,
        has_chats: bool,
        max_seq_length: int,
        batch_size: int,
        is_sharded: bool,
    ) -> None:
        if self.prefix >= max_seq_length and not has_examples:
            raise InvalidOptionError(
                "replay.prefix",
                self.prefix,
                reason=f"it leaves nothing to generate of model.max_seq_length={max_seq_length}",
                allowed=f"0 to {max_seq_length - 1}, or a larger model.max_seq_length",
            )
        if has_examples:
            self.check_examples(batch_size)
        if has_chats:
            raise InvalidOptionError(
                "replay", "generated", reason="no model learns to write chats", allowed="replay=past"
            )
        if is_sharded:
            raise InvalidOptionError(
                "replay",
                "generated",
                reason="strategy=fsdp leaves each process a shard of the model",
                allowed="strategy=single, ddp",
            )

    def check_examples(self, batch_size: int) -> None:
        """Raises ValueError for options that do not go with domains of examples."""
        prompt = self.prompt or "{domain}"  # the writer's default prompt names it
        if "{domain}" not in prompt:
            raise InvalidOptionError(
                "replay.prompt",
                prompt,
                reason="it does not name the domain of an example",
                allowed="null, or a text with {domain}",
            )
        if self.general_ratio:
            raise InvalidOptionError(
                "replay.general_ratio",
                self.general_ratio,
                reason="replay=generated writes examples of these domains, not text",
                allowed="0",
            )

        # The shares have to leave some of the batch; where they displace new samples, one at least.
        num_new = batch_size * (1 - to_fraction(self.past_ratio) - to_fraction(self.forms))
        if num_new <= 0 or (num_new < 1 and not self.is_appended):
            raise ValueError(
                f"replay.past_ratio={self.past_ratio} with replay.forms={self.forms} is invalid: "
                f"{float(num_new):g} new samples remain in a batch of trainer.batch_size={batch_size}. "
                "Allowed: 1 or more"
            )

    def check_objective(self, objective: str, *, model: str, examples: bool) -> None:
        if objective != "causal" and not examples:
            fills = "masks" if objective == "masked" else "spans"
            raise InvalidOptionError(
                "replay",
                "generated",
                reason=f"{model} fills {fills} and cannot generate text",
                allowed="replay=past, or a causal model like model=tiny_gpt2",
            )

    def open_source(
        self, folder: Path, *, module: Any, data: Any, corpora: Any, base: Any, seed: int
    ) -> ReplaySource:
        from cpt.contrib.generative_replay import writer  # loads torch

        writer_class = writer.TextWriter if corpora.encoding is None else writer.ExampleWriter
        return writer_class(self, folder, module=module, data=data, corpora=corpora, base=base, seed=seed)
