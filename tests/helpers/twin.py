"""The plain run as the oracle: a one-process twin on the whole batch, a DDP twin, and how far a run is from them."""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tests.helpers import models
from zero_core import ZeroConfig, ZeroEngine, shard

MakeOptimizer = Callable[[nn.Module], Optimizer]


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The usual two groups: matrices decay, vectors do not."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda m: torch.optim.SGD(decay_groups(m), lr=0.05, momentum=0.9),
    "adamw": lambda m: torch.optim.AdamW(decay_groups(m), lr=1e-3, foreach=True),
    "adamw_fused": lambda m: torch.optim.AdamW(decay_groups(m), lr=1e-3, fused=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3, momentum=0.9),
}


@dataclass
class Sharded:
    """A model that the engine trains."""

    model: nn.Module
    engine: ZeroEngine
    optimizer: Optimizer


class Twin:
    """The same model trained by one process, by DDP, and by an engine for each of some configs."""

    def __init__(self, model: nn.Module, optimizer: MakeOptimizer, configs: Iterable[ZeroConfig]) -> None:
        ddp = copy.deepcopy(model)
        self.sharded = []
        for config in configs:
            own = copy.deepcopy(model)
            engine = shard(own, config)
            self.sharded.append(Sharded(own, engine, engine.bind(optimizer(own))))
        self.plain, self.plain_optimizer = model, optimizer(model)
        self.ddp, self.ddp_optimizer = DistributedDataParallel(ddp), optimizer(ddp)

    @property
    def _runs(self) -> list[tuple[nn.Module, Optimizer]]:
        own = [(run.model, run.optimizer) for run in self.sharded]
        return [(self.plain, self.plain_optimizer), (self.ddp, self.ddp_optimizer), *own]

    def backward(self, data: dict[str, Tensor]) -> list[float]:
        """Forward and backward of all; returns the mean losses over ranks."""
        mine = models.part(data, dist.get_rank(), dist.get_world_size())
        losses = []
        for model, _ in self._runs:
            value = models.loss(model, data if model is self.plain else mine)
            value.backward()
            losses.append(value.item() if model is self.plain else mean_over_ranks(value.detach()).item())
        return losses

    def step(self) -> None:
        for _, optimizer in self._runs:
            optimizer.step()
            optimizer.zero_grad()

    def gradient_errors(self) -> list[float]:
        """The largest relative error of a gradient: of DDP's, then of the engines'."""
        expected = [p.grad for p in self.plain.parameters()]
        own = [full_grads(run.engine) for run in self.sharded]
        return [distance(grads, expected) for grads in ([p.grad for p in self.ddp.parameters()], *own)]

    def weight_errors(self) -> list[float]:
        """The largest absolute difference of a weight: of DDP's, then of the engines'."""
        errors = [largest_difference(self.ddp.parameters(), self.plain.parameters())]
        for run in self.sharded:
            with run.engine.full_params():
                errors.append(largest_difference(run.model.parameters(), self.plain.parameters()))
        return errors

    def state_error(self, run: Sharded) -> float:
        """The largest relative error of an optimizer state tensor (on rank 0; 0 elsewhere)."""
        own = run.engine.full_optimizer_state_dict(run.optimizer)
        expected = self.plain_optimizer.state_dict()
        if dist.get_rank() != 0:
            return 0.0
        assert own["state"].keys() == expected["state"].keys()
        worst = 0.0
        for key in sorted({key for entries in expected["state"].values() for key in entries}):
            columns = [[state["state"][i][key] for i in expected["state"]] for state in (own, expected)]
            worst = max(worst, distance(*columns))
        return worst


def full_grads(engine: ZeroEngine) -> list[Tensor | None]:
    """`engine.full_grad` of every parameter, with one exchange for all of them instead of two for each."""
    engine._reducer.reduce_local_grads()
    engine._reducer.drop_zeroed()
    own: dict[str, tuple[int, Tensor]] = {}
    layouts = {}
    for partition in (partition for unit in engine._units for partition in unit.partitions):
        for index, layout in enumerate(partition.layout.params):
            layouts[id(partition.params[index])] = layout
            grad = partition.master.gradient(index)
            if grad is not None:
                own[layout.fqn] = (partition.slices[index][0].piece.start, grad)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    grads: list[Tensor | None] = []
    for param in engine.model.parameters():
        layout = layouts[id(param)]
        parts = [found[layout.fqn] for found in ranks if layout.fqn in found]
        if not parts:
            grads.append(None)
            continue
        whole = torch.zeros(layout.numel, dtype=parts[0][1].dtype)
        for start, part in parts:
            whole[start : start + part.numel()] = part
        grads.append(whole.as_strided(layout.shape, layout.stride))
    return grads


def distance(values: Iterable[Tensor | None], expected: Iterable[Tensor | None]) -> float:
    """The largest relative error of a tensor.

    Relative to the tensor's own norm, but at least to a thousandth of the norm of all: some gradients are zero but for
    rounding (an attention key's bias), and their own scale means nothing.
    """
    pairs = list(zip(values, expected, strict=True))
    assert [a is None for a, _ in pairs] == [b is None for _, b in pairs], "one has values where the other has none"
    known = [(a.double(), b.double()) for a, b in pairs if a is not None and b is not None]
    floor = 1e-3 * torch.stack([b.norm() for _, b in known]).norm().item()
    return max((((a - b).norm()) / max(b.norm().item(), floor, 1e-30)).item() for a, b in known if b.numel())


def largest_difference(values: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(values, expected, strict=True) if a.numel())


