"""`zero checkpoint` looks into checkpoints of any format, checks, exports, converts and compares them."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

from tests.helpers import models, processes
from tests.helpers.ranks import run_ranks
from zero_core import ZeroConfig, cli, load_checkpoint, save_checkpoint, shard
from zero_core.comparison import deviation

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


def trained(steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    """One process's run."""
    model = models.build("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        models.loss(model, models.batch("mlp", step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def one_file(path: Path, steps: int = 2) -> None:
    model, optimizer = trained(steps)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": steps}, path)


def save(root: str) -> None:
    """The same run on two ranks, sharded."""
    model, optimizer = models.build("mlp"), None
    engine = shard(model, ZeroConfig(stage=3, precision=None))
    optimizer = engine.bind(torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in range(2):
        models.loss(model, models.part(models.batch("mlp", step), dist.get_rank(), dist.get_world_size())).backward()
        optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(f"{root}/ours", engine, optimizer, {"step": 2})


def resume(path: str, out: str) -> None:
    """Loads into another stage; keeps all of the state in a file."""
    model = models.build("mlp", seed=1)
    engine = shard(model, ZeroConfig(stage=2))
    optimizer = engine.bind(torch.optim.AdamW(model.parameters()))
    found = load_checkpoint(path, engine, optimizer)
    state = {"model": engine.full_state_dict(), "optimizer": engine.full_optimizer_state_dict(optimizer)}
    if dist.get_rank() == 0:
        torch.save({**state, "extra": found.extra}, out)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    run_ranks(2, save, str(folder))
    one_file(folder / "one.pt")
    return folder


def zero(*arguments: Any, code: int = 0) -> str:
    """Runs the command in this process; returns what it printed, on stderr if it failed."""
    result = CliRunner().invoke(cli.app, ["checkpoint", *map(str, arguments)])
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    return result.stderr if code == 2 else result.output


def as_json(*arguments: Any, code: int = 0) -> Any:
    result = CliRunner().invoke(cli.app, ["checkpoint", *map(str, arguments), "--json"])
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    return json.loads(result.stdout)


def test_inspect_says_what_a_checkpoint_holds(root: Path) -> None:
    found = as_json("inspect", root / "ours", "--tensors")
    assert (found["format"], found["version"], found["world_size"]) == ("zero-redundancy", 1, 2)
    sizes = {"tensors": 4, "elements": 66, "bytes": 264}
    assert found["models"] == {
        "model": {"stage": 3, "precision": None, "tied": {}, **sizes, "dtypes": {"float32": sizes}}
    }
    sizes = {"tensors": 8, "elements": 132, "bytes": 528}
    assert found["optimizers"] == {
        "optimizer": {
            "class": "AdamW", "model": "model", "groups": 1, "parameters": 4,
            "state": ["exp_avg", "exp_avg_sq", "step"], **sizes, "dtypes": {"float32": sizes},
        }
    }  # fmt: skip
    assert found["extra"] == {"step": "int"} and found["random_states"] == 2
    assert found["files"] == {file.name: file.stat().st_size for file in (root / "ours").iterdir()}
    rows = {row["name"]: row for row in found["tensors"]}
    assert rows["model.0.weight"] == {"name": "model.0.weight", "shape": [7, 5], "dtype": "float32", "bytes": 140}
    assert rows.keys() == {f"model.{n}" for n in NAMES} | {
        f"optimizer.state.{n}.{key}" for n in NAMES for key in ("exp_avg", "exp_avg_sq")
    }
    text = zero("inspect", root / "ours", "--tensors")
    assert "zero-redundancy version 1, 2 rank(s)" in text and "manifest.json" in text and "model.0.weight" in text
    other = as_json("inspect", root / "one.pt")
    assert (other["format"], other["world_size"], other["extra"]) == ("torch", None, {"step": "int"})
    assert other["models"]["model"]["elements"] == 66 and other["optimizers"]["optimizer"]["elements"] == 132


def test_verify_names_the_damaged_file_and_ends_with_1(root: Path, tmp_path: Path) -> None:
    found = as_json("verify", root / "ours")
    sizes = [f.stat().st_size for f in (root / "ours").iterdir() if f.name not in ("manifest.json", ".metadata")]
    assert found == {
        "path": str(root / "ours"), "ok": True, "files": len(sizes), "bytes": sum(sizes), "problem": None
    }  # fmt: skip
    assert "all as written" in zero("verify", root / "ours")
    shutil.copytree(root / "ours", tmp_path / "damaged")
    changed, cut = sorted((tmp_path / "damaged").glob("*.distcp"))
    content = bytearray(changed.read_bytes())
    content[-1] ^= 1
    changed.write_bytes(content)
    cut.write_bytes(cut.read_bytes()[:-1])
    found = as_json("verify", tmp_path / "damaged", code=1)
    assert not found["ok"] and changed.name in found["problem"] and cut.name in found["problem"]
    assert changed.name in zero("verify", tmp_path / "damaged", code=1)
    assert "no checkpoint of zero-redundancy" in zero("verify", root / "one.pt", code=1)


def test_consolidate_writes_plain_weights(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    assert as_json("consolidate", root / "ours", out) == {"path": str(root / "ours"), "files": [str(out)]}
    assert as_json("diff", root / "ours", out)["equal"] == 4
    files = as_json("consolidate", root / "ours", tmp_path / "sharded", "--max-shard-size", "0.15kB")["files"]
    assert [Path(file).name for file in files] == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"
    ]  # fmt: skip
    assert "Written" in zero("consolidate", root / "ours", tmp_path / "half.safetensors", "--dtype", "bfloat16")
    assert {tensor.dtype for tensor in load_file(tmp_path / "half.safetensors").values()} == {torch.bfloat16}
    zero("consolidate", root / "ours", tmp_path / "optimizer.pt", "--optimizer", "optimizer")
    assert torch.load(tmp_path / "optimizer.pt", weights_only=True).keys() == {"state", "param_groups"}


def test_convert_keeps_weights_optimizer_and_extra_state(root: Path, tmp_path: Path) -> None:
    zero("convert", root / "one.pt", tmp_path / "converted")
    assert as_json("verify", tmp_path / "converted")["ok"]
    assert as_json("diff", root / "one.pt", tmp_path / "converted") == {
        "a": str(root / "one.pt"), "b": str(tmp_path / "converted"), "equal": 16, "differences": [], "notes": []
    }  # fmt: skip
    run_ranks(2, resume, str(tmp_path / "converted"), str(tmp_path / "loaded.pt"))
    loaded = torch.load(tmp_path / "loaded.pt", weights_only=True)
    expected = torch.load(root / "one.pt", weights_only=True)
    assert loaded["extra"] == {"step": 2}
    for name in NAMES:
        assert torch.equal(loaded["model"][name], expected["model"][name])
    for number, state in expected["optimizer"]["state"].items():
        found = loaded["optimizer"]["state"][number]
        assert all(torch.equal(torch.as_tensor(found[key]), value) for key, value in state.items())
    assert loaded["optimizer"]["param_groups"][0]["lr"] == 1e-2
    zero("convert", root / "ours", tmp_path / "copy")  # our own, by one rank
    assert not as_json("diff", root / "ours", tmp_path / "copy")["differences"]


def test_convert_refuses_numbers_that_could_mean_other_parameters(tmp_path: Path) -> None:
    model = models.build("mlp")
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1]}, {"params": [model[0].bias, model[2].bias]}]
    optimizer = torch.optim.AdamW(groups)
    named = torch.optim.AdamW([{"params": [(n, p)]} for n, p in reversed(list(model.named_parameters()))])
    models.loss(model, models.batch("mlp", 0)).backward()
    named.step()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "groups.pt")
    torch.save({"model": model.state_dict(), "optimizer": named.state_dict()}, tmp_path / "named.pt")
    error = zero("convert", tmp_path / "groups.pt", tmp_path / "converted", code=2)
    assert "it numbers its parameters, through 2 groups" in error and "load_checkpoint" in error
    assert not (tmp_path / "converted").exists()
    zero("convert", tmp_path / "groups.pt", tmp_path / "converted", "--weights-only")
    assert as_json("diff", tmp_path / "groups.pt", tmp_path / "converted")["equal"] == 4
    zero("convert", tmp_path / "named.pt", tmp_path / "by_name")  # these say which is which
    rows = {row["name"]: row["shape"] for row in as_json("inspect", tmp_path / "by_name", "--tensors")["tensors"]}
    assert rows["optimizer.state.0.weight.exp_avg"] == [7, 5] and rows["optimizer.state.2.bias.exp_avg"] == [3]


