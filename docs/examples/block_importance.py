"""How much the loss of a causal model on general text rises without each of its blocks, for `method.blocks`.

python docs/examples/block_importance.py MODEL LENGTH general.txt COUNT

MODEL is a folder or a name on the Hub. Each line of the file is a document of at most LENGTH tokens. The last
line printed is the option for the COUNT blocks without which the loss rises least (ADEPT, stage 1)."""

import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from cpt.models.growth import zero_outputs
from cpt.models.units import find_blocks


@torch.no_grad()
def find_loss(model: PreTrainedModel, rows: list[Tensor]) -> float:
    """The mean loss over the predicted tokens of all rows, in nats."""
    total = 0.0
    count = 0
    for row in rows:
        num_targets = row.shape[1] - 1
        total += num_targets * model(row, labels=row).loss.item()
        count += num_targets
    return total / count


folder, length, file, count = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
model = AutoModelForCausalLM.from_pretrained(folder).eval()
tokenizer = AutoTokenizer.from_pretrained(folder)
rows = []
for line in file.read_text(encoding="utf-8").splitlines():
    ids = tokenizer(line, split_special_tokens=True, truncation=True, max_length=length).input_ids
    if len(ids) > 1:
        rows.append(torch.tensor([ids]))

base_loss = find_loss(model, rows)
rises = []
for name, block in find_blocks(model):
    weights = {key: value.clone() for key, value in block.state_dict().items()}
    zero_outputs(model, [f"{name}."])  # what passes through the block stays as it is
    rises.append(find_loss(model, rows) - base_loss)
    block.load_state_dict(weights)

least_important_last = sorted(range(len(rises)), key=lambda number: -rises[number])
for number in least_important_last:
    print(f"block {number}: {rises[number]:+.4f}")
chosen = sorted(least_important_last[-count:])
print(f"method.blocks=[{','.join(map(str, chosen))}]")
