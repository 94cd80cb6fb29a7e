"""Makes tests/data/deepspeed with the real package, which the tests themselves do not need.

In an environment of its own, from the repository's root:

    DS_BUILD_OPS=0 pip install torch deepspeed
    PYTHONPATH=. python tests/data/make_deepspeed.py

Each case is what `engine.save_checkpoint` wrote after two steps. A plain run of the same steps says what it has to hold; in
bf16, which no other run repeats, the weights are besides those that DeepSpeed's own `zero_to_fp32` makes of it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0", OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1")

import deepspeed
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import multiprocessing

from tests.helpers import tied

FOLDER = Path(__file__).parent / "deepspeed"
# Name: ranks, settings of ZeRO, and others.
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "stage1": (2, {"stage": 1}, {}),
    "stage2": (3, {"stage": 2}, {}),
    "stage3": (2, {"stage": 3}, {}),
    "elastic": (2, {"stage": 2, "elastic_checkpoint": True}, {}),
    "sub_groups": (2, {"stage": 3, "sub_group_size": 40}, {"bf16": {"enabled": True}}),
    "bf16": (2, {"stage": 2}, {"bf16": {"enabled": True}}),
    "bf16_stage1": (2, {"stage": 1}, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}),
}


def main(rank: int, case: str, port: int) -> None:
    world_size, zero, settings = CASES[case]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_PORT=str(port))
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    model = tied.build()
    config = {
        "train_micro_batch_size_per_gpu": 12 // world_size,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        **settings,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=tied.adamw(model), config=config)
    for step in range(2):
        ids = tied.batch(step, rank, world_size)
        engine.backward(tied.loss(engine(ids), ids))
        engine.step()
    engine.save_checkpoint(str(FOLDER / case), client_state={"epoch": 3})
    torch.distributed.barrier()
    if rank == 0:
        for script in (FOLDER / case).glob("zero_to_*.py"):
            script.unlink()
        if settings and "data_types" not in settings:  # of which zero_to_fp32 says that it is not a zero checkpoint
            weights = get_fp32_state_dict_from_zero_checkpoint(str(FOLDER / case))
            torch.save({name: value.clone() for name, value in weights.items()}, FOLDER / case / "fp32.pt")


if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    for number, (case, (world_size, _, _)) in enumerate(CASES.items()):
        multiprocessing.spawn(main, (case, 29600 + number), nprocs=world_size)
