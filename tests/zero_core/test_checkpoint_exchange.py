"""Checkpoints go to and from plain torch, DDP, FSDP2 and files of other formats, optimizer and all."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tests.helpers import models
from tests.helpers.cases import Cases, check, folder
from tests.helpers.twin import OPTIMIZERS, mean_over_ranks
from zero_core import ZeroConfig, ZeroEngine, load_checkpoint, save_checkpoint, shard

cases = Cases(__name__)
outcomes = cases.fixture(2)

FAMILY = "gpt2"  # a tied head, and matrices that are stored transposed
# fp32: ranks sum micro-batches in another order than one process, and Adam divides by roots of small moments.
TOLERANCE = 1e-6


@dataclass
class Run:
    """A model in training, by whatever engine; the ranks share a batch unless the run is of one process."""

    model: nn.Module
    optimizer: Optimizer
    engine: ZeroEngine | None = None
    alone: bool = False

    def train(self, *steps: int) -> list[float]:
        losses = []
        for step in steps:
            data = models.batch(FAMILY, step)
            loss = models.loss(self.model, data if self.alone else models.part(data, dist.get_rank(), 2))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item() if self.alone else mean_over_ranks(loss.detach()).item())
        return losses

    def state(self) -> dict[str, Any]:
        """Weights by name, and optimizer state by parameter's number and key, whole, on rank 0."""
        if self.engine is not None:
            weights = self.engine.full_state_dict()
            optimizer = self.engine.full_optimizer_state_dict(self.optimizer)
        else:
            # DDP's and FSDP2's too: both names of a tied tensor, whole values.
            inner = getattr(self.model, "module", self.model)
            weights = {name: whole(value) for name, value in inner.state_dict().items()}
            optimizer = self.optimizer.state_dict()
        if dist.get_rank():
            [whole(value) for entries in optimizer.get("state", {}).values() for value in entries.values()]
            return {}
        moments = {
            f"{number}.{key}": whole(value)
            for number, entries in optimizer["state"].items()
            for key, value in entries.items()
        }
        groups = {f"{i}.{k}": g[k] for i, g in enumerate(optimizer["param_groups"]) for k in ("lr", "weight_decay")}
        return {**weights, **moments, **groups}


def whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def plain(seed: int = 0) -> Run:
    model = models.build(FAMILY, seed)
    return Run(model, OPTIMIZERS["adamw"](model), alone=True)


def ours(stage: int, seed: int = 0) -> Run:
    model = models.build(FAMILY, seed)
    engine = shard(model, ZeroConfig(stage=stage, unit_numel=3000))
    return Run(model, engine.bind(OPTIMIZERS["adamw"](model)), engine)


def ddp(seed: int = 0) -> Run:
    run = plain(seed)
    return Run(DistributedDataParallel(run.model), run.optimizer)


def fsdp(seed: int = 0) -> Run:
    model = models.build(FAMILY, seed)
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    return Run(model, OPTIMIZERS["adamw"](model))


def check_same(run: Run, source: Run, after: tuple[int, ...] = (2, 3)) -> None:
    """One has loaded what the other saved: every bit, and further steps arrive at the same weights."""
    given, expected = run.state(), source.state()
    assert given.keys() == expected.keys(), given.keys() ^ expected.keys()
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(given[name]), torch.as_tensor(value)), f"{name} was not loaded"
    losses = zip(run.train(*after), source.train(*after), strict=True)
    assert max(abs(a - b) for a, b in losses) < TOLERANCE
    given, expected = run.state(), source.state()
    for name, value in expected.items():
        error = (torch.as_tensor(given[name]).double() - torch.as_tensor(value).double()).abs().max()
        assert error < TOLERANCE, f"{name} is off by {error:.1e} after more steps"


def loaded_by_torch(run: Run, place: str) -> Run:
    """What plain torch's users do to resume: DCP into state dicts that say where each part belongs."""
    weights, states = get_state_dict(run.model, run.optimizer)
    tree = {"model": weights, "optimizer": states}
    dcp.load(tree, checkpoint_id=place, no_dist=run.alone)
    set_state_dict(run.model, run.optimizer, model_state_dict=tree["model"], optim_state_dict=tree["optimizer"])
    return run


