"""A training batch of full rows: the most memory that a batch of the run can take."""

import numpy as np
import torch

from cpt.data.collate import Batch, Rows
from cpt.models.objectives import Objective


def make_full_batch(
    objective: Objective, *, num_rows: int, length: int, num_entries: int, has_examples: bool
) -> Batch:
    """A training batch of rows of `length` tokens, in which every position is scored that the objective can
    score; `has_examples`: of answers to examples. Its ids, below `num_entries`, have values, as shapes may
    depend on them."""
    rows = Rows(
        ids=np.arange(num_rows * length).reshape(num_rows, length) % num_entries,
        lengths=np.full(num_rows, length),
        keys=np.arange(num_rows, dtype=np.uint64),
        answers=np.ones((num_rows, length), bool) if has_examples else None,
        segments=np.zeros((num_rows, length), np.int64) if objective.isolated else None,
    )
    batch, _ = objective.batch(rows)
    batch["domains"] = torch.zeros(num_rows, dtype=torch.long)
    batch["weight"] = torch.tensor(1.0)
    batch["mean_rows"] = torch.tensor(float(num_rows))
    batch["mean_tokens"] = torch.tensor([float(num_rows * length), float(num_rows * length)])
    return batch
