"""Accelerate's states load at any stage and number of ranks, appear whole or not at all, and keep what users add."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate as stock
import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import FullyShardedDataParallelPlugin, GradScalerKwargs, ProjectConfiguration
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import lightning_zero  # noqa: F401 - for the strategies' names
from accelerate_zero import Accelerator
from tests.helpers import models
from tests.helpers.accelerating import accelerator, loader, steps
from tests.helpers.cases import Cases, check, folder
from tests.helpers.lightning import Module, make_optimizer, trainer
from tests.helpers.lightning import loader as lightning_loader
from tests.helpers.ranks import run_ranks
from tests.helpers.twin import largest_difference
from zero_core import (
    CheckpointError,
    ZeroConfig,
    consolidate,
    engine_of,
    load_checkpoint,
    save_checkpoint,
    shard,
    storage,
    verify_checkpoint,
)

cases = Cases(__name__)
outcomes = cases.fixture(2, timeout=240)

STEPS = 4


class Counter:
    """An object of the user's that is registered for checkpoints."""

    value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Run:
    """What a script prepares.

    Args:
        stage: 1, 2 or 3.
        seed: of the weights.
        settings: the Accelerator's.
    """

    def __init__(self, stage: int, seed: int = 0, **settings: Any) -> None:
        self.accelerate = accelerator(stage, **{"gradient_accumulation_steps": 1, **settings})
        model = models.build("llama", seed)
        optimizer = make_optimizer("adamw", model)
        # Accelerate's schedulers step once a process.
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / dist.get_world_size()))
        self.model, self.optimizer, self.data, self.scheduler = self.accelerate.prepare(
            model, optimizer, loader("llama", STEPS), schedule
        )
        self.counter = Counter()
        self.accelerate.register_for_checkpointing(self.counter)

    def train(self, data: Any = None) -> Iterator[float]:
        return steps(self.accelerate, self.model, self.optimizer, data or self.data, self.scheduler)

    def rest(self) -> list[float]:
        return list(self.train(self.accelerate.skip_first_batches(self.data, 2)))

    def weights(self) -> dict[str, Tensor]:
        return weights(self.model)


def weights(model: nn.Module) -> dict[str, Tensor]:
    engine = engine_of(model)
    return dict(model.state_dict()) if engine is None else engine.full_state_dict(all_ranks=True)


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return largest_difference(one.values(), (other[name] for name in one))


def assert_same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Compares optimizers' whole states, which only the first rank has."""
    assert bool(one) == bool(other) == (dist.get_rank() == 0)
    for number, entries in other.get("state", {}).items():
        assert all(torch.equal(one["state"][number][key], value) for key, value in entries.items())


def write(path: str, text: str = "") -> None:
    """Writes a file; the first rank."""
    if dist.get_rank() == 0:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    dist.barrier()


def names(path: str) -> set[str]:
    """Without the numbers that make a save's names its own."""
    return {re.sub("^[0-9a-f]{8}-", "", name) for name in os.listdir(path)}


@contextmanager
def failing_on_the_last_rank(function: str) -> Iterator[None]:
    """A context in which one of `storage`'s functions finds the disk full."""

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    if dist.get_rank() == dist.get_world_size() - 1:
        with mock.patch.object(storage, function, full):
            yield
    else:
        yield


@cases
def a_run_goes_on_at_every_stage(stage: int) -> None:
    path = folder() + "/state"
    first = Run(stage)
    run = first.train()
    next(run), next(run)
    first.counter.value = 2
    saved = first.accelerate.save_state(path)
    assert saved == Path(path)
    random, rest, expected = torch.rand(1), list(run), first.weights()
    assert len(rest) == 2
    for other in {1, 3, stage}:
        again = Run(other, seed=7)
        again.accelerate.load_state(path)
        assert again.counter.value == 2 and torch.equal(torch.rand(1), random)
        assert again.rest() == pytest.approx(rest, rel=1e-6)
        assert difference(again.weights(), expected) < (
            1e-6 if other == stage else 5e-5
        )  # Adam divides by small numbers
    ranks = dist.get_world_size()
    assert names(path) == {
        "manifest.json", ".metadata", "index.json", "extra.pt", *(f"{rank}.distcp" for rank in range(ranks)),
        "scheduler.bin", "custom_checkpoint_0.pkl", *(f"random_states_{rank}.pkl" for rank in range(ranks)),
    }  # fmt: skip
    assert verify_checkpoint(path).files.keys() >= {"scheduler.bin", "random_states_1.pkl"}


