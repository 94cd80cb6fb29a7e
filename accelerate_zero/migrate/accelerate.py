"""What becomes of each other key of an Accelerate config; look a key up in `ACCELERATE`."""

from __future__ import annotations

from accelerate_zero.migrate.rules import FP8, GROUPS, PARALLEL, Said, Table, Verdict, count, keep, to, unsupported


def distributed_type(said: Said) -> str:
    """Accelerate's word for the same processes without an engine of its own."""
    if said.whole("num_processes", -1, least=-1) == 1 and said.whole("num_machines", 1) == 1:
        return "NO"
    return "MULTI_CPU" if said.boolean("use_cpu") else "MULTI_GPU"


def _mixed_precision(said: Said, key: str) -> Verdict:
    # YAML reads an unquoted no as false.
    words = {"no": "no", "false": "no", "none": "no", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}
    value = words[said.word(key, tuple(words), "no")]
    decisive = [name for name in ("bf16.enabled", "fp16.enabled") if said.value(name) is True]
    if value == "no" and decisive:
        return Verdict("not needed", f"{decisive[0]} decides.")
    if value == "fp8":
        return Verdict("unsupported", f"mixed_precision: bf16; {FP8}", accelerate={key: "bf16"})
    return to(accelerate={key: value})


def _on_this_machine(said: Said, key: str) -> Verdict:
    if said.value(key) == "LOCAL_MACHINE":
        return keep(said, key)
    return Verdict("unsupported", "compute_environment: LOCAL_MACHINE; SageMaker has its own launcher.")


def _old_fp16(said: Said, key: str) -> Verdict:
    if not said.boolean(key):
        return Verdict("not needed", "mixed_precision decides.")
    return to(accelerate={"mixed_precision": "fp16"})


_KEPT = ("gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend", "same_network", "main_training_function",
         "enable_cpu_affinity", "debug", "downcast_bf16", "mpirun_config", "mpirun_config.*", "dynamo_config",
         "dynamo_config.*", "dynamo_backend", "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "command_file",
         "commands", "tpu_vm", "tpu_env")  # fmt: skip

ACCELERATE: Table = {
    **dict.fromkeys(_KEPT, keep),
    "compute_environment": _on_this_machine,
    "distributed_type": lambda said, key: to(accelerate={key: distributed_type(said)}),
    "num_processes": count(-1),
    "num_machines": count(1),
    "machine_rank": count(0),
    "use_cpu": lambda said, key: to(accelerate={key: said.boolean(key)}),
    "mixed_precision": _mixed_precision,
    "fp16": _old_fp16,
    "deepspeed_config": "empty.",
    "fsdp_config": "empty.",
    "megatron_lm_config.*": unsupported(PARALLEL),
    "fp8_config.*": unsupported(FP8),
    "parallelism_config.parallelism_config_dp_shard_size": "all ranks are shards.",
    "parallelism_config.parallelism_config_dp_replicate_size": unsupported(GROUPS, (None, 1)),
    "parallelism_config.*": unsupported(PARALLEL, (None, 1)),
}
"""Accelerate's top-level keys."""
