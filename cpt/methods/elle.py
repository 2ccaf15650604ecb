"""ELLE (Qin et al., Findings of ACL 2022): a model that grows before each domain after the first, recovers on
replayed text, and reads each text with the prompt of its domain; each part can be used alone.

    growth     theta <- G(theta) before the domain: neurons, heads, blocks, hidden size (`cpt.models.growth`)
    recovery   L_lm(theta; memory) for the first steps, with their own schedule; then a new optimizer
    prompt     [e(x_1); P_k; e(x_2); ...] for text x of domain k, P_k [n, D] trained with all else
    memory     that of `replay=past`, which is also mixed into the domain's steps

General text is read with the latest prompt, and by the base with none."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cpt.adapters.domain_store import BASE, DomainScorer
from cpt.adapters.soft_prompt import attach_prompt, draw_prompt
from cpt.core.exceptions import InvalidOptionError
from cpt.core.messages import count_noun
from cpt.data.collate import Batch, label_batch
from cpt.data.options import Domain
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import NO_GROWTH, ELLEOptions
from cpt.methods.prompt import NEEDS_ROWS_REASON, check_rows, check_tokens, copy_with_prompt
from cpt.models import growth
from cpt.models.forward import set_mode
from cpt.models.loading import make_skeleton
from cpt.models.objectives import Objective
from cpt.models.units import find_sublayers
from cpt.models.weights import swap_weights

log = logging.getLogger(__name__)

NUM_COMPARED_TOKENS = 16  # on which the loss before and after growth is compared


class ByPrompt(DomainScorer):
    """Reads each text with the prompt of its domain."""

    needs_domain = True

    def __init__(self, name: str, prompts: nn.ParameterList, objective: Objective) -> None:
        super().__init__()
        self.name = name  # of the model's parameter that a prompt takes the place of
        self.prompts = prompts
        self.objective = objective

    @property
    def all_sources(self) -> list[int]:
        return list(range(len(self.prompts))) or [BASE]

    def source_of(self, domain: int) -> int:
        """The domain whose prompt text of a domain is read with: the latest for one that has none."""
        return domain if domain in self.all_sources else self.all_sources[-1]

    @contextmanager
    def reading(self, model: PreTrainedModel, domains: Tensor) -> Iterator[None]:
        """A context in which each of B rows is read with the prompt of its domain, [B]."""
        count = len(self.prompts)
        weights = {}  # before the first domain: the model's own prompt, of no vectors
        if count:
            # `source_of` for a whole batch: the latest prompt for rows of other text.
            sources = torch.where((domains >= 0) & (domains < count), domains, count - 1)
            weights = {self.name: torch.stack(list(self.prompts))[sources]}  # [B, n, D]
        with swap_weights(model, weights):
            yield

    def nll(self, model: PreTrainedModel, batch: Batch, domain: int) -> Tensor:
        ids = batch["input_ids"]
        with self.reading(model, torch.full((len(ids),), domain, device=ids.device)):
            nll = self.objective.nll(model, batch)
        self.record_weights(domain, [self.source_of(domain)], torch.ones_like(nll)[None])
        return nll


class ELLE(ContinualMethod):
    """Trains all of a model that grows."""

    sharded = False  # weights change their shape between two stages
    options: ELLEOptions

    def __init__(self, options: ELLEOptions, context: MethodContext) -> None:
        causal = context.objective.causal
        self.prompting: ByPrompt | None = None  # without prompts: None
        names: tuple[str, ...] = ()
        if options.prompt:
            check_tokens(options.prompt, length=context.length, model=context.model, option="method.prompt")
            check_rows(context, f"method=elle, {NEEDS_ROWS_REASON}")
            # A prompt without vectors, with which the model is the base: in each pass `ByPrompt` puts the
            # prompt of a domain in its place.
            names = attach_prompt(context.model, tokens=0, causal=causal).names
        super().__init__(options, context)

        self.prompts = nn.ParameterList()  # [n, D] of each domain so far
        # The largest change of a token's loss by the last growth (nats), [1]; None: the model has not grown.
        self.largest_loss_change: Tensor | None = None
        if names:
            self.prompting = ByPrompt(names[0], self.prompts, context.objective)
            self.router = self.prompting
            self.attached = attach_prompt, {"tokens": 0, "causal": causal}

    def stages(self, order: Sequence[str]) -> list[Domain]:
        stages = super().stages(order)
        # On a copy without values: refuses what cannot grow before any text is read.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            model = make_skeleton(self.model)
            for stage in stages:
                self.grow(model, stage)
        return [replace(stage, recovery=self.options.recovery) for stage in stages]

    def grow(self, model: PreTrainedModel, stage: Domain) -> None:
        """Grows a model for a stage; raises ValueError where it cannot."""
        growths = self.options.growth(stage.index)
        # In this order: new neurons and heads have the new hidden size, and new blocks are copies with both.
        for option in ("hidden", "neurons", "heads", "layers"):
            try:
                self.grow_by(model, option, growths[option])
            except ValueError as error:
                raise InvalidOptionError(
                    f"method.{option}",
                    getattr(self.options, option),
                    context=f"before {stage.name}",
                    reason=str(error),
                    allowed=f"{NO_GROWTH[option]}, or a value that its configuration can say",
                ) from error

    def grow_by(self, model: PreTrainedModel, option: str, value: float) -> None:
        """Grows one of a model's sizes by the value of an option."""
        noise = self.options.noise
        if option == "hidden":
            growth.grow_hidden(model, int(value), noise=noise)
        elif option == "neurons" and value != 1:
            num_neurons = find_sublayers(model, ("neurons",))[0].count  # of each FFN
            growth.grow_neurons(model, round((value - 1) * num_neurons), noise=noise)
        elif option == "heads":
            growth.grow_heads(model, int(value), noise=noise)
        elif option == "layers":
            growth.grow_layers(model, int(value))

    def expand(self, stage: Domain) -> None:
        if self.prompting is not None:
            self.prompts.append(nn.Parameter(draw_prompt(self.model, self.options.prompt)))
        self.largest_loss_change = None
        growths = self.options.growth(stage.index)
        if growths == NO_GROWTH:
            return

        # The domain starts from the weights before a decay branch, so these are grown.
        if self.weights_before_decay is not None:
            self.weights_before_decay.restore(self.model)
        batch = self.draw_tokens()
        nll_before = self.token_losses(batch)
        size_before = self.model.num_parameters()
        self.grow(self.model, stage)
        # The domain's own prompt is drawn from the narrower embeddings, and is widened with the others.
        if growths["hidden"] > 1 and self.prompting is not None:
            self.widen_prompts(self.prompting.name, growths["hidden"])
        for parameter in self.frozen:
            parameter.requires_grad_(False)

        loss_changes = (self.token_losses(batch) - nll_before).abs()
        self.largest_loss_change = loss_changes.max().view(1)
        log.info(
            "Growing the model before %s from %d to %s: a token's loss moves by up to %.1e nats",
            stage.name,
            size_before,
            count_noun(self.model.num_parameters(), "parameter"),
            self.largest_loss_change,
        )

    def draw_tokens(self) -> Batch:
        """A row of random tokens, all of them scored."""
        entries = self.model.get_input_embeddings().num_embeddings
        # On the CPU, whose draws are alike on all machines.
        ids = torch.randint(entries, (1, min(NUM_COMPARED_TOKENS, self.length)), device="cpu")
        ids = ids.to(self.model.device)
        decoder_ids = ids if self.model.config.is_encoder_decoder else None
        is_token = torch.ones_like(ids, dtype=torch.bool)
        return label_batch(ids, ids, is_token, decoder_input_ids=decoder_ids)

    @torch.no_grad()
    def token_losses(self, batch: Batch) -> Tensor:
        with set_mode(self.model, training=False):
            return self.objective.nll(self.model, batch)

    def widen_prompts(self, name: str, factor: float) -> None:
        """Repeats the entries of all prompts, and of the model's parameter of this name."""
        owner = self.model.get_submodule(name.rpartition(".")[0])
        growth.replace_parameter(owner, "weight", owner.weight.repeat(1, factor))
        for index, prompt in enumerate(self.prompts):
            self.prompts[index] = nn.Parameter(prompt.detach().repeat(1, factor))

    def activate(self, domain: int) -> None:
        super().activate(domain)
        if self.prompting is not None:  # not the model's own, of no vectors: `prompts` are trained
            self.model.get_parameter(self.prompting.name).requires_grad_(False)
        has_past_text = bool(self.replay.past_ratio or self.options.recovery)  # earlier prompts see text
        for index, prompt in enumerate(self.prompts):
            prompt.requires_grad_(index == domain or has_past_text)

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        if self.domain.index == 0 and not self.replay.past_ratio:
            log.info("No text of past domains is replayed, as ELLE does (replay=past)")

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        if self.prompting is None:
            return super().losses(batch)
        with self.prompting.reading(self.model, batch["domains"]):
            return super().losses(batch)

    def on_gradients_ready(self) -> None:
        # The first step of the domain's own text has a new optimizer, unless moments are to be carried over.
        # Here and not after the step, as masks copy the moments before it.
        recovery_steps = self.data.recovery_steps(self.domain)
        is_recovered = recovery_steps > 0 and self.trainer.global_step == recovery_steps
        if is_recovered and self.optimizer_state is None:
            self.trainer.optimizers[0].state.clear()

    def model_for(self, domain: int) -> PreTrainedModel:
        if self.prompting is None:
            return super().model_for(domain)
        name = self.prompting.name
        source = self.prompting.source_of(domain)  # BASE before the first domain
        prompt = self.model.get_parameter(name) if source == BASE else self.prompts[source]
        return copy_with_prompt(self.model, name, prompt)

    def domain_modules(self, order: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        assert self.prompting is not None  # exports with modules have `attached`
        name = self.prompting.name
        return {domain: {name: self.prompts[index]} for index, domain in enumerate(order)}

    def diagnostics(self) -> dict[str, Tensor]:
        diagnostics = super().diagnostics()
        if self.largest_loss_change is not None:
            diagnostics["elle/moved"] = self.largest_loss_change
        return diagnostics
