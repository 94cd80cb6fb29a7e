"""Makes tests/data/deepspeed with the real package, which the tests themselves do not need.

In an environment of its own, from the repository's root:

    DS_BUILD_OPS=0 pip install torch deepspeed
    PYTHONPATH=. python tests/data/make_deepspeed.py

Each case is what `engine.save_checkpoint` wrote after two steps; a plain run of the same steps says what it has to hold.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0", OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1")

import deepspeed
import torch
from torch import multiprocessing

from tests.helpers import tied

FOLDER = Path(__file__).parent / "deepspeed"
# Name: stage, ranks.
CASES = {"stage1": (1, 2), "stage2": (2, 3), "stage3": (3, 2)}


def main(rank: int, case: str, port: int) -> None:
    stage, world_size = CASES[case]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_PORT=str(port))
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    model = tied.build()
    config = {
        "train_micro_batch_size_per_gpu": 12 // world_size,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
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


if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    for number, (case, (_, world_size)) in enumerate(CASES.items()):
        multiprocessing.spawn(main, (case, 29600 + number), nprocs=world_size)
