"""The command line: `zero checkpoint inspect | verify | consolidate | convert | diff`."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch

from zero_core.checkpoint import verify_checkpoint
from zero_core.comparison import Comparison, Difference, compare
from zero_core.consolidation import consolidate
from zero_core.conversion import convert
from zero_core.errors import CheckpointError
from zero_core.inspection import inspect
from zero_core.storage import Progress

try:
    import typer
    from rich import progress as bars
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from typer.core import TyperGroup
except ModuleNotFoundError as error:
    raise SystemExit(f"zero: {error}. The command line needs it: pip install 'zero-redundancy[cli]'") from None


# Help as running text: rich would keep the line ends of docstrings.
_PLAIN: dict[str, Any] = {"rich_markup_mode": None}


class _Group(TyperGroup):
    """Says what the user can mend in one line, without a traceback."""

    def invoke(self, ctx: Any) -> Any:  # typer's context, which is click's or a copy of it
        """Runs the command."""
        try:
            return super().invoke(ctx)
        except (CheckpointError, ValueError, OSError) as error:
            typer.secho(f"zero: {error}", fg="red", err=True)
            raise typer.Exit(2) from error


app = typer.Typer(help="ZeRO in pure PyTorch.", no_args_is_help=True, add_completion=False, cls=_Group, **_PLAIN)
checkpoint = typer.Typer(
    help="Look into checkpoints, check, export, convert and compare them: our own, FSDP's and other sharded ones of torch, "
    "DeepSpeed's, torch and safetensors files, Hugging Face directories. Paths may be fsspec URLs.",
    no_args_is_help=True,
    **_PLAIN,
)
app.add_typer(checkpoint, name="checkpoint")

Place = Annotated[str, typer.Argument(metavar="PATH", help="The checkpoint.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, see above.")]
Trusted = Annotated[
    bool, typer.Option("--trusted", help="Open pickles that could run code: I know where it comes from.")
]


@app.callback()
def _only_groups() -> None:
    """ZeRO in pure PyTorch."""


@checkpoint.command("inspect")
def inspect_command(
    path: Place,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    as_json: AsJson = False,
    trusted: Trusted = False,
) -> None:
    """Show what a checkpoint holds.

    JSON: path, format, version, world_size, written_by, models and optimizers by key, extra (the type of each value),
    random_states (how many ranks'), files (bytes of each), bytes; a model has stage, precision, tied, tensors, elements,
    bytes and the same by dtype in dtypes; an optimizer class, model, groups, parameters, state (its keys), and the sizes.
    With --tensors also tensors: name, shape, dtype, bytes of each. What a format does not say is null.
    """
    facts = inspect(path, tensors=tensors, trusted=trusted)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    console = Console()
    console.print(escape(_headline(facts)), soft_wrap=True)
    table = _table("", "tensors", "elements", "size", "dtypes", "")
    for key, model in facts["models"].items():
        about = [f"stage {model['stage']}" if model["stage"] else "", model["precision"] or ""]
        about += [f"{len(model['tied'])} tied"] if model["tied"] else []
        _add(table, key, *_sizes(model), ", ".join(filter(None, about)))
    for key, optimizer in facts["optimizers"].items():
        about = [optimizer["class"] or "", f"{optimizer['parameters']} parameters", " ".join(optimizer["state"])]
        _add(table, key, *_sizes(optimizer), ", ".join(filter(None, about)))
    console.print(table)
    if facts["extra"]:
        console.print(escape("extra: " + ", ".join(f"{k} ({kind})" for k, kind in facts["extra"].items())))
    for name, size in facts["files"].items():
        console.print(f"{_size(size):>10}  {escape(name)}", soft_wrap=True, highlight=False)
    if tensors:
        table = _table("tensor", "shape", "dtype", "size")
        for row in facts["tensors"]:
            _add(table, row["name"], str(row["shape"]), row["dtype"], _size(row["bytes"]))
        console.print(table)


@checkpoint.command()
def verify(path: Place, as_json: AsJson = False) -> None:
    """Read every file of a checkpoint of ours and compare it with the manifest. Ends with 1 if one is damaged.

    JSON: path, ok, files (how many), bytes, problem (null, or what is wrong with which file).
    """
    found: dict[str, Any] = {"path": path, "ok": True, "files": None, "bytes": None, "problem": None}
    try:
        with _bar("verify") as progress:
            manifest = verify_checkpoint(path, progress=progress)
        found["files"], found["bytes"] = len(manifest.files), sum(record.size for record in manifest.files.values())
    except CheckpointError as error:
        found["ok"], found["problem"] = False, str(error)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    elif found["ok"]:
        typer.echo(f"{path}: {found['files']} files, {_size(found['bytes'])}, all as written")
    else:
        typer.secho(f"zero: {found['problem']}", fg="red", err=True)
    if not found["ok"]:
        raise typer.Exit(1)


@checkpoint.command("consolidate")
def consolidate_command(
    path: Place,
    out: Annotated[
        str, typer.Argument(help="A .safetensors, .pt, .pth or .bin file, or a directory for from_pretrained.")
    ],
    model: Annotated[str | None, typer.Option(help="Which, where there are several.")] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Write this optimizer's state instead, as one process has it, as a .pt file."),
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="For a directory, the most that a file holds, as in 5GB.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="What floating-point weights become, as in bfloat16.")] = None,
    as_json: AsJson = False,
    trusted: Trusted = False,
) -> None:
    """Write a checkpoint's weights, or an optimizer's state, as plain files, a tensor at a time.

    JSON: path, files.
    """
    limit = None if max_shard_size is None else _bytes(max_shard_size)
    kind = None if dtype is None else _dtype(dtype)
    with _bar("consolidate") as progress:
        files = consolidate(
            path,
            out,
            model=model,
            optimizer=optimizer,
            max_shard_bytes=limit,
            dtype=kind,
            trusted=trusted,
            progress=progress,
        )
    _written(path, files, as_json)


@checkpoint.command("convert")
def convert_command(
    path: Place,
    out: Annotated[str, typer.Argument(help="The directory to write.")],
    weights_only: Annotated[bool, typer.Option("--weights-only", help="Leave the optimizers out.")] = False,
    as_json: AsJson = False,
    trusted: Trusted = False,
) -> None:
    """Write a checkpoint of any format, with its optimizer state, as one of ours, a tensor at a time.

    Of what is beside the tensors, plain values come along. JSON: path, files, left_out (names of other values).
    """
    with _bar("convert") as progress:
        left_out = convert(path, out, weights_only=weights_only, trusted=trusted, progress=progress)
    _written(path, [out], as_json, left_out=left_out)
    if left_out and not as_json:
        typer.echo(f"Left out, because only a pickle could keep them: {', '.join(left_out)}")


@checkpoint.command()
def diff(
    a: Annotated[str, typer.Argument(help="A checkpoint.")],
    b: Annotated[str, typer.Argument(help="Another one, of the same or another format.")],
    weights_only: Annotated[bool, typer.Option("--weights-only", help="Leave optimizer state alone.")] = False,
    tolerance: Annotated[float, typer.Option(min=0.0, help="The largest difference that counts as equal.")] = 0.0,
    as_json: AsJson = False,
    trusted: Trusted = False,
) -> None:
    """Compare two checkpoints tensor by tensor. Ends with 1 if they differ.

    JSON: a, b, equal (how many tensors), differences and notes (what was not compared). A difference has name, kind (only
    in a, only in b, shape, dtype, values), a and b (shape and dtype), elements (how many differ), absolute and relative
    (the largest difference; null where there is none to compute, or it is not finite).
    """
    with _bar("diff") as progress:
        found = compare(a, b, weights_only=weights_only, tolerance=tolerance, trusted=trusted, progress=progress)
    if as_json:
        rows = [{**dataclasses.asdict(d), **_finite(d)} for d in found.differences]
        typer.echo(
            json.dumps({"a": a, "b": b, "equal": found.equal, "differences": rows, "notes": found.notes}, indent=2)
        )
    else:
        _show(found)
    if found.differences:
        raise typer.Exit(1)


def main() -> None:
    """Runs the command line."""
    app()


@contextmanager
def _bar(title: str) -> Iterator[Progress]:
    """A bar of bytes on stderr, where that is a terminal."""
    console = Console(stderr=True)
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.DownloadColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as shown:
        task = shown.add_task(title, total=None)
        yield lambda name, done, total: shown.update(task, completed=done, total=total)


def _headline(facts: dict[str, Any]) -> str:
    parts = [facts["format"] + (f" version {facts['version']}" if facts["version"] else "")]
    parts += [f"{facts['world_size']} rank(s)"] if facts["world_size"] else []
    parts += [f"{name} {number}" for name, number in facts["written_by"].items()]
    return f"{facts['path']}: {', '.join(parts)}, {_size(facts['bytes'])}"


def _sizes(facts: dict[str, Any]) -> tuple[str, ...]:
    return f"{facts['tensors']:,}", f"{facts['elements']:,}", _size(facts["bytes"]), " ".join(facts["dtypes"])


def _show(found: Comparison) -> None:
    console = Console()
    if found.differences:
        table = _table("tensor", "difference", "of", "elements", "absolute", "relative")
        for d in found.differences:
            of = " / ".join(dict.fromkeys(filter(None, (d.a, d.b))))
            numbers = ["" if n is None else f"{n:.3g}" for n in (d.absolute, d.relative)]
            _add(table, d.name, d.kind, of, "" if d.elements is None else f"{d.elements:,}", *numbers)
        console.print(table)
    for note in found.notes:
        console.print(escape(note), soft_wrap=True)
    console.print(f"{found.equal} equal, {len(found.differences)} different")


def _finite(difference: Difference) -> dict[str, float | None]:
    values = {"absolute": difference.absolute, "relative": difference.relative}
    return {key: value if value is not None and math.isfinite(value) else None for key, value in values.items()}


def _table(*headings: str) -> Table:
    table = Table(box=None)
    for heading in headings:
        table.add_column(heading, overflow="fold", justify="left")
    return table


def _add(table: Table, *cells: str) -> None:
    table.add_row(*(escape(cell) for cell in cells))


def _written(path: str, files: list[str], as_json: bool, **more: Any) -> None:
    if as_json:
        typer.echo(json.dumps({"path": path, "files": files, **more}, indent=2))
        return
    for file in files:
        typer.echo(f"Written: {file}")


def _size(number: int) -> str:
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if number >= 1000**power:
            return f"{number / 1000**power:.1f} {unit}"
    return f"{number} B"


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text, re.IGNORECASE)
    if found is None:
        raise ValueError(f"--max-shard-size expects a number of bytes like 5GB or 500MiB, got {text!r}.")
    number, unit, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))


def _dtype(text: str) -> torch.dtype:
    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"--dtype expects a floating-point dtype of torch like bfloat16 or float32, got {text!r}.")
    return found


if __name__ == "__main__":
    main()
