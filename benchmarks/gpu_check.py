"""What only a GPU can show, in under five minutes: the same numbers, the device's memory, copies beside compute.

    python benchmarks/gpu_check.py                  # one GPU, NCCL, a 1B Llama in bf16
    python benchmarks/gpu_check.py --device cpu --hidden 64 --layers 2 --vocab 256    # the script itself, anywhere

One process, so nothing is sent; what is exercised is everything else that CUDA does differently: streams, pinned copies,
storages that are freed and filled again, NCCL's own collectives.

1. Parity: stage x precision x offload x accumulation x clipping against a run by hand on the same device (half weights
   under autocast, fp32 masters). The largest difference of a weight after three steps is printed beside what is allowed.
2. Memory: the device's peak during a step, without and with offload, beside the formula's bytes.
3. Overlap: the step with offload over the larger of its parts, compute and transfer (of weights and gradients over
   pinned memory at the rate measured here) or the optimizer's step on the host. 1.0 would be perfect.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from zero_core import ZeroConfig, ZeroGradScaler, shard

GB = 1e9
SCALE = 2.0**10
# Kernels may order additions differently, and Adam turns rounding into up to a step of 1e-3 where gradients vanish.
ALLOWED = {None: 1e-5, "bf16-mixed": 6e-3, "16-mixed": 6e-3}
DTYPES = {None: torch.float32, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def llama(hidden: int, layers: int, vocab: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
            num_attention_heads=max(1, hidden // 64), tie_word_embeddings=False, use_cache=False,
        )
    )  # fmt: skip


def batch(device: torch.device, vocab: int, rows: int, tokens: int, seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(vocab, (rows, tokens), generator=torch.Generator().manual_seed(seed)).to(device)
    return {"input_ids": ids, "labels": ids}


# --- 1. parity --------------------------------------------------------------------------------------------


def by_hand(device: torch.device, precision: str | None, parts: int, clip: float | None) -> dict[str, Tensor]:
    """Three steps on fp32 masters with weights in the compute dtype."""
    masters = llama(64, 2, 128).to(device)
    model = copy.deepcopy(masters).to(DTYPES[precision])
    for (_, buffer), (_, given) in zip(model.named_buffers(), masters.named_buffers(), strict=True):
        buffer.data = given.data.clone()
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-3)
    scale = SCALE if precision == "16-mixed" else 1.0
    for step in range(3):
        for part in range(parts):
            with torch.autocast(device.type, DTYPES[precision], enabled=precision is not None):
                loss = model(**batch(device, 128, 4, 16, seed=10 * step + part)).loss / parts
            (loss.float() * scale).backward()
            for param, master in zip(model.parameters(), masters.parameters(), strict=True):
                grad = param.grad.float() / scale  # type: ignore[union-attr]
                master.grad = grad if master.grad is None else master.grad + grad
                param.grad = None
        if clip is not None:
            nn.utils.clip_grad_norm_(masters.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters.parameters(), strict=True):
                param.copy_(master)
    return {name: value.detach().cpu() for name, value in masters.named_parameters()}


def by_engine(
    device: torch.device, stage: int, precision: str | None, offload: str | None, parts: int, clip: float | None
) -> dict[str, Tensor]:
    model = llama(64, 2, 128).to(device)
    engine = shard(model, ZeroConfig(stage=stage, precision=precision, offload=offload, unit_numel=4000))
    optimizer = engine.bind(torch.optim.AdamW(model.parameters(), lr=1e-3))
    scaler = ZeroGradScaler(device.type, init_scale=SCALE, enabled=precision == "16-mixed")
    for step in range(3):
        for part in range(parts):
            loss = model(**batch(device, 128, 4, 16, seed=10 * step + part)).loss / parts
            with engine.no_sync() if part < parts - 1 else torch.enable_grad():
                scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            engine.clip_grad_norm_(clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    state = engine.full_state_dict()
    return {name: state[name].float() for name, _ in model.named_parameters()}


def parity(device: torch.device, console: Console) -> bool:
    worst: dict[Any, float] = {}
    for precision, parts, clip in itertools.product(DTYPES, (1, 2), (None, 0.1)):
        expected = by_hand(device, precision, parts, clip)
        for stage, offload in itertools.product((1, 2, 3), (None, "optimizer", "all")):
            if offload == "all" and stage != 3:
                continue
            own = by_engine(device, stage, precision, offload, parts, clip)
            off = max((own[name] - value).abs().max().item() for name, value in expected.items())
            key = (precision or "fp32", f"zero{stage}", offload or "device")
            worst[key] = max(worst.get(key, 0.0), off)
    table = Table("precision", "stage", "shards", "largest difference", "allowed", title="Parity with a run by hand")
    good = True
    for (precision, stage, place), off in worst.items():
        allowed = ALLOWED[None if precision == "fp32" else precision]
        good &= off <= allowed
        table.add_row(precision, stage, place, f"{off:.1e}", f"{allowed:.0e}" + ("" if off <= allowed else "  TOO FAR"))
    console.print(table)
    return good


# --- 2. and 3. memory and overlap -------------------------------------------------------------------------


def timed(device: torch.device, function: Callable[[], Any], times: int) -> float:
    """Median seconds."""
    found = []
    for _ in range(times):
        _synchronize(device)
        start = time.perf_counter()
        function()
        _synchronize(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def large(device: torch.device, args: argparse.Namespace, console: Console) -> None:
    data = batch(device, args.vocab, args.batch, args.tokens)
    table = Table(
        "setting", "peak GB", "device at rest GB", "formula GB", "step ms", "x best possible", title="Llama in bf16"
    )
    rate = transfer_rate(device, args)
    alone = None
    for stage, offload in ((2, None), (2, "optimizer"), (3, None), (3, "optimizer"), (3, "all")):
        model = llama(args.hidden, args.layers, args.vocab)
        engine = shard(model, ZeroConfig(stage=stage, precision="bf16-mixed", offload=offload), device=device)
        optimizer = engine.bind(torch.optim.AdamW(model.parameters(), lr=1e-4))

        def compute(model: nn.Module = model) -> None:
            model(**data).loss.backward()

        def step(optimizer: Any = optimizer, compute: Any = compute) -> None:
            compute()
            optimizer.step()
            optimizer.zero_grad()

        step()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds = timed(device, step, args.steps)
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        held = [line for line in engine.report().held if line.place == "device"]
        numel = sum(p.numel() for p in model.parameters())
        best = ""
        if offload is None:
            alone = seconds
        elif alone is not None:
            # Down: gradients in fp32. Up: fp32 masters, for each of two gathers where they live on the host.
            moved = 4 * numel + (4 * numel if offload == "optimizer" else 8 * numel)
            host = host_step(numel)
            ratio, transfer = seconds / max(alone, moved / rate, host), moved / rate
            best = f"{ratio:.2f} (transfer {transfer * 1e3:.0f} ms, host {host * 1e3:.0f} ms)"
        table.add_row(
            f"zero{stage} {offload or ''}", f"{peak / GB:.2f}", f"{sum(h.bytes for h in held) / GB:.2f}",
            f"{sum(h.formula or 0 for h in held) / GB:.2f}", f"{seconds * 1e3:.0f}", best,
        )  # fmt: skip
        engine.close()
        del engine, optimizer, model, compute, step, held
        if device.type == "cuda":
            torch.cuda.empty_cache()
    console.print(table)


def transfer_rate(device: torch.device, args: argparse.Namespace) -> float:
    """Bytes per second from pinned host memory."""
    pinned = device.type == "cuda"
    host = torch.empty(256 * 2**20 if pinned else 2**20, dtype=torch.uint8, pin_memory=pinned)
    there = torch.empty_like(host, device=device)
    return host.numel() / timed(device, lambda: there.copy_(host, non_blocking=True), args.steps)


def host_step(numel: int) -> float:
    """Seconds that AdamW takes for `numel` elements on the host."""
    sample = min(numel, 50_000_000)
    param = nn.Parameter(torch.zeros(sample))
    param.grad = torch.zeros(sample)
    optimizer = torch.optim.AdamW([param], fused=True)
    optimizer.step()
    return timed(torch.device("cpu"), optimizer.step, 3) * numel / sample


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--hidden", type=int, default=2048, help="hidden size of the large model")
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each setting")
    args = parser.parse_args(argv)
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    console = Console()
    with tempfile.NamedTemporaryFile() as store:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.FileStore(store.name, 1), rank=0, world_size=1)
        try:
            good = parity(device, console)
            large(device, args, console)
        finally:
            dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
