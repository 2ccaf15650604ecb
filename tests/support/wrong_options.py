"""What a config may not say, and how what is said of it begins: at once, without torch, or on the model's
skeleton. Values that a type alone refuses are those of tests/core/test_schema.py."""

import re

WORD = re.compile(r"(?:\{[^}]*\}|\S)+")  # with the spaces that a mapping has


def read(table: str) -> dict[str, str]:
    """What is given, and how what is said begins: `given -> said`, in which … stands for the last override
    and ? for its key; without an arrow, "…; allowed"."""
    found = {}
    for cell in " | ".join(table.strip().splitlines()).split(" | "):
        given, _, said = cell.partition(" -> ")
        last = WORD.findall(given)[-1].lstrip("+~")
        said = re.sub(r"^\?", last.partition("=")[0], said or "…; allowed")
        found[given] = last + said[1:] if said[0] == "…" else said
    return found


AT_ONCE = read("""
name=../../x | order=true | trainable=( | method._target_=null | endtask._target_=cpt.methods.ewc.EWC
trainer.checkpoint_every=0min | domains._target_=collections.OrderedDict | domains.only=/*/
optimized_metric=LC.furlongs | method=elle method.neurons=0.5 | +data.processes=2 -> ? is not known
+unknown=1 -> ? is not known | ~method -> … is missing | endtask._target_=nowhere.X -> …:
name='${no.such}' -> name: Interpolation key 'no.such' | order=[law] -> order: unknown domain law;
strategy=fsdp endtask=submodules -> endtask needs the whole
strategy=fsdp method=elle -> method: cpt.methods.elle.ELLE does not
+trainer.max_steps=1 -> … is set by | monitor.stop=0.1 -> … with every=null
monitor.every=2 monitor.stop=1 monitor.past=0 monitor.general=false -> monitor.stop=1 with past=0
monitor.every=2 monitor.patience=1 lr_scheduler=wsd -> monitor.stop, patience and keep
monitor.every=2 monitor.keep=best strategy=fsdp -> monitor.keep=best does not go with strategy=fsdp
budget.steer=end -> … with general=null, past=null
budget.general=1 monitor.general=false -> budget.general=1 does not go with monitor.general=false;
budget.past=1 monitor.every=2 monitor.keep=best -> budget.past=1 does not go with monitor.keep=best,
budget.general=1 method=dga -> budget.general=1 does not go with method=dga,
method=agem method.apply_to=update method.margin=1 -> … with apply_to=update
method=derpp method.buffer_bytes=5 -> method.buffer_size=512 and buffer_bytes=5
method=hat method.units=[] -> method.shared=frozen leaves nothing to
method=ewc +method.strenght=1 -> ? is not known;
method._target_=cpt.methods.ewc.ECW -> …: cpt.methods.ewc has no
mask=migu mask.migu.top_p=0.9 -> mask.migu.threshold=0.7 and top_p=0.9: one
mask=migu mask.migu.backend=backward mask.migu.importance=gradient -> mask.migu.backend=backward does not go
+mask.mine=5 -> … has no class | replay=past replay.general_ratio=0.9 -> replay.past_ratio=0
replay=general replay.buffer_size=5 -> … with past_ratio=0.0
replay=generated strategy=fsdp -> replay=generated needs the whole
model.vocab_size=null -> model.name_or_path=null of tiny_modernbert is
domains=texts domains.root=nowhere -> …: there is no
domains=tasks domains.packing=concat
domains.embedding=sentence -> … embedding_model=null | order=similar_tree -> …: the 3 domains
domains=hub -> domains.catalogue names no domain;
domains=tasks answers.measures={a:sari} answers.written=false -> answers.measures.a=sari is of what
domains=tasks model=tiny_gpt2 answers.measures={nosuch:sari} -> answers.measures.nosuch is not known;
domains=tasks model.objective=masked -> … does not go with domains | order=9 -> … is not known
trainer.accumulate_grad_batches=5 -> trainer.batch_size=32 is not a | trainer.epochs=2 -> the budget of a
method=lifelong_moe method.num_experts=0 method.dense=frozen -> method.num_experts=0 with dense=frozen lea
method=merge_lora method.exported=peft -> … has no pair
""")

ON_THE_MODEL = read("""
method=adapter method.reduction_factor=100000 | method=lora method.target_modules=[nothing]
method=prompt method.num_virtual_tokens=497
method=hat method.form=adapter method.reduction_factor=33 | model.mlm_probability=null
model.max_seq_length=9999
freeze.layers=9 | optim._target_=collections.OrderedDict | +callbacks.x._target_=builtins.dict
method=lifelong_moe method.every=3 | replay=generated -> … asks a model
method=peft +method.arguments.rank=3 -> ? is not known
method=progprompt method.num_virtual_tokens=166 -> … for each of
method=elle method.heads=1 -> …: before law, heads
optim=sgd +optim.nesterov=true -> optim: Nesterov momentum requires
model.config.num_attention_heads=5 -> model.config: The hidden size
model.objective=causal -> … does not go with a | trainable=nothing -> … finds nothing in
trainable=norms method=lora -> trainable=norms leaves nothing of
method=recadam method.strength=1e6 -> method.strength=1e+06 at optim.lr=
method=ewc strategy=fsdp trainer.precision=bf16-true -> … does not go with m
trainer.accelerator=tpu -> … trainer.devices=1 trainer.strategy=auto
model.name_or_path=/proc -> … is neither a
+callbacks.x={_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: a} -> callbacks.x=EarlyStopping
method=lifelong_moe freeze.layers=2 -> freeze leaves no FFN
method=das method.contrast_dropout=null -> two passes of ModernBertForMaskedLM
domains.packing=document_mask trainer.attn_implementation=flex_attention -> domains.packing=document_mask does
""")

ON_A_CAUSAL = read("""
domains.packing=document_mask method=prompt -> domains.packing=document_mask does not go with method=prompt
domains.packing=document_mask model.config.model_type=bloom -> domains.packing=document_mask does not go
""")

ON_A_DECODER = read("""
model.mean_span=null | model.max_seq_length=2010 | model.vocab_size=300
domains.packing=document_mask -> … does not go with a | model.objective=masked -> … does not go with a
model.max_seq_length=600 model.mlm_probability=0.5 model.mean_span=1 -> model.max_seq_length=600
method=lora method.embeddings=true -> … does not go with a
""")
