"""Methods, with options, whose base stays frozen, and those of them that change a part of it themselves."""

KEEPING = [
    "lora",
    "lora method.per_domain=true method.embeddings=true",
    "inclora method.adapter_storage=separate",
    "olora method.adapter_storage=separate",
    "moelora",
    "sapt",
    "peft method.tuner=ia3",
    "peft method.tuner=vera",
    "peft method.tuner=delora",
    "adapter",
    "prompt",
    "progprompt",
    "hat method.form=adapter",
    "cpt_plugin",
    "demix",
    "lifelong_moe method.dense=frozen method.strength=0",
]
PISSA_OF_PEFT = "+method.arguments={use_dora:false,init_lora_weights:pissa}"
REWRITING = [
    "inclora method.adapter_storage=merged",
    "merge_lora",
    "lora method.init_lora_weights=pissa",
    f"peft method.tuner=dora {PISSA_OF_PEFT}",
]
