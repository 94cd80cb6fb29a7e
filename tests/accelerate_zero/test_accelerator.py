"""`accelerate_zero.Accelerator` in place of Accelerate's: the usual loop is one process's, and so are its files."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin, GradScalerKwargs
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2LMHeadModel

from accelerate_zero import Accelerator, ZeroOptimizer, ZeroPlugin
from tests.helpers import models
from tests.helpers.accelerating import accelerator, loader, steps
from tests.helpers.cases import Cases, check, folder
from tests.helpers.lightning import make_optimizer
from tests.helpers.twin import HalfTwin, largest_difference
from zero_core import ZeroConfig, engine_of, shard, watchdog

cases = Cases(__name__)
outcomes = cases.fixture(2, timeout=200)

STEPS = 4


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    engine = engine_of(model)
    assert engine is not None
    return engine.full_state_dict(all_ranks=True)


def decay(optimizer: Any) -> Any:
    """Linear over as many scheduler steps as Accelerate makes: one a process and training step."""
    total = STEPS * dist.get_world_size()
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (2 * total))


def plain_run(norm: float | None = None) -> tuple[list[float], list[float], nn.Module]:
    """One process on whole batches: losses, learning rates, model."""
    model = models.build("llama")
    optimizer = make_optimizer("adamw", model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (2 * STEPS))
    losses, rates = [], []
    for step in range(STEPS):
        loss = models.loss(model, models.batch("llama", step))
        loss.backward()
        if norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), norm)
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, rates, model


@cases
def the_usual_loop_in_any_order_of_preparation(stage: int) -> None:
    losses, rates, plain = plain_run(norm=0.5)
    for order in ("together", "model first", "model last"):
        for micro_batches in (1, 2):
            accelerate = accelerator(stage, gradient_accumulation_steps=micro_batches)
            model = models.build("llama")
            given = model
            optimizer = make_optimizer("adamw", model)
            scheduler, data = decay(optimizer), loader("llama", STEPS, micro_batches)
            if order == "together":
                data, optimizer, scheduler, model = accelerate.prepare(data, optimizer, scheduler, model)
            elif order == "model first":
                model = accelerate.prepare(model)
                optimizer = accelerate.prepare(optimizer)
                data, scheduler = accelerate.prepare(data, scheduler)
            else:
                scheduler = accelerate.prepare(scheduler)
                data, optimizer = accelerate.prepare(data, optimizer)
                model = accelerate.prepare(model)
            assert model is given and accelerate.unwrap_model(model) is given
            assert isinstance(optimizer, ZeroOptimizer)
            own = list(
                steps(
                    accelerate, model, optimizer, data, scheduler,
                    clip=lambda: accelerate.clip_grad_norm_(model.parameters(), 0.5),  # noqa: B023
                )
            )  # fmt: skip
            means = [sum(own[i : i + micro_batches]) / micro_batches for i in range(0, len(own), micro_batches)]
            assert means == pytest.approx(losses, rel=2e-6)
            # Adam amplifies rounding where gradients vanish.
            state = whole_state(model)
            assert max((state[k] - v).abs().max().item() for k, v in plain.named_parameters()) < 5e-5
            assert optimizer.param_groups[0]["lr"] == pytest.approx(rates[-1] - (rates[0] - rates[1]))


@cases.at(1, 3)
def learning_rates_are_those_of_one_process_at_every_step(stage: int) -> None:
    _, rates, _ = plain_run()
    accelerate = accelerator(stage)
    model = models.build("llama")
    optimizer = make_optimizer("adamw", model)
    model, optimizer, data, scheduler = accelerate.prepare(model, optimizer, loader("llama", STEPS), decay(optimizer))
    seen = []
    for _ in steps(
        accelerate, model, optimizer, data, scheduler, clip=lambda: seen.append(optimizer.param_groups[0]["lr"])
    ):
        pass
    assert seen == pytest.approx(rates)


@cases.at(1, 3)
def mixed_precision_has_the_bits_of_one_process(stage: int) -> None:
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        scaling = [GradScalerKwargs(init_scale=2.0**8)]
        accelerate = accelerator(stage, mixed_precision=name, kwargs_handlers=scaling)
        model = models.build("llama")
        optimizer = make_optimizer("adamw", model)
        model, optimizer, data = accelerate.prepare(model, optimizer, loader("llama", STEPS))
        list(steps(accelerate, model, optimizer, data))
        twin = HalfTwin(models.build("llama"), lambda m: make_optimizer("adamw", m), dtype)
        for step in range(STEPS):
            twin.backward(models.batch("llama", step), dist.get_world_size(), scale=2.0**8 if name == "fp16" else 1.0)
            for master in twin.masters.parameters():
                master.grad /= 2.0**8 if name == "fp16" else 1.0
            twin.step()
        for key, value in whole_state(model).items():
            assert torch.equal(value, twin.masters.state_dict()[key]), (name, key)
        assert next(model.parameters()).dtype == dtype
        with accelerate.autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
        assert model(**models.part(models.batch("llama", 0), 0, 2)).logits.dtype == torch.float32


@cases.at(1, 3)
def clipping_by_value_is_that_of_plain_torch(stage: int) -> None:
    accelerate = accelerator(stage)
    plain, model = models.build("llama"), models.build("llama")
    expected, optimizer = (torch.optim.SGD(net.parameters(), lr=1.0) for net in (plain, model))
    model, optimizer, data = accelerate.prepare(model, optimizer, loader("llama", 1))
    clip = lambda: accelerate.clip_grad_value_(model.parameters(), 1e-3)  # noqa: E731
    list(steps(accelerate, model, optimizer, data, clip=clip))
    models.loss(plain, models.batch("llama", 0)).backward()
    nn.utils.clip_grad_value_(plain.parameters(), 1e-3)
    expected.step()
    assert largest_difference(whole_state(model).values(), plain.state_dict().values()) < 1e-6


@cases.at(1, 3)
def a_skipped_step_keeps_the_schedule(stage: int) -> None:
    accelerate = accelerator(stage, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=2.0**4)])
    model = models.mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer, scheduler = accelerate.prepare(model, optimizer, decay(optimizer))
    skipped, rates = [], []
    for step in range(3):
        data = torch.ones(4, 5) * (float("inf") if dist.get_rank() == 1 and step == 1 else 1.0)
        accelerate.backward(model(data).sum())
        accelerate.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        skipped.append(accelerate.optimizer_step_was_skipped)
        rates.append(scheduler.get_last_lr()[0])
    assert skipped == [False, True, False]
    assert rates[0] == rates[1] > rates[2]


@cases.at(1, 3)
def models_are_saved_as_plain_files(stage: int) -> None:
    path = folder()
    accelerate = accelerator(stage)
    given = models.build("gpt2")  # embedding and head are one
    expected = {name: value.clone() for name, value in given.state_dict().items()}
    model = accelerate.prepare(given)
    accelerate.save_model(model, f"{path}/one")
    accelerate.save_model(model, f"{path}/several", max_shard_size="50KB")
    state = accelerate.get_state_dict(model)
    assert (state.keys() == expected.keys()) == accelerate.is_main_process
    accelerate.unwrap_model(model).save_pretrained(
        f"{path}/pretrained",
        is_main_process=accelerate.is_main_process,
        save_function=accelerate.save,
        state_dict=state,
    )
    accelerate.wait_for_everyone()
    loaded = GPT2LMHeadModel.from_pretrained(f"{path}/pretrained").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    one = load_file(f"{path}/one/model.safetensors")
    several: dict[str, torch.Tensor] = {}
    for file in Path(path, "several").glob("*.safetensors"):
        several |= load_file(file)
    assert len(list(Path(path, "several").glob("*.safetensors"))) > 1
    assert Path(path, "several", "model.safetensors.index.json").exists()
    assert one.keys() == several.keys() and all(torch.equal(one[name], several[name]) for name in one)
    assert set(expected) - set(one) <= {"lm_head.weight"}


@cases.at(1, 3)
def two_networks_with_optimizers_of_their_own(stage: int) -> None:
    """A GAN's two steps; clipping over one network, then over both."""

    def nets() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        make, judge = nn.Linear(5, 5), nn.Linear(5, 1)
        return make, judge

    def train(make: nn.Module, judge: nn.Module, opts: Any, data: torch.Tensor, backward: Any, clip: Any) -> None:
        for step in range(3):
            x = data[step]
            opts[1].zero_grad()
            backward((judge(make(x).detach()) - 1).square().mean() + judge(x).square().mean())
            clip(judge.parameters())
            opts[1].step()
            opts[0].zero_grad()
            backward(judge(make(x)).square().mean())
            clip(chain(make.parameters(), judge.parameters()))
            opts[0].step()

    data = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(1))
    plain = nets()
    plain_opts = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in plain]
    train(*plain, plain_opts, data, lambda loss: loss.backward(), lambda p: nn.utils.clip_grad_norm_(list(p), 0.1))
    accelerate = accelerator(stage)
    own = nets()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in own]
    first, second, opt_first, opt_second = accelerate.prepare(*own, *optimizers)
    mine = data.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]
    train(
        first, second, [opt_first, opt_second], mine, accelerate.backward, lambda p: accelerate.clip_grad_norm_(p, 0.1)
    )
    for net, expected in zip(own, plain, strict=True):
        assert largest_difference(whole_state(net).values(), expected.state_dict().values()) < 1e-6


