"""Configs of other engines become ours, and each of their keys is accounted for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig

from accelerate_zero import ZeroPlugin
from accelerate_zero.migrate import _AUTO as AUTO
from accelerate_zero.migrate import Row, Translation, translate
from accelerate_zero.migrate.accelerate import ACCELERATE
from accelerate_zero.migrate.deepspeed import ALIASES, DEEPSPEED
from accelerate_zero.migrate.fsdp import FSDP

CONFIGS = Path(__file__).parent / "configs"
ALONE = {  # what a file that says nothing of processes becomes
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "mixed_precision": "no", "num_machines": 1,
    "num_processes": -1, "machine_rank": 0, "use_cpu": False,
}  # fmt: skip


@dataclass(frozen=True)
class Expected:
    """What becomes of a file; keys by outcome, `prefix` before each."""

    zero: Mapping[str, Any]
    accelerate: Mapping[str, Any]
    translated: str
    not_needed: str
    unsupported: str = ""
    prefix: Mapping[str, str] = field(default_factory=dict)

    def outcomes(self) -> dict[str, str]:
        of = {"translated": self.translated, "not needed": self.not_needed, "unsupported": self.unsupported}
        return {self._whole(key): outcome for outcome, keys in of.items() for key in keys.split()}

    def _whole(self, key: str) -> str:
        short, _, rest = key.partition(":")
        return self.prefix[short] + rest if rest else key


ZERO = {"z": "zero_optimization."}
EXPECTED = {
    "ds_stage2_offload.json": Expected(
        zero={"version": 1, "stage": 2, "offload": "optimizer"},
        accelerate={**ALONE, "mixed_precision": "bf16"},
        translated="z:stage z:offload_optimizer.device bf16.enabled",
        not_needed="train_batch_size train_micro_batch_size_per_gpu steps_per_print wall_clock_breakdown "
        "zero_allow_untested_optimizer z:offload_optimizer.pin_memory z:overlap_comm z:contiguous_gradients "
        "z:reduce_scatter z:reduce_bucket_size z:allgather_partitions z:allgather_bucket_size z:round_robin_gradients "
        "optimizer.params.torch_adam scheduler.params.warmup_type",
        unsupported="gradient_accumulation_steps gradient_clipping communication_data_type optimizer.type "
        "optimizer.params.lr optimizer.params.betas optimizer.params.eps optimizer.params.weight_decay scheduler.type "
        "scheduler.params.warmup_max_lr scheduler.params.warmup_num_steps scheduler.params.total_num_steps",
        prefix=ZERO,
    ),
    "ds_stage3_auto.json": Expected(
        zero={"version": 1, "stage": 3, "offload": "all"},
        accelerate=ALONE,
        translated="z:stage z:offload_param.device",
        not_needed="fp16.enabled fp16.auto_cast fp16.loss_scale fp16.initial_scale_power fp16.min_loss_scale bf16.enabled "
        "optimizer.type optimizer.params.lr optimizer.params.betas optimizer.params.eps optimizer.params.weight_decay "
        "scheduler.params.warmup_min_lr scheduler.params.warmup_max_lr scheduler.params.warmup_num_steps "
        "z:offload_optimizer.device z:offload_optimizer.pin_memory z:offload_param.pin_memory z:overlap_comm "
        "z:contiguous_gradients z:sub_group_size z:reduce_bucket_size z:stage3_prefetch_bucket_size "
        "z:stage3_param_persistence_threshold z:stage3_max_live_parameters z:stage3_max_reuse_distance "
        "z:stage3_gather_16bit_weights_on_model_save gradient_accumulation_steps gradient_clipping steps_per_print "
        "train_batch_size train_micro_batch_size_per_gpu wall_clock_breakdown",
        unsupported="fp16.loss_scale_window fp16.hysteresis scheduler.type",
        prefix=ZERO,
    ),
    "ds_fp16_scaler.json": Expected(
        zero={"version": 1, "stage": 3, "prefetch_bytes": 100_000_000},
        accelerate={**ALONE, "mixed_precision": "fp16"},
        translated="z:stage z:stage3_prefetch_bucket_size fp16.enabled",
        not_needed="train_micro_batch_size_per_gpu z:zero_quantized_gradients z:mics_shard_size fp16.loss_scale "
        "fp16.hysteresis fp16.min_loss_scale amp.enabled amp.opt_level activation_checkpointing.cpu_checkpointing "
        "flops_profiler.enabled flops_profiler.profile_step flops_profiler.detailed",
        unsupported="z:zero_hpz_partition_size z:zero_quantized_weights fp16.initial_scale_power fp16.loss_scale_window "
        "fp32_allreduce activation_checkpointing.partition_activations tensorboard.enabled tensorboard.output_path "
        "sparse_gradients my_own_key.depth",
        prefix=ZERO,
    ),
    "ds_stage3_nvme.json": Expected(
        zero={"version": 1, "stage": 3, "offload": "all", "offload_directory": "/local_nvme", "precision": "bf16-true",
              "prefetch_bytes": 0},
        accelerate=ALONE,
        translated="bf16.enabled bf16.bf16_master_weights_and_grads z:stage z:offload_optimizer.device "
        "z:offload_optimizer.nvme_path z:offload_param.device z:stage3_prefetch_bucket_size",
        not_needed="train_micro_batch_size_per_gpu bf16.bf16_optimizer_states z:offload_optimizer.buffer_count "
        "z:offload_optimizer.ratio z:offload_param.max_in_cpu aio.block_size aio.queue_depth",
        unsupported="z:offload_param.nvme_path",
        prefix=ZERO,
    ),
    "accelerate_deepspeed_bf16.yaml": Expected(
        zero={"version": 1, "stage": 3, "offload": "all"},
        accelerate={
            "compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "mixed_precision": "bf16",
            "num_machines": 2, "num_processes": 16, "machine_rank": 1, "use_cpu": False, "debug": False,
            "downcast_bf16": "no", "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default"},
            "main_process_ip": "10.0.0.1", "main_process_port": 29500, "main_training_function": "main",
            "rdzv_backend": "static", "same_network": True, "tpu_env": [],
        },
        translated="compute_environment debug distributed_type downcast_bf16 dynamo_config.dynamo_backend "
        "dynamo_config.dynamo_mode machine_rank main_process_ip main_process_port main_training_function mixed_precision "
        "num_machines num_processes rdzv_backend same_network tpu_env use_cpu d:zero_stage d:offload_optimizer_device "
        "d:offload_param_device",
        not_needed="fsdp_config d:deepspeed_multinode_launcher d:zero3_init_flag d:zero3_save_16bit_model",
        unsupported="d:gradient_accumulation_steps d:gradient_clipping",
        prefix={"d": "deepspeed_config."},
    ),
    "accelerate_deepspeed_file.yaml": Expected(
        zero={"version": 1, "stage": 3, "offload": "all", "offload_directory": "/local_nvme", "precision": "bf16-true",
              "prefetch_bytes": 0},
        accelerate={**ALONE, "distributed_type": "NO", "num_processes": 1},
        translated="compute_environment distributed_type machine_rank num_machines num_processes "
        "deepspeed_config.deepspeed_config_file f:bf16.enabled f:bf16.bf16_master_weights_and_grads z:stage "
        "z:offload_optimizer.device z:offload_optimizer.nvme_path z:offload_param.device z:stage3_prefetch_bucket_size",
        not_needed="deepspeed_config.zero3_init_flag f:train_micro_batch_size_per_gpu f:bf16.bf16_optimizer_states "
        "z:offload_optimizer.buffer_count z:offload_optimizer.ratio z:offload_param.max_in_cpu f:aio.block_size "
        "f:aio.queue_depth",
        unsupported="z:offload_param.nvme_path",
        prefix={"f": "deepspeed_config_file.", "z": "deepspeed_config_file.zero_optimization."},
    ),
    "accelerate_fsdp1_hybrid.yaml": Expected(
        zero={"version": 1, "stage": 3, "unit_classes": ["LlamaDecoderLayer", "LlamaRMSNorm"]},
        accelerate={**ALONE, "mixed_precision": "fp16", "num_processes": 8, "downcast_bf16": False},
        translated="compute_environment distributed_type downcast_bf16 machine_rank mixed_precision num_machines "
        "num_processes f:transformer_layer_cls_to_wrap",
        not_needed="f:auto_wrap_policy f:backward_prefetch f:cpu_ram_efficient_loading f:forward_prefetch f:offload_params "
        "f:state_dict_type f:sync_module_states f:use_orig_params",
        unsupported="f:activation_checkpointing f:sharding_strategy",
        prefix={"f": "fsdp_config.fsdp_"},
    ),
    "accelerate_fsdp2.yaml": Expected(
        zero={"version": 1, "stage": 2, "offload": "optimizer", "unit_numel": 20_000_000},
        accelerate={**ALONE, "num_processes": 2, "enable_cpu_affinity": False, "gpu_ids": "0,1"},
        translated="compute_environment distributed_type enable_cpu_affinity gpu_ids mixed_precision num_machines "
        "num_processes f:min_num_params f:offload_params f:reshard_after_forward",
        not_needed="f:activation_checkpointing f:auto_wrap_policy f:cpu_ram_efficient_loading f:state_dict_type f:version "
        "p:dp_replicate_size p:dp_shard_size p:tp_size",
        unsupported="p:cp_size",
        prefix={"f": "fsdp_config.fsdp_", "p": "parallelism_config.parallelism_config_"},
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ACCELERATE_ZERO_")]:
        monkeypatch.delenv(name)


@pytest.fixture(params=EXPECTED)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def written(folder: Path, content: Mapping[str, Any] | str, name: str = "config.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def deepspeed(folder: Path, zero: Mapping[str, Any], **more: Any) -> Translation:
    return translate(written(folder, {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, **more}))


def fsdp(folder: Path, **settings: Any) -> Translation:
    return translate(written(folder, {"distributed_type": "FSDP", "fsdp_config": settings}))


def row(translation: Translation, key: str) -> Row:
    (found,) = [row for row in translation.rows if row.key == key]
    return found


def test_every_kind_of_config_is_expected_here() -> None:
    assert {path.name for path in CONFIGS.iterdir()} == set(EXPECTED)


def test_a_config_becomes_the_section_and_the_accelerate_config_that_mean_the_same(name: str) -> None:
    translation = translate(CONFIGS / name)
    assert translation.zero == EXPECTED[name].zero
    assert translation.accelerate == EXPECTED[name].accelerate


def test_every_key_has_its_outcome(name: str) -> None:
    assert {row.key: row.outcome for row in translate(CONFIGS / name).rows} == EXPECTED[name].outcomes()


def test_every_key_has_exactly_one_row_with_its_value_and_a_note(name: str) -> None:
    data = yaml.safe_load((CONFIGS / name).read_text())
    keys = list(leaves(data))
    if "deepspeed_config_file" in data.get("deepspeed_config", {}):
        file = yaml.safe_load((CONFIGS / data["deepspeed_config"]["deepspeed_config_file"]).read_text())
        keys += leaves(file, "deepspeed_config_file.")
    rows = translate(CONFIGS / name).rows
    assert [row.key for row in rows] == keys
    assert all(row.note for row in rows)
    assert row(translate(CONFIGS / "ds_stage2_offload.json"), "optimizer.params.betas").value == [0.9, 0.95]


def test_a_translated_config_is_read_by_the_plugin_and_by_accelerate(name: str, tmp_path: Path) -> None:
    translation = translate(CONFIGS / name)
    ours = tmp_path / "ours.yaml"
    ours.write_text(yaml.safe_dump({**translation.accelerate, "zero_config": translation.zero}))
    plugin = ZeroPlugin.from_file(ours)
    config = plugin.config(translation.accelerate["mixed_precision"])
    assert config.zero_stage.value == translation.zero["stage"]
    ours.write_text(yaml.safe_dump(translation.accelerate))
    cluster = ClusterConfig.from_yaml_file(ours)
    assert (cluster.num_processes, cluster.fsdp_config) == (translation.accelerate["num_processes"], {})
    assert cluster.deepspeed_config == cluster.megatron_lm_config == cluster.parallelism_config == {}


def test_the_tables_agree_with_each_other() -> None:
    assert set(ALIASES.values()) <= set(DEEPSPEED)
    tables = {**DEEPSPEED, **FSDP}
    assert all(key in tables or key.rpartition(".")[0] + ".*" in tables for key in AUTO)
    assert set(ClusterConfig.__dataclass_fields__) <= {key.removesuffix(".*") for key in ACCELERATE}


# -- DeepSpeed -------------------------------------------------------------------------------------------------------


def test_plain_data_parallelism_becomes_stage_1_and_says_so(tmp_path: Path) -> None:
    translation = deepspeed(tmp_path, {"stage": 0, "offload_optimizer": {"device": "cpu"}})
    assert translation.zero == {"version": 1, "stage": 1}
    stage = row(translation, "zero_optimization.stage")
    assert stage.outcome == "translated"
    assert "ZeRO has no stage 0: stage 1 gives the same results" in stage.note
    assert translate(written(tmp_path, {"train_batch_size": 8})).zero == {"version": 1, "stage": 1}
    translation = fsdp(tmp_path, fsdp_sharding_strategy="NO_SHARD")
    assert translation.zero == {"version": 1, "stage": 1}
    assert "stage 1 gives the same results" in row(translation, "fsdp_config.fsdp_sharding_strategy").note


@pytest.mark.parametrize(
    ("stage", "optimizer", "param", "expected"),
    [
        (1, "cpu", "none", {"offload": "optimizer"}),
        (2, "none", "none", {}),
        (2, "cpu", "cpu", {"offload": "optimizer"}),
        (2, "nvme", "none", {"offload": "optimizer", "offload_directory": "/optimizer"}),
        (3, "none", "cpu", {"offload": "all"}),
        (3, "cpu", "nvme", {"offload": "all", "offload_directory": "/param"}),
        (3, "nvme", "cpu", {"offload": "all", "offload_directory": "/optimizer"}),
    ],
)
def test_devices_become_offload_and_nvme_its_directory(
    tmp_path: Path, stage: int, optimizer: str, param: str, expected: dict[str, str]
) -> None:
    translation = deepspeed(
        tmp_path,
        {
            "stage": stage,
            "offload_optimizer": {"device": optimizer, "nvme_path": "/optimizer"},
            "offload_param": {"device": param, "nvme_path": "/param"},
        },
    )
    assert translation.zero == {"version": 1, "stage": stage, **expected}


def test_the_old_words_for_offload_are_understood(tmp_path: Path) -> None:
    assert deepspeed(tmp_path, {"stage": 2, "cpu_offload": True}).zero["offload"] == "optimizer"
    assert deepspeed(tmp_path, {"stage": 3, "cpu_offload_params": True}).zero["offload"] == "all"
    assert deepspeed(tmp_path, {"stage": 3, "cpu_offload_param": True}).zero["offload"] == "all"


@pytest.mark.parametrize(
    ("precision", "size"), [({}, 4), ({"bf16": {"enabled": True}}, 2), ({"fp16": {"enabled": True}}, 2)]
)
def test_a_prefetch_bucket_of_elements_becomes_bytes_of_the_compute_dtype(
    tmp_path: Path, precision: dict[str, Any], size: int
) -> None:
    translation = deepspeed(tmp_path, {"stage": 3, "stage3_prefetch_bucket_size": 1e6}, **precision)
    assert translation.zero["prefetch_bytes"] == 1_000_000 * size
    below = deepspeed(tmp_path, {"stage": 2, "stage3_prefetch_bucket_size": 1e6}, **precision)
    assert "prefetch_bytes" not in below.zero


def test_auto_says_where_the_trainer_has_it(tmp_path: Path) -> None:
    translation = translate(CONFIGS / "ds_stage3_auto.json")
    for key, argument in {
        "gradient_clipping": "max_grad_norm",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "bf16.enabled": "bf16",
        "optimizer.params.lr": "learning_rate",
        "scheduler.params.warmup_num_steps": "warmup_steps",
        "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    }.items():
        assert f"TrainingArguments({argument}=" in row(translation, key).note
    assert deepspeed(tmp_path, {"stage": "auto"}).zero["stage"] == 2


def test_a_loss_scale_that_is_not_ours_is_said_with_the_call_that_sets_it(tmp_path: Path) -> None:
    call = "Accelerator(kwargs_handlers=[GradScalerKwargs(init_scale=2**12, growth_interval=500)]) or ZeroGradScaler"
    translation = translate(CONFIGS / "ds_fp16_scaler.json")
    assert call in row(translation, "fp16.initial_scale_power").note
    assert call in row(translation, "fp16.loss_scale_window").note

    fp16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 2}
    translation = deepspeed(tmp_path, {"stage": 1}, fp16=fp16)
    outcomes = {row.key: row.outcome for row in translation.rows}
    assert outcomes["fp16.initial_scale_power"] == outcomes["fp16.loss_scale_window"] == "not needed"
    assert outcomes["fp16.hysteresis"] == "unsupported"

    translation = deepspeed(tmp_path, {"stage": 1}, fp16={**fp16, "loss_scale": 128, "initial_scale_power": 8})
    assert "GradScalerKwargs(init_scale=128, growth_interval=10**9)" in row(translation, "fp16.loss_scale").note
    assert row(translation, "fp16.initial_scale_power").outcome == "not needed"

    translation = deepspeed(tmp_path, {"stage": 1}, fp16={**fp16, "enabled": False, "initial_scale_power": 8})
    assert row(translation, "fp16.initial_scale_power").outcome == "not needed"


def test_what_deepspeed_does_in_the_loop_is_said_with_its_numbers() -> None:
    translation = translate(CONFIGS / "ds_stage2_offload.json")
    assert "accelerator.clip_grad_norm_(model.parameters(), 0.5)" in row(translation, "gradient_clipping").note
    assert "TrainingArguments(max_grad_norm=0.5)" in row(translation, "gradient_clipping").note
    accumulation = row(translation, "gradient_accumulation_steps").note
    assert "Accelerator(gradient_accumulation_steps=4)" in accumulation
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4" in accumulation
    optimizer = "torch.optim.AdamW(model.parameters(), lr=3e-05, betas=[0.9, 0.95], eps=1e-08, weight_decay=0.1)"
    assert optimizer in row(translation, "optimizer.type").note
    scheduler = "get_linear_schedule_with_warmup(optimizer, num_warmup_steps=100, num_training_steps=2000)"
    assert scheduler in row(translation, "scheduler.type").note
    wire = "MixedPrecision(param=torch.bfloat16, reduce=torch.float32)"
    assert wire in row(translation, "communication_data_type").note


@pytest.mark.parametrize(
    ("name", "params", "outcome", "note"),
    [
        ("Adam", {"lr": 0.1, "adam_w_mode": False}, "unsupported", "torch.optim.Adam(model.parameters(), lr=0.1)"),
        ("AdamW", {"lr": "auto", "eps": 1e-6}, "not needed", "the Trainer builds AdamW"),
        ("OneBitAdam", {"lr": 0.1, "freeze_step": 400}, "unsupported", "the nearest is AdamW.* lr=0.1"),
        (
            "SGD",
            {"lr": 0.1, "momentum": 0.9},
            "unsupported",
            "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
        ),
    ],
)
def test_an_optimizer_of_the_file_is_to_be_built_in_code(
    tmp_path: Path, name: str, params: dict[str, Any], outcome: str, note: str
) -> None:
    found = row(deepspeed(tmp_path, {"stage": 2}, optimizer={"type": name, "params": params}), "optimizer.type")
    assert found.outcome == outcome
    assert all(part in found.note for part in note.split(".*"))


def test_unknown_keys_are_named_and_not_taken_over(tmp_path: Path) -> None:
    translation = deepspeed(tmp_path, {"stage": 2, "overlap_com": True}, precision="bf16-true")
    for key in ("zero_optimization.overlap_com", "precision"):
        assert row(translation, key).outcome == "unsupported"
        assert "unknown" in row(translation, key).note
    assert translation.zero == {"version": 1, "stage": 2}
    translation = translate(written(tmp_path, {"distributed_type": "FSDP", "fsdp_config": {}, "stage": 1}))
    assert (row(translation, "stage").outcome, translation.zero["stage"]) == ("unsupported", 3)


def test_a_section_that_is_switched_off_loses_nothing(tmp_path: Path) -> None:
    translation = deepspeed(
        tmp_path, {"stage": 2, "zenflow": None}, amp={"enabled": False, "opt_level": "O1"}, pipeline={}
    )
    assert {row.outcome for row in translation.rows[2:]} == {"not needed"}


# -- Accelerate ------------------------------------------------------------------------------------------------------


def test_accelerates_defaults_hold_where_the_file_says_nothing(tmp_path: Path) -> None:
    assert translate(written(tmp_path, {"distributed_type": "DEEPSPEED"})).zero["stage"] == 2
    assert translate(written(tmp_path, {"distributed_type": "FSDP"})).zero["stage"] == 3
    assert fsdp(tmp_path, fsdp_version=2).zero["stage"] == 3


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        ({"num_processes": 1}, "NO"),
        ({"num_processes": 1, "num_machines": 2}, "MULTI_GPU"),
        ({"num_processes": 4}, "MULTI_GPU"),
        ({"num_processes": 4, "use_cpu": True}, "MULTI_CPU"),
        ({}, "MULTI_GPU"),
    ],
)
def test_the_distributed_type_is_that_of_the_processes(
    tmp_path: Path, processes: dict[str, Any], expected: str
) -> None:
    file = written(tmp_path, {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 1}, **processes})
    assert translate(file).accelerate["distributed_type"] == expected


def test_fp8_becomes_bf16_and_says_so(tmp_path: Path) -> None:
    translation = translate(written(tmp_path, {"distributed_type": "FSDP", "mixed_precision": "fp8"}))
    assert translation.accelerate["mixed_precision"] == "bf16"
    assert row(translation, "mixed_precision").outcome == "unsupported"


def test_a_named_deepspeed_file_is_found_beside_the_config_or_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    config = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    file = written(tmp_path / "here", config)
    with pytest.raises(ValueError, match=r"config\.json: deepspeed_config\.deepspeed_config_file names 'ds\.json'"):
        translate(file)
    monkeypatch.chdir(tmp_path)
    written(tmp_path, {"zero_optimization": {"stage": 1}}, "ds.json")
    assert translate(file).zero["stage"] == 1
    written(tmp_path / "here", {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}, "ds.json")
    assert translate(file).zero["stage"] == 3
    assert translate(file).accelerate["mixed_precision"] == "bf16"


def test_precision_of_the_deepspeed_file_wins_over_no(tmp_path: Path) -> None:
    config = {"mixed_precision": "no", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    written(tmp_path, {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}, "ds.json")
    translation = translate(written(tmp_path, config))
    assert translation.accelerate["mixed_precision"] == "bf16"
    assert row(translation, "mixed_precision").note == "bf16.enabled decides."


# -- FSDP ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "stage"),
    [
        ({"fsdp_sharding_strategy": "FULL_SHARD"}, 3),
        ({"fsdp_sharding_strategy": 1}, 3),
        ({"fsdp_sharding_strategy": "2"}, 2),
        ({"fsdp_sharding_strategy": 3}, 1),
        ({"fsdp_sharding_strategy": "hybrid_shard"}, 3),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"}, 2),
        ({"fsdp_sharding_strategy": 5}, 2),
        ({"fsdp_version": 1, "fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, 2),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_reshard_after_forward": "true"}, 2),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": True}, 3),
        ({"fsdp_version": "2", "fsdp_reshard_after_forward": "false"}, 2),
        ({"fsdp_version": 2, "fsdp_sharding_strategy": "SHARD_GRAD_OP"}, 3),
        ({"version": 2, "reshard_after_forward": False}, 2),
    ],
)
def test_a_sharding_strategy_becomes_the_stage_that_shards_as_much(
    tmp_path: Path, settings: dict[str, Any], stage: int
) -> None:
    assert fsdp(tmp_path, **settings).zero["stage"] == stage


def test_hybrid_sharding_is_said_to_be_over_all_ranks_here() -> None:
    hybrid = row(translate(CONFIGS / "accelerate_fsdp1_hybrid.yaml"), "fsdp_config.fsdp_sharding_strategy")
    assert hybrid.outcome == "unsupported"
    assert "zero_config.stage: 3; ZeRO shards over all ranks here" in hybrid.note


def test_offloaded_params_are_all_at_stage_3_and_the_optimizer_below(tmp_path: Path) -> None:
    assert fsdp(tmp_path, fsdp_offload_params=True).zero["offload"] == "all"
    assert fsdp(tmp_path, fsdp_offload_params="true", fsdp_sharding_strategy=2).zero["offload"] == "optimizer"
    assert "offload" not in fsdp(tmp_path, fsdp_offload_params=False).zero


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, {}),
        ({"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": "auto"}, {}),
        (
            {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": "A, B"},
            {"unit_classes": ["A", "B"]},
        ),
        ({"fsdp_auto_wrap_policy": "NO_WRAP", "fsdp_transformer_layer_cls_to_wrap": "A"}, {}),
        ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 5}, {"unit_numel": 5}),
        ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1_000_000}, {}),
        ({"fsdp_auto_wrap_policy": "NO_WRAP", "fsdp_min_num_params": 5}, {}),
    ],
)
def test_wrapping_becomes_units_where_it_is_read_and_not_the_default(
    tmp_path: Path, settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert fsdp(tmp_path, **settings).zero == {"version": 1, "stage": 3, **expected}


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{stage: [3", "cannot be parsed, it is neither YAML nor JSON"),
        ("- 1", "must hold keys and values, got list"),
        ({"learning_rate": 1}, "is neither a DeepSpeed config .* nor an Accelerate config"),
        ({"distributed_type": "MULTI_GPU", "num_processes": 2}, "without DeepSpeed or FSDP.*accelerate-zero config"),
        ({"distributed_type": "NO", "zero_config": {"stage": 3}}, "has a section 'zero_config': it is ours already"),
        ({"fsdp_config": {"fsdp_version": 2}, "deepspeed_config": {"zero_stage": 2}}, "asks for both"),
        ({"distributed_type": "FSDP", "fsdp_config": "FULL_SHARD"}, "fsdp_config must hold keys and values"),
        ({"zero_optimization": True}, "zero_optimization must hold keys and values, got True"),
        ({"zero_optimization": {"stage": 4}}, r"zero_optimization\.stage must be one of 0, 1, 2, 3, got 4"),
        ({"zero_optimization": {"stage": True}}, r"zero_optimization\.stage must be one of 0, 1, 2, 3, got True"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "gpu"}}},
            r"zero_optimization\.offload_optimizer\.device must be one of none, cpu, nvme, got 'gpu'",
        ),
        (
            {"deepspeed_config": {"zero_stage": 3, "offload_param_device": "nvme"}},
            r"deepspeed_config\.offload_param_device is nvme, so .*offload_param\.nvme_path must be a directory, got None",
        ),
        (
            {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "many"}},
            r"stage3_prefetch_bucket_size must be a number, got 'many'",
        ),
        ({"zero_optimization": {}, "bf16": {"enabled": 2}}, r"bf16\.enabled must be true or false, got 2"),
        ({"zero_optimization": {}, "gradient_clipping": -1}, r"gradient_clipping must be a number from 0 on, got -1"),
        (
            {"zero_optimization": {}, "gradient_accumulation_steps": 1.5},
            r"gradient_accumulation_steps must be a whole number, got 1\.5",
        ),
        (
            {"zero_optimization": {}, "bf16": {"enabled": True}, "fp16": {"enabled": True}},
            r"bf16\.enabled asks for mixed_precision='bf16' and fp16\.enabled for mixed_precision='fp16'. Keep one",
        ),
        (
            {"deepspeed_config": {"zero_stage": 2, "deepspeed_config_file": str(CONFIGS / "ds_stage3_auto.json")}},
            r"deepspeed_config\.zero_stage says 2 and deepspeed_config_file\.zero_optimization\.stage says 3",
        ),
        (
            {"fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": "FULL_SHARD"}},
            "must be one of true, false",
        ),
        ({"fsdp_config": {"fsdp_sharding_strategy": "SOME"}}, "fsdp_config.fsdp_sharding_strategy must be one of true"),
        ({"fsdp_config": {"fsdp_auto_wrap_policy": "WRAP"}}, "must be one of TRANSFORMER_BASED_WRAP, .* got 'WRAP'"),
        ({"fsdp_config": {"fsdp_version": 2}, "num_processes": "two"}, "num_processes must be a number, got 'two'"),
        ({"fsdp_config": {"fsdp_version": 2}, "mixed_precision": "int8"}, "mixed_precision must be one of no"),
    ],
)
def test_a_file_that_makes_no_sense_is_named_with_the_key(
    tmp_path: Path, content: dict[str, Any] | str, message: str
) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ValueError, match=f"(?s)^{path}.*{message}"):
        translate(path)


def test_a_file_that_is_not_there_is_said() -> None:
    with pytest.raises(FileNotFoundError, match=r"no config file 'nowhere\.json'"):
        translate("nowhere.json")
