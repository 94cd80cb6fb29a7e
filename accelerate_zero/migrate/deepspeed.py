"""What becomes of each key of DeepSpeed's configs; look a key up in `DEEPSPEED`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate_zero.migrate.rules import (
    CHECKPOINTING,
    FP8,
    GROUPS,
    PARALLEL,
    PLAIN,
    SAVES,
    SHARDED_INIT,
    Rule,
    Said,
    Table,
    Verdict,
    to,
    unsupported,
)

_STAGE = "zero_optimization.stage"


def _stage_of(said: Said) -> int:
    if said.value(_STAGE) == "auto":
        return 2  # what Accelerate fills in where launch is given no other
    return int(said.word(_STAGE, ("0", "1", "2", "3"), str(said.default_stage)))


def _stage(said: Said, key: str) -> Verdict:
    stage = _stage_of(said)
    return to({"stage": max(stage, 1)}, why=PLAIN if stage == 0 else "")


def _device(said: Said, what: str) -> str:
    """Where DeepSpeed puts the "optimizer" or "param" shards: none, cpu or nvme."""
    section = f"zero_optimization.offload_{what}"
    old = "cpu_offload" if what == "optimizer" else "cpu_offload_params"
    default = "cpu" if said.boolean(f"zero_optimization.{old}") else "none"
    device = said.word(f"{section}.device", ("none", "cpu", "nvme"), default)
    in_use = _stage_of(said) == 3 if what == "param" else _stage_of(said) > 0
    return device if in_use else "none"


def _placement(said: Said) -> dict[str, Any]:
    """Our settings for both devices together."""
    devices = {what: _device(said, what) for what in ("optimizer", "param")}
    if set(devices.values()) == {"none"}:
        return {}
    on_disk = [what for what, device in devices.items() if device == "nvme"]
    offload = {"offload": "optimizer" if devices["param"] == "none" else "all"}
    return {**offload, "offload_directory": _directory(said, on_disk[0])} if on_disk else offload


def _directory(said: Said, what: str) -> str:
    section = f"zero_optimization.offload_{what}"
    path = said.value(f"{section}.nvme_path")
    if not isinstance(path, str) or path in ("", "none", "auto"):
        raise ValueError(
            f"{said.path}: {said.shown(f'{section}.device')} is nvme, so {said.shown(f'{section}.nvme_path')} must be a "
            f"directory, got {path!r}."
        )
    return path


def _offload_optimizer(said: Said, key: str) -> Verdict:
    if _device(said, "optimizer") == "none":
        together = "masters and optimizer state are kept with the weights' shards; see offload_param."
        return Verdict("not needed", together if _placement(said) else "shards are on the device by default.")
    return to(_placement(said), why="masters, gradient shards, optimizer state and the step.")


def _offload_param(said: Said, key: str) -> Verdict:
    if _stage_of(said) < 3:
        return Verdict("not needed", "below stage 3 the weights are whole on the device, in DeepSpeed as well.")
    if _device(said, "param") == "none":
        return Verdict("not needed", "shards are on the device by default.")
    return to(_placement(said), why="weights, masters and optimizer state live together.")


def _nvme_path(said: Said, key: str) -> Verdict:
    what = "optimizer" if "offload_optimizer" in key else "param"
    directory = _placement(said).get("offload_directory")
    if _device(said, what) != "nvme":
        return Verdict("not needed", "only nvme reads it.")
    if said.value(key) == directory:
        return to({"offload_directory": directory})
    return Verdict("unsupported", f"one directory holds all: {directory}.")


def _prefetch(said: Said, key: str) -> Verdict:
    if _stage_of(said) < 3:
        return Verdict("not needed", "only stage 3 gathers weights.")
    elements, size = said.whole(key), 4 if _compute(said) == "fp32" else 2
    return to({"prefetch_bytes": elements * size}, why=f"{elements} elements of {size} bytes.")


# -- DeepSpeed: precision --------------------------------------------------------------------------------------------


def _compute(said: Said) -> str:
    """The dtype of forward and backward; bf16 where it is left open."""
    mixed = str(said.value("mixed_precision", "no")).lower()
    autocast = said.value("torch_autocast.enabled") and _AUTOCAST[_autocast_dtype(said)]
    if said.value("bf16.enabled") or mixed in ("bf16", "fp8") or autocast == "bf16":
        return "bf16"
    return "fp16" if said.value("fp16.enabled") or mixed == "fp16" or autocast == "fp16" else "fp32"


def _bf16(said: Said, key: str) -> Verdict:
    if not said.boolean(key):
        return Verdict("not needed", "it is switched off.")
    if said.boolean("bf16.bf16_master_weights_and_grads"):
        return to({"precision": "bf16-true"}, {"mixed_precision": "no"}, "weights, masters and moments in bf16.")
    return to(accelerate={"mixed_precision": "bf16"}, why="fp32 masters; forward runs under torch.autocast.")


def _fp16(said: Said, key: str) -> Verdict:
    if not said.boolean(key):
        return Verdict("not needed", "it is switched off.")
    return to(accelerate={"mixed_precision": "fp16"}, why="fp32 masters and a loss scale; forward runs under autocast.")


def _bf16_masters(said: Said, key: str) -> Verdict:
    if not said.boolean(key):
        return Verdict("not needed", "masters are in fp32, here by default as well.")
    return to({"precision": "bf16-true"}, why='MixedPrecision(master=None, rounding="stochastic") keeps small updates.')


_AUTOCAST = {"bfloat16": "bf16", "torch.bfloat16": "bf16", "bf16": "bf16",
             "float16": "fp16", "torch.float16": "fp16", "fp16": "fp16"}  # fmt: skip


def _autocast_dtype(said: Said) -> str:
    return said.word("torch_autocast.dtype", tuple(_AUTOCAST), "bfloat16")


def _autocast(said: Said, key: str) -> Verdict:
    if not said.boolean(key):
        return Verdict("not needed", "it is switched off.")
    return to(accelerate={"mixed_precision": _AUTOCAST[_autocast_dtype(said)]})


def _loss_scale(said: Said, key: str) -> Verdict:
    scale = said.number(key)
    if scale == 0:
        return Verdict("not needed", "the loss scale is dynamic, here as well.")
    return Verdict(
        "unsupported",
        f"start at it and never raise it: Accelerator(kwargs_handlers=[GradScalerKwargs(init_scale={scale:g}, "
        f"growth_interval=10**9)]) or ZeroGradScaler with the same arguments; an overflow still halves it.",
    )


def _scaling(usual: int, default: int) -> Rule:
    """A rule for a number of the dynamic loss scale: `usual` with torch's scaler, `default` with DeepSpeed's."""

    def rule(said: Said, key: str) -> Verdict:
        if said.number("fp16.loss_scale"):
            return Verdict("not needed", "fp16.loss_scale is static, so DeepSpeed does not read it either.")
        if said.whole(key, default) == usual:
            return Verdict("not needed", "the same as here by default.")
        power, window = said.whole("fp16.initial_scale_power", 16), said.whole("fp16.loss_scale_window", 1000)
        return Verdict(
            "unsupported",
            f"the scale is set in code: Accelerator(kwargs_handlers=[GradScalerKwargs(init_scale=2**{power}, "
            f"growth_interval={window})]) or ZeroGradScaler with the same arguments; by default 2**16 and 2000.",
        )

    return rule


def _accumulation_dtype(said: Said, key: str) -> Verdict:
    if said.word(key, ("none", "fp32", "bf16", "fp16"), "none") in ("none", "fp32"):
        return Verdict("not needed", "gradients are summed in fp32, into shards in the masters' dtype.")
    return Verdict(
        "unsupported", 'half-precision masters go with half-precision sums: zero_config.precision: "bf16-true".'
    )


_TORCH = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}


def _wire_dtype(said: Said, key: str) -> Verdict:
    dtype, own = said.word(key, ("none", *_TORCH), "none"), _compute(said)
    if dtype in ("none", own):
        return Verdict("not needed", "gradients travel in their own dtype and are summed in fp32.")
    return _reducing_in(dtype, own)


def _fp32_wire(said: Said, key: str) -> Verdict:
    own = _compute(said)
    if not said.boolean(key) or own == "fp32":
        return Verdict("not needed", "gradients travel in their own dtype and are summed in fp32.")
    return _reducing_in("fp32", own)


def _reducing_in(dtype: str, own: str) -> Verdict:
    skips = ', nonfinite="skip"' if own == "fp16" else ""
    policy = f"MixedPrecision(param={_TORCH[own]}, reduce={_TORCH[dtype]}{skips})"
    return Verdict("unsupported", f"in code: ZeroPlugin(precision={policy}).")


# -- DeepSpeed: the training loop ------------------------------------------------------------------------------------


def _clipping(said: Said, key: str) -> Verdict:
    norm = said.number(key)
    if norm == 0:
        return Verdict("not needed", "gradients are not clipped.")
    return Verdict(
        "unsupported",
        f"DeepSpeed clips by itself; here call accelerator.clip_grad_norm_(model.parameters(), {norm:g}) before the step, "
        f"or set TrainingArguments(max_grad_norm={norm:g}).",
    )


def _accumulation(said: Said, key: str) -> Verdict:
    steps = said.whole(key, 1)
    if steps == 1:
        return Verdict("not needed", "the default.")
    return Verdict(
        "unsupported",
        f"set Accelerator(gradient_accumulation_steps={steps}), TrainingArguments(gradient_accumulation_steps={steps}) or "
        f"the variable ACCELERATE_GRADIENT_ACCUMULATION_STEPS={steps}.",
    )


_OPTIMIZERS = {"adam": "torch.optim.AdamW", "adamw": "torch.optim.AdamW", "adagrad": "torch.optim.Adagrad",
               "sgd": "torch.optim.SGD", "rmsprop": "torch.optim.RMSprop", "lion": "an element-wise Lion"}  # fmt: skip
_OPTIMIZER_ARGUMENTS = {"lr": "learning_rate=...", "betas": "adam_beta1=..., adam_beta2=...",
                        "eps": "adam_epsilon=...", "weight_decay": "weight_decay=..."}  # fmt: skip
_TORCH_ARGUMENTS = (*_OPTIMIZER_ARGUMENTS, "momentum", "nesterov", "amsgrad", "lr_decay", "alpha")
_SCHEDULERS = {"warmuplr": ("get_constant_schedule_with_warmup", "constant_with_warmup"),
               "warmupdecaylr": ("get_linear_schedule_with_warmup", "linear"),
               "warmupcosinelr": ("get_cosine_schedule_with_warmup", "cosine")}  # fmt: skip
_SCHEDULER_ARGUMENTS = {"warmup_max_lr": "learning_rate=...", "warmup_num_steps": "warmup_steps=...",
                        "total_num_steps": "max_steps=..."}  # fmt: skip


def _optimizer(said: Said, key: str) -> Verdict:
    name, given = str(said.value(key)), said.below("optimizer.params.")
    torchs = _OPTIMIZERS.get(name.lower(), "torch.optim.AdamW")
    if name.lower() == "adam" and given.get("adam_w_mode") is False:
        torchs = "torch.optim.Adam"
    if "auto" in given.values() and torchs == "torch.optim.AdamW" and name.lower() in _OPTIMIZERS:
        return Verdict("not needed", "the Trainer builds AdamW, its default, from TrainingArguments.")
    numbers = [f"{arg}={given[arg]}" for arg in _TORCH_ARGUMENTS if given.get(arg, "auto") != "auto"]
    call = f"{torchs}({', '.join(['model.parameters()', *numbers])})"
    why = "" if name.lower() in _OPTIMIZERS else f"{name} is not offered; the nearest is AdamW. "
    return Verdict("unsupported", f"{why}DeepSpeed builds it from the file; build it in code: {call}.")


def _scheduler(said: Said, key: str) -> Verdict:
    given = said.below("scheduler.params.")
    function, kind = _SCHEDULERS.get(str(said.value(key)).lower(), ("", ""))
    if kind == "linear" and "auto" in given.values():
        return Verdict("not needed", "the Trainer builds a linear schedule, its default, from TrainingArguments.")
    if not function:
        return Verdict(
            "unsupported", "DeepSpeed builds it from the file; build one of torch.optim.lr_scheduler in code."
        )
    names = {"warmup_num_steps": "num_warmup_steps", "total_num_steps": "num_training_steps"}
    numbers = [f"{torchs}={given[name]}" for name, torchs in names.items() if given.get(name, "auto") != "auto"]
    return Verdict(
        "unsupported",
        "DeepSpeed builds it from the file; build it in code: "
        f"transformers.{function}({', '.join(['optimizer', *numbers])}), or set "
        f'TrainingArguments(lr_scheduler_type="{kind}").',
    )


def _build_argument(said: Said, key: str) -> Verdict:
    section, _, name = key.split(".", 2)
    if section == "optimizer" and name not in _TORCH_ARGUMENTS:
        return Verdict("unsupported", "no argument of torch's optimizers. Leave it out.")
    arguments = _OPTIMIZER_ARGUMENTS if section == "optimizer" else _SCHEDULER_ARGUMENTS
    trainer = f", or TrainingArguments({arguments[name]})" if name in arguments else ""
    return Verdict(
        "unsupported", f"{name}={said.value(key)} where the {section} is built (see {section}.type){trainer}."
    )


def _warmup_type(said: Said, key: str) -> Verdict:
    if said.word(key, ("log", "linear"), "log") == "linear":
        return Verdict("not needed", "transformers' schedules warm up linearly.")
    return Verdict("unsupported", "transformers' schedules warm up linearly; for another way use LambdaLR.")


def _trainer(arguments: str) -> str:
    return f'"auto" is filled in by the Trainer: set TrainingArguments({arguments}).'


DECIDED = (_STAGE,)
"""Keys whose rule knows what "auto" becomes."""

AUTO: Mapping[str, str] = {
    "gradient_accumulation_steps": _trainer("gradient_accumulation_steps=..."),
    "gradient_clipping": _trainer("max_grad_norm=..."),
    "bf16.enabled": _trainer("bf16=..."),
    "fp16.enabled": _trainer("fp16=..."),
    "optimizer.type": _trainer("optim=..."),
    **{f"optimizer.params.{name}": _trainer(argument) for name, argument in _OPTIMIZER_ARGUMENTS.items()},
    "scheduler.type": _trainer("lr_scheduler_type=..."),
    "scheduler.params.warmup_min_lr": '"auto" is 0, where the Trainer\'s schedules start as well.',
    **{f"scheduler.params.{name}": _trainer(argument) for name, argument in _SCHEDULER_ARGUMENTS.items()},
    "zero_optimization.stage3_prefetch_bucket_size": "by default the next unit is gathered ahead.",
}
"""Why "auto" needs no translation, for keys whose value decides otherwise."""

ALIASES: Mapping[str, str] = {
    # Accelerate's names for DeepSpeed's keys
    "zero_stage": _STAGE,
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    # DeepSpeed's older names
    "bfloat16.enabled": "bf16.enabled",
    "zero_optimization.cpu_offload_param": "zero_optimization.cpu_offload_params",
    "zero_optimization.prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
}
"""Other spellings of keys of the table DEEPSPEED."""

_UNITS = "gradients are reduced and weights gathered by units (blocks of the model), not by buckets."
_LIVE = "a unit is let go when it was used; only prefetch_bytes decides how much is live."
_LOADERS = "the batch size is your DataLoader's, or TrainingArguments(per_device_train_batch_size=...)."
_LOCAL = "it only tunes DeepSpeed's own code."
_REPORT = "print(engine.report()) shows bytes held and sent; torch.profiler shows times."
_TRACKER = "use Accelerator(log_with=...) or TrainingArguments(report_to=...)."
_COMPRESSION = "weights and gradients travel unquantized. Remove it: results become exact, and traffic grows."
_LAUNCHER = "start `accelerate-zero launch` on each machine with --machine_rank, --num_machines and --main_process_ip."
_OWN_DATA = "data, layers and compression are not the engine's here. Do it in your own code, or leave it out."

DEEPSPEED: Table = {
    # the loop
    "train_batch_size": _LOADERS,
    "train_micro_batch_size_per_gpu": _LOADERS,
    "gradient_accumulation_steps": _accumulation,
    "gradient_clipping": _clipping,
    "optimizer.type": _optimizer,
    "optimizer.params.torch_adam": _LOCAL,
    "optimizer.params.adam_w_mode": "it decides between Adam and AdamW; see optimizer.type.",
    "optimizer.params.bias_correction": unsupported("torch's optimizers correct the bias.", (True,)),
    "optimizer.params.*": _build_argument,
    "optimizer.legacy_fusion": _LOCAL,
    "scheduler.type": _scheduler,
    "scheduler.params.warmup_type": _warmup_type,
    "scheduler.params.*": _build_argument,
    "zero_allow_untested_optimizer": "any element-wise optimizer works; others are refused by name.",
    "zero_force_ds_cpu_optimizer": "torch's own optimizers step on the host, with their fused kernels.",
    "dataloader_drop_last": "your DataLoader(drop_last=...) decides.",
    "gradient_allreduce_op": unsupported("gradients are averaged. Multiply the loss by the number of ranks.", ("mean",)),
    "prescale_gradients": "sums are in fp32, so there is nothing to protect from overflow.",
    "gradient_predivide_factor": "sums are in fp32, so there is nothing to protect from overflow.",
    "sparse_gradients": unsupported("gradients must be dense. Remove sparse=True from nn.Embedding."),
    "disable_allgather": _LOCAL,
    "vocabulary_size": _LOCAL,
    # precision
    "bf16.enabled": _bf16,
    "bf16.bf16_master_weights_and_grads": _bf16_masters,
    "bf16.bf16_optimizer_states": "moments have the masters' dtype.",
    "bf16.immediate_grad_update": "gradients become shards as they are made, always.",
    "bf16.check_grad_overflow": "gradients that are not finite are found always; MixedPrecision(nonfinite=...) decides.",
    "fp16.enabled": _fp16,
    "fp16.auto_cast": "forward runs under torch.autocast, which casts what it needs.",
    "fp16.fused_mode": _LOCAL,
    "fp16.loss_scale": _loss_scale,
    "fp16.initial_scale_power": _scaling(16, 16),
    "fp16.loss_scale_window": _scaling(2000, 1000),
    "fp16.hysteresis": unsupported("torch's scaler lowers the scale at the first overflow; nothing to set.", (1,)),
    "fp16.consecutive_hysteresis": "torch's scaler has no hysteresis.",
    "fp16.min_loss_scale": "instead of a floor, MixedPrecision.max_skips (30) skipped steps in a row end the run.",
    "fp16.fp16_master_weights_and_grads": unsupported("masters stay in fp32: 2Ψ/N bytes more on each of N ranks."),
    "amp.*": unsupported("apex is not used. Set mixed_precision: bf16 or fp16."),
    "torch_autocast.enabled": _autocast,
    "torch_autocast.dtype": "see torch_autocast.enabled.",
    "torch_autocast.lower_precision_safe_modules": "half-precision weights are what travels, for all modules.",
    "data_types.grad_accum_dtype": _accumulation_dtype,
    "data_types.*": unsupported("in code: ZeroPlugin(precision=MixedPrecision(param=..., buffers=...))."),
    "communication_data_type": _wire_dtype,
    "fp32_allreduce": _fp32_wire,
    "seq_parallel_comm_data_type": "there is no sequence parallelism, so nothing is sent for it.",
    # ZeRO
    _STAGE: _stage,
    "zero_optimization.offload_optimizer.device": _offload_optimizer,
    "zero_optimization.offload_optimizer.nvme_path": _nvme_path,
    "zero_optimization.offload_optimizer.ratio": unsupported("the optimizer is offloaded as a whole, or not.", (None, 1)),
    "zero_optimization.offload_optimizer.*": "memory is pinned on CUDA and copies overlap with the step, by themselves.",
    "zero_optimization.offload_param.device": _offload_param,
    "zero_optimization.offload_param.nvme_path": _nvme_path,
    "zero_optimization.offload_param.*": "memory is pinned on CUDA and two units are in flight, by themselves.",
    "zero_optimization.cpu_offload": _offload_optimizer,
    "zero_optimization.cpu_offload_params": _offload_param,
    "zero_optimization.cpu_offload_use_pin_memory": "memory is pinned on CUDA by itself.",
    "zero_optimization.overlap_comm": "communication overlaps with backward, always.",
    "zero_optimization.contiguous_gradients": "a unit's gradients are contiguous, always.",
    "zero_optimization.reduce_scatter": "gradients are reduce-scattered, always.",
    "zero_optimization.allgather_partitions": "weights are all-gathered, always.",
    "zero_optimization.round_robin_gradients": "each rank has a part of each unit, so the ranks' shares are even.",
    "zero_optimization.reduce_bucket_size": _UNITS,
    "zero_optimization.allgather_bucket_size": _UNITS,
    "zero_optimization.sub_group_size": "the optimizer steps unit by unit.",
    "zero_optimization.use_multi_rank_bucket_allreduce": _UNITS,
    "zero_optimization.stage3_prefetch_bucket_size": _prefetch,
    "zero_optimization.stage3_param_persistence_threshold": "small parameters are gathered with their unit.",
    "zero_optimization.stage3_model_persistence_threshold": "small parameters are gathered with their unit.",
    "zero_optimization.stage3_max_live_parameters": _LIVE,
    "zero_optimization.stage3_max_reuse_distance": _LIVE,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": SAVES,
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": SAVES,
    "zero_optimization.stage3_module_granularity_threshold": _UNITS,
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _LOCAL,
    "zero_optimization.stage3_allgather_sequential": _LOCAL,
    "zero_optimization.stage3_partition_stream_chunk_size": "a model on the meta device is created a unit at a time.",
    "zero_optimization.leaf_module.*": "a unit is gathered with all in it, whichever of its experts are called.",
    "zero_optimization.load_from_fp32_weights": "masters are in fp32 in checkpoints, and loaded from them.",
    "zero_optimization.elastic_checkpoint": "states load at any number of ranks, always.",
    "zero_optimization.ignore_unused_parameters": "unused parameters are allowed, also different ones on each rank.",
    "zero_optimization.legacy_stage1": _LOCAL,
    "zero_optimization.memory_efficient_linear": _LOCAL,
    "zero_optimization.override_module_apply": _LOCAL,
    "zero_optimization.pipeline_loading_checkpoint": _LOCAL,
    "zero_optimization.log_trace_cache_warnings": _LOCAL,
    "zero_optimization.enable_sanity_checks": "what goes wrong is an error, always.",
    "zero_optimization.save_muon_momentum_buffer_in_memory": _LOCAL,
    "zero_optimization.zenflow.*": unsupported("updates are never delayed here. Remove it."),
    "zero_optimization.zero_quantized_weights": unsupported(_COMPRESSION),
    "zero_optimization.zero_quantized_nontrainable_weights": unsupported(_COMPRESSION),
    "zero_optimization.zero_quantized_gradients": unsupported(_COMPRESSION),
    "zero_optimization.zeropp_loco_param.*": unsupported(_COMPRESSION),
    "zero_optimization.zero_hpz_partition_size": unsupported(GROUPS, (None, 0, 1)),
    "zero_optimization.mics_shard_size": unsupported(GROUPS, (None, 0, -1)),
    "zero_optimization.mics_hierarchical_params_gather": unsupported(GROUPS),
    # what DeepSpeed reports
    "wall_clock_breakdown": unsupported(_REPORT),
    "memory_breakdown": unsupported(_REPORT),
    "dump_state": unsupported(_REPORT),
    "steps_per_print": "nothing is printed; TrainingArguments(logging_steps=...) decides for the Trainer.",
    "log_level": "Python's logging decides.",
    "timers.*": unsupported(_REPORT),
    "flops_profiler.*": unsupported("use torch.profiler.profile(with_flops=True)."),
    "comms_logger.*": unsupported(_REPORT),
    "tensorboard.*": unsupported(_TRACKER),
    "wandb.*": unsupported(_TRACKER),
    "comet.*": unsupported(_TRACKER),
    "csv_monitor.*": unsupported(_TRACKER),
    # checkpoints
    "checkpoint.*": "checkpoints are plain files, which load at any number of ranks.",
    "load_universal_checkpoint": "checkpoints are plain files, which load at any number of ranks.",
    "nebula.*": unsupported("checkpoints are written by Accelerate or the Trainer."),
    "datastates_ckpt.*": unsupported("checkpoints are written by Accelerate or the Trainer."),
    "aio.*": "files are memory-mapped; the operating system reads and writes them.",
    # what ZeRO here is not
    "activation_checkpointing.*": unsupported(CHECKPOINTING),
    "compile.*": unsupported("set dynamo_config in the file, TrainingArguments(torch_compile=True), or call torch.compile."),
    "graph_harvesting": unsupported("set dynamo_config in the file, or call torch.compile."),
    "pipeline.*": unsupported(PARALLEL),
    "tensor_parallel.*": unsupported(PARALLEL),
    "expert_parallel.*": unsupported(PARALLEL),
    "moe.*": unsupported(PARALLEL),
    "use_data_before_expert_parallelism": unsupported(PARALLEL),
    "sequence_parallel_size": unsupported(PARALLEL, (None, 1)),
    "sparse_attention.*": unsupported("attention is the model's. Choose it there (attn_implementation=...)."),
    "hybrid_engine.*": unsupported("generate with the model itself, or in another process."),
    "elasticity.*": unsupported("fix the batch size; checkpoints load at another number of ranks."),
    "autotuning.*": unsupported("there is little to tune: choose the stage."),
    "compression_training.*": unsupported(_OWN_DATA),
    "quantize_training.*": unsupported(_OWN_DATA),
    "weight_quantization.*": unsupported(_OWN_DATA),
    "curriculum_learning.*": unsupported(_OWN_DATA),
    "data_efficiency.*": unsupported(_OWN_DATA),
    "progressive_layer_drop.*": unsupported(_OWN_DATA),
    "eigenvalue.*": unsupported(_OWN_DATA),
    # keys of Accelerate's deepspeed_config that DeepSpeed's own files do not have
    "deepspeed_config_file": lambda said, key: Verdict("translated", "its keys follow, as deepspeed_config_file.*"),
    "zero3_init_flag": f"nothing has to be switched on; where a whole model does not fit, {SHARDED_INIT}",
    "zero3_save_16bit_model": SAVES,
    "deepspeed_multinode_launcher": unsupported(_LAUNCHER, (None, "standard")),
    "deepspeed_hostfile": unsupported(_LAUNCHER),
    "deepspeed_exclusion_filter": unsupported(_LAUNCHER),
    "deepspeed_inclusion_filter": unsupported(_LAUNCHER),
    "deepspeed_moe_layer_cls_names": "a unit is gathered with all in it, whichever of its experts are called.",
    "enable_msamp": unsupported(FP8),
    "msamp_opt_level": unsupported(FP8),
}  # fmt: skip
"""DeepSpeed's keys, and those of Accelerate's section deepspeed_config."""
