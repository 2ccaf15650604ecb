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
name=../../x | order=true | freeze=null | freeze.only=( | endtask._target_=[] | method._target_=null
endtask._target_=cpt.methods.ewc.EWC | trainer.checkpoint_every=0min | domains=hub +domains.catalogue.news=5
domains._target_=collections.OrderedDict | probe._target_=collections.OrderedDict
endtask=submodules endtask.packages=null | model.base.optim._partial_=no
model.base=5 | domains=tasks domains.packing=concat | domains.only=/*/ | objective=LC.furlongs
probe=lm_eval probe.when=every:0 | method=elle method.neurons=0.5
+data.processes=2 -> ? is not known | +unknown=1 -> ? is not known | ~method -> … is missing
+callbacks.early.patience=3 -> callbacks.early={'patience': 3} has no class
replay=past ~replay._target_ -> …=null | ~method.name -> … is missing; needed: method.name=…
~optim._target_ -> …=null | endtask._target_=nowhere.X -> …:
name='${no.such}' -> name: Interpolation key 'no.such' not found
order=[law] -> order: unknown domain law; there are: networkx, pandas, sympy
strategy=fsdp endtask=submodules -> endtask needs the whole model, of which strategy=fsdp leaves
strategy=fsdp method._target_=tests.support.seams.Growing -> method: tests.support.seams.Growing does
strategy=fsdp method=elle -> method: cpt.methods.elle.ELLE does not support sharded weights
+trainer.reshard_after_forward=true -> … is of strategy=fsdp; allowed
+trainer.max_steps=1 -> … is set by cpt | +trainer.fast_dev_run=true -> … is set by cpt
monitor.stop=0.1 -> … with every=null
monitor.every=2 monitor.stop=1 monitor.past=0 monitor.general=false -> monitor.stop=1 with past=0
monitor.keep=best -> … with every=null
monitor.every=2 monitor.patience=1 schedule=wsd -> monitor.stop, patience and keep do not go with a
monitor.every=2 monitor.keep=best strategy=fsdp -> monitor.keep=best does not go with strategy=fsdp
budget.steer=end -> … with general=null, past=null
budget.general=1 monitor.general=false -> budget.general=1 does not go with monitor.general=false; allo
budget.past=1 monitor.every=2 monitor.keep=best -> budget.past=1 does not go with monitor.keep=best, wh
budget.past=1 schedule=wsd -> budget.past=1 does not go with a schedule whose decay is a branch
budget.general=1 method=dga -> budget.general=1 does not go with method=dga, which trains each domain
budget.general=1 strategy=fsdp -> budget.general=1 does not go with strategy=fsdp, as it needs whole
method=agem method.acts_on=update method.margin=1 -> … with acts_on=update
method=derpp method.memory_bytes=5 -> method.memory=512 and memory_bytes=5
method=hat method.units=[] -> method.shared=frozen leaves nothing to train without units
method=ewc +method.strenght=1 -> ? is not known; did you mean method.strength?
method._target_=cpt.methods.ewc.ECW -> …: cpt.methods.ewc has no ECW
mask=migu mask.migu.mass=0.9 -> mask.migu.threshold=0.7 and mass=0.9: one of them says how
mask=migu mask.migu.backend=backward mask.migu.importance=gradient -> mask.migu.backend=backward does not go
mask=migu mask.migu.backend=backward mask.migu.acts_on=frozen -> mask.migu.backend=backward is invalid with
+mask.mine=5 -> … has no class | replay=past replay.general=0.9 -> replay.past=0.25 and general=0.9
replay=general replay.memory=5 -> … with past=0.0
replay=generated replay.past=0.9 replay.general=0.1 -> replay.past=0.9 and general=0.1
replay=generated replay.prefix=9999 -> …, which leaves nothing to write of model.len
replay=generated strategy=fsdp -> replay=generated needs the whole model, of which strategy=fsdp
schedule._target_=cpt.optim.schedulers.Wsd -> …: cpt.optim.
model.vocabulary=null -> model.checkpoint=null of tiny_modernbert is nothing to start from; allowed
domains=texts domains.root=nowhere -> …: there is no folder nowhere
domains.packing=none domains=texts domains.root=. -> domains.packing=none
domains=tasks +domains.by=coarse -> … joins text, and these domains are examples; allow
domains.embedding=sentence -> … embedding_model=null
domains.embedding_model=folder -> domains.embedding=tfidf embedding_model=folder
order=similar domains.embedding=static -> … needs the package wordllama, which
order=similar_tree -> …: the 3 domains are within 3 coarse ones, by their names; allow
domains=hub -> domains.catalogue names no domain; needed: '+domains.catalogue.news={path: ag_news}'
domains=tasks answers.measures={a:sarri} -> answers.measures.a=sarri is not known; did you mean sari?
domains=tasks answers.measures={a:sari} answers.written=false -> answers.measures.a=sari is of what a model
domains=tasks model=tiny_gpt2 answers.measures={nosuch:sari} -> answers.measures.nosuch is not known;
domains=tasks domains.root=nowhere -> …: there is no such folder
domains=tasks domains.format=trace domains.root=cpt -> … has no data set in the layout f
domains=tasks model.objective=masked -> … does not go with domains of examples: a
order=9 -> … is not known
trainer.accumulate_grad_batches=5 -> trainer.batch_size=32 is not a multiple of trainer.accumulate_grad
trainer.epochs=2 -> the budget of a domain is trainer.steps=250 trainer.epochs=2
method=lifelong_moe method.experts=0 method.dense=frozen -> method.experts=0 with dense=frozen lea
method=merge_lora method.exported=peft -> … has no pair to write once pairs
""")

ON_THE_MODEL = read("""
method=adapter method.reduction=100000 | method=lora method.targets=[nothing]
method=prompt method.tokens=497 | method=elle method.prompt=497
method=hat method.form=adapter method.reduction=33 | model.mask_rate=null | model.length=9999
freeze.layers=9 | optim._target_=collections.OrderedDict | +callbacks.x._target_=builtins.dict
+logger.x._target_=lightning.pytorch.callbacks.Timer | method=sapt method.targets=[head.dense]
method=lifelong_moe method.every=3 | method=moelora method.targets=[nothing]
method=derpp method.memory=null method.memory_bytes=9
replay=generated -> … asks a model to write text, and model=tiny_modernbert fills
method=replay replay@method.mixture=generated -> replay=generated asks a model to write text, and mode
method=peft +method.arguments.rank=3 -> ? is not known
method=progprompt method.tokens=166 -> … for each of 3 domains
method=elle method.heads=1 -> …: before law, heads of a modernbert can not be grown:
method=elle method.layers=[0,3] -> …: before space, 3 more blocks for a modernbert,
optim=sgd +optim.nesterov=true -> optim: Nesterov momentum requires a momentum and zero dampening
model.config.num_attention_heads=5 -> model.config: The hidden size (32) is not a multiple
model.config=null -> model.checkpoint=null of tiny_modernbert is nothing to start from; allowed
model.objective=causal -> … does not go with a modernbert model
freeze.only=nothing -> … finds nothing in a modernbert
freeze.only=norms method=lora -> freeze.only=norms leaves nothing of what method=lora trains;
method=recadam method.strength=1e6 -> method.strength=1e+06 at optim.lr=
domains=tasks domains.root=null -> model.objective=masked does not go with domains of examples: a mask
method=ewc strategy=fsdp trainer.precision=bf16-true -> … does not go with m
trainer.accelerator=tpu -> … trainer.devices=1 trainer.strategy=auto
model.checkpoint=/proc -> … is neither a folder nor a name that can be loaded:
method._target_=collections.OrderedDict -> _target_=collections.OrderedDict
+callbacks.x={_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: a} -> callbacks.x=EarlyStopping
method=lifelong_moe freeze.layers=2 -> freeze leaves no FFN that method.every=2 makes a mixture;
method=das method.contrast_dropout=null -> two passes of ModernBertForMaskedLM with method.contrast_dro
mask=migu mask.migu.only=nothing -> only=nothing leaves nothing to mask
domains.packing=isolated trainer.attention=flex_attention -> domains.packing=isolated does not go with
""")

ON_A_CAUSAL = read("""
domains=tasks domains.root=null domains.packing=isolated method=prompt -> domains.packing=isolated does not
domains.packing=isolated method=prompt -> domains.packing=isolated does not go with method=prompt
domains.packing=isolated model.config.model_type=bloom -> domains.packing=isolated does not go with a bloom,
domains=tasks domains.root=null domains.packing=isolated model.config.model_type=bloom -> domains.packing=is
""")

ON_A_DECODER = read("""
model.mask_rate=null | model.mean_span=null | model.length=2010 | model.vocabulary=300 | freeze.layers=9
method=lora method.targets=[nothing] | method=derpp method.memory=null method.memory_bytes=9
replay=generated -> … asks a model to write text, and model=tiny_t5 fills spans
domains.packing=isolated -> … does not go with a model of two stacks
model.objective=masked -> … does not go with a t5 model
model.objective=causal -> … does not go with a t5 model
model.length=600 model.mask_rate=0.5 model.mean_span=1 -> model.length=600
method=lora method.embeddings=true -> … does not go with a t5, whose encoder and d
mask=migu mask.migu.only=nothing -> only=nothing leaves nothing to mask
method=das method.contrast_dropout=null -> two passes of T5ForConditionalGeneration with met
""")