@cases.at(3)
def the_state_goes_to_plain_files_and_other_loops(stage: int) -> None:
    path = folder() + "/state"
    run = Run(stage)
    list(run.train())
    run.accelerate.save_state(path)
    expected = run.weights()
    if dist.get_rank() == 0:
        consolidate(path, f"{path}.safetensors")
        assert difference(load_file(f"{path}.safetensors"), expected) == 0
    # A plain loop at another stage,
    model = models.build("llama", 3)
    engine = shard(model, ZeroConfig(stage=1))
    optimizer = engine.bind(make_optimizer("adamw", model))
    load_checkpoint(path, engine, optimizer)
    assert difference(weights(model), expected) == 0
    # and Lightning, which goes on as this loop does.
    module = Module("llama", "adamw", seed=1)
    saving = ModelCheckpoint(f"{path}-lightning", every_n_train_steps=1, save_top_k=-1, filename="end")
    fit = trainer("zero2", callbacks=[saving], enable_checkpointing=True)
    fit.fit(module, lightning_loader("llama", 1), ckpt_path=path)
    list(run.train(run.accelerate.prepare(loader("llama", 1))))
    own = {name.removeprefix("model."): value for name, value in module.state_dict().items()}
    assert difference(own, run.weights()) < 5e-5  # Adam divides by small numbers
    # Back from Lightning.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that Accelerate's own parts start afresh
        run.accelerate.load_state(f"{path}-lightning/end.ckpt")
    assert difference(run.weights(), own) == 0
    assert all(entries["step"].item() == STEPS + 1 for entries in run.optimizer.state_dict().get("state", {}).values())


@cases.at(1, 3)
def a_checkpoint_of_another_host_says_what_starts_afresh(stage: int) -> None:
    path = folder() + "/state"
    model = models.build("llama")
    engine = shard(model, ZeroConfig(stage=3))
    optimizer = engine.bind(make_optimizer("adamw", model))
    models.loss(model, models.part(models.batch("llama", 0), dist.get_rank(), dist.get_world_size())).backward()
    optimizer.step()
    save_checkpoint(path, engine, optimizer)
    run = Run(stage, seed=5)
    if run.accelerate.is_main_process:
        with pytest.warns(UserWarning, match="not saved by Accelerate"):
            run.accelerate.load_state(path)
    else:
        run.accelerate.load_state(path)
    assert difference(run.weights(), weights(model)) == 0
    assert_same_state(run.optimizer.state_dict(), engine.full_optimizer_state_dict(optimizer))


@cases.at(1, 3)
def several_models_and_optimizers(stage: int) -> None:
    path = folder() + "/state"

    def start(at: int, seed: int) -> Any:
        torch.manual_seed(seed)
        nets = nn.Linear(5, 5), nn.Linear(5, 1), nn.Identity()
        optimizers = [torch.optim.AdamW(net.parameters(), lr=0.1) for net in nets[:2]]
        accelerate = accelerator(at)
        return accelerate, accelerate.prepare(*nets, *optimizers)

    def train(accelerate: Accelerator, parts: Any) -> None:
        first, second, _, *optimizers = parts
        accelerate.backward(second(first(torch.ones(2, 5))).sum())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    accelerate, parts = start(stage, 0)
    train(accelerate, parts)
    accelerate.save_state(path)
    train(accelerate, parts)
    again, others = start(stage % 3 + 1, 9)
    again.load_state(path)
    train(again, others)
    for own, expected in zip(others[:2], parts[:2], strict=True):
        assert difference(weights(own), weights(expected)) < 1e-6


@cases.at(1, 3)
def what_hooks_take_out_is_theirs(stage: int) -> None:
    """As scripts do that save in a format of their own: the main process writes and takes the state out of the list."""
    path = folder() + "/state"

    def start(seed: int) -> Any:
        torch.manual_seed(seed)
        nets = nn.Linear(5, 5), nn.Linear(5, 1), nn.Linear(5, 2)
        accelerate = accelerator(stage)
        optimizer = torch.optim.AdamW([param for net in nets[:1] for param in net.parameters()], lr=0.1)
        prepared = accelerate.prepare(*nets, optimizer)

        def save(found: list[nn.Module], states: list[Any], output_dir: str) -> None:
            assert found == list(nets) and os.path.basename(output_dir) == "state"
            if accelerate.is_main_process:
                assert states[0]["weight"].shape == (5, 5)
                assert states[0] is accelerate.get_state_dict(nets[0])  # on one rank, as it is gathered already
                os.makedirs(f"{output_dir}/own")
                torch.save(states.pop(0), f"{output_dir}/own/weights.pt")
                states[0]["added"] = torch.ones(1)  # the second model's: changed, so it is to be written as it is now

        def load(found: list[nn.Module], input_dir: str) -> None:
            engine_of(found.pop(0)).load_full_state_dict(torch.load(f"{input_dir}/own/weights.pt"))

        accelerate.register_save_state_pre_hook(save)
        accelerate.register_load_state_pre_hook(load)
        return accelerate, *prepared

    accelerate, *nets, optimizer = start(0)
    accelerate.backward(nets[0](torch.ones(2, 5)).sum())
    optimizer.step()
    accelerate.save_state(path)
    if accelerate.is_main_process:
        assert "added" in load_file(f"{path}/model.safetensors")
        manifest = verify_checkpoint(path)
        assert "model.safetensors" in manifest.files and "own" not in manifest.files
        index = json.loads(Path(path, manifest.index).read_text())["tensors"]
        assert {"model.weight", "model_1.weight", "model_2.weight"} & index.keys() == {"model_2.weight"}
    again, *others, own_optimizer = start(4)
    with pytest.raises(RuntimeError, match=r"unexpected .*'added'"):
        again.load_state(path)
    again.register_load_state_pre_hook(lambda found, _: found.pop(0))  # the second, too
    again.load_state(path)
    assert difference(weights(others[0]), weights(nets[0])) == difference(weights(others[2]), weights(nets[2])) == 0
    assert_same_state(own_optimizer.state_dict(), optimizer.state_dict())