@cases.at(1, 3)
def a_frozen_teacher_is_sharded_beside_its_student(stage: int) -> None:
    accelerate = accelerator(stage)
    torch.manual_seed(0)
    teacher, student = nn.Linear(5, 3), nn.Linear(5, 3)
    teacher.requires_grad_(False)
    before = {k: v.clone() for k, v in teacher.state_dict().items()}
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    teacher, student, optimizer = accelerate.prepare(teacher, student, optimizer)
    for step in range(60):
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
        loss = (student(x) - teacher(x)).square().mean()
        accelerate.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.02
    assert all(torch.equal(before[k], v) for k, v in whole_state(teacher).items())


@cases.at(1, 3)
def metrics_leave_out_what_fills_the_last_batch(stage: int) -> None:
    accelerate = accelerator(stage)
    rows = torch.arange(7.0).reshape(7, 1)
    model, data = accelerate.prepare(
        nn.Linear(1, 1), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=2)
    )
    seen = [accelerate.gather_for_metrics(x) for (x,) in data if model(x) is not None]
    assert sorted(torch.cat(seen).flatten().tolist()) == rows.flatten().tolist()


@cases.at(1, 3)
def memory_is_freed_between_trainings(stage: int) -> None:
    accelerate = accelerator(stage)
    for _ in range(2):
        model = models.mlp()
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = accelerate.prepare(model, optimizer)
        accelerate.backward(model(torch.ones(2, 5)).sum())
        optimizer.step()
        model, optimizer = accelerate.free_memory(model, optimizer)
        assert model is None and accelerate._models == [] and accelerate._optimizers == []