def saved_by_torch(run: Run, flat: bool = False) -> str:
    place = folder()
    weights, states = get_state_dict(
        run.model, run.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat)
    )
    if not run.alone or dist.get_rank() == 0:
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=place, no_dist=run.alone)
    dist.barrier()
    return place


PEERS: dict[str, Callable[[int], Run]] = {"plain": plain, "ddp": ddp, "fsdp2": fsdp}


@cases
def runs_of_torch_go_on_here(stage: int) -> None:
    for make, flat in ((plain, False), (ddp, False), (fsdp, False), (fsdp, True)):
        source = make(0)
        source.train(0, 1)
        place = saved_by_torch(source, flat)
        run = ours(stage, seed=1)
        found = load_checkpoint(place, run.engine, run.optimizer)
        assert not found.missing and not found.unexpected and found.optimizers == ["optimizer"]
        check_same(run, source)


@cases
def runs_from_here_go_on_in_torch(stage: int) -> None:
    source = ours(stage)
    source.train(0, 1)
    place = f"{folder()}/checkpoint"
    save_checkpoint(place, source.engine, source.optimizer)
    for number, make in enumerate(PEERS.values()):
        again = ours(stage, seed=2)  # each peer has a run of its own to be compared with
        load_checkpoint(place, again.engine, again.optimizer)
        check_same(loaded_by_torch(make(1), place), again, after=(2, 3) if number else (2,))


def save_files(source: Run, root: str) -> dict[str, str]:
    """Files of the usual formats with the same weights, some with the optimizer; rank 0 writes."""
    weights: dict[str, Tensor] = source.model.state_dict()
    several = {f"{root}/{i}.safetensors": dict(list(weights.items())[i::3]) for i in range(3)}
    if dist.get_rank() == 0:
        both = {"model": weights, "optimizer": source.optimizer.state_dict(), "epoch": 3}
        torch.save(both, f"{root}/both.pt")
        torch.save(weights, f"{root}/weights.pt")
        torch.save({f"module.{name}": value for name, value in weights.items()}, f"{root}/wrapped.pt")
        torch.save({"state_dict": weights, "optimizer_states": [both["optimizer"]], "epoch": 3}, f"{root}/host.ckpt")
        # Like transformers: of a tied pair one name.
        save_file({k: v.clone() for k, v in weights.items() if k != "lm_head.weight"}, f"{root}/model.safetensors")
        for path, part in several.items():
            save_file({k: v.clone() for k, v in part.items()}, path)
        index = {"weight_map": {name: path.rpartition("/")[2] for path, part in several.items() for name in part}}
        with open(f"{root}/model.safetensors.index.json", "w") as file:
            json.dump(index, file)
    dist.barrier()
    return {
        "torch, both": f"{root}/both.pt", "torch, weights": f"{root}/weights.pt", "torch, DDP": f"{root}/wrapped.pt",
        "torch, host": f"{root}/host.ckpt", "safetensors": f"{root}/model.safetensors", "several safetensors": root,
    }  # fmt: skip


@cases
def files_of_the_usual_formats_are_read(stage: int) -> None:
    source = plain()
    source.train(0, 1)
    for kind, place in save_files(source, folder()).items():
        run = ours(stage, seed=1)
        with_optimizer = kind in ("torch, both", "torch, host")
        found = load_checkpoint(place, run.engine, run.optimizer if with_optimizer else None)
        assert not found.missing and not found.unexpected, kind
        assert found.extra.get("epoch") == (3 if with_optimizer else None), kind
        if with_optimizer:
            again = plain()
            again.model.load_state_dict(source.model.state_dict())
            again.optimizer.load_state_dict(copy.deepcopy(source.optimizer.state_dict()))
            check_same(run, again)
            continue
        given = run.engine.full_state_dict(all_ranks=True)
        for name, value in source.model.state_dict().items():
            assert torch.equal(given[name], value), f"{kind}: {name}"


@cases.parametrize()
def test_checkpoints_are_exchanged_with_other_engines_and_formats(case: tuple[str, int], outcomes: Any) -> None:
    check(outcomes, case)