def test_diff_lists_what_differs_and_by_how_much(root: Path, tmp_path: Path) -> None:
    state = trained()[0].state_dict()
    state["0.bias"] = state["0.bias"] + torch.tensor([0, 0, 0.5, 0, 0, -0.25, 0])
    state["2.weight"] = state["2.weight"].half()
    state["2.bias"] = torch.zeros(4)
    state["new"] = state.pop("0.weight")
    torch.save(state, tmp_path / "other.pt")
    found = as_json("diff", root / "one.pt", tmp_path / "other.pt", code=1)
    rows = {row["name"]: row for row in found["differences"]}
    assert {name: row["kind"] for name, row in rows.items()} == {
        "0.weight": "only in a", "0.bias": "values", "2.weight": "dtype", "2.bias": "shape", "new": "only in b"
    }  # fmt: skip
    assert (rows["0.bias"]["elements"], rows["0.bias"]["absolute"]) == (2, 0.5)
    assert (rows["2.bias"]["a"], rows["2.bias"]["b"]) == ("[3] float32", "[4] float32")
    assert rows["2.weight"]["b"] == "[3, 7] float16" and 0 < rows["2.weight"]["relative"] < 1e-3
    assert found["equal"] == 0 and "has no optimizer state" in found["notes"][0]
    text = zero("diff", root / "one.pt", tmp_path / "other.pt", code=1)
    assert "only in a" in text and "0 equal, 5 different" in text
    one_file(tmp_path / "longer.pt", steps=3)
    found = as_json("diff", root / "one.pt", tmp_path / "longer.pt", code=1)
    assert found["equal"] == 0 and len(found["differences"]) == 16  # with moments and step counts
    assert len(as_json("diff", root / "one.pt", tmp_path / "longer.pt", "--weights-only", code=1)["differences"]) == 4
    assert not as_json("diff", root / "one.pt", tmp_path / "longer.pt", "--weights-only", "--tolerance", "0.1")["notes"]