@cases
def no_sync_defers_the_reduction_as_the_stage_says(stage: int) -> None:
    accelerate = accelerator(stage)
    model = accelerate.prepare(models.mlp())
    with accelerate.no_sync(model):
        accelerate.backward(model(torch.ones(2, 5)).sum())
    waits = engine_of(model)._reducer.has_local_grads
    assert waits == (stage == 1)


@cases.at(1, 3)
def a_model_is_prepared_once(stage: int) -> None:
    accelerate = accelerator(stage)
    model = models.mlp()
    assert accelerate.prepare(accelerate.prepare(model)) is model and accelerate._models == [model]
    sharded = models.mlp()
    engine = shard(sharded, ZeroConfig(stage=stage))
    assert accelerate.prepare(sharded) is sharded and engine_of(sharded) is engine


@cases.at(3)
def a_call_on_one_rank_only_is_named_within_seconds(stage: int) -> None:
    watchdog._PATIENCE, watchdog._INTERVAL = 0.5, 0.1
    accelerate = accelerator(stage)
    model = accelerate.prepare(models.mlp())
    path = folder()
    for call, name in (
        (lambda: accelerate.save_state(path), "accelerator.save_state()"),
        (lambda: accelerate.save_model(model, path), "accelerator.save_model()"),
        (lambda: accelerate.get_state_dict(model), "engine.full_state_dict()"),
    ):
        if accelerate.is_main_process:
            with pytest.raises(
                RuntimeError, match=rf"rank 0 waits in {re.escape(name)}.*\n.*rank 1 waits in the gather"
            ):
                call()
        accelerate.backward(model(torch.ones(2, 5)).sum())  # and the run goes on
    # As scripts have it: `if is_main_process: save_state()`, and then all wait.
    if accelerate.is_main_process:
        with pytest.raises(
            RuntimeError, match=r"accelerator\.save_state\(\).*\n.*rank 1 waits in torch\.distributed\.barrier"
        ):
            accelerate.save_state(path)
    accelerate.wait_for_everyone()
    accelerate.save_state(path)


