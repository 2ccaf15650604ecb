"""Prompt tuning (Lester, Al-Rfou and Constant, EMNLP 2021): trained embeddings P [n, D] within a text's own.

    [e(x_1); ...; e(x_T)]  ->  [e(x_1); P; e(x_2); ...; e(x_T)]

The prompt stands behind the first token, so that <s> keeps its place. The model's body gets n tokens more,
and what it gives is cut back to the T of the text: labels, positions and masks of a batch, the head, and
whatever an end task puts in its place are those of a model without a prompt. In a causal model the prompt's
last place predicts the second token, so the n outputs that are cut off there are the first.

Of encoder and decoder, as in the paper, P stands in front of what the encoder reads, as T5 begins no text
with a token of its own. What is cut back there comes back for the decoder, which attends to the prompt too.

peft's PromptTuning puts the prompt before <s>, where the classifiers of masked models read, has no form for
masked language models, and gives causal ones logits that are n positions longer than the text."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel

from cpt.adapters.bank import BASE, Bank, Scope
from cpt.models.forward import body, reader
from cpt.models.loading import positions_of
from cpt.models.sharding import call_within

NAME = "prompt"
ALONE = {"past_key_values", "encoder_hidden_states"}  # inputs that do not go with a prompt
FILLED = {"inputs_embeds": 0, "attention_mask": 1, "token_type_ids": 0}  # what the prompt's places get
WHOLE = WeakTensorKeyDictionary()  # of what was cut back for a decoder, what it was cut from


class PromptVectors(nn.Module):
    """Widens the input of a model's body by the prompt `weight` [n, D], and cuts its output back. n is what
    the weight at work has: 0 changes nothing; it may be one for each row, [B, n, D]. The prompt stands behind
    so many tokens as `before` says; with `leading`, the first outputs are cut off."""

    written_whole = True  # a causal model writes without a cache, and behind no padding

    def __init__(
        self,
        weight: Tensor,
        *,
        before: int,
        leading: bool,
        placeholder: int,
        limit: int | None,
        names: tuple[str, ...],
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.before, self.leading = before, leading
        self.placeholder, self.limit, self.names = placeholder, limit, names
        self.within = False  # whether the body's pass is under way: embeddings may be looked up outside it

    @property
    def positions_taken(self) -> int:
        """Of a model's positions, those that a text can not have."""
        return self.weight.shape[-2]

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        stored = state_dict.get(f"{prefix}weight", self.weight)
        if len(stored) != len(self.weight):  # n is what the state has
            self.weight = nn.Parameter(self.weight.new_empty(stored.shape))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def widen(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The body's pre-hook: in each row [B, T] n places for the prompt."""
        given = dict(zip(self.names, args, strict=False)) | kwargs
        given = {name: value for name, value in given.items() if value is not None}
        self.check(given)
        for name, value in (FILLED | {"input_ids": self.placeholder}).items():
            if name in given:
                given[name] = insert_prompt(given[name], value, self.positions_taken, before=self.before)
        if "inputs_embeds" in given:
            given["inputs_embeds"] = self.put_in(given["inputs_embeds"])
        if "position_ids" in given:
            given["position_ids"] = self.positions(given["position_ids"])
        self.within = True
        return (), given

    def check(self, given: dict[str, Any]) -> None:
        """Raises ValueError for what can not be widened."""
        text = given.get("input_ids", given.get("inputs_embeds"))
        if text is None:
            raise ValueError("a model with a prompt needs input_ids or inputs_embeds")
        for name in ALONE & given.keys():
            raise ValueError(f"a model with a prompt takes no {name}; to generate: use_cache=False")
        length, width, mask = text.shape[1], self.positions_taken, given.get("attention_mask")
        if self.limit is not None and length + width > self.limit:
            raise ValueError(f"{length} tokens and a prompt of {width}; allowed: {self.limit} together")
        if mask is not None and (mask.ndim != 2 or not mask[:, 0].all()):
            raise ValueError("a prompt takes an attention_mask [B, T] of rows that are padded at their end")

    def positions(self, given: Tensor) -> Tensor:
        """Positions [B, T] that count on through the prompt, [B, T + n]."""
        first, width = given[:, :1], self.positions_taken
        steps = torch.arange(1, width + 1, device=given.device)
        return torch.cat([first, first + steps, given[:, 1:] + width], dim=1)

    def embed(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """The hook of the input embedding."""
        return self.put_in(output) if self.within else output

    def put_in(self, embeddings: Tensor) -> Tensor:
        """Widened embeddings [B, T + n, D] with the prompt at its places."""
        prompt = self.weight.to(embeddings).expand(len(embeddings), -1, -1)
        before, behind = self.before, self.before + self.positions_taken
        return torch.cat([embeddings[:, :before], prompt, embeddings[:, behind:]], dim=1)

    def cut(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The hook of the body: its output, and all layers' where it gives them, at the text's places."""
        self.within = False
        if output is not None:  # None where the pass has failed
            whole = output.last_hidden_state
            output.last_hidden_state = self.narrowed(whole)
            if self.before == 0:  # a decoder may come
                WHOLE[output.last_hidden_state] = whole
            if output.get("hidden_states") is not None:
                output.hidden_states = tuple(self.narrowed(each) for each in output.hidden_states)
        return output

    def narrowed(self, hidden: Tensor) -> Tensor:
        """[B, T, D] of [B, T + n, D]."""
        width = self.positions_taken
        if self.leading:
            return hidden[:, width:]
        return torch.cat([hidden[:, :1], hidden[:, 1 + width :]], dim=1)

    def remind(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The decoder's pre-hook: it attends to the prompt as well. Raises ValueError where what it attends
        to is not the encoder's output itself, as with several beams."""
        seen, mask = kwargs.get("encoder_hidden_states"), kwargs.get("encoder_attention_mask")
        if seen is None or seen not in WHOLE:
            raise ValueError("a decoder takes a prompt from its encoder; to generate: num_beams=1")
        given = {**kwargs, "encoder_hidden_states": WHOLE[seen]}
        if mask is not None:
            given["encoder_attention_mask"] = insert_prompt(mask, 1, self.positions_taken, before=self.before)
        return args, given


class PromptChain(Bank):
    """Prompts of domains, of which that of domain k stands in front of those before it (Progressive Prompts;
    Razdaibiedina et al., ICLR 2023): its part is [P_k; ...; P_1]."""

    def weights(self, domain: int) -> dict[str, Tensor]:
        weights = super().weights
        if domain == BASE:
            return weights(BASE)
        links = [weights(each) for each in reversed(self.domains) if each <= domain]
        return {name: torch.cat([each[name] for each in links]) for name in links[0]}

    def before(self, domain: int) -> list[int]:
        """The domains before one that have a prompt, ascending."""
        return [each for each in self.domains if each < domain]


def insert_prompt(given: Tensor, value: int, width: int, *, before: int) -> Tensor:
    """`width` times a value behind the first columns, `before` of them, of [B, T] or [B, T, D]."""
    between = given.new_full((len(given), width, *given.shape[2:]), value)
    return torch.cat([given[:, :before], between, given[:, before:]], dim=1)


def attach_prompt(model: PreTrainedModel, *, tokens: int, causal: bool) -> Scope:
    """Gives a model a prompt of so many tokens, its vectors those of random ordinary tokens; what is to be
    trained. `causal` says that outputs predict the next token and not their own. A model takes one."""
    both, inner = model.config.is_encoder_decoder, reader(model)
    table = inner.get_input_embeddings() if both else model.get_input_embeddings()
    special = special_ids(model)
    part = PromptVectors(
        draw_prompt(model, tokens),
        before=0 if both else 1,
        leading=causal or both,
        placeholder=next(number for number in range(len(special) + 1) if number not in special),
        limit=positions_of(model),
        names=tuple(inspect.signature(inner.forward).parameters),
    )
    inner.add_module(NAME, part)
    inner.register_forward_pre_hook(part.widen, with_kwargs=True)
    table.register_forward_hook(part.embed)
    inner.register_forward_hook(part.cut, always_call=True)
    if both:
        body(model).register_forward_pre_hook(part.remind, with_kwargs=True)
    return Scope(tuple(name for name, weight in model.named_parameters() if weight is part.weight), ())


@torch.no_grad()
def draw_prompt(model: PreTrainedModel, tokens: int, generator: torch.Generator | None = None) -> Tensor:
    """What the input embedding gives for so many random tokens that the configuration does not name as
    special, [tokens, D]; one may come twice."""
    table = model.get_input_embeddings()
    special = special_ids(model)
    ordinary = torch.tensor([number for number in range(table.num_embeddings) if number not in special])
    chosen = ordinary[torch.randint(len(ordinary), (tokens,), generator=generator)]
    return call_within(model, table, chosen.to(model.device)).clone()


def special_ids(model: PreTrainedModel) -> set[int]:
    """The token ids that a model's configuration names, the padding's among them."""
    fields = model.config.to_dict().items()
    named = [value for name, value in fields if name.endswith("_token_id") and value is not None]
    return {number for value in named for number in (value if isinstance(value, list) else [value])}
