"""One rank of one launch of ``step_time.py``: builds a variant, times its steps, measures memory and bytes."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import re
import resource
import socket
import stat
import statistics
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULT_MARK = "STEP_TIME_RESULT "

_LINUX_TCP_INFO_BYTES_SENT = 200  # offset of tcpi_bytes_sent in struct tcp_info; tcpi_bytes_retrans follows


def run(args: argparse.Namespace) -> None:
    """Runs one rank; rank 0 prints one line, :data:`RESULT_MARK` and a JSON object.

    Args:
        args: The options of ``step_time.py``, with ``worker`` set to the variant.
    """
    _exit_with_parent()
    if args.pin:
        # Before torch is imported, so that every thread it or gloo starts inherits the core.
        _pin(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))

    import _peers
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        rank = dist.get_rank()
        # A throw-away model first: modules and code pages that the variant's first step pulls in belong to the
        # process, and are not what the variant holds for this model.
        throw_away = _peers.build(args.worker, _llama(args, tiny=True), args)
        throw_away.step(_batch(args, rank, tiny=True))
        del throw_away
        dist.barrier()
        _trim()
        resident_before = _status_bytes("VmRSS")

        model = _llama(args)
        parameters = sum(p.numel() for p in model.parameters())
        peer = _peers.build(args.worker, model, args)
        del model  # what the variant does not keep should not count against it
        _trim()
        batch = _batch(args, rank)
        for _ in range(args.warmup):
            peer.step(batch)
        _settle()

        memory_source = _reset_peak()
        wire_before, wire_source = _wire_bytes()
        cpu_before = time.process_time()
        step_ms = []
        for _ in range(args.steps):
            start = time.perf_counter()
            loss = peer.step(batch)
            step_ms.append((time.perf_counter() - start) * 1e3)
        cpu_ms = (time.process_time() - cpu_before) * 1e3 / args.steps
        peak = _peak_bytes(memory_source)
        _settle()
        wire_after, _ = _wire_bytes()

        report = peer.report() if peer.report else None

        mine = {
            "peak": None if peak is None or resident_before is None else peak - resident_before,
            "wire": None if wire_before is None or wire_after is None else (wire_after - wire_before) / args.steps,
            "loss": loss.item(),
            "report": report,
        }
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        if rank == 0:
            result = {
                "variant": args.worker,
                "median_ms": statistics.median(step_ms),
                "step_ms": step_ms,
                "cpu_ms_per_step": cpu_ms,
                "peak_bytes": _max([r["peak"] for r in ranks]),
                "peak_source": memory_source,
                "sent_bytes": _mean([r["wire"] for r in ranks]),
                "sent_source": wire_source,
                "reported_sent_bytes": _mean([_total(r["report"], "sent") for r in ranks]),
                "reported_held_bytes": _mean([_total(r["report"], "held") for r in ranks]),
                "report": report,
                "final_loss": _mean([r["loss"] for r in ranks]),
                "optimizer": peer.optimizer,
                "parameters": parameters,
                "torch": torch.__version__,
            }
            print(RESULT_MARK + json.dumps(result), flush=True)
    finally:
        dist.destroy_process_group()


def _llama(args: argparse.Namespace, tiny: bool = False) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)  # the same weights on every rank and for every variant
    hidden = 64 if tiny else args.hidden
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=args.vocab,
            hidden_size=hidden,
            intermediate_size=3 * hidden,  # with the default sizes: 35.7M parameters
            num_hidden_layers=1 if tiny else args.layers,
            num_attention_heads=max(1, hidden // 64),
            max_position_embeddings=max(args.tokens, 32),
            tie_word_embeddings=False,
            use_cache=False,
        )
    )


def _batch(args: argparse.Namespace, rank: int, tiny: bool = False) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(1 + rank)
    shape = (1, 8) if tiny else (args.batch, args.tokens)
    # Each rank has a few words of its own. With text alike on all ranks, what a rank learns alone and what the
    # ranks learn together would score alike, and a variant that forgets to communicate would not stand out.
    tokens = (torch.randint(64, shape, generator=generator) + 64 * rank) % args.vocab
    return {"input_ids": tokens, "labels": tokens}


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def _max(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return max(known) if len(known) == len(values) else None


def _total(report: dict[str, Any] | None, part: str) -> float | None:
    return None if report is None else float(sum(entry["bytes"] for entry in report[part]))


def _settle() -> None:
    """Waits for all ranks, and for what a step left in flight, so that it is counted with that step.

    A barrier alone does not wait for collectives that run in the background or in another group.
    """
    import torch.distributed as dist

    dist.barrier()
    time.sleep(0.2)
    dist.barrier()


# --- the process ------------------------------------------------------------------------------------------


def _exit_with_parent() -> None:
    """Ends this process when the benchmark's parent is gone, however it ended.

    torchrun puts each worker in a session of its own, so a signal to the launcher's process group does not
    reach it. Standard input is inherited all the way down, and the other end of that pipe is held by the
    parent alone: it reads as closed exactly when the parent has closed it or has died.
    """

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    # A terminal or /dev/null (somebody started the worker by hand) says nothing about a parent.
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        threading.Thread(target=watch, daemon=True).start()


def _pin(local_rank: int, local_world_size: int) -> None:
    """Gives each rank a core of its own where there are enough, and leaves it free otherwise."""
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= local_world_size:
        os.sched_setaffinity(0, {cores[local_rank]})


# --- memory -----------------------------------------------------------------------------------------------


def _trim() -> None:
    """Gives freed memory back to the system, so that what building left behind is not taken for use."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _status_bytes(field: str) -> int | None:
    try:
        found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found.group(1)) * 1024 if found else None