@cases.at(1, 3)
def states_are_numbered_and_limited(stage: int) -> None:
    config = ProjectConfiguration(project_dir=folder(), automatic_checkpoint_naming=True, total_limit=2)
    run = Run(stage, project_config=config)
    accelerate, directory = run.accelerate, Path(config.project_dir, "checkpoints")
    with pytest.raises(ValueError, match="no state yet"):
        accelerate.load_state()
    for number in range(3):
        run.counter.value = number
        accelerate.save_state()
    # As a killed save leaves it; and neither it nor something else is taken for the newest.
    write(f"{directory}/.checkpoint_7.partial/checkpoint_7/scheduler.bin")
    write(f"{directory}/notes 9/text")
    accelerate.load_state()
    assert run.counter.value == 2
    with pytest.raises(CheckpointError, match="interrupted"):
        accelerate.load_state(f"{directory}/.checkpoint_7.partial")
    config.iteration = 2
    with pytest.raises(ValueError, match="already exists"):
        accelerate.save_state()
    config.iteration = 3
    accelerate.save_state()
    dist.barrier()
    assert {path.name for path in directory.iterdir()} == {"checkpoint_2", "checkpoint_3", "notes 9"}
    with pytest.raises(ValueError, match="needs output_dir"):
        Run(stage).accelerate.save_state()


@cases.at(1, 3)
def what_fails_on_one_rank_raises_on_all_and_leaves_the_state_before(stage: int) -> None:
    root = folder()
    path = f"{root}/state"
    run = Run(stage)
    run.accelerate.save_state(path)
    expected = run.weights()
    list(run.train())
    for function in ("flush", "flush_tree", "random_states"):
        if function == "random_states":
            denied = mock.patch("accelerate_zero.checkpoint.save_accelerator_state", side_effect=OSError(13, "denied"))
            failing: Any = denied if dist.get_rank() else nullcontext()
        elif function == "flush_tree":  # the process that publishes it
            failing = mock.patch("accelerate_zero.staging.flush_tree", side_effect=OSError(28, "No space left"))
        else:
            failing = failing_on_the_last_rank(function)
        with failing, pytest.raises((OSError, RuntimeError, CheckpointError), match=r"No space left|denied"):
            run.accelerate.save_state(path)
        dist.barrier()
        assert os.listdir(root) == ["state"]
    again = Run(stage, seed=2)
    again.accelerate.load_state(path)
    assert difference(again.weights(), expected) == 0
    run.accelerate.save_state(path)  # and it can be made good
    again.accelerate.load_state(path)
    assert difference(again.weights(), run.weights()) == 0


@cases.at(2)
def what_users_keep_beside_the_state_stays(stage: int) -> None:
    path = folder() + "/run"
    write(f"{path}/logs/events", "1")
    write(f"{path}/notes.json", "mine")
    run = Run(stage)
    run.accelerate.save_state(path)
    write(f"{path}/later.json", "also mine")
    first = names(path)
    run.accelerate.save_state(path)
    assert names(path) == first
    assert len([name for name in os.listdir(path) if name.endswith(".distcp")]) == dist.get_world_size()
    for name, text in (("logs/events", "1"), ("notes.json", "mine"), ("later.json", "also mine")):
        assert Path(path, name).read_text() == text
    run.accelerate.load_state(path)


