"""Times one training step of the same Llama under zero_core and under what PyTorch offers for the same job.

    python benchmarks/step_time.py
    python benchmarks/step_time.py --variants ddp,fsdp2,zero3 --rounds 5
    python benchmarks/step_time.py --hidden 768 --layers 12 --vocab 16384     # about 117M parameters
    python benchmarks/step_time.py --precision bf16
    python benchmarks/step_time.py --variants zero3,zero3_disk --hidden 768 --layers 12 --vocab 16384 --disk /big/disk

Every variant runs in a torchrun launch of its own (gloo, one thread a rank), several times: the rounds are
interleaved, one launch of each variant after the other, and variants are compared within a round, so that a
slow minute of the machine hits all of them alike.

What the columns mean:

* ``ms``, ``min``: the median step of each launch on rank 0; their median and minimum over the rounds.
  A step is forward, backward, optimizer step and zero_grad.
* ``x ddp``, ``x fsdp2``: the median over the rounds of the ratio within a round.
* ``cpu``: processor time of rank 0 per step; unlike ``ms`` it hardly moves when others use the machine.
* ``peak MB``: the process's peak resident set during the timed steps, less what was resident before the model
  was built; the largest over the ranks.
* ``live MB``: the same in a short launch of its own, with an allocator that returns every large buffer as soon
  as it is freed. glibc by default keeps freed buffers of up to 32 MiB, and the more of them the more a variant
  allocates and frees in each step. That memory is really taken, so ``peak MB`` counts it, but another allocator
  would not take it.
* ``sent MB``: bytes that the kernel saw a rank send per step, mean over the ranks.
* ``report MB``: the same according to the engine's own report.
* ``theory MB``: the volume of the algorithm's collectives, in multiples of (N - 1) / N times the model's bytes. In bf16
  everything travels in half, but for DDP, which keeps fp32 weights and gradients and computes under autocast.
* ``final loss``: of the last step, mean over the ranks. All variants train on the same batches and must agree,
  except ``no_comm``, whose ranks do not share gradients: it is the floor that no communication can go below.

MB are 10^6 bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _worker import RESULT_MARK, run

# Theoretical volume per rank and step, in units of (N - 1) / N times the bytes of the model: a reduce-scatter,
# an all-gather and (on average) a broadcast of everything cost 1 each, an all-reduce 2.
VARIANTS = {
    "ddp": 2,
    "ddp_plain": 2,
    "ddp_zero_redundancy_optimizer": 3,
    "fsdp2": 3,
    "no_comm": 0,
    "zero1": 2,
    "zero2": 2,
    "zero3": 3,
    "zero2_offload": 2,
    "zero3_offload": 3,
    "zero3_disk": 3,
    "deepspeed1": 2,
    "deepspeed2": 2,
    "deepspeed3": 3,
}
LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2}  # relative; bf16 has 8 bits, and variants round at different places
STDERR_TAIL_LINES = 25
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}  # read by glibc, ignored elsewhere

Result = dict[str, Any]
"""One launch: what the worker printed, with ``round``; or ``variant``, ``round`` and ``error``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    Args:
        argv: Command line, ``sys.argv`` by default.

    Returns:
        The exit status: 1 when a variant that is not optional failed, else 0.
    """
    args = _parse(argv)
    if args.worker:
        run(args)
        return 0

    # A terminated parent should unwind through the clean-up below, as it does for an interrupt.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    variants, skipped = _available(args.variants)
    for variant in skipped:
        print(f"{variant}: skipped, deepspeed is not installed")

    memory = {}
    for variant in variants:
        memory[variant] = _launch(variant, _memory_settings(args), RETURN_FREED_MEMORY)
        _show("memory", memory[variant])
    results: list[Result] = []
    for number in range(1, args.rounds + 1):
        for variant in variants:
            results.append({**_launch(variant, args), "round": number})
            _show(f"round {number}", results[-1])

    summary = [_summarize(variant, results, memory, args) for variant in variants]
    print()
    _print_table(summary)
    warnings = _warnings(summary, results, LOSS_TOLERANCE[args.precision])
    for line in warnings:
        print(line)
    _write_json(args, results, memory, summary, skipped, warnings)
    failed = {r["variant"] for r in [*results, *memory.values()] if "error" in r}
    return int(any(not _optional(variant) for variant in failed))


def _show(launch: str, result: Result) -> None:
    if "error" in result:
        outcome = f"FAILED\n{result['error']}"
    elif result["peak_bytes"] is None:
        outcome = f"{result['median_ms']:.0f} ms"
    else:
        outcome = f"{result['median_ms']:.0f} ms, {result['peak_bytes'] / 1e6:.0f} MB"
    print(f"{launch}  {result['variant']}: {outcome}", flush=True)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Times a training step under zero_core, DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed."
    )
    parser.add_argument("--variants", type=_names, default=list(VARIANTS), help="comma-separated; default: all")
    parser.add_argument("--rounds", type=int, default=3, help="launches of each variant")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a launch")
    parser.add_argument("--world-size", type=int, default=2, help="ranks")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size; heads have 64 columns each")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=128, help="length of a sequence")
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank")
    parser.add_argument(
        "--precision", choices=["fp32", "bf16"], default="fp32", help="bf16: every variant's own way, with fp32 masters"
    )
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="directory for zero3_disk; not on a RAM disk")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a launch may take")
    # Off by default: measured with two ranks on two cores, pinning did not narrow the spread between launches. A
    # pinned rank cannot step aside when another process lands on its core, and its gloo threads cannot use the
    # other core while that rank waits, which made the variants that communicate most (FSDP2, stage 3) slower.
    parser.add_argument(
        "--pin", action=argparse.BooleanOptionalAction, default=False, help="give each rank a core of its own"
    )
    default_json = Path(__file__).resolve().parent / "results" / "step_time.json"
    parser.add_argument("--json", type=Path, default=default_json, help="where the results go")
    parser.add_argument("--worker", choices=list(VARIANTS), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if min(args.rounds, args.steps, args.world_size) < 1 or args.warmup < 0:
        parser.error("--rounds, --steps and --world-size start at 1, --warmup at 0")
    if args.hidden % 64:
        parser.error("--hidden must be a multiple of 64")
    return args


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in VARIANTS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; choose from {', '.join(VARIANTS)}")
    return names


def _optional(variant: str) -> bool:
    return variant.startswith("deepspeed")


def _available(asked: list[str]) -> tuple[list[str], list[str]]:
    """Splits the asked variants into those that can run here and those that are skipped."""
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    skipped = [variant for variant in asked if _optional(variant) and not has_deepspeed]
    return [variant for variant in asked if variant not in skipped], skipped


# --- launching --------------------------------------------------------------------------------------------


def _memory_settings(args: argparse.Namespace) -> argparse.Namespace:
    """Few steps: from the second one on, each allocates what the one before it did."""
    return argparse.Namespace(**{**vars(args), "warmup": 2, "steps": 2})


def _launch(variant: str, args: argparse.Namespace, environment: dict[str, str] | None = None) -> Result:
    """Runs one variant in a launch of its own.

    Args:
        variant: Which.
        args: The options to pass on.
        environment: Set in the workers, beside what this process has.

    Returns:
        What rank 0 printed, or the error.
    """
    options = ("warmup", "steps", "world_size", "hidden", "layers", "vocab", "tokens", "batch", "precision", "disk")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={args.world_size}", str(Path(__file__).resolve()), "--worker", variant]
    command += [f"--{option.replace('_', '-')}={getattr(args, option)}" for option in options]
    command += ["--pin" if args.pin else "--no-pin"]
    # Files rather than pipes: nothing a worker prints can then block it, and a timeout loses no output.
    with tempfile.TemporaryDirectory() as folder:
        out_path, err_path = Path(folder, "stdout"), Path(folder, "stderr")
        with out_path.open("w") as out, err_path.open("w") as err:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # held open and never written: the workers end when it closes
                stdout=out,
                stderr=err,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
                start_new_session=True,
            )
            problem = None
            try:
                if status := process.wait(args.timeout):
                    problem = f"exit status {status}"
            except subprocess.TimeoutExpired:
                problem = f"no result after {args.timeout:g} s"
            finally:
                errors = err_path.read_text(errors="replace")  # before the launcher writes about being stopped
                _stop(process)
        lines = [line for line in out_path.read_text(errors="replace").splitlines() if line.startswith(RESULT_MARK)]
    if problem is None and not lines:
        problem = "no result printed"
    if problem is not None:
        tail = "".join(f"\n    {line}" for line in _worker_errors(errors.splitlines())[-STDERR_TAIL_LINES:])
        return {"variant": variant, "error": f"    {problem}{tail}"}
    result: Result = json.loads(lines[-1].removeprefix(RESULT_MARK))
    return result


def _worker_errors(lines: list[str]) -> list[str]:
    """Drops the launcher's own report on a failed worker, which would push the worker's off the tail."""
    for index, line in enumerate(lines):
        if "torch/distributed/elastic/multiprocessing/api.py" in line and "failed (exitcode" in line:
            return lines[:index] or lines
    return lines


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a launch that may still be running, workers included."""
    assert process.stdin is not None
    process.stdin.close()  # the workers, each in a session of its own, end on this
    if process.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# --- results ----------------------------------------------------------------------------------------------


