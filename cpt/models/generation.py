"""What a model writes: one call of transformers' `generate`, which is told all there is to say."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel


@contextmanager
def generating(model: PreTrainedModel, how: GenerationConfig) -> Iterator[None]:
    """A model that generates so and in no other way: what a call leaves open, like a penalty for repeating,
    would be as its checkpoint says."""
    before = model.generation_config
    model.generation_config = how
    try:
        yield
    finally:
        model.generation_config = before


def is_written_whole(model: PreTrainedModel) -> bool:
    """Whether a decoder has a part that takes rows of its own, so that nothing can be cached, and only rows
    of one length go together."""
    own = any(getattr(part, "written_whole", False) for part in model.modules())
    return own and not model.config.is_encoder_decoder


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled: from softmax(logits / `temperature`), cut to the likeliest tokens whose
    probability comes to `top_p` (Holtzman et al., ICLR 2020). Of ids from `entries` on, which no tokenizer
    gives, none is."""

    temperature: float
    top_p: float
    entries: int
    end: int  # the token that ends a text

    def choose(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """Tokens [B] of logits [B, V], by numbers [B] in [0, 1): the inverse of the distribution function
        over tokens from the likeliest on, of equal ones in the order of their ids."""
        probabilities = (logits.double() / self.temperature).softmax(-1)
        ordered, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
        sums = ordered.cumsum(-1)
        kept = sums - ordered < self.top_p  # the likeliest always
        whole = (ordered * kept).sum(-1, keepdim=True)
        places = (sums <= uniforms[:, None].to(sums) * whole).sum(-1)
        places = torch.minimum(places, kept.sum(-1) - 1)  # where the sum was rounded down
        return tokens.gather(-1, places[:, None])[:, 0]


class Keyed(LogitsProcessor):
    """Leaves one token for the greedy search to find: that which the numbers [B, most] choose, number t for
    token t. `nll` [B, most] are the nats of the tokens chosen, to the model as it is."""

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
    """What a model writes behind contexts of one length, which its encoder reads if it has one: of each the
    ids, with the end if one was written, and their mean nll (nats). Of text b token t is a function of
    uniforms[b, t] and what stands before it; at most uniforms.shape[1] tokens are written."""
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
    keyed = Keyed(sampling, uniforms.to(model.device))
    with generating(model, how):
        found = model.generate(
            input_ids=given,
            attention_mask=torch.ones_like(given),
            logits_processor=LogitsProcessorList([keyed]),
        )
    texts, first = [], 1 if model.config.is_encoder_decoder else given.shape[1]
    for row, nll in zip(found[:, first:].tolist(), keyed.nll, strict=True):
        size = row.index(sampling.end) + 1 if sampling.end in row else len(row)
        texts.append((row[:size], float(nll[:size].mean())))
    return texts
