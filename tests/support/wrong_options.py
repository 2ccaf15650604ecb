"""What a config may not say: at once, without torch, or on the model's skeleton. Values that a type alone
refuses are those of tests/core/test_schema.py."""

import re

# `KEY=VALUE is invalid: REASON. Did you mean X? Allowed: VALUES`
FORM = re.compile(
    r"[^\n]+? (?:is missing|is invalid)(?: (?:with|for|before) [^:\n]+?)?"
    r"(: [^\n]+?)?((?:\. Did you mean [^\n]+?\?|\.) Allowed: [^\n]*[^ .])?"
)


def is_refused(overrides: str, message: str) -> bool:
    """Whether a message has the form of all, names an option that is given, and no internals."""
    keys: list[str] = []
    for override in overrides.split():
        path = override.lstrip("+~").partition("=")[0]
        keys += path.split(".")[-2:]
    match = FORM.fullmatch(message)
    has_form = match is not None and any(match.groups())
    return has_form and any(key in message for key in keys) and "_recursive_" not in message


def cells(table: str) -> list[str]:
    return " | ".join(table.strip().splitlines()).split(" | ")


AT_ONCE = cells("""
name=../../x | order=true | trainable=( | method._target_=null | endtask._target_=cpt.methods.ewc.EWC
trainer.checkpoint_every_n_steps=10min | domains._target_=collections.OrderedDict | domains.only=/*/
optimized_metric=LC.furlongs | method=elle method.neurons=0.5 | +modules.processes=2 | +unknown=1 | ~method
endtask._target_=nowhere.X | name='${no.such}' | order=[law]
strategy=fsdp endtask=hub endtask.tasks.sympy.path=x
strategy=fsdp method=elle | strategy=fsdp method=block_expansion | +trainer.max_steps=1 | monitor.stop=0.1 | trainer.precision=16-true
monitor.every=2 monitor.stop=1 monitor.past=0 monitor.general=false | monitor.chats=true
monitor.every=2 monitor.patience=1 lr_scheduler=wsd | monitor.every=2 monitor.keep=best strategy=fsdp
budget=drift budget.general=1 monitor.general=false | budget.general=1 | budget=drift
budget=drift budget.past=1 monitor.every=2 monitor.keep=best
budget=drift budget.general=1 method=dga
method=agem method.apply_to=update method.margin=1 | method=derpp method.buffer_size=0
method=hat method.units=[] | method=ewc +method.strenght=1 | method._target_=cpt.methods.ewc.ECW
mask=migu mask.migu.top_p=0.9 | mask=migu mask.migu.backend=backward mask.migu.importance=gradient
method._target_=tests.support.hook_methods.Companions +method.strength=1 | lr_scheduler._target_=functools.partial | domains._target_=collections.Counter
+mask.mine=5 | replay=past replay.general_ratio=0.9 | replay=general replay.buffer_size=5
replay=generated strategy=fsdp | model.vocab_size=null | domains=texts domains.root=nowhere
domains=tasks domains.packing=concat | order=similar_tree | domains=hub
domains=tasks answers.metrics={a:sari} answers.written=false
domains=tasks answers.written=false answers.ranked=false
domains=tasks answers.metrics={a:accuracy_ranked} answers.ranked=false
domains=tasks model=tiny_gpt2 answers.metrics={nosuch:sari} | domains=tasks model.objective=masked
order=9 | trainer.accumulate_grad_batches=5 | trainer.epochs=2
method=lifelong_moe method.num_experts=0 method.dense=frozen | method=merge_lora method.export_format=peft
optim.lr_multipliers={embeddings:0} | optim.lr_multipliers=0.1 | optim.no_decay=embeddings
method=olora method.init_lora_weights=pissa | method=moelora method.use_dora=true
method=lora method.init_lora_weights=eva | method=lora method.use_dora=true strategy=fsdp
model=hf model.name_or_path=here model.quantization=nf4 | method=lora model.quantization=int8
model=hf model.name_or_path=here model.quantization=int8 method=merge_lora
model=hf model.name_or_path=here model.quantization=nf4 method=olora
model=hf model.name_or_path=here model.quantization=nf4 method=lora strategy=fsdp
model=hf model.name_or_path=here model.quantization=nf4 method=lora method.use_dora=true
model=hf model.name_or_path=here model.quantization=nf4 method=sapt method.init_lora_weights=pissa
model=hf model.name_or_path=here model.quantization=nf4 method=peft method.tuner=vera
model=hf model.name_or_path=here model.quantization=nf4 method=lora trainer.match=ncl
optim=adafactor strategy=fsdp | optim=adafactor mask=mofo | optim=adafactor method=das method.apply_to=frozen
optim=sgd mask=mofo | optim=muon optim.ns_steps=100 | optim=muon optim.momentum=1 | optim=adafactor optim.d=0.5
optim.rounding=up | optim=adafactor optim.beta2_decay=0.5 | optim=adafactor optim.eps=1e-3
optim._target_=bitsandbytes.optim.Lion8bit strategy=fsdp
loss=eaft loss.top_k=1 | loss=rho1 loss.share=0 | loss=rho1 strategy=fsdp | loss=flow loss.temperature=mean
loss=flow +loss.alpha=1
method=lora method.protected_rank=4 method.use_dora=true | method=lora method.protected_rank=4 method.embeddings=true
""")