def _summarize(variant: str, results: list[Result], memory: dict[str, Result], args: argparse.Namespace) -> Result:
    """One row of the table: the launches of a variant, taken together. What is not known is ``None``."""
    good = [r for r in results if "error" not in r]
    mine = [r for r in good if r["variant"] == variant]

    def over_rounds(key: str, reduce: Callable[[list[float]], float] = statistics.median) -> float | None:
        values = [r[key] for r in mine if r[key] is not None]
        return reduce(values) if values else None

    def ratio(key: str, reference: str) -> float | None:
        base = {r["round"]: r[key] for r in good if r["variant"] == reference}
        ratios = [r[key] / base[r["round"]] for r in mine if r[key] is not None and base.get(r["round"])]
        return statistics.median(ratios) if ratios else None

    live = memory[variant].get("peak_bytes")
    reference_live = memory.get("fsdp2", {}).get("peak_bytes")
    parameters = over_rounds("parameters")
    share = (args.world_size - 1) / args.world_size
    itemsize = 2 if args.precision == "bf16" and not variant.startswith("ddp") else 4
    return {
        "variant": variant,
        "launches": len(mine),
        "median_ms": over_rounds("median_ms"),
        "min_ms": over_rounds("median_ms", min),
        "ratio_to_ddp": ratio("median_ms", "ddp"),
        "ratio_to_fsdp2": ratio("median_ms", "fsdp2"),
        "cpu_ms": over_rounds("cpu_ms_per_step"),
        "peak_bytes": over_rounds("peak_bytes"),
        "peak_ratio_to_fsdp2": ratio("peak_bytes", "fsdp2"),
        "live_peak_bytes": live,
        "live_peak_ratio_to_fsdp2": live / reference_live if live and reference_live else None,
        "sent_bytes": over_rounds("sent_bytes"),
        "reported_sent_bytes": over_rounds("reported_sent_bytes"),
        "theory_bytes": None if parameters is None else VARIANTS[variant] * share * parameters * itemsize,
        "final_loss": over_rounds("final_loss"),
        "optimizer": mine[0]["optimizer"] if mine else None,
    }


