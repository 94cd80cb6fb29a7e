"""Makes tests/data/deepspeed with the real package, which the tests themselves do not need.

In an environment of its own, from the repository's root:

    DS_BUILD_OPS=0 pip install torch deepspeed safetensors
    PYTHONPATH=. python tests/data/make_deepspeed.py

Each case is what `engine.save_checkpoint` wrote after two steps. Beside it, `<case>.safetensors` has what DeepSpeed itself
says the state is: masters, moments and, where it computed in fp32, the weights after a third step.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0", OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1")

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import save_file
from torch import multiprocessing

from tests.helpers import tied

FOLDER = Path(__file__).parent / "deepspeed"
BF16 = {"bf16": {"enabled": True}}
# Name: ranks, settings of ZeRO, other settings, settings of the save.
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "stage1": (2, {"stage": 1}, {}, {}),
    "stage1-bf16-optimizer": (2, {"stage": 1}, {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}, {}),
    "stage2-bf16": (3, {"stage": 2}, BF16, {}),
    "stage2-elastic": (
        2,
        {"stage": 2, "elastic_checkpoint": True, "parameter_alignment": True, "round_robin_gradients": True},
        {},
        {"exclude_frozen_parameters": True},
    ),
    "stage3": (2, {"stage": 3}, {}, {}),
    "stage3-bf16-subgroups": (3, {"stage": 3, "sub_group_size": 10}, BF16, {}),
}


def main(rank: int, case: str, port: int) -> None:
    world_size, zero, settings, saving = CASES[case]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_PORT=str(port))
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    model = tied.build()
    initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = tied.adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    config = {
        "train_micro_batch_size_per_gpu": 12 // world_size,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        **settings,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)

    def step(number: int) -> None:
        ids = tied.batch(number, rank, world_size)
        engine.backward(tied.loss(engine(ids), ids))
        engine.step()

    def masters() -> dict[str, torch.Tensor]:
        return {n: safe_get_full_fp32_param(p).clone() for n, p in model.named_parameters() if p.requires_grad}

    step(0)
    step(1)
    engine.save_checkpoint(str(FOLDER / case), client_state={"epoch": 3}, **saving)
    expected = masters()
    for name in masters():
        param = model.get_parameter(name)
        for key in ("exp_avg", "exp_avg_sq"):
            expected[f"{name}/{key}"] = safe_get_full_optimizer_state(param, key).clone()
    half = torch.bfloat16 if "bf16" in settings else torch.float32
    for name in ("base.weight", "base.bias", "scale"):
        expected[name] = initial[name].to(half).float()
    if not settings:
        step(2)
        expected |= {f"{name}/after": tensor for name, tensor in masters().items()}
    if rank == 0:
        save_file({name: tensor.contiguous() for name, tensor in expected.items()}, FOLDER / f"{case}.safetensors")
        for script in (FOLDER / case).glob("zero_to_*.py"):
            script.unlink()
    torch.distributed.barrier()


if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    for number, (case, (world_size, *_)) in enumerate(CASES.items()):
        multiprocessing.spawn(main, (case, 29600 + number), nprocs=world_size)