@cases.at(1, 3)
def states_of_plain_accelerate_load(stage: int) -> None:
    path = folder() + "/state"
    accelerator(stage)  # leaves the environment that a launcher makes
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    plain = stock.Accelerator(cpu=True)
    model = models.build("llama")
    optimizer = make_optimizer("adamw", model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / dist.get_world_size()))
    ddp, optimizer, data, schedule = plain.prepare(model, optimizer, loader("llama", STEPS), schedule)
    plain.register_for_checkpointing(Counter())
    run = steps(plain, ddp, optimizer, data, schedule)
    next(run), next(run)
    plain.save_state(path)
    plain.wait_for_everyone()
    rest = list(run)
    again = Run(stage, seed=7)
    again.accelerate.load_state(path)
    assert again.rest() == pytest.approx(rest, rel=1e-6)
    assert difference(again.weights(), model.state_dict()) < 5e-5  # Adam divides by small numbers


@cases.at(1, 3)
def states_of_accelerates_fsdp_load(stage: int) -> None:
    """Written by Accelerate's own functions for FSDP2, whose Accelerator wants a GPU."""
    run = Run(stage, seed=7)
    for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        path = folder()
        model = models.build("llama")
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer = make_optimizer("adamw", model)
        models.loss(model, models.part(models.batch("llama", 0), dist.get_rank(), dist.get_world_size())).backward()
        optimizer.step()
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
        save_fsdp_model(plugin, run.accelerate, model, path)
        save_fsdp_optimizer(plugin, run.accelerate, optimizer, model, path)
        dist.barrier()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is nothing but models and optimizers
            run.accelerate.load_state(path)
        assert difference(run.weights(), {name: full(value) for name, value in model.state_dict().items()}) == 0
        theirs = optimizer.state_dict()["state"]
        whole = {number: {key: full(value) for key, value in entries.items()} for number, entries in theirs.items()}
        assert_same_state(run.optimizer.state_dict(), {"state": whole} if dist.get_rank() == 0 else {})


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


@cases.at(1, 3)
def the_loss_scale_goes_on(stage: int) -> None:
    path = folder() + "/state"
    scaling = {"mixed_precision": "fp16", "kwargs_handlers": [GradScalerKwargs(init_scale=2.0**9, growth_interval=3)]}
    run = Run(stage, **scaling)
    train = run.train()
    next(train), next(train)
    run.accelerate.save_state(path)
    rest, scale = list(train), run.accelerate.scaler.get_scale()
    assert scale == 2.0**10
    again = Run(stage, seed=4, **{**scaling, "kwargs_handlers": [GradScalerKwargs(growth_interval=3)]})
    again.accelerate.load_state(path)
    assert again.rest() == rest and again.accelerate.scaler.get_scale() == scale
    assert difference(again.weights(), run.weights()) == 0


@cases.at(3)
def what_does_not_fit_is_said_and_changes_nothing(stage: int) -> None:
    path = folder() + "/state"
    run = Run(stage)
    run.accelerate.save_state(path)
    other = Run(stage, seed=3)
    other.accelerate.register_for_checkpointing(Counter())
    with pytest.raises(RuntimeError, match=r"1 custom checkpoints.*2 objects are registered"):
        other.accelerate.load_state(path)
    small = accelerator(stage)
    model = small.prepare(models.mlp())
    before = weights(model)
    with pytest.raises(CheckpointError, match=r"missing there: .*not in the model: "):
        small.load_state(path)
    assert difference(weights(model), before) == 0
    with pytest.raises(ValueError, match="does not exist"):
        small.load_state(path + "/none")
    each_node = ProjectConfiguration(save_on_each_node=True)
    two_nodes = accelerator(stage, project_config=each_node)
    with (
        mock.patch.object(Accelerator, "is_local_main_process", True),
        pytest.raises(ValueError, match=r"got ranks \[0, 1\]: leave out save_on_each_node"),
    ):
        two_nodes.save_state(path)


@cases.parametrize()
def test_states_of_accelerate(case: tuple[str, int], outcomes: Any) -> None:
    check(outcomes, case)


def start(path: str) -> list[float]:
    run = Run(2)
    train = run.train()
    next(train), next(train)
    run.accelerate.save_state(path)
    return list(train)


def go_on(path: str) -> tuple[list[float], list[int]]:
    run = Run(3, seed=1)
    run.accelerate.load_state(path)
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, run.accelerate.step)
    return run.rest(), counts


def test_a_run_goes_on_at_another_number_of_ranks(tmp_path: Path) -> None:
    rest = run_ranks(2, start, str(tmp_path / "state"))[0]
    found, counts = run_ranks(3, go_on, str(tmp_path / "state"))[0]
    assert found == pytest.approx(rest, rel=1e-6)
    assert len(set(counts)) == 1  # or ranks would end accumulation at different batches