def _warnings(summary: list[Result], results: list[Result], tolerance: float) -> list[str]:
    """Lines a reader of the table should see: losses that disagree, counters that fell back."""
    lines = []
    losses = {r["variant"]: r["final_loss"] for r in summary if r["final_loss"] is not None}
    losses.pop("no_comm", None)
    if losses:
        reference = losses["ddp"] if "ddp" in losses else statistics.median(losses.values())
        for variant, loss in losses.items():
            # "not <=" so that a loss that is not a number is reported as well.
            if not abs(loss - reference) <= tolerance * abs(reference):
                lines.append(f"WARNING: final loss of {variant} is {loss:.6f}, that of the others {reference:.6f}")
    good = [r for r in results if "error" not in r]
    for key, usual in (("peak_source", "VmHWM"), ("sent_source", "TCP_INFO of the rank's sockets")):
        lines += [f"note: {key} is '{other}'" for other in sorted({r[key] for r in good} - {usual})]
    return lines


def _print_table(summary: list[Result]) -> None:
    def number(value: float | None, digits: int, scale: float = 1.0) -> str:
        return "-" if value is None else f"{value / scale:.{digits}f}"

    header = ["variant", "ms", "min", "x ddp", "x fsdp2", "cpu"]
    header += ["peak MB", "x fsdp2", "live MB", "x fsdp2", "sent MB", "report MB", "theory MB", "final loss"]
    rows = [
        [
            row["variant"],
            number(row["median_ms"], 0),
            number(row["min_ms"], 0),
            number(row["ratio_to_ddp"], 2),
            number(row["ratio_to_fsdp2"], 2),
            number(row["cpu_ms"], 0),
            number(row["peak_bytes"], 0, 1e6),
            number(row["peak_ratio_to_fsdp2"], 2),
            number(row["live_peak_bytes"], 0, 1e6),
            number(row["live_peak_ratio_to_fsdp2"], 2),
            number(row["sent_bytes"], 1, 1e6),
            number(row["reported_sent_bytes"], 1, 1e6),
            number(row["theory_bytes"], 1, 1e6),
            number(row["final_loss"], 5),
        ]
        for row in summary
    ]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        for line in [header, *rows]:
            name, *numbers = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
            print("  ".join([line[0].ljust(len(name)), *numbers]))
        return
    table = Table()
    for index, title in enumerate(header):
        table.add_column(title, justify="left" if index == 0 else "right", no_wrap=True)
    for line in rows:
        table.add_row(*line)
    # Redirected output has no width of its own, and rich would cut the table at 80 columns.
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _write_json(
    args: argparse.Namespace,
    results: list[Result],
    memory: dict[str, Result],
    summary: list[Result],
    skipped: list[str],
    warnings: list[str],
) -> None:
    settings = {key: value for key, value in vars(args).items() if key not in ("json", "worker")}
    machine = {"cores": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()}
    document = {
        "settings": settings,
        "machine": machine,
        "skipped": skipped,
        "warnings": warnings,
        "summary": summary,
        "launches": results,
        "memory_launches": list(memory.values()),
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(document, indent=2) + "\n")
    print(f"written to {args.json}")


if __name__ == "__main__":
    sys.exit(main())