def test_diff_takes_two_formats_prefixes_and_tied_names_for_what_they_are(root: Path, tmp_path: Path) -> None:
    # Ranks sum their gradients in another order than one process: the last bits differ.
    assert as_json("diff", root / "ours", root / "one.pt", "--tolerance", "1e-6")["equal"] == 16
    model = models.build("gpt2")
    torch.save({"state_dict": {f"model.{k}": v for k, v in model.state_dict().items()}}, tmp_path / "host.ckpt")
    model.save_pretrained(tmp_path / "hugging", max_shard_size="50KB")
    found = as_json("diff", tmp_path / "host.ckpt", tmp_path / "hugging")
    assert found["equal"] == 28 and not found["differences"]


def test_deviation_counts_nan_as_itself_and_as_far_from_the_rest() -> None:
    a = torch.tensor([1.0, float("nan"), float("inf"), 2.0])
    assert deviation(a, a.clone()) == (0, 0.0, 0.0)
    assert deviation(a, torch.tensor([1.0, float("nan"), float("inf"), 4.0])) == (1, 2.0, 0.5)
    assert deviation(a, torch.tensor([1.0, 0.0, float("inf"), 2.0])) == (1, float("inf"), float("inf"))
    assert deviation(torch.empty(0), torch.empty(0)) == (0, 0.0, 0.0)
    large = torch.arange(2**20 + 3, dtype=torch.int32)  # in several runs
    changed: Tensor = large.clone()
    changed[-1] += 5
    assert deviation(large, changed)[:2] == (1, 5.0)


def test_what_the_user_can_mend_is_one_line_and_ends_with_2(root: Path, tmp_path: Path) -> None:
    for arguments, expected in (
        (("inspect", tmp_path / "nothing"), "there is no checkpoint at"),
        (("consolidate", root / "ours", tmp_path / "x.ckpt"), "expected a .safetensors"),
        (("consolidate", root / "ours", tmp_path / "x", "--max-shard-size", "many"), "--max-shard-size expects"),
        (("consolidate", root / "ours", tmp_path / "x.pt", "--dtype", "int"), "--dtype expects"),
        (("diff", root / "ours", tmp_path / "nothing"), "there is no checkpoint at"),
    ):
        error = zero(*arguments, code=2)
        assert error.startswith("zero: ") and expected in error and error.count("\n") == 1


def test_pickles_that_could_run_code_are_opened_when_they_are_trusted(tmp_path: Path) -> None:
    torch.save({"model": trained()[0].state_dict(), "arguments": Namespace(lr=0.1)}, tmp_path / "pickle.pt")
    for command in (("inspect",), ("consolidate", tmp_path / "out.pt"), ("convert", tmp_path / "out")):
        name, *rest = command
        assert "Namespace" in zero(name, tmp_path / "pickle.pt", *rest, code=2)
    assert as_json("inspect", tmp_path / "pickle.pt", "--trusted")["extra"] == {"arguments": "Namespace"}
    zero("consolidate", tmp_path / "pickle.pt", tmp_path / "out.pt", "--trusted")
    # Ours are opened without trust, so nothing goes into them that would need it.
    assert as_json("convert", tmp_path / "pickle.pt", tmp_path / "out", "--trusted")["left_out"] == ["arguments"]
    assert as_json("inspect", tmp_path / "out")["extra"] == {}
    assert as_json("diff", tmp_path / "pickle.pt", tmp_path / "out.pt", "--trusted")["equal"] == 4


def test_the_program_runs_by_itself(root: Path) -> None:
    done = processes.run(sys.executable, "-m", "zero_core.cli", "checkpoint", "verify", str(root / "ours"))
    assert done.returncode == 0 and "all as written" in done.stdout


def test_without_typer_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match=re.escape("pip install 'zero-redundancy[cli]'")):
        runpy.run_path(str(cli.__file__))
