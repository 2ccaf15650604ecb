"""Which arguments of lightning.Trainer a config may give."""

# Options of lightning.Trainer that cpt sets, or that would change unseen how much is learned and scored.
BUDGET = "trainer.steps, trainer.epochs or trainer.tokens say how much of a domain is learned"
SCORING = "every domain is scored as a whole after each; domains.held_out.most bounds what is held out"
OWN = "cpt does that itself"
REFUSED: dict[str, str] = {
    **dict.fromkeys(("max_steps", "min_steps", "max_epochs", "min_epochs", "max_time"), BUDGET),
    **dict.fromkeys(("limit_train_batches", "overfit_batches", "fast_dev_run"), BUDGET),
    **dict.fromkeys(("limit_val_batches", "limit_test_batches", "limit_predict_batches"), SCORING),
    **dict.fromkeys(("val_check_interval", "check_val_every_n_epoch", "num_sanity_val_steps"), SCORING),
    "callbacks": "callbacks=…, or '+callbacks.my._target_=module.Class'",
    "logger": "logger=…, or '+logger.my._target_=module.Class'",
    "default_root_dir": "hydra.run.dir=… is the folder of a run",
    "enable_checkpointing": "trainer.checkpoint_every says how often",
    "enable_progress_bar": OWN,
    "enable_model_summary": "+callbacks.summary._target_=lightning.pytorch.callbacks.ModelSummary",
    "use_distributed_sampler": OWN,
    "reload_dataloaders_every_n_epochs": OWN,
    "plugins": OWN,
    "barebones": "logger=none is the fastest",
}
# What goes to lightning.Trainer as it is; a name that is in neither list is looked for in its signature.
PASSED = (
    *("benchmark", "detect_anomaly", "enable_autolog_hparams", "gradient_clip_algorithm"),
    *("inference_mode", "model_registry", "profiler", "sync_batchnorm"),
)
