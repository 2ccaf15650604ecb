"""The answers of a chat model to prompts, as chats that `replay.sources` mixes into training.

python docs/examples/write_chats.py MODEL prompts.txt chats.jsonl

MODEL is a folder or a name on the Hub with a chat template. Each line of prompts.txt is a question of a
user. An answer is the model's most likely one. One that does not end within 128 tokens is left out: a chat
that stops in the middle of a sentence would teach just that. What the model itself says changes it least."""

import json
import sys
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH_SIZE = 16  # prompts at a time
MAX_NEW_TOKENS = 128

folder = sys.argv[1]
prompt_file = Path(sys.argv[2])
chat_file = Path(sys.argv[3])
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
if tokenizer.chat_template is None:
    sys.exit(f"MODEL={folder} is invalid: it has no chat template. Allowed: an instruction-tuned model")
if tokenizer.pad_token is None:
    tokenizer.pad_token = tokenizer.eos_token
device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForCausalLM.from_pretrained(folder).eval().to(device)
ends_of_answers = torch.tensor(model.generation_config.eos_token_id, device=device).flatten()
prompts = [line for line in prompt_file.read_text(encoding="utf-8").splitlines() if line.strip()]

# A batch can take a minute, so that its tokens are counted: a line of a log every ten seconds.
seconds_between_states = 0.2 if sys.stderr.isatty() else 10.0
progress = tqdm(
    total=len(prompts) * MAX_NEW_TOKENS,
    desc=f"answering {len(prompts)} prompts",
    unit="token",
    mininterval=seconds_between_states,
)


def count_tokens(token_ids: torch.Tensor, scores: torch.Tensor, **options: object) -> torch.Tensor:
    """Advances the bar by one token of each answer. Says of no answer that it ends here."""
    progress.update(len(token_ids))
    return torch.zeros(len(token_ids), dtype=torch.bool, device=device)


rows = []
for first in range(0, len(prompts), BATCH_SIZE):
    batch = prompts[first : first + BATCH_SIZE]
    chats = [[{"role": "user", "content": prompt}] for prompt in batch]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    ).to(device)
    with torch.inference_mode():
        outputs = model.generate(
            **inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, stopping_criteria=[count_tokens]
        )
    new_tokens = outputs[:, inputs["input_ids"].shape[1] :]
    answers = tokenizer.batch_decode(new_tokens, skip_special_tokens=True)
    has_ended = torch.isin(new_tokens, ends_of_answers).any(dim=1).tolist()
    for prompt, answer, is_whole in zip(batch, answers, has_ended, strict=True):
        if not is_whole:
            continue
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer.strip()}]
        rows.append({"messages": turns})
    progress.update((first + len(batch)) * MAX_NEW_TOKENS - progress.n)  # answers that ended early
progress.close()
chat_file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
print(f"{len(rows)} chats in {chat_file}; {len(prompts) - len(rows)} answers did not end and were left out")