def mean_over_ranks(value: Tensor) -> Tensor:
    value = value.clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def fingerprint(engine: ZeroEngine) -> str:
    """A digest of every bit of the weights."""
    digest = hashlib.sha256()
    with engine.full_params():
        for param in engine.model.parameters():
            digest.update(param.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Pair:
    """A plain model on the whole batch beside the engine's on this rank's part, for models a test makes itself."""

    def __init__(
        self,
        model: nn.Module,
        stage: int,
        optimizer: MakeOptimizer = lambda m: torch.optim.SGD(m.parameters(), lr=0.02, momentum=0.9),
        before: Callable[[nn.Module, Optimizer], None] | None = None,
        **config: Any,
    ) -> None:
        self.plain = copy.deepcopy(model)
        self.model = model
        self.plain_optimizer = optimizer(self.plain)
        if before is not None:  # both still plain, with the same data on every rank
            self.optimizer = optimizer(model)
            before(self.plain, self.plain_optimizer)
            before(model, self.optimizer)
            self.engine = shard(model, ZeroConfig(stage=stage, **config))
        else:
            self.engine = shard(model, ZeroConfig(stage=stage, **config))
            self.optimizer = optimizer(model)
        self.engine.bind(self.optimizer)

    def backward(self, loss: Callable[[nn.Module, Any], Tensor], data: Any) -> None:
        """`loss(model, data)` and backward on both; tensors in `data` are cut along their first dimension."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        mine = torch.utils._pytree.tree_map(lambda t: t.chunk(world_size)[rank], data)
        loss(self.plain, data).backward()
        loss(self.model, mine).backward()

    def step(self) -> None:
        for optimizer in (self.plain_optimizer, self.optimizer):
            optimizer.step()
            optimizer.zero_grad()

    def check_gradients(self, tolerance: float = 5e-6) -> None:
        """Fp32 rounding (6e-8) a few dozen times over: deep or recurrent graphs, after steps that rounded as well."""
        expected = [p.grad for p in self.plain.parameters()]
        error = distance(full_grads(self.engine), expected)
        assert error < tolerance, f"a gradient is off by {error:.1e}"

    def check_weights(self, tolerance: float = 1e-5) -> None:
        with self.engine.full_params():
            error = largest_difference(self.model.parameters(), self.plain.parameters())
        assert error < tolerance, f"a weight is off by {error:.1e}"

    def train(self, loss: Callable[[nn.Module, Any], Tensor], *batches: Any) -> None:
        """A step for each batch, compared each time."""
        for data in batches:
            self.backward(loss, data)
            self.check_gradients()
            self.step()
            self.check_weights()


class HalfTwin:
    """One process, weights in one dtype and masters in another; without autocast where they are the same."""

    def __init__(
        self, model: nn.Module, optimizer: MakeOptimizer, dtype: torch.dtype, master: torch.dtype = torch.float32
    ) -> None:
        self.masters = copy.deepcopy(model).to(master)
        self.model = copy.deepcopy(model)
        for param in self.model.parameters():
            param.data = param.data.to(dtype)
        self.dtype, self.master = dtype, master
        self.optimizer = optimizer(self.masters)
        self._waiting: list[list[Tensor]] = []  # by part: the sum of its micro-batches, in fp32

    def backward(
        self,
        data: dict[str, Tensor],
        parts: int,
        scale: float = 1.0,
        part: Callable[..., Any] = models.part,
        wait: bool = False,
    ) -> float:
        """The mean of the parts' losses; their mean gradient is added to the masters', or each part's own sum waits."""
        losses, sums = [], [None] * len(list(self.model.parameters()))
        for rank in range(parts):
            mine = part(data, rank, parts)
            if self.dtype == self.master:
                loss = models.loss(self.model, cast(mine, self.dtype))
            else:
                with torch.autocast("cpu", self.dtype):
                    loss = models.loss(self.model, mine)
            (loss if scale == 1 else loss.float() * scale).backward()
            losses.append(loss.item())
            for i, param in enumerate(self.model.parameters()):
                grad = param.grad.to(max(self.dtype, torch.float32, key=lambda d: d.itemsize))
                sums[i] = grad if sums[i] is None else sums[i] + grad
                if wait:
                    self._wait(rank, i, grad)
                param.grad = None
        if wait:
            return sum(losses) / parts
        for master, total in zip(self.masters.parameters(), sums, strict=True):
            grad = (total / parts).to(self.master)
            master.grad = grad if master.grad is None else master.grad + grad
        return sum(losses) / parts

    def _wait(self, rank: int, index: int, grad: Tensor) -> None:
        while len(self._waiting) <= rank:
            self._waiting.append([torch.zeros_like(master) for master in self.masters.parameters()])
        self._waiting[rank][index] += grad

    def sums_by_owner(self, index: int) -> list[Tensor]:
        """The mean gradient of parameter `index` from what waits, as each part would form it: the others' parts rounded."""
        sums = [rows[index] for rows in self._waiting]
        means = []
        for owner in range(len(sums)):
            seen = [grad if rank == owner else grad.to(self.dtype).to(grad.dtype) for rank, grad in enumerate(sums)]
            means.append(functools.reduce(torch.add, seen) / len(sums))
        return means

    def step(self) -> None:
        self._waiting = []
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for param, master in zip(self.model.parameters(), self.masters.parameters(), strict=True):
                param.copy_(master)


def cast(data: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in data.items()}


def random_batch(*shape: int, seed: int = 0) -> Tensor:
    """Normal values, the same on all ranks; the first dimension is the whole batch."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
