"""Prompt tuning (Lester, Al-Rfou and Constant, EMNLP 2021): trained embeddings P [n, D] within a text's own.

    [e(x_1); ...; e(x_T)]  ->  [e(x_1); P; e(x_2); ...; e(x_T)]

The prompt follows the first token, so that <s> keeps its place. The output of the model's body is cut back to
the T places of the text: of a causal model the first n are cut, as the prompt's last place predicts the
second token. With encoder and decoder P precedes the encoder's input, and the decoder attends to it too.
peft's PromptTuning puts the prompt before <s> and has no form for masked language models."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel

from cpt.adapters.domain_store import BASE, DomainParams, Scope
from cpt.models.forward import CACHES, find_body, find_input_stack
from cpt.models.fsdp import call_within
from cpt.models.loading import find_max_positions

UNCUT = WeakTensorKeyDictionary()  # an encoder's output with the prompt's places, by that without them


class PromptVectors(nn.Module):
    """Inserts the prompt `weight` [n, D], or [B, n, D] by row, into the input of a model's body `before`
    tokens from its start, and cuts its output back, with `leading` at the first places."""

    written_whole = True  # a causal model generates without a cache, and not after padding

    def __init__(
        self, weight: Tensor, *, before: int, leading: bool, placeholder: int, limit: int | None, names: list
    ) -> None:
        super().__init__()
        self.weight, self.before, self.leading = nn.Parameter(weight), before, leading
        self.placeholder, self.limit, self.names = placeholder, limit, names
        self.within = False  # whether the body's pass has started: embeddings may be computed outside it

    @property
    def positions_taken(self) -> int:
        """n: of a model's positions, those that a text can not have."""
        return self.weight.shape[-2]

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        stored = state_dict.get(f"{prefix}weight", self.weight)
        if len(stored) != len(self.weight):  # n is what the state has
            self.weight = nn.Parameter(self.weight.new_empty(stored.shape))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def insert(self, given: Tensor, value: int) -> Tensor:
        """[B, T] or [B, T, D] with n columns of a value at the prompt's places."""
        between = given.new_full((len(given), self.positions_taken, *given.shape[2:]), value)
        return torch.cat([given[:, : self.before], between, given[:, self.before :]], dim=1)

    def widen(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The body's pre-hook: adds n places to each row. ValueError for inputs that do not go with it."""
        given = dict(zip(self.names, args, strict=False)) | kwargs
        given = {name: value for name, value in given.items() if value is not None}
        text, width = given.get("input_ids", given.get("inputs_embeds")), self.positions_taken
        if text is None:
            raise ValueError("a model with a prompt needs input_ids or inputs_embeds")
        for name in {*CACHES, "encoder_hidden_states"} & given.keys():
            raise ValueError(f"a model with a prompt takes no {name}; to generate: use_cache=False")
        length, mask = text.shape[1], given.get("attention_mask")
        if self.limit is not None and length + width > self.limit:
            raise ValueError(f"{length} tokens and a prompt of {width}. Allowed: {self.limit} together")
        if mask is not None and (mask.ndim != 2 or not mask[:, 0].all()):
            raise ValueError("a prompt takes an attention_mask [B, T] of rows that are padded at their end")
        filled = {"inputs_embeds": 0, "attention_mask": 1, "token_type_ids": 0, "input_ids": self.placeholder}
        for name, value in filled.items():
            if name in given:
                given[name] = self.insert(given[name], value)
        if "inputs_embeds" in given:
            given["inputs_embeds"] = self.fill(given["inputs_embeds"])
        if (places := given.get("position_ids")) is not None:  # they count on through the prompt
            steps = torch.arange(1, width + 1, device=places.device)
            parts = [places[:, :1], places[:, :1] + steps, places[:, 1:] + width]
            given["position_ids"] = torch.cat(parts, 1)
        self.within = True
        return (), given

    def fill(self, embeddings: Tensor) -> Tensor:
        """Widened embeddings [B, T + n, D] with the prompt at its places."""
        prompt = self.weight.to(embeddings).expand(len(embeddings), -1, -1)
        after = self.before + self.positions_taken
        return torch.cat([embeddings[:, : self.before], prompt, embeddings[:, after:]], dim=1)

    def embed(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return self.fill(output) if self.within else output

    def cut(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The forward hook of the body: its output, and all layers', at the text's places."""
        self.within, width = False, self.positions_taken

        def narrow(hidden: Tensor) -> Tensor:
            kept = hidden[:, 1 + width :]
            return hidden[:, width:] if self.leading else torch.cat([hidden[:, :1], kept], 1)

        if output is not None:  # None where the pass has failed
            uncut = output.last_hidden_state
            output.last_hidden_state = narrow(uncut)
            if self.before == 0:  # an encoder's
                UNCUT[output.last_hidden_state] = uncut
            if output.get("hidden_states") is not None:
                output.hidden_states = tuple(narrow(each) for each in output.hidden_states)
        return output

    def restore(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The decoder's pre-hook: it attends to the prompt too. ValueError for another encoder's output."""
        seen, mask = kwargs.get("encoder_hidden_states"), kwargs.get("encoder_attention_mask")
        if seen is None or seen not in UNCUT:
            raise ValueError("a decoder takes a prompt from its encoder; to generate: num_beams=1")
        given = {**kwargs, "encoder_hidden_states": UNCUT[seen]}
        if mask is not None:
            given["encoder_attention_mask"] = self.insert(mask, 1)
        return args, given


class PromptChain(DomainParams):
    """Prompts of domains; the parameters of domain k are [P_k; ...; P_1] (Progressive Prompts)."""

    def weights(self, domain: int) -> dict[str, Tensor]:
        stored = super().weights
        if domain == BASE:
            return stored(BASE)
        links = [stored(each) for each in reversed(self.domains) if each <= domain]
        return {name: torch.cat([each[name] for each in links]) for name in links[0]}

    def before(self, domain: int) -> list[int]:
        """The domains before one that have a prompt, ascending."""
        return [each for each in self.domains if each < domain]


def attach_prompt(model: PreTrainedModel, *, tokens: int, causal: bool) -> Scope:
    """Adds a prompt of `tokens` random ordinary tokens' vectors; `causal`: outputs predict the next token."""
    both, inner = model.config.is_encoder_decoder, find_input_stack(model)
    table = inner.get_input_embeddings() if both else model.get_input_embeddings()
    special = special_ids(model)
    part = PromptVectors(
        draw_prompt(model, tokens),
        before=0 if both else 1,
        leading=causal or both,
        placeholder=next(number for number in range(len(special) + 1) if number not in special),
        limit=find_max_positions(model),
        names=[*inspect.signature(inner.forward).parameters],
    )
    inner.add_module("prompt", part)
    inner.register_forward_pre_hook(part.widen, with_kwargs=True)
    table.register_forward_hook(part.embed)
    inner.register_forward_hook(part.cut, always_call=True)
    if both:
        find_body(model).register_forward_pre_hook(part.restore, with_kwargs=True)
    return Scope(tuple(name for name, weight in model.named_parameters() if weight is part.weight), ())


@torch.no_grad()
def draw_prompt(model: PreTrainedModel, tokens: int, generator: torch.Generator | None = None) -> Tensor:
    """The input embeddings of random ordinary tokens, [tokens, D]; one may come twice."""
    table, special = model.get_input_embeddings(), special_ids(model)
    ordinary = torch.tensor([number for number in range(table.num_embeddings) if number not in special])
    chosen = ordinary[torch.randint(len(ordinary), (tokens,), generator=generator)]
    return call_within(model, table, chosen.to(model.device)).clone()


def special_ids(model: PreTrainedModel) -> set[int]:
    """The token ids that a model's configuration names, the padding's among them."""
    fields = model.config.to_dict().items()
    named = [value for name, value in fields if name.endswith("_token_id") and value is not None]
    return {number for value in named for number in (value if isinstance(value, list) else [value])}
