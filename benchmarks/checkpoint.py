"""Times saving and loading of the same Llama with its AdamW state: zero_core beside torch's own checkpoints of FSDP2.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --rounds 15 --folder /a/real/disk
    python benchmarks/checkpoint.py --hidden 768 --layers 12 --vocab 16384     # about 117M parameters

All variants live in the same two gloo ranks (one thread each) and take turns: each round saves, loads and saves beside
training once with each, so that a slow minute of the machine hits all of them alike. Variants are compared within a round.

What is timed is what a user calls. FSDP2: `get_model_state_dict` and `get_optimizer_state_dict`, `dcp.save` or `dcp.load`,
and for loading the two setters. Ours: `save_checkpoint` and `load_checkpoint`. `dcp.save` flushes its files to the disk
(torch's default) and does no more. Ours flushes files and directory, takes checksums, reads what it wrote once more to
compare, and takes its place in one step; loading compares the checksums of what it reads. "in memory" is the same with
the flushing left out on either side: what remains is what the programs do, and the difference is the disk.

What the columns mean:

* ``save``, ``in memory``, ``load``: the median over the rounds, in ms, of the slower rank. Files are read from the page
  cache.
* ``x fsdp2``: the median over the rounds of the ratio to FSDP2's in the same round.
* ``MB``: all files of one checkpoint.
* ``+save``, ``+load``: the largest of the ranks' peak resident sets in MB during the call, less what was resident before it;
  in a launch of its own, with an allocator that returns every large buffer as soon as it is freed.
* ``blocked``: how long the call that saves beside training (`async_save_checkpoint`, `dcp.async_save`) holds up the
  loop, in ms.
* ``copy``: a bare copy of the same bytes into new memory, in ms, in the same round.

MB are 10^6 bytes.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from _peers import _fused_adamw, _usual_loop
from _worker import _batch, _llama, _peak_bytes, _reset_peak, _status_bytes, _trim
from rich.console import Console
from rich.table import Table
from step_time import RETURN_FREED_MEMORY
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import zero_core

VARIANTS = ("fsdp2", "zero1", "zero2", "zero3")
Samples = dict[tuple[str, str], list[float]]
"""By variant and column, one number a round."""


@dataclass
class Variant:
    """One way to shard, save and load.

    Attributes:
        step: one training step; returns the loss.
        save: to a directory.
        save_beside: the same, returning what has a `result()` to wait for.
        load: from a directory.
        state: this rank's tensors, as a checkpoint holds them.
    """

    step: Callable[[], Tensor]
    save: Callable[[str], Any]
    save_beside: Callable[[str], Any]
    load: Callable[[str], Any]
    state: Callable[[], list[Tensor]]


def fsdp2(model: Any, batch: dict[str, Tensor]) -> Variant:
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = _fused_adamw(model.parameters())

    def state() -> dict[str, Any]:
        return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}

    def load(path: str) -> None:
        found = state()
        dcp.load(found, checkpoint_id=path)
        set_model_state_dict(model, found["model"])
        set_optimizer_state_dict(model, optimizer, found["optimizer"])

    def local() -> list[Tensor]:
        values = [*model.parameters(), *(v for entries in optimizer.state.values() for v in entries.values())]
        return [value.to_local() if hasattr(value, "to_local") else value for value in values]

    step = _usual_loop(model, optimizer)
    beside = dist.new_group()  # a save beside training must not mix its messages with those of the loop
    return Variant(
        step=lambda: step(batch),
        save=lambda path: dcp.save(state(), checkpoint_id=path),
        save_beside=lambda path: dcp.async_save(state(), checkpoint_id=path, process_group=beside),
        load=load,
        state=local,
    )


def zero(model: nn.Module, batch: dict[str, Tensor], stage: int) -> Variant:
    engine = zero_core.shard(model, zero_core.ZeroConfig(stage=stage))
    optimizer = engine.bind(_fused_adamw(model.parameters()))

    def state() -> list[Tensor]:
        parts = list(engine.model_state().tensors.values())
        parts += [part for entries in engine.optimizer_state(optimizer).tensors.values() for part in entries.values()]
        return [segment.values for part in parts if hasattr(part, "_segments") for segment in part._segments]

    step = _usual_loop(model, optimizer)
    return Variant(
        step=lambda: step(batch),
        save=lambda path: zero_core.save_checkpoint(path, engine, optimizer),
        save_beside=lambda path: zero_core.async_save_checkpoint(path, engine, optimizer),
        load=lambda path: zero_core.load_checkpoint(path, engine, optimizer),
        state=state,
    )


# --- a rank -----------------------------------------------------------------------------------------------


def run(rank: int, args: argparse.Namespace, folder: str, measure_memory: bool) -> None:
    """One rank of a launch; rank 0 leaves the samples in `folder`. SIGUSR1 makes it say where it is."""
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", args.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.world_size)
    try:
        batch = _batch(args, rank)
        variants: dict[str, Variant] = {}
        for name in args.variants:
            model = _llama(args)
            variants[name] = fsdp2(model, batch) if name == "fsdp2" else zero(model, batch, int(name[-1]))
            del model
            variants[name].step()
        samples: Samples = defaultdict(list)
        for number in range(args.rounds + 1):
            for name, variant in variants.items():
                path = f"{folder}/{name}"
                found = _memory(variant, path) if measure_memory else _times(variant, path)
                _remove(path)
                for column, value in found.items():
                    if number:  # the first round is for caches to fill
                        samples[name, column].append(value)
        for name, variant in variants.items():
            _check(name, variant, f"{folder}/{name}")
        if rank == 0:
            torch.save(dict(samples), f"{folder}/samples")
    finally:
        dist.destroy_process_group()


def _times(variant: Variant, path: str) -> dict[str, float]:
    found = {"save": _slowest(lambda: variant.save(path))}
    found["MB"] = sum(file.stat().st_size for file in Path(path).iterdir()) / 1e6
    found["load"] = _slowest(lambda: variant.load(path))
    _remove(path)
    with mock.patch.object(os, "fsync", lambda _: None):
        found["in memory"] = _slowest(lambda: variant.save(path))
    _remove(path)
    copies: list[Tensor] = []
    found["copy"] = _slowest(lambda: copies.extend(tensor.clone() for tensor in variant.state()))
    copies.clear()
    futures: list[Any] = []
    found["blocked"] = _slowest(lambda: futures.append(variant.save_beside(path)))
    futures[0].result()
    return found


def _memory(variant: Variant, path: str) -> dict[str, float]:
    found = {}
    for name, call in (("+save", variant.save), ("+load", variant.load)):
        dist.barrier()
        _trim()
        before, source = _status_bytes("VmRSS"), _reset_peak()
        call(path)
        peak = _peak_bytes(source)
        found[name] = _largest((peak - before) / 1e6 if peak is not None and before is not None else float("nan"))
    return found


def _check(name: str, variant: Variant, path: str) -> None:
    """A step after loading is the step after saving: what was timed was the whole state."""
    variant.save(path)
    expected = [variant.step().item(), variant.step().item()]
    variant.load(path)
    found = [variant.step().item(), variant.step().item()]
    _remove(path)
    if found != expected:
        raise AssertionError(f"{name}: after loading the losses are {found}, after saving they were {expected}")


def _slowest(call: Callable[[], Any]) -> float:
    dist.barrier()
    start = time.perf_counter()
    call()
    return _largest((time.perf_counter() - start) * 1e3)


def _largest(value: float) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def _remove(path: str) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
        os.sync()  # the next one's flush should not pay for this
    dist.barrier()


# --- the program ------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    times = _launch(args, measure_memory=False)
    os.environ.update(RETURN_FREED_MEMORY)
    memory = _launch(args, measure_memory=True)
    _print_table(args, {**times, **memory})


def _launch(args: argparse.Namespace, measure_memory: bool) -> Samples:
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="checkpoint-benchmark-") as folder:
        mp.spawn(run, (args, folder, measure_memory), nprocs=args.world_size)  # type: ignore[no-untyped-call]
        found: Samples = torch.load(f"{folder}/samples", weights_only=True)
    return found


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Times saving and loading under zero_core and FSDP2 with DCP.")
    parser.add_argument("--variants", type=lambda text: text.split(","), default=list(VARIANTS), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--world-size", type=int, default=2, help="ranks")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size; heads have 64 columns each")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where checkpoints go; not on a RAM disk")
    parser.set_defaults(tokens=16, batch=1)
    args = parser.parse_args(argv)
    if unknown := set(args.variants) - set(VARIANTS):
        parser.error(f"unknown: {', '.join(unknown)}; choose from {', '.join(VARIANTS)}")
    return args


def _print_table(args: argparse.Namespace, samples: Samples) -> None:
    table = Table()
    for title in ("variant", "save", "x fsdp2", "in memory", "x fsdp2", "load", "x fsdp2", "MB", "+save", "+load"):
        table.add_column(title, justify="left" if title == "variant" else "right", no_wrap=True)
    for title in ("blocked", "copy"):
        table.add_column(title, justify="right", no_wrap=True)
    for name in args.variants:
        cells = [name]
        for column in ("save", "in memory", "load"):
            own, other = samples[name, column], samples.get(("fsdp2", column))
            ratios = [a / b for a, b in zip(own, other, strict=True)] if other else [float("nan")]
            cells += [f"{statistics.median(own):.0f}", f"{statistics.median(ratios):.2f}"]
        for column in ("MB", "+save", "+load", "blocked", "copy"):
            cells.append(f"{statistics.median(samples[name, column]):.0f}")
        table.add_row(*cells)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


if __name__ == "__main__":
    main()
