"""Perplexity of an exported causal model with transformers alone: the number in the last row of its report.

python docs/examples/perplexity.py outputs/NAME/RUN/model LENGTH my_corpora/law/test.jsonl

LENGTH is model.max_seq_length, the file has one {"text": …} per line. Documents are tokenized one by one, an
end token follows each (unless the tokenizer adds one), and all are joined and cut into sequences of LENGTH
(domains.packing=concat). Every token is scored but the first of a sequence, which nothing precedes."""

import json
import math
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, length, file = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
texts = [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]
ids: list[int] = []
for text in texts:
    ids += tokenizer(text, split_special_tokens=True).input_ids
    ids += [tokenizer.eos_token_id] * (ids[-1] != tokenizer.eos_token_id)
loss, scored = 0.0, 0
for begin in range(0, len(ids), length):
    row = torch.tensor([ids[begin : begin + length]])
    if (targets := row.shape[1] - 1) > 0:
        with torch.no_grad():
            loss += targets * model(row, labels=row).loss.item()
        scored += targets
print(f"{math.exp(loss / scored):.4f} over {scored} tokens of {len(texts)} documents")