def _reset_peak() -> str:
    """Restarts the kernel's record of this process's peak resident set.

    The kernel's own high-water mark misses nothing and costs nothing, unlike a sampling thread, which needs
    the interpreter lock and the core that is being timed.

    Returns:
        Where :func:`_peak_bytes` will find the peak.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return "ru_maxrss"  # since the process started: includes building the model
    return "VmHWM"


def _peak_bytes(source: str) -> int | None:
    if source == "VmHWM":
        return _status_bytes("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# --- bytes on the wire ------------------------------------------------------------------------------------


def _wire_bytes() -> tuple[float | None, str]:
    """Counts the bytes that this rank has sent so far.

    The kernel counts the payload of every TCP socket, and gloo keeps its sockets for as long as its process
    group lives, so the sum over this process's sockets is what this rank sent and nobody else's traffic.
    Without those counters the loopback interface's serve: they hold all ranks (hence the division) and all
    other traffic of the machine.

    Returns:
        The count, and how it was obtained; the count is ``None`` where neither can be read.
    """
    per_socket = list(_tcp_bytes_sent())
    if per_socket:
        return float(sum(per_socket)), "TCP_INFO of the rank's sockets"
    try:
        for line in Path("/proc/net/dev").read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == "lo":
                transmitted = int(counters.split()[8])
                return transmitted / int(os.environ["WORLD_SIZE"]), "loopback counters / ranks"
    except OSError:
        pass
    return None, "not measured"


def _tcp_bytes_sent() -> Iterator[int]:
    if not sys.platform.startswith("linux"):
        return
    seen = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
            if not stat.S_ISSOCK(status.st_mode) or status.st_ino in seen:
                continue
            seen.add(status.st_ino)
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
                    continue
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 512)
        except OSError:  # closed in the meantime
            continue
        if len(info) >= _LINUX_TCP_INFO_BYTES_SENT + 16:  # Linux 4.19 and later
            sent, again = struct.unpack_from("=QQ", info, _LINUX_TCP_INFO_BYTES_SENT)
            yield sent - again
