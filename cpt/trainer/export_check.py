"""The exported model, loaded as its card says, has to score a batch of held-out text as the run does."""

import ast
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers
from hydra.utils import get_object
from peft import PeftModel
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from cpt.adapters.domain_store import BASE
from cpt.core.errors import find_reason
from cpt.core.messages import abbreviate
from cpt.data.collate import Batch
from cpt.data.datamodule import DomainSequence
from cpt.data.sampler import EvalSubset
from cpt.methods.base import ContinualMethod
from cpt.models.block_attention import MASKABLE
from cpt.models.forward import set_mode
from cpt.trainer.auto import make_autocast
from cpt.trainer.export_dtype import name_dtype
from cpt.trainer.options import Precision

log = logging.getLogger(__name__)
CHECKED_TOKENS = 2048  # of the held-out text, in whole rows
SPREAD_TOKENS = 512  # from all of the vocabulary
# Nats by which the mean of tokens may differ, as a share of their loss where it is above 1: of the weights
# that were written, and of the precision in which the run has scored its last row.
TOLERANCES_BY_DTYPE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 0.02}
EXACT_PRECISIONS: tuple[Precision, ...] = ("32-true", "32", 32, "64-true")
EXACT_TOLERANCE = 2e-3
ROUNDED_TOLERANCE = 0.02


@dataclass(frozen=True)
class ScoredBatch:
    """Rows, and what the run makes of them."""

    batch: Batch
    expected: Tensor  # nats at each scored position [K], on the CPU, computed in the type of the weights


@dataclass(frozen=True)
class ExportedLosses:
    """The mean losses (nats) of a held-out sample."""

    nll: float  # of the exported model, loaded as its card says
    run_nll: float  # of the run's weights
    num_tokens: int


@dataclass(frozen=True)
class HeldOutSample:
    """Rows of a held-out text, and the same places with tokens from all of the vocabulary: rows of embedding
    and head that no held-out token reads may be lost, too."""

    text: str
    held_out: ScoredBatch
    in_run_precision: Tensor  # of `held_out`: nats [K] in the precision in which the run scores its rows
    spread: ScoredBatch


@torch.no_grad()
def draw_sample(
    module: ContinualMethod, data: DomainSequence, *, num_entries: int, precision: Precision
) -> HeldOutSample:
    """The first rows of the last domain's text (of the general text in a run without stages), and tokens of a
    tokenizer with `num_entries`, scored by the weights that will be exported. `precision`: the run's."""
    if data.domains:
        last = data.domains[-1]
        text = last.texts[0]
        domain = last.index
    else:
        text = list(data.held_out)[-1]
        domain = BASE

    held_out_batch = read_first_rows(data, text, num_tokens=CHECKED_TOKENS)
    spread_batch = spread_tokens(read_first_rows(data, text, num_tokens=SPREAD_TOKENS), num_entries)
    with set_mode(module, training=False), computable_anywhere(module.model):
        held_out = score_batch(module, held_out_batch, domain)
        spread = score_batch(module, spread_batch, domain)
        with make_autocast(precision, module.model.device.type):
            in_run_precision = score_batch(module, held_out_batch, domain).expected
    return HeldOutSample(text=text, held_out=held_out, in_run_precision=in_run_precision, spread=spread)


def read_first_rows(data: DomainSequence, text: str, *, num_tokens: int) -> Batch:
    """The first rows of a held-out text with scored tokens, up to the one that completes `num_tokens`."""
    objective = data.objective.scoring
    rows = data.scored_rows(text)[objective.scored(data.scored_sizes(text)) > 0]
    cumulative_tokens = data.held_out[text].row_lengths[rows].cumsum()
    rows = rows[: int(np.searchsorted(cumulative_tokens, num_tokens)) + 1]
    subset = EvalSubset(
        data.held_out,
        {text: rows},
        objective=objective,
        batch_size=len(rows),
        purpose="score",
        domain_indices=data.domain_indices,
    )
    return subset[0]