@cases.at(1, 3)
def a_model_in_half_precision_trains(stage: int) -> None:
    for settings, master in (({"mixed_precision": "bf16"}, torch.float32), ({}, torch.bfloat16)):
        accelerate = accelerator(stage, **settings)
        model = models.build("llama").bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, data = accelerate.prepare(model, optimizer, loader("llama", 2))
        before = whole_state(model)
        list(steps(accelerate, model, optimizer, data))
        after = whole_state(model)
        assert all(value.dtype == master for value in after.values())
        assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])


@cases.at(1, 3)
def generation_ends_at_different_lengths(stage: int) -> None:
    accelerate = accelerator(stage)
    model = accelerate.prepare(models.build("gpt2").eval())
    length = 2 + 3 * dist.get_rank()
    prompt = models.random_tokens(1, 4 - dist.get_rank(), seed=dist.get_rank())
    how = {"max_new_tokens": length, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    own = model.generate(prompt, synced_gpus=stage == 3, **how)
    assert torch.equal(own, models.build("gpt2").eval().generate(prompt, **how))


@cases.at(1, 3)
def a_script_may_make_two_accelerators(stage: int) -> None:
    first = accelerator(stage)
    second = Accelerator(zero_plugin=ZeroPlugin(stage=stage))
    model, other = first.prepare(models.mlp()), second.prepare(models.mlp())
    assert engine_of(model) is not engine_of(other) and second.prepare(model) is model
    first.backward((model(torch.ones(2, 5)) + other(torch.ones(2, 5))).sum())
    assert first.clip_grad_norm_(chain(model.parameters(), other.parameters()), 1.0) > 0


@cases.at(1, 3)
def mistakes_are_told_what_to_do(stage: int) -> None:
    accelerate = accelerator(stage)
    with pytest.raises(ValueError, match="wrapped in DistributedDataParallel"):
        accelerate.prepare(DistributedDataParallel(models.mlp()))
    other = models.mlp()
    optimizer = accelerate.prepare(torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="the model whose parameters it has was not"):
        optimizer.step()
    with pytest.raises(ValueError, match="belongs to no prepared model"):
        accelerate.clip_grad_norm_(other.parameters(), 1.0)
    with pytest.raises(ValueError, match="ranks must have the same number of batches"):
        accelerate.join_uneven_inputs([other])
    with pytest.raises(ValueError, match="argument fsdp_plugin switches on an engine that does what ZeRO does"):
        accelerator(stage, fsdp_plugin=FullyShardedDataParallelPlugin())


@cases.parametrize()
def test_the_accelerator_is_accelerates(case: tuple[str, int], outcomes: Any) -> None:
    check(outcomes, case)
