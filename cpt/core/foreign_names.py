"""What other libraries and papers call the options, choices and values of cpt: error messages suggest the
name that they have here. They are not aliases: a run would then have two names."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class ForeignOption:
    """The option for which another library has a name of its own, and how the two differ, in words."""

    option: str
    difference: str = ""


PER_DOMAIN = "of each domain, not of the whole run"
GLOBAL_BATCH = "over all processes and micro-batches"
# By the name in transformers' TrainingArguments and example scripts, in peft, or in Lightning's Trainer.
OPTIONS = {
    "attn_impl": ForeignOption("trainer.attn_implementation"),
    "batch": ForeignOption("trainer.batch_size", GLOBAL_BATCH),
    "bf16": ForeignOption("trainer.precision"),
    "block_size": ForeignOption("model.max_seq_length"),
    "dataloader_num_workers": ForeignOption("trainer.num_workers"),
    "fp16": ForeignOption("trainer.precision"),
    "global_batch_size": ForeignOption("trainer.batch_size"),
    "gradient_accumulation_steps": ForeignOption("trainer.accumulate_grad_batches"),
    "learning_rate": ForeignOption("optim.lr"),
    "logging_steps": ForeignOption("trainer.log_every_n_steps"),
    "lr_scheduler_type": ForeignOption("lr_scheduler"),
    "mask_rate": ForeignOption("model.mlm_probability"),
    "max_epochs": ForeignOption("trainer.epochs", PER_DOMAIN),
    "max_grad_norm": ForeignOption("trainer.gradient_clip_val"),
    "max_length": ForeignOption("model.max_seq_length"),
    "max_steps": ForeignOption("trainer.steps", PER_DOMAIN),
    "model_name_or_path": ForeignOption("model.name_or_path"),
    "num_train_epochs": ForeignOption("trainer.epochs", PER_DOMAIN),
    "output_dir": ForeignOption("name", "runs are in outputs/NAME"),
    "per_device_eval_batch_size": ForeignOption("trainer.eval_batch_size"),
    "per_device_train_batch_size": ForeignOption("trainer.batch_size", GLOBAL_BATCH),
    "rank": ForeignOption("method.r"),
    "report_to": ForeignOption("logger"),
    "save_steps": ForeignOption("trainer.checkpoint_every_n_steps"),
    "train_batch_size": ForeignOption("trainer.batch_size", GLOBAL_BATCH),
    "warmup_steps": ForeignOption("lr_scheduler.warmup_ratio", "a share of a domain's steps"),
}
# Choices of config groups, by names that are in use for them: in lower case, with _ for all other signs.
CHOICES = {
    "method": {
        "a_gem": "agem",
        "dapt": "one",
        "der": "derpp",
        "elastic_weight_consolidation": "ewc",
        "er": "replay",
        "experience_replay": "replay",
        "fine_tune": "ncl",
        "fine_tuning": "ncl",
        "finetune": "ncl",
        "finetuning": "ncl",
        "ft": "ncl",
        "gem": "agem",
        "houlsby": "adapter",
        "individual": "one",
        "knowledge_distillation": "kd",
        "l2_sp": "l2",
        "learning_without_forgetting": "kd",
        "llama_pro": "block_expansion",
        "lwf": "kd",
        "memory_aware_synapses": "mas",
        "mocl": "sapt",
        "model_soup": "merge",
        "mtl": "joint",
        "multitask": "joint",
        "naive": "ncl",
        "online_ewc": "ewc",
        "p_tuning": "prompt",
        "prompt_tuning": "prompt",
        "rehearsal": "replay",
        "seq_ft": "ncl",
        "seqft": "ncl",
        "seqlora": "lora",
        "sequential": "ncl",
        "soft_masking": "das",
        "synaptic_intelligence": "si",
        "task_arithmetic": "merge",
        "ties": "merge",
        "upper_bound": "joint",
        "vanilla": "ncl",
        "zero_shot": "none",
    },
    "lr_scheduler": {
        "constant_with_warmup": "constant",
        "cosine_with_restarts": "cosine",
        "inverse_sqrt": "rsqrt",
        "linear_with_warmup": "linear",
        "warmup_stable_decay": "wsd",
    },
    "optim": {"adam": "adamw", "adamw_bnb_8bit": "adamw_8bit", "adamw_torch": "adamw"},
    "strategy": {"deepspeed": "fsdp", "fsdp2": "fsdp", "zero3": "fsdp"},
    "logger": {"mlf": "mlflow", "tb": "tensorboard", "weights_and_biases": "wandb"},
    "routing": {"oracle": "domain"},
}
# Values of options, by the name of the option.
VALUES = {
    "precision": {
        "bfloat16": "bf16-mixed",
        "float16": "16-mixed",
        "float32": "32-true",
        "fp16": "16-mixed",
        "fp32": "32-true",
        "half": "16-mixed",
    },
}


def normalize_choice(name: str) -> str:
    """A name in lower case, with _ for signs.

    >>> normalize_choice("A-GEM"), normalize_choice("DER++")
    ('a_gem', 'der')
    """
    return re.sub(r"\W+", "_", name.lower()).strip("_")


def find_choice(group: str, name: str) -> str:
    """The choice of a group for which a name is in use; empty for any other name."""
    return CHOICES.get(group, {}).get(normalize_choice(name), "")


def find_value(option: str, value: str) -> str:
    """The value of an option for which another one is in use; empty for any other value."""
    return VALUES.get(option, {}).get(value.lower(), "")
