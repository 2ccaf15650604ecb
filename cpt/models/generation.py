"""Sampling from a model by keyed random numbers, with transformers' `generate`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from cpt.models.forward import set_temporarily, supports_kv_cache


@dataclass(frozen=True)
class Sampling:
    """Sampling from softmax(logits / `temperature`), cut to the likeliest tokens of total probability `top_p`
    (nucleus sampling, Holtzman et al., ICLR 2020). `entries` is the size of the tokenizer's vocabulary: rows
    of the output layer beyond it have no token. A text ends with the token `end`."""

    temperature: float
    top_p: float
    entries: int
    end: int

    def choose(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """Tokens [B] of logits [B, V] by numbers [B] in [0, 1): the inverse of the distribution function over
        tokens from the likeliest on, equal ones in the order of their ids."""
        probabilities = (logits.double() / self.temperature).softmax(-1)
        sorted_probabilities, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
        sums = sorted_probabilities.cumsum(-1)
        nucleus_mask = sums - sorted_probabilities < self.top_p  # the likeliest always
        nucleus_probability = (sorted_probabilities * nucleus_mask).sum(-1, keepdim=True)

        # As many tokens come before the chosen one as have a sum up to the number.
        ranks = (sums <= uniforms[:, None].to(sums) * nucleus_probability).sum(-1)
        ranks = torch.minimum(ranks, nucleus_mask.sum(-1) - 1)  # where the sum was rounded down
        return tokens.gather(-1, ranks[:, None])[:, 0]


class KeyedSampling(LogitsProcessor):
    """Leaves one token to greedy search, chosen by numbers [B, T]; `nll` [B, T] are its nats."""

    def __init__(self, sampling: Sampling, uniforms: Tensor) -> None:
        self.sampling = sampling
        self.uniforms = uniforms
        self.step = 0  # of the T tokens
        self.nll = torch.zeros(uniforms.shape, dtype=torch.double, device=uniforms.device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logits = scores.float()
        logits[:, self.sampling.entries :] = -torch.inf  # rows of the head without a token
        chosen = self.sampling.choose(logits, self.uniforms[:, self.step])[:, None]
        self.nll[:, self.step] = -logits.log_softmax(-1).gather(1, chosen)[:, 0].double()
        self.step += 1
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)


@torch.no_grad()
def sample_texts(
    model: PreTrainedModel, contexts: Sequence[Sequence[int]], uniforms: Tensor, *, sampling: Sampling
) -> list[tuple[list[int], float]]:
    """A continuation of each of `contexts` [B], which have one length for an encoder-decoder and for a model
    without a key-value cache. Returns by text the new ids, up to and with the token `sampling.end` if the
    model wrote it, else T of them, and their mean nll (nats). Token t of text b is a function of
    uniforms[b, t], [B, T], and of the tokens before it."""
    context_ids, attention_mask = pad_prompts(contexts, padding=sampling.end, on_the_left=True)
    config = GenerationConfig(
        max_new_tokens=uniforms.shape[1],
        do_sample=False,
        num_beams=1,
        use_cache=supports_kv_cache(model),
        eos_token_id=sampling.end,
        pad_token_id=sampling.end,
        decoder_start_token_id=getattr(model.config, "decoder_start_token_id", None),
    )
    keyed_sampling = KeyedSampling(sampling, uniforms.to(model.device))

    # A checkpoint's own generation config, with penalties for example, would change the distribution.
    with set_temporarily((model, "generation_config", config)):
        output_ids = model.generate(
            input_ids=context_ids.to(model.device),
            attention_mask=attention_mask.to(model.device),
            logits_processor=LogitsProcessorList([keyed_sampling]),
        )

    # A decoder's output begins with its context, that of an encoder-decoder with one start token.
    first = 1 if model.config.is_encoder_decoder else context_ids.shape[1]
    texts = []
    for ids, nll in zip(output_ids[:, first:].tolist(), keyed_sampling.nll, strict=True):
        # A batch is as long as its longest text: after their end the shorter ones are padded.
        size = ids.index(sampling.end) + 1 if sampling.end in ids else len(ids)
        texts.append((ids[:size], float(nll[:size].mean())))
    return texts


def pad_prompts(
    prompts: Sequence[Sequence[int]], *, padding: int, on_the_left: bool
) -> tuple[Tensor, Tensor]:
    """Prompts as token ids, with the token `padding` on one side, and the attention mask; both [B, T] with T
    the length of the longest prompt."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), width), padding)
    mask = torch.zeros((len(prompts), width), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        begin = width - len(prompt) if on_the_left else 0
        ids[row, begin : begin + len(prompt)] = torch.tensor(prompt)
        mask[row, begin : begin + len(prompt)] = 1
    return ids, mask