def spread_tokens(batch: Batch, num_entries: int) -> Batch:
    """A batch with other tokens, read and predicted, in the same places."""
    spread: Batch = {**batch}
    spread["input_ids"] = choose_tokens(batch["input_ids"], num_entries)
    spread["targets"] = choose_tokens(batch["targets"], num_entries)
    if "decoder_input_ids" in batch:
        spread["decoder_input_ids"] = choose_tokens(batch["decoder_input_ids"], num_entries)
    return spread


def choose_tokens(tokens: Tensor, num_entries: int) -> Tensor:
    """Other token ids in the form of `tokens`: one half are the last of a vocabulary, where new tokens are,
    the other half lie evenly in the rest.

    >>> choose_tokens(torch.zeros(2, 3), 10)
    tensor([[9, 8, 7],
            [0, 3, 6]])
    """
    num_last = min(tokens.numel() // 2, num_entries - 1)
    last_ids = num_entries - 1 - torch.arange(num_last)
    even_ids = torch.linspace(0, num_entries - 1 - num_last, tokens.numel() - num_last).long()
    return torch.cat([last_ids, even_ids]).view(tokens.shape)


def score_batch(module: ContinualMethod, batch: Batch, domain: int) -> ScoredBatch:
    """A batch with its losses by the weights that are exported, with the modules of a domain (-1: the
    base)."""
    losses = module.exported_nll(move(batch, module.model.device), domain)
    return ScoredBatch(batch=batch, expected=losses.double().cpu())


@contextmanager
def computable_anywhere(model: PreTrainedModel) -> Iterator[None]:
    """The model without compiled blocks and without attention kernels that need a GPU, inside the context."""
    implementation = model.config._attn_implementation
    with torch.compiler.set_stance("force_eager"):
        if implementation in MASKABLE:
            yield
            return
        model.set_attn_implementation("eager")
        try:
            yield
        finally:
            model.set_attn_implementation(implementation)


def move(batch: Batch, device: torch.device) -> Batch:
    tensors = cast(dict[str, Tensor], batch)
    return cast(Batch, {name: tensor.to(device) for name, tensor in tensors.items()})


@torch.no_grad()
def check_export(
    folder: Path,
    expression: str,
    sample: HeldOutSample,
    module: ContinualMethod,
    *,
    recorded: np.ndarray | None,
    precision: Precision,
) -> ExportedLosses:
    """The losses on the sample of the model of an `expression`, and of the module.

    Raises ValueError where the model does not load from its folder without missing or unused weights, or does
    not score the sample as the module did, and its whole documents as the last row has them: `recorded` [2,
    documents], nats and tokens, or None."""
    # Loading draws random numbers for weights that are missing, which the run must not notice.
    with torch.random.fork_rng(devices=[]):
        try:
            model = load_as_written(folder, expression)
            with set_mode(model, training=False):
                losses = module.objective.nll(model, sample.held_out.batch).double()
                spread_losses = module.objective.nll(model, sample.spread.batch).double()
        except Exception as error:
            raise wrong_export_error(folder, find_reason(error)) from error

    # The exported weights against those in memory, which differ by nothing but the dtype of the file.
    rounding = TOLERANCES_BY_DTYPE[model.dtype]
    label = "the run's weights give"
    cause = describe_loss_difference(losses, sample.held_out.expected, allowed=rounding, label=label)
    if cause is not None:
        raise wrong_export_error(folder, f"on {sample.text} {cause}")
    cause = describe_loss_difference(spread_losses, sample.spread.expected, allowed=rounding, label=label)
    if cause is not None:
        raise wrong_export_error(
            folder, f"on tokens from all of the vocabulary {cause}; rows of embedding or head are lost"
        )

    # Those in memory against the last row, in its precision: on unusual text 16 bits can be far from 32.
    if recorded is not None:
        documents = sample.held_out.batch["documents"]
        document_losses, recorded_losses = select_whole_documents(
            documents, sample.in_run_precision, recorded
        )
        allowed = EXACT_TOLERANCE if precision in EXACT_PRECISIONS else ROUNDED_TOLERANCE
        cause = describe_loss_difference(
            document_losses, recorded_losses, allowed=allowed, label="the last row has"
        )
        if cause is not None:
            raise wrong_export_error(folder, f"on {sample.text} {cause}")

    precision_loss = float((sample.in_run_precision - sample.held_out.expected).mean())
    if abs(precision_loss) > ROUNDED_TOLERANCE:
        log.warning(
            "In trainer.precision=%s the loss on %s is %+.3f nats off what the same weights give without it; "
            "other losses of this run may be, too. trainer.precision=32-true scores exactly",
            precision,
            sample.text,
            precision_loss,
        )
    exported = ExportedLosses(
        nll=float(losses.mean()), run_nll=float(sample.held_out.expected.mean()), num_tokens=len(losses)
    )
    log.info(
        "Loaded the exported model: in %s it scores %s as the run does (loss %.4f, run %.4f)",
        name_dtype(model.dtype),
        sample.text,
        exported.nll,
        exported.run_nll,
    )
    return exported


def wrong_export_error(folder: Path, cause: str) -> ValueError:
    return ValueError(
        f"the exported model in {folder} is not the trained one: {cause}; "
        "the stages are kept, and the same command exports it again"
    )


def load_as_written(folder: Path, expression: str) -> PreTrainedModel:
    """What an expression loads, as transformers' class. Raises ValueError for weights of the plain model that
    its folder lacks, has in another shape or has in addition."""
    name = AutoConfig.from_pretrained(folder, trust_remote_code=False).architectures[0]
    model_class = getattr(transformers, name)
    plain_model, info = model_class.from_pretrained(folder, output_loading_info=True, trust_remote_code=False)
    # transformers initializes what is missing at random, with a warning at most.
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = sorted(map(str, info[fault]))
        if keys:
            raise ValueError(f"{len(keys)} {fault.replace('_', ' ')}: {abbreviate(keys)}")
    del plain_model  # before another copy is in memory

    loaded = evaluate(ast.parse(expression, mode="eval").body)
    if isinstance(loaded, PeftModel):
        loaded = loaded.get_base_model()
    model: PreTrainedModel = loaded
    return model


def evaluate(node: ast.expr) -> Any:
    """The value of calls of dotted names with constants, as a method's export returns them."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Call):
        function = get_object(ast.unparse(node.func))
        positional = [evaluate(argument) for argument in node.args]
        by_keyword = {str(keyword.arg): evaluate(keyword.value) for keyword in node.keywords}
        return function(*positional, **by_keyword)
    return get_object(ast.unparse(node))


def select_whole_documents(documents: Tensor, losses: Tensor, recorded: np.ndarray) -> tuple[Tensor, Tensor]:
    """The mean losses [n] of the documents that are scored in whole: here, and as they were `recorded`, [2,
    documents]: sums and counts. `documents` and `losses` are of the scored tokens."""
    sums, counts = torch.from_numpy(recorded).double()
    sample_sums = torch.zeros_like(sums).index_add_(0, documents, losses)
    sample_counts = torch.bincount(documents, minlength=len(counts))
    is_whole = (sample_counts == counts) & (counts > 0)
    return (sample_sums / counts)[is_whole], (sums / counts)[is_whole]


def describe_loss_difference(losses: Tensor, expected: Tensor, *, allowed: float, label: str) -> str | None:
    """How losses differ in the mean of their absolute differences, or None. A NaN differs."""
    if not len(expected):
        return None
    mean = float((losses - expected).abs().mean())
    if mean <= allowed * max(1.0, float(expected.abs().mean())):
        return None
    return f"its loss is {losses.mean():.4f}, {label} {expected.mean():.4f} ({mean:.1e} apart by token)"
