"""Methods that store samples of a run in a reservoir: DER++ and A-GEM.

Reservoir sampling: Vitter, ACM Transactions on Mathematical Software 11(1), 1985, algorithm R."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from cpt.core.distributed import all_reduce_sum, gather_shards
from cpt.core.exceptions import InvalidOptionError
from cpt.core.processes import rank_and_world
from cpt.core.randomness import draw_uniforms, key, permute, sample_keys
from cpt.data.collate import UNSCORED, Batch, label_batch, place_labels
from cpt.data.packing import PADDING
from cpt.gradient_masks.base import Constraint, Step
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import AGEMOptions, DERPPOptions
from cpt.models.chunked_head import WeightedLoss, WholeLogits, make_nll, sum_losses
from cpt.models.forward import select_positions, token_nll
from cpt.models.objectives import Objective

MAX_SWEEPS = 1000  # over the entries of v
SWEEP_TOLERANCE = 1e-12  # relative change of v that ends the sweeps
PRECISIONS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
INTEGER_TYPES = {2: torch.int16, 4: torch.int32}  # by bytes per entry


class Reservoir(nn.Module):
    """`samples` slots: a row of ids with its labels, and outputs [scored, width] at its scored positions,
    padded. A slot also has the decoder ids for an encoder-decoder, the document of each token where documents
    share rows, and `by_domain` the domain.

    Process r of w keeps its own samples in the slots r, r + w, r + 2w, ... and draws from these; `seen[r]`
    counts the samples that it was offered. A state_dict gathers all slots (a collective)."""

    def __init__(
        self,
        objective: Objective,
        *,
        samples: int,
        length: int,
        seed: int,
        width: int = 0,
        precision: str = "float32",
        pad: int | None = None,
        by_domain: bool = False,
    ) -> None:
        """Empty slots for rows of `length` tokens; `width` features of an output, 0 to store none;
        `precision` of the outputs, a key of PRECISIONS; `pad`, the id of padding, None without one."""
        super().__init__()
        source, target = objective.side_lengths(length)  # target: of the decoder, None without one
        self.seed = seed
        self.pad = pad or 0  # without a padding token any id does: it is masked
        self.by_domain = by_domain
        self.isolated = objective.isolated
        self.decodes = target is not None

        self.input_ids = nn.Buffer(torch.zeros(samples, source, dtype=torch.int32))
        if target is not None:
            self.decoder_input_ids = nn.Buffer(torch.zeros(samples, target, dtype=torch.int32))
        # Labels are those of the side that predicts.
        self.labels = nn.Buffer(torch.full((samples, target or source), UNSCORED, dtype=torch.int32))
        self.lengths = nn.Buffer(torch.zeros(samples, dtype=torch.int32))  # tokens per slot, 0: empty
        size = (samples, objective.max_scored(length), width)
        self.outputs = nn.Buffer(torch.zeros(size, dtype=PRECISIONS[precision]))
        self.seen = nn.Buffer(torch.zeros(samples, dtype=torch.int64))  # by process: one has a slot at least
        if self.isolated:
            self.segments = nn.Buffer(torch.full((samples, source), PADDING, dtype=torch.int32))
        if by_domain:
            self.domains = nn.Buffer(torch.full((samples,), -1, dtype=torch.int32))

    def slots(self) -> np.ndarray:
        """The numbers of this process's slots; raises ValueError if there are fewer slots than processes."""
        rank, world = rank_and_world()
        size = len(self.lengths)
        if size < world:
            raise InvalidOptionError(
                "method.buffer_size", size, allowed=f"one or more for each of {world} processes"
            )
        return np.arange(rank, size, world)

    @torch.no_grad()
    def rebalance_and_count(self) -> int:
        """How many samples this process was offered. A state of another number of processes is first divided
        among those of this run, with its samples and their number."""
        rank, world = rank_and_world()
        # `seen` has an entry above 0 for each process that was offered samples.
        num_processes_before = int((self.seen > 0).sum())
        if num_processes_before not in (0, world):
            # With the filled slots first, the slots r, r + w, ... of any process are filled from their start
            # on, as `choose_slots` fills them.
            filled_first = (self.lengths == 0).int().argsort(stable=True)
            total = int(self.seen.sum())
            for buffer in self.buffers():
                if buffer is not self.seen:
                    buffer.copy_(buffer[filled_first.to(buffer.device)])
            # Process r counts as offered each world-th sample from sample r on.
            self.seen.zero_()
            self.seen[:world] = (total + torch.arange(world).flip(0)) // world
        return int(self.seen[rank])

    @torch.no_grad()
    def add(self, batch: Batch, outputs: Tensor, *, domain: int = -1) -> None:
        """Offers a batch's samples, of the domain with this place in the order, with the outputs [K, width]
        at its scored positions, clamped to the range of half precision."""
        _, world = rank_and_world()
        count = len(batch["input_ids"])
        # Chosen before the count moves: the slot of a sample depends on how many came before it.
        rows_by_slot = self.choose_slots(count)
        self.seen[:world] += count
        if not rows_by_slot:
            return

        labels = place_labels(batch)
        row_outputs = outputs.split(torch.bincount(batch["rows"], minlength=count).tolist())
        for slot, row in rows_by_slot.items():
            if not row_outputs[row].isfinite().all():  # as of a skipped step
                continue
            self.store(slot, row, batch, labels=labels, outputs=row_outputs[row])
            if self.by_domain:
                self.domains[slot] = domain

    def choose_slots(self, count: int) -> dict[int, int]:
        """The rows of a batch of `count` samples that are stored, by slot."""
        rank, world = rank_and_world()
        process_slots = self.slots()
        num_slots = len(process_slots)
        numbers = np.arange(count) + self.rebalance_and_count()
        keys = sample_keys(key(self.seed, "reservoir", rank, world), numbers)
        uniforms = draw_uniforms(keys, 1, stream=0)[:, 0]

        # Sample k, from 0, fills the process's slot k while there is one. A later sample draws a position
        # below k + 1, and is stored if it is one of a slot: with probability num_slots / (k + 1).
        drawn_positions = (uniforms * (numbers + 1)).astype(np.int64)
        positions = np.where(numbers < num_slots, numbers, drawn_positions)
        # The later of two samples of a batch that take the same slot stays.
        rows_by_slot = {}
        for row, position in enumerate(positions):
            if position < num_slots:
                rows_by_slot[process_slots[position]] = row
        return rows_by_slot

    def store(self, slot: int, row: int, batch: Batch, *, labels: Tensor, outputs: Tensor) -> None:
        """Writes a row of a batch with labels [B, T], and its outputs [scored, width], into a slot."""
        ids = batch["input_ids"]
        self.fill(self.input_ids, slot, ids[row], padding=self.pad)
        self.fill(self.labels, slot, labels[row], padding=UNSCORED)
        if self.decodes:
            self.fill(self.decoder_input_ids, slot, batch["decoder_input_ids"][row], padding=self.pad)
        if self.isolated:
            self.fill(self.segments, slot, batch["segments"][row], padding=PADDING)
        mask = batch.get("attention_mask")
        self.lengths[slot] = ids.shape[1] if mask is None else mask[row].sum()

        limit = torch.finfo(self.outputs.dtype).max
        clamped = outputs.float().clamp(-limit, limit)
        self.outputs[slot] = functional.pad(clamped, (0, 0, 0, self.outputs.shape[1] - len(outputs)))

    @staticmethod
    def fill(buffer: Tensor, slot: int, values: Tensor, *, padding: int) -> None:
        """Writes values [n] into a slot of a buffer [slots, width >= n], and pads them."""
        buffer[slot, : len(values)] = values
        buffer[slot, len(values) :] = padding

    def draw(self, count: int, *, purpose: str, domain: int | None = None) -> Tensor:
        """The numbers [at most `count`] of distinct filled slots of this process, of a domain or all. The
        draw is a function of the purpose."""
        stream = key(self.seed, purpose, *rank_and_world(), self.rebalance_and_count())
        slots = torch.from_numpy(self.slots())
        if domain is not None:
            slots = slots[self.domains[slots] == domain]
        filled = slots[self.lengths[slots] > 0]
        # The first entries of a permutation of all filled slots: distinct, and without drawing the rest.
        order = permute(np.arange(min(count, len(filled))), len(filled), stream=stream)
        return filled[torch.from_numpy(order)]

    def batch(self, slots: Tensor) -> Batch:
        """The samples in slots [B] as an objective's batch without a weight, on the outputs' device."""
        ids = self.input_ids[slots].long()
        labels = self.labels[slots].long()
        is_token = torch.arange(ids.shape[1]) < self.lengths[slots][:, None]
        decoder_ids = self.decoder_input_ids[slots].long() if self.decodes else None
        segments = self.segments[slots].long() if self.isolated else None
        batch = label_batch(ids, labels, is_token, decoder_input_ids=decoder_ids, segments=segments)
        device = self.outputs.device
        return cast(Batch, {name: cast(Tensor, value).to(device) for name, value in batch.items()})

    def outputs_of(self, slots: Tensor) -> Tensor:
        """The stored outputs [K, width] at the scored positions of the samples in slots [B]."""
        # Slot after slot, as a batch numbers its scored positions; a slot's entries after them are padding.
        scored_counts = (self.labels[slots] != UNSCORED).sum(1, keepdim=True)
        positions = torch.arange(self.outputs.shape[1])
        flat_positions = slots[:, None] * len(positions) + positions
        scored = flat_positions[positions < scored_counts]
        return self.outputs.flatten(0, 1)[scored.to(self.outputs.device)]

    @torch.no_grad()
    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # Each process has written its own slots only; a file has those of all.
        for buffer in self.buffers():
            gather_shards(buffer)
        super()._save_to_state_dict(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> "Reservoir":
        # Outputs are moved but never cast, as `fn` casts floating-point tensors and these are passed to it as
        # integers; the other buffers stay on the CPU, where reads wait for no GPU.
        def move(buffer: Tensor) -> Tensor:
            if buffer is not self.outputs:
                return buffer
            return fn(buffer.view(INTEGER_TYPES[buffer.itemsize])).view(buffer.dtype)

        return super()._apply(move, recurse)


class DERPP(ContinualMethod):
    """DER++: dark experience replay (Buzzega et al., NeurIPS 2020, equation 6, sections 3 and 4).

        L = l(f(x), y) + alpha * ||h(x') - z'||^2 + beta * l(f(x''), y'')

    with x' and x'' two independent draws from a reservoir of the whole stream, z' the model's outputs on x'
    when it was added. No domain labels are needed. l is the language-model loss; h, at the scored positions,
    the last hidden states or the logits (the paper's). ||.||^2 is the mean over the draw's scored positions
    and features, the second l over its scored tokens.

    With `trainer.accumulate_grad_batches` the draws are made, and samples offered to the reservoir, for each
    micro-batch: a later one of the same step may draw what an earlier one has stored."""

    options: DERPPOptions
    settled = 1  # in the first step of all nothing is stored yet

    def __init__(self, options: DERPPOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.memory = Reservoir(
            self.objective,
            samples=options.buffer_size,
            length=self.length,
            seed=self.seed,
            width=self.output_width(options.matched),
            precision=options.precision,
            pad=self.model.config.pad_token_id,
        )

    @torch.no_grad()
    def output_width(self, matched: str) -> int:
        """Features of an output at a position, from a forward pass: not every configuration says."""
        ids = torch.zeros(1, 2, dtype=torch.long)
        batch: Batch = {"input_ids": ids, "positions": torch.zeros(1, dtype=torch.long)}
        if self.model.config.is_encoder_decoder:
            batch["decoder_input_ids"] = ids
        with torch.random.fork_rng(devices=[]):
            logits, hidden = self.objective.outputs(self.model, batch)
        return (logits if matched == "logits" else hidden).shape[-1]

    def describe_accumulation(self) -> str:
        return "each micro-batch draws its own past samples, also from those of the step's earlier ones"

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        if self.options.matched == "hidden":
            sums, hidden = self.objective.sum_losses(self.model, batch, {"lm": self.lm_loss(batch)})
            outputs = select_positions(hidden, batch["positions"])
        else:  # the memory stores whole logits
            lm_loss = self.lm_loss(batch)
            outputs, hidden = self.objective.outputs(self.model, batch)
            sums = sum_losses(WholeLogits(outputs), {"lm": lm_loss})
        lm = sums["lm"] * batch["weight"]
        # Before this batch is stored: it would be replayed in the step that it is learned in.
        match, replay = self.replay_terms(max(1, self.draw_size(len(hidden))))
        self.memory.add(batch, outputs)
        return {
            "lm": lm,
            "derpp_match": self.options.alpha * match,
            "derpp_replay": self.options.beta * replay,
        }

    def draw_size(self, rows: int) -> int:
        """The samples of a draw for a micro-batch of `rows`."""
        if self.options.minibatch_size is None:
            return rows // 2
        return self.options.minibatch_size // (self.trainer.world_size * self.trainer.accumulate_grad_batches)

    def replay_terms(self, count: int) -> tuple[Tensor, Tensor]:
        """The mean squared error on one draw of `count` samples and the mean loss on another, scalars; 0 from
        an empty memory."""
        matched_slots = self.memory.draw(count, purpose="match")  # x'
        replayed_slots = self.memory.draw(count, purpose="replay")  # x''
        if not len(matched_slots):
            zero = torch.zeros((), device=self.device)
            return zero, zero.clone()
        stored_outputs = self.memory.outputs_of(matched_slots).float()  # z'
        num_matched = len(stored_outputs)  # positions

        # Both draws in one pass: the positions of the matched samples come first.
        joint_batch = self.objective.lay_out(self.memory.batch(torch.cat([matched_slots, replayed_slots])))
        matched_positions, replayed_positions = joint_batch["positions"].tensor_split([num_matched])
        replay_batch = joint_batch | {
            "positions": replayed_positions,
            "targets": joint_batch["targets"][num_matched:],
        }
        if self.options.matched == "hidden":  # the head is computed for the replayed draw only
            losses = {"lm": WeightedLoss(make_nll(replay_batch))}
            sums, hidden = self.objective.sum_losses(self.model, replay_batch, losses)
            sum_nll = sums["lm"]
            outputs = select_positions(hidden, matched_positions)
        else:
            logits, _ = self.objective.outputs(self.model, joint_batch)
            outputs, replay_logits = logits.tensor_split([num_matched])
            sum_nll = token_nll(replay_logits, replay_batch).sum()

        # Means over at least 1: a drawn row may have no scored token.
        squared_error = functional.mse_loss(outputs.float(), stored_outputs, reduction="sum")
        return squared_error / max(1, stored_outputs.numel()), sum_nll / max(1, len(replayed_positions))


class Reference(Constraint):
    """Projects steps so that they raise none of the losses whose gradients are the references."""

    def __init__(self, *, apply_to: str, margin: float = 0.0) -> None:
        super().__init__(apply_to=apply_to)
        self.margin = margin
        self.gradients: list[Mapping[nn.Parameter, Tensor]] = []  # the references of the current step
        self.step_counts = nn.Buffer(torch.zeros(2, dtype=torch.int64))  # with a reference, and projected

    def covered(self) -> Iterable[nn.Parameter]:
        return self.gradients[0] if self.gradients else ()

    def constrain(self, steps: Sequence[Step], optimizer: Optimizer) -> None:
        # A loss rises where a gradient points against its reference, or the step that is made points along.
        sign = 1 if self.apply_to == "gradient" else -1
        steps_made = [step for _, step in steps]
        references = []
        for gradient in self.gradients:
            references.append([gradient[parameter] for parameter, _ in steps])

        products = sign * torch.stack([inner_product(steps_made, reference) for reference in references])
        raises_loss = bool((products < 0).any())
        self.step_counts.add_(torch.tensor([1, raises_loss], device=self.step_counts.device))
        # g + G^T v; with one reference v is -g^T g_ref / g_ref^T g_ref, as in A-GEM.
        if raises_loss:
            weights = solve(gram_matrix(references), products, lower_bound=self.margin).tolist()
            for weight, reference in zip(weights, references, strict=True):
                torch._foreach_add_(steps_made, reference, alpha=sign * weight)

    def diagnostics(self) -> dict[str, Tensor]:
        """The share of steps that were projected."""
        return {"projected": (self.step_counts[1] / self.step_counts[0].clamp_min(1)).view(1)}


class AGEM(ContinualMethod):
    """A-GEM, averaged gradient episodic memory (Chaudhry et al., ICLR 2019, eq. 11): to first order, no step
    may raise the loss on a draw of earlier domains' samples.

        g <- g - (g^T g_ref / g_ref^T g_ref) g_ref     where g^T g_ref < 0

    g_ref is the gradient of L_lm on samples from a memory of the domains before. `constraints: each` is GEM
    (Lopez-Paz and Ranzato, NeurIPS 2017, eq. 11), with one per earlier domain, the rows of G:

        g <- g + G^T v,    v = argmin_{v >= margin} 1/2 v^T G G^T v + (G g)^T v    where G g has an entry < 0

    With `apply_to: update` the same holds for -d of the step d that is made, decay included."""

    sharded = False  # reference gradients are of whole weights
    options: AGEMOptions
    reads_importance_batches = True

    def __init__(self, options: AGEMOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.per_domain = options.constraints == "each"
        self.memory = Reservoir(
            self.objective,
            samples=options.buffer_size,
            length=self.length,
            seed=self.seed,
            pad=self.model.config.pad_token_id,
            by_domain=self.per_domain,
        )
        self.reference = Reference(apply_to=options.apply_to, margin=options.margin)
        self.masks.append(self.reference)

    def after_domain(self, importance_batches: Iterable[Batch]) -> None:
        for batch in importance_batches:
            # Without outputs: a reference gradient needs the text and its labels only.
            no_outputs = torch.empty(len(batch["positions"]), 0)
            self.memory.add(batch, no_outputs, domain=self.domain.index)

    def transform_gradients(self, optimizer: Optimizer) -> None:
        domain = self.domain.index
        if self.per_domain:
            sources: list[int | None] = list(range(domain))
        else:
            sources = [None] if domain > 0 else []  # all earlier domains together
        gradients = [self.reference_gradient(source) for source in sources]
        self.reference.gradients = [gradient for gradient in gradients if gradient]

    def reference_gradient(self, source: int | None) -> dict[nn.Parameter, Tensor]:
        """The mean loss's gradient by parameter on a draw from a domain's samples, or (None) from all."""
        trained = [parameter for parameter in self.parameters() if parameter.grad is not None]
        num_samples = max(1, self.options.minibatch_size // self.trainer.world_size)  # of this process
        slots = self.memory.draw(num_samples, purpose=f"step {self.trainer.global_step}", domain=source)

        # Zeros if this process has no samples: the sum is over all processes.
        gradients = [torch.zeros_like(parameter) for parameter in trained]
        count = torch.zeros((), device=self.device)
        if len(slots):
            batch = self.objective.lay_out(self.memory.batch(slots))
            # Not `backward`, which would add to the gradients of the step.
            with torch.autocast(self.device.type, enabled=False), torch.enable_grad():
                loss = self.objective.sum_nll(self.model, batch)
            gradients = list(torch.autograd.grad(loss, trained, materialize_grads=True, allow_unused=True))
            count += len(batch["positions"])
        all_reduce_sum(*gradients, count)
        if not count:
            return {}
        torch._foreach_div_(gradients, count)
        return dict(zip(trained, gradients, strict=True))


def solve(gram: Tensor, products: Tensor, *, lower_bound: float) -> Tensor:
    """argmin over v [t] >= lower_bound of 1/2 v^T gram v + products^T v, by coordinate descent in 64 bits.

    >>> solve(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([-4.0, 1.0]), lower_bound=0.0).tolist()
    [2.0, 0.0]
    """
    gram = gram.double().cpu()
    products = products.double().cpu()
    v = torch.full_like(products, lower_bound)
    # A reference gradient of 0 constrains nothing, and would be a divisor.
    coordinates = gram.diagonal().nonzero().flatten().tolist()
    for _ in range(MAX_SWEEPS):
        previous = v.clone()
        # The minimum over one entry with the others fixed, in turn.
        for k in coordinates:
            v[k] = (v[k] - (gram[k] @ v + products[k]) / gram[k, k]).clamp_min(lower_bound)
        if (v - previous).abs().max() <= SWEEP_TOLERANCE * v.abs().max():
            break
    return v


def gram_matrix(vectors: Sequence[Sequence[Tensor]]) -> Tensor:
    """The inner products of lists of tensors with each other, [t, t]."""
    rows = []
    for first in vectors:
        rows.append(torch.stack([inner_product(first, second) for second in vectors]))
    return torch.stack(rows)


def inner_product(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    """The inner product of two lists of tensors, a scalar in at least 32 bits."""
    products = []
    for a, b in zip(first, second, strict=True):
        products.append(torch.dot(a.flatten().float(), b.flatten().float()))
    return torch.stack(products).sum()