ON_THE_MODEL = cells("""
domains.separator=nosuch | domains.bos_in_rows=true
method=adapter method.reduction_factor=100000 | method=lora method.target_modules=[nothing]
method=prompt method.num_virtual_tokens=497 | method=hat method.form=adapter method.reduction_factor=33
model.mean_span=3 | model.max_seq_length=9999 | freeze.layers=9
optim._target_=collections.OrderedDict | +callbacks.x._target_=builtins.dict
method=lifelong_moe method.moe_every_n_blocks=3 | replay=generated | method=peft +method.arguments.rank=3
method=progprompt method.num_virtual_tokens=166 | method=elle method.heads=1
optim=sgd +optim.nesterov=true | +trainer.setps=4
optim=sgd ~optim.momentum optim._target_=torch.optim.Muon | optim=sgd ~optim.momentum optim._target_=torch.optim.LBFGS
model.config.num_attention_heads=5 | model.objective=causal
optim.no_decay=[nothing] | optim.lr_multipliers={embeddings:0.1,head:0.5}
method=block_expansion model=tiny_roberta | loss=rho1 loss.reference=nowhere | method=lora method.protected_rank=32 | method=lora optim.no_decay=[embeddings] | method=lora method.modules_to_save=[nothing]
method=lora method.modules_to_save=[embeddings] freeze.embeddings=true
method=sapt method.modules_to_save=[embeddings] | method=olora method.modules_to_save=[Wqkv]
trainable=nothing | trainable=norms method=lora | method=recadam method.strength=1e6
method=ewc strategy=fsdp trainer.precision=bf16-true | trainer.accelerator=tpu | model.name_or_path=/proc
+callbacks.x={_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: a}
+callbacks.x._target_=lightning.pytorch.callbacks.WeightAveraging
method=lifelong_moe freeze.layers=2 | method=adapter freeze.layers=2 | method=hat lr_scheduler=wsd
method=das method.contrast_dropout=null
method=demix method.routing.prior=cached strategy=ddp trainer.devices=2 trainer.accelerator=cpu
domains.packing=document_mask trainer.attn_implementation=flex_attention
""")

ON_A_CAUSAL = cells("""
model.mlm_probability=0.15 | domains.packing=document_mask method=prompt
domains.packing=document_mask model.config.model_type=bloom
""")

ON_A_DECODER = cells("""
model.max_seq_length=2010 | model.vocab_size=300 | domains.packing=document_mask
model.objective=masked | model.max_seq_length=600 model.mlm_probability=0.5 model.mean_span=1
method=lora method.embeddings=true
""")
