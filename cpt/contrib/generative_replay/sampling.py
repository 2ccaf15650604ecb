"""Sampling from a model by keyed random numbers, with transformers' `generate`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from cpt.models.forward import is_written_whole, set_temporarily


@dataclass(frozen=True)
class Sampling:
    """Sampling from softmax(logits / `temperature`), cut to the likeliest tokens of total probability `top_p`
    (Holtzman et al., ICLR 2020), with ids below `entries`, up to the token `end`."""

    temperature: float
    top_p: float
    entries: int
    end: int

    def choose(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """Tokens [B] of logits [B, V] by numbers [B] in [0, 1): the inverse of the distribution function over
        tokens from the likeliest on, equal ones in the order of their ids."""
        chances = (logits.double() / self.temperature).softmax(-1)
        ordered, tokens = chances.sort(dim=-1, descending=True, stable=True)
        sums = ordered.cumsum(-1)
        kept = sums - ordered < self.top_p  # the likeliest always
        whole = (ordered * kept).sum(-1, keepdim=True)
        places = (sums <= uniforms[:, None].to(sums) * whole).sum(-1)
        places = torch.minimum(places, kept.sum(-1) - 1)  # where the sum was rounded down
        return tokens.gather(-1, places[:, None])[:, 0]


class KeyedSampling(LogitsProcessor):
    """Leaves one token to greedy search, chosen by numbers [B, most]; `nll` [B, most] are its nats."""

    def __init__(self, sampling: Sampling, uniforms: Tensor) -> None:
        self.sampling, self.uniforms, self.step = sampling, uniforms, 0
        self.nll = torch.zeros(uniforms.shape, dtype=torch.double, device=uniforms.device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logits = scores.float()
        logits[:, self.sampling.entries :] = -torch.inf
        chosen = self.sampling.choose(logits, self.uniforms[:, self.step])[:, None]
        self.nll[:, self.step] = -logits.log_softmax(-1).gather(1, chosen)[:, 0].double()
        self.step += 1
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)


@torch.no_grad()
def sample_texts(
    model: PreTrainedModel, contexts: Sequence[Sequence[int]], uniforms: Tensor, *, sampling: Sampling
) -> list[tuple[list[int], float]]:
    """Continuations of contexts of one length: up to uniforms.shape[1] ids, with the end if it was written,
    and their mean nll (nats). Token t of text b is a function of uniforms[b, t] and what precedes it."""
    given = torch.tensor(contexts, device=model.device)
    how = GenerationConfig(
        max_new_tokens=uniforms.shape[1],
        do_sample=False,
        num_beams=1,
        use_cache=not is_written_whole(model),
        eos_token_id=sampling.end,
        pad_token_id=sampling.end,
        decoder_start_token_id=getattr(model.config, "decoder_start_token_id", None),
    )
    keyed = KeyedSampling(sampling, uniforms.to(model.device))
    inputs = {"input_ids": given, "attention_mask": torch.ones_like(given)}
    with set_temporarily((model, "generation_config", how)):  # and not the checkpoint's own
        found = model.generate(**inputs, logits_processor=LogitsProcessorList([keyed]))
    texts, first = [], 1 if model.config.is_encoder_decoder else given.shape[1]
    for row, nll in zip(found[:, first:].tolist(), keyed.nll, strict=True):
        size = row.index(sampling.end) + 1 if sampling.end in row else len(row)
        texts.append((row[:size], float(nll[:size].mean())))
    return texts
