"""What becomes of each key of Accelerate's FSDP section; look a key up in `FSDP`."""

from __future__ import annotations

from collections.abc import Mapping

from accelerate_zero.migrate.rules import (
    CHECKPOINTING,
    GROUPS,
    PLAIN,
    SAVES,
    SHARDED_INIT,
    Said,
    Table,
    Verdict,
    to,
    unsupported,
)

_STRATEGIES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 1, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
_STRATEGY_KEYS = ("fsdp_sharding_strategy", "fsdp_reshard_after_forward")
_WRAPS = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")


def _strategy(said: Said) -> tuple[str, str]:
    """FSDP's strategy by its name, and the key that says it."""
    second = said.word("fsdp_version", ("1", "2"), "1") == "2"
    key = _STRATEGY_KEYS[1] if second or said.value(_STRATEGY_KEYS[0]) is None else _STRATEGY_KEYS[0]
    words = {"true": "FULL_SHARD", "false": "SHARD_GRAD_OP"}
    if not second:
        words |= {spelled: name for number, name in enumerate(_STRATEGIES, 1) for spelled in (name, str(number))}
    return words[said.word(key, tuple(words), "true")], key


def _sharding(said: Said, key: str) -> Verdict:
    name, decisive = _strategy(said)
    if key != decisive:
        return Verdict("not needed", f"{decisive} decides.")
    settings = {"stage": _STRATEGIES[name]}
    if name.startswith("HYBRID"):
        return Verdict("unsupported", f"zero_config.stage: {settings['stage']}; {GROUPS}", settings)
    notes = {"NO_SHARD": PLAIN, "SHARD_GRAD_OP": "weights stay whole between steps, too."}
    return to(settings, why=notes.get(name, ""))


def _fsdp_offload(said: Said, key: str) -> Verdict:
    if not said.boolean(key):
        return Verdict("not needed", "shards are on the device by default.")
    sharded = _STRATEGIES[_strategy(said)[0]] == 3
    why = "" if sharded else "below stage 3 the weights stay whole on the device."
    return to({"offload": "all" if sharded else "optimizer"}, why=why)


def _wrap_policy(said: Said, key: str) -> Verdict:
    policy = said.word(key, _WRAPS, "NO_WRAP")
    notes = {
        "TRANSFORMER_BASED_WRAP": "units are the classes named, or else the model's own _no_split_modules.",
        "SIZE_BASED_WRAP": "units are the model's blocks; fsdp_min_num_params becomes unit_numel.",
        "NO_WRAP": "units are found by themselves; the whole model as one would be gathered at once.",
    }
    return Verdict("not needed", notes[policy])


def _classes(said: Said, key: str) -> Verdict:
    if said.word("fsdp_auto_wrap_policy", _WRAPS, "NO_WRAP") != _WRAPS[0]:
        return Verdict("not needed", "only TRANSFORMER_BASED_WRAP reads it.")
    value = said.value(key) or ""
    names = [name.strip() for name in (value if isinstance(value, list) else str(value).split(","))]
    classes = [name for name in names if name]
    if not classes:
        return Verdict("not needed", AUTO["fsdp_transformer_layer_cls_to_wrap"])
    return to({"unit_classes": classes})


def _min_params(said: Said, key: str) -> Verdict:
    if said.word("fsdp_auto_wrap_policy", _WRAPS, "NO_WRAP") != _WRAPS[1]:
        return Verdict("not needed", "only SIZE_BASED_WRAP reads it.")
    return to({"unit_numel": max(said.whole(key), 1)}, why="for what no repeated block covers.")


AUTO: Mapping[str, str] = {
    "fsdp_transformer_layer_cls_to_wrap": "by default the model's own _no_split_modules are the units.",
}
"""Why "auto" needs no translation."""

FSDP: Table = {
    "fsdp_version": lambda said, key: Verdict(
        "not needed", f"ZeRO takes the place of FSDP{said.word(key, ('1', '2'), '1')}."
    ),
    "fsdp_sharding_strategy": _sharding,
    "fsdp_reshard_after_forward": _sharding,
    "fsdp_offload_params": _fsdp_offload,
    "fsdp_auto_wrap_policy": _wrap_policy,
    "fsdp_transformer_layer_cls_to_wrap": _classes,
    "fsdp_min_num_params": _min_params,
    "fsdp_backward_prefetch": "at stage 3 the next unit is gathered ahead, in forward and backward.",
    "fsdp_backward_prefetch_policy": "at stage 3 the next unit is gathered ahead, in forward and backward.",
    "fsdp_forward_prefetch": "at stage 3 the next unit is gathered ahead, in forward and backward.",
    "fsdp_limit_all_gathers": "prefetch_bytes bounds what is gathered ahead.",
    "fsdp_state_dict_type": SAVES,
    "fsdp_sync_module_states": "all ranks start from rank 0's weights, always.",
    "fsdp_use_orig_params": "parameters keep their identity, name and shape, always.",
    "fsdp_cpu_ram_efficient_loading": f"where the host's memory does not hold a model for each rank, {SHARDED_INIT}",
    "fsdp_activation_checkpointing": unsupported(CHECKPOINTING),
    "fsdp_activation_checkpointing_offload": unsupported("use torch.autograd.graph.save_on_cpu(pin_memory=True)."),
    "fsdp_ignored_modules": unsupported("all modules are sharded. Keep such a module outside the model you prepare."),
    "fsdp_mixed_precision_policy": unsupported(
        "in code: ZeroPlugin(precision=MixedPrecision(param=..., reduce=..., buffers=...))."
    ),
    "fsdp_mixed_precision_policy.*": unsupported(
        "in code: ZeroPlugin(precision=MixedPrecision(param=..., reduce=..., buffers=...))."
    ),
    "fsdp_param_init_fn": "modules on the meta device are initialised by their own reset_parameters or _init_weights.",
}
"""Keys of Accelerate's section fsdp_config."""
