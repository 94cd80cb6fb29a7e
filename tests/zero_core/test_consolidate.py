"""A checkpoint of any format becomes plain weights: complete, the same bits, one tensor at a time."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import GPT2LMHeadModel

from tests.helpers import models
from tests.helpers.allocations import PeakBytes
from tests.helpers.ranks import run_ranks
from tests.helpers.twin import OPTIMIZERS
from zero_core import CheckpointError, ZeroConfig, consolidate, save_checkpoint, shard
from zero_core.conversion import convert
from zero_core.shard_tensor import CHUNK_BYTES
from zero_core.sharded_state import ModelState

TIED, KEPT = "lm_head.weight", "transformer.wte.weight"


class Keeping(nn.Module):
    """Keeps more than tensors: a dict that holds one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)
        self.register_buffer("count", torch.arange(3))
        self.kept: Any = {"scale": torch.full((2, 2), 7.0), "calls": 3}

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def save_all(root: str) -> None:
    """Ours with a tied head, ours with two models, and FSDP2's."""
    engine = shard(models.build("gpt2"), ZeroConfig(stage=3, unit_numel=3000))
    save_checkpoint(f"{root}/ours", engine)
    pair = {"a": models.build("mlp"), "b": Keeping()}
    save_checkpoint(f"{root}/two", {key: shard(model, ZeroConfig(stage=1)) for key, model in pair.items()})
    sharded = models.build("gpt2")
    fully_shard(sharded, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    dcp.save({"model": get_model_state_dict(sharded)}, checkpoint_id=f"{root}/fsdp")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(2, save_all, str(folder))
    state = models.build("gpt2").state_dict()
    torch.save(state, folder / "one.pt")
    torch.save(
        {"state_dict": {f"model.{name}": tensor for name, tensor in state.items()}, "step": 3}, folder / "host.ckpt"
    )
    save_model(models.build("gpt2"), str(folder / "one.safetensors"))
    models.build("gpt2").save_pretrained(folder / "hugging", max_shard_size="50KB")
    return folder


@pytest.fixture
def memory() -> Iterator[str]:
    """A remote directory."""
    yield "memory:///consolidate"
    fsspec.filesystem("memory").rm("/consolidate", recursive=True)


def expected() -> dict[str, Tensor]:
    return models.build("gpt2").state_dict()


def assert_same(found: dict[str, Any], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_the_state_dict_of_every_format_is_the_models(root: Path) -> None:
    for name in ("ours", "fsdp", "one.pt"):
        assert_same(consolidate(root / name), expected())
    prefixed = {f"model.{name}": tensor for name, tensor in expected().items()}
    assert_same(consolidate(root / "host.ckpt"), prefixed)
    assert_same(consolidate(root / "one.safetensors"), expected())
    assert_same(
        consolidate(root / "hugging"), {k: t for k, t in expected().items() if k != TIED}
    )  # as transformers says


def test_tied_names_share_a_tensor_and_a_strict_load_passes(root: Path) -> None:
    for name in ("ours", "one.pt", "one.safetensors"):
        state = consolidate(root / name)
        assert state[TIED] is state[KEPT]
        models.build("gpt2", seed=1).load_state_dict(state, strict=True)


def test_a_safetensors_file_loads_with_safetensors_and_transformers(root: Path, tmp_path: Path) -> None:
    assert consolidate(root / "ours", tmp_path / "model.safetensors") == [str(tmp_path / "model.safetensors")]
    once = {name: tensor for name, tensor in expected().items() if name != TIED}
    assert_same(load_file(tmp_path / "model.safetensors"), once)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", TIED: KEPT}
    model = models.build("gpt2", seed=1)
    assert load_model(model, tmp_path / "model.safetensors", strict=True) == (set(), [])
    assert_same(model.state_dict(), expected())
    model.config.save_pretrained(tmp_path)
    assert_same(GPT2LMHeadModel.from_pretrained(tmp_path).state_dict(), expected())


def test_a_directory_has_the_layout_of_hugging_face(root: Path, tmp_path: Path) -> None:
    models.build("gpt2").config.save_pretrained(tmp_path)
    files = [Path(file) for file in consolidate(root / "ours", tmp_path, max_shard_bytes=40_000)]
    *shards, index = files
    assert [file.name for file in shards] == [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, 6)]
    tensors = {file.name: load_file(file) for file in shards}
    assert all(sum(t.nbytes for t in found.values()) <= 40_000 for found in tensors.values())
    content = json.loads(index.read_text())
    assert content["weight_map"] == {name: file for file, found in tensors.items() for name in found}
    assert content["metadata"] == {"total_size": sum(t.nbytes for found in tensors.values() for t in found.values())}
    assert_same(GPT2LMHeadModel.from_pretrained(tmp_path).state_dict(), expected())
    consolidate(root / "ours", tmp_path)  # in one file, and nothing is left of the export before
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
    assert_same(GPT2LMHeadModel.from_pretrained(tmp_path).state_dict(), expected())


def test_a_torch_file_is_what_torch_save_would_have_written(root: Path, tmp_path: Path) -> None:
    consolidate(root / "ours", tmp_path / "model.pt")
    for mapped in (False, True):
        state = torch.load(tmp_path / "model.pt", weights_only=True, mmap=mapped)
        assert_same(state, expected())
        assert state[TIED].data_ptr() == state[KEPT].data_ptr()
    models.build("gpt2", seed=1).load_state_dict(state, strict=True)
    assert zipfile.ZipFile(tmp_path / "model.pt").testzip() is None  # the checksums, which torch does not look at
    consolidate(root / "two", tmp_path / "model.bin", model="b")
    found, model = torch.load(tmp_path / "model.bin", weights_only=True), Keeping()
    assert found.keys() == model.state_dict().keys()
    model.kept = None
    model.load_state_dict(found, strict=True)
    assert model.kept["calls"] == 3 and torch.equal(model.kept["scale"], torch.full((2, 2), 7.0))


def test_floating_point_weights_take_the_dtype_asked_for(root: Path, tmp_path: Path) -> None:
    consolidate(root / "two", tmp_path / "b.safetensors", model="b", dtype=torch.bfloat16)
    found = load_file(tmp_path / "b.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "inner.weight": torch.bfloat16, "inner.bias": torch.bfloat16, "count": torch.int64
    }  # fmt: skip


def test_remote_paths_are_read_and_written(root: Path, memory: str) -> None:
    fsspec.filesystem("memory").put(str(root / "ours"), "/consolidate/ours", recursive=True)
    assert_same(consolidate(f"{memory}/ours"), expected())
    assert consolidate(f"{memory}/ours", f"{memory}/model.pt") == [f"{memory}/model.pt"]
    assert_same(consolidate(f"{memory}/model.pt"), expected())
    files = consolidate(root / "ours", f"{memory}/exported", max_shard_bytes=40_000)
    found: dict[str, Tensor] = {}
    for file in files[:-1]:
        with fsspec.open(file, "rb") as stream:
            found.update(safetensors.torch.load(stream.read()))
    assert_same({**found, TIED: found[KEPT]}, expected())


def test_an_export_that_fails_leaves_what_was_there(root: Path, tmp_path: Path, memory: str) -> None:
    shutil.copytree(root / "ours", tmp_path / "damaged")
    largest = max((tmp_path / "damaged").iterdir(), key=lambda file: file.stat().st_size)
    with open(largest, "r+b") as file:
        file.seek(largest.stat().st_size - 2000)
        file.write(b"damaged!" * 100)
    outs = ["model.safetensors", "model.pt", "directory"]
    for out in outs:
        consolidate(root / "two", tmp_path / "out" / out, model="a")
        consolidate(root / "two", f"{memory}/{out}", model="a")
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    fs = fsspec.filesystem("memory")
    before_remote = {path: fs.cat(path) for path in fs.find("/consolidate")}
    for out in outs:
        for place in (tmp_path / "out" / out, f"{memory}/{out}"):
            with pytest.raises(CheckpointError, match=re.escape(largest.name)):
                consolidate(tmp_path / "damaged", place)
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before
    assert {path: fs.cat(path) for path in fs.find("/consolidate")} == before_remote


def test_what_does_not_fit_is_refused_with_the_reason(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has the models \['a', 'b'\]: say which"):
        consolidate(root / "two")
    with pytest.raises(ValueError, match=r"has no model 'c'; it has \['a', 'b'\]"):
        consolidate(root / "two", model="c")
    with pytest.raises(ValueError, match=r"expected a .safetensors, .pt, .pth or .bin file or a directory"):
        consolidate(root / "ours", tmp_path / "model.ckpt")
    with pytest.raises(ValueError, match=r"max_shard_bytes makes several files, which need a directory"):
        consolidate(root / "ours", tmp_path / "model.safetensors", max_shard_bytes=1000)
    torch.save({"weight": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "complex.pt")
    with pytest.raises(ValueError, match=r"no torch.complex128, which 'weight' is of: write a .pt file"):
        consolidate(tmp_path / "complex.pt", tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be written: (FileExists|NotADirectory)Error"):
        consolidate(root / "ours", tmp_path / "complex.pt" / "model.safetensors")
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        consolidate(tmp_path / "nothing")
    assert os.listdir(tmp_path) == ["complex.pt"]


def save_trained(root: str) -> bytes:
    """Ours with optimizer state, and FSDP2's without groups; what one process would have, as a file."""
    model, rank = models.build("gpt2"), dist.get_rank()
    engine = shard(model, ZeroConfig(stage=3, unit_numel=3000))
    optimizer = engine.bind(OPTIMIZERS["adamw"](model))
    models.loss(model, models.part(models.batch("gpt2", 0), rank, 2)).backward()
    optimizer.step()
    save_checkpoint(f"{root}/trained", engine, optimizer)
    save_checkpoint(f"{root}/weightless", engine, optimizer, states={"model": ModelState()})
    buffer = io.BytesIO()
    torch.save(engine.full_optimizer_state_dict(optimizer), buffer)
    sharded = models.build("mlp")
    fully_shard(sharded, mesh=dist.init_device_mesh("cpu", (2,)))
    adam = torch.optim.AdamW(sharded.parameters())
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    dcp.save({"optimizer": get_optimizer_state_dict(sharded, adam, options=options)}, checkpoint_id=f"{root}/flat")
    return buffer.getvalue()


def test_an_optimizers_state_goes_on_in_one_process(root: Path, tmp_path: Path) -> None:
    wanted = torch.load(io.BytesIO(run_ranks(2, save_trained, str(tmp_path))[0]), weights_only=True)
    (file,) = consolidate(tmp_path / "trained", tmp_path / "optimizer.pt", optimizer="optimizer")
    assert sorted(os.listdir(tmp_path)) == ["flat", "optimizer.pt", "trained", "weightless"]
    both = (consolidate(tmp_path / "weightless", optimizer="optimizer"), torch.load(file, weights_only=True))
    for found in both:
        assert found["param_groups"] == wanted["param_groups"] and list(found["state"]) == list(wanted["state"])
        for number, entries in wanted["state"].items():
            assert_same(found["state"][number], entries)
    plain = models.build("gpt2")
    plain.load_state_dict(consolidate(tmp_path / "trained"))
    optimizer = OPTIMIZERS["adamw"](plain)
    optimizer.load_state_dict(found)
    models.loss(plain, models.batch("gpt2", 1)).backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"has no optimizer 'other'; it has \['optimizer'\]"):
        consolidate(tmp_path / "trained", optimizer="other")
    with pytest.raises(ValueError, match=r"expected a .pt, .pth or .bin file for an optimizer's state"):
        consolidate(tmp_path / "trained", tmp_path / "optimizer.safetensors", optimizer="optimizer")
    with pytest.raises(CheckpointError, match="has no weights of 'model'"):
        consolidate(tmp_path / "weightless")
    with pytest.raises(CheckpointError, match="does not say in which groups"):
        consolidate(tmp_path / "flat", optimizer="optimizer")


WIDTH, LAYERS = 1600, 16
TENSOR_BYTES = 4 * WIDTH * WIDTH


def save_large(path: str) -> None:
    """164 MB in tensors of 10 MB each."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    save_checkpoint(path, shard(model, ZeroConfig(stage=3)))


def test_one_tensor_is_in_memory_beside_a_chunk_of_the_file(root: Path, tmp_path: Path) -> None:
    large = str(tmp_path / "large")
    run_ranks(1, save_large, large)
    convert(root / "two", tmp_path / "small")  # what the first call imports
    consolidate(root / "ours", tmp_path / "small.pt")
    for out in ("model.safetensors", "model.pt", "ours"):
        write: Callable[[str, str], Any] = convert if out == "ours" else consolidate
        tracemalloc.start()
        try:
            with PeakBytes() as tensors:
                write(large, str(tmp_path / out))
            python = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert TENSOR_BYTES <= CHUNK_BYTES  # so a chunk is a whole tensor here
        assert tensors.peak <= 2 * TENSOR_BYTES + 2**16, out  # the tensor, and the chunk that it is copied from
        assert python <= TENSOR_BYTES + 2**21, out  # the chunk as bytes of the file, and all that is small
