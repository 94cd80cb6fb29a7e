"""The variants that ``step_time.py`` compares: ours, and what a PyTorch user would reach for instead.

Every builder takes the same freshly initialised model and returns a :class:`Peer`, whose ``step`` runs
forward, backward, optimizer step and ``zero_grad`` on one batch. Imports that only one variant needs
stay inside its builder, so that a missing library fails that variant alone.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Batch = dict[str, Tensor]

# Large enough that the loss on the repeated batch drops well below ln(vocab) within a few steps: a variant
# that averages gradients wrongly then shows up in the final loss instead of hiding in the noise.
LEARNING_RATE = 1e-3


@dataclass
class Peer:
    """One variant, ready to train.

    Attributes:
        step: Runs one whole training step on a batch and returns the detached loss.
        optimizer: What the update runs on, for the record.
        report: The engine's own account of its bytes, or ``None`` where the variant keeps none.
    """

    step: Callable[[Batch], Tensor]
    optimizer: str
    report: Callable[[], dict[str, Any]] | None = None


def build(variant: str, model: nn.Module, args: argparse.Namespace) -> Peer:
    """Wraps a model as one of the variants.

    Args:
        variant: A name from ``step_time.VARIANTS``.
        model: A model with the same weights on every rank, in fp32.
        args: The options of ``step_time.py``: ``precision`` ("fp32" or "bf16") and ``disk`` (a directory).

    Returns:
        The variant, ready to train.
    """
    if variant.startswith("zero"):
        return _zero(model, variant, args)
    if variant.startswith("deepspeed"):
        return _deepspeed(model, int(variant.removeprefix("deepspeed")), args.precision)
    builders: dict[str, Callable[[nn.Module, str], Peer]] = {
        "ddp": _ddp,
        "ddp_plain": _ddp_plain,
        "ddp_zero_redundancy_optimizer": _ddp_zero_redundancy_optimizer,
        "fsdp2": _fsdp2,
        "no_comm": _no_comm,
    }
    return builders[variant](model, args.precision)


def _fused_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """Fused AdamW: on a CPU the default (one Python iteration per tensor) is the slower choice by far."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def _usual_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, autocast: bool = False
) -> Callable[[Batch], Tensor]:
    def step(batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss: Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _ddp(model: nn.Module, precision: str) -> Peer:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Peer(_usual_loop(wrapped, _fused_adamw(wrapped.parameters()), precision == "bf16"), "AdamW, fused")


def _ddp_plain(model: nn.Module, precision: str) -> Peer:
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=LEARNING_RATE)
    return Peer(_usual_loop(wrapped, optimizer, precision == "bf16"), "AdamW, default")


def _ddp_zero_redundancy_optimizer(model: nn.Module, precision: str) -> Peer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(),
        optimizer_class=torch.optim.AdamW,
        lr=LEARNING_RATE,
        fused=True,
    )
    return Peer(_usual_loop(wrapped, optimizer, precision == "bf16"), "ZeroRedundancyOptimizer(AdamW, fused)")


def _fsdp2(model: nn.Module, precision: str) -> Peer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if precision == "bf16" else MixedPrecisionPolicy()
    for block in model.model.layers:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    return Peer(_usual_loop(model, _fused_adamw(model.parameters())), "AdamW, fused, on DTensor")


def _no_comm(model: nn.Module, precision: str) -> Peer:
    return Peer(_usual_loop(model, _fused_adamw(model.parameters()), precision == "bf16"), "AdamW, fused")


def _zero(model: nn.Module, variant: str, args: argparse.Namespace) -> Peer:
    import zero_core

    stage, _, where = variant.removeprefix("zero").partition("_")
    disk = zero_core.Offload(optimizer="disk", params="disk", directory=args.disk)
    engine = zero_core.shard(
        model,
        zero_core.ZeroConfig(
            stage=int(stage),
            precision="bf16-mixed" if args.precision == "bf16" else None,
            offload={"": None, "offload": "optimizer" if stage == "2" else "all", "disk": disk}[where],
        ),
    )
    optimizer = _fused_adamw(model.parameters())
    engine.bind(optimizer)  # rebinds the optimizer in place

    def report() -> dict[str, Any]:
        account = engine.report()
        return {
            "held": [{"kind": h.kind, "bytes": h.bytes, "formula": h.formula} for h in account.held],
            "sent": [{"kind": s.kind, "calls": s.calls, "bytes": s.bytes, "formula": s.formula} for s in account.sent],
        }

    return Peer(_usual_loop(model, optimizer), "AdamW, fused, on shards", report)


def _deepspeed(model: nn.Module, stage: int, precision: str) -> Peer:
    # Without this DeepSpeed probes for accelerators and may pick one that the gloo group cannot serve.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed  # type: ignore[import-not-found]

    config = {
        "train_micro_batch_size_per_gpu": 1,  # only feeds DeepSpeed's own throughput arithmetic
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # some releases clip by default, and nobody else here does
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": precision == "bf16"},
        # Take the AdamW below as it is: DeepSpeed's own CPU optimizer needs a compiler at run time.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=_fused_adamw(model.parameters()), config=config, dist_init_required=False
    )

    def step(batch: Batch) -> Tensor:
        loss: Tensor = engine(**batch).loss
        engine.backward(loss)
        engine.step()  # zeroes the gradients as well
        return loss.detach()

    return Peer(step, "DeepSpeed(AdamW, fused)")
