"""Whatever shape a model's computation has, gradients are those of the plain run."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.helpers import models
from tests.helpers.cases import Cases, check
from tests.helpers.twin import Pair, random_batch
from zero_core import PartitionedParameterError

cases = Cases(__name__)
outcomes = cases.fixture(3)


SMALL = {"unit_numel": 1}  # every layer a unit of its own, so that there is something to get wrong


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def batches(*shape: int, steps: int = 3) -> list[Tensor]:
    return [random_batch(*shape, seed=i) for i in range(steps)]


class Block(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 7)
        self.down = nn.Linear(7, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, shared: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        block = Block()
        self.blocks = nn.ModuleList([block] * 3 if shared else [block, Block(), Block()])
        self.last = nn.Linear(5, 2)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


@cases
def activation_checkpointing_of_either_kind(stage: int) -> None:
    for reentrant in (False, True):
        Pair(Checkpointed(reentrant), stage, **SMALL).train(squared, *batches(6, 5))


@cases.at(1, 3)
def activation_checkpointing_of_a_shared_block(stage: int) -> None:
    for reentrant in (False, True):
        Pair(Checkpointed(reentrant, shared=True), stage, **SMALL).train(squared, *batches(6, 5))


@cases.at(1, 3)
def checkpointed_blocks_with_frozen_weights_and_trainable_adapters(stage: int) -> None:
    for reentrant in (False, True):
        for shared in (False, True):
            model = Checkpointed(reentrant, shared)
            for block in model.blocks:
                block.norm.requires_grad_(False)
                block.up.weight.requires_grad_(False)
            Pair(model, stage, **SMALL).train(squared, *batches(6, 5))


@cases.at(1, 3)
def transformers_gradient_checkpointing(stage: int) -> None:
    for kwargs in ({"use_reentrant": False}, {"use_reentrant": True}):
        model = models.build("llama")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        model.enable_input_require_grads()
        model.train()
        pair = Pair(model, stage)
        for step in range(3):
            pair.backward(models.loss, models.batch("llama", step))
            pair.check_gradients()
            pair.step()
            pair.check_weights()


@cases.at(1, 3)
def a_frozen_weight_beside_a_trainable_bias(stage: int) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    pair = Pair(model, stage, **SMALL)
    pair.train(squared, *batches(6, 5))
    # Momentum exists for what is trainable only.
    states = sum(s["momentum_buffer"].numel() for s in pair.optimizer.state.values())
    total = torch.tensor(states)
    dist.all_reduce(total)
    assert total.item() == 7 + 21


@cases.at(1, 3)
def everything_frozen_but_the_input_wants_a_gradient(stage: int) -> None:
    pair = Pair(nn.Sequential(Block(), Block()).requires_grad_(False), stage)
    x = random_batch(6, 5)
    grads = []
    for model in (pair.plain, pair.model):
        own = x.clone().requires_grad_()
        squared(model, own).backward()
        grads.append(own.grad)
    assert torch.equal(*grads)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block(6) for _ in range(2))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def tokens(steps: int = 3) -> list[Tensor]:
    return [torch.randint(0, 11, (6, 4), generator=torch.Generator().manual_seed(i)) for i in range(steps)]


@cases.at(1, 3)
def a_tied_head_in_another_unit(stage: int) -> None:
    pair = Pair(Tied(), stage, **SMALL)
    pair.train(squared, *tokens())
    assert pair.model.head.weight is pair.model.embed.weight


class BorrowsWeights(nn.Module):
    """Reads other modules' weights directly, and passes a parameter as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.block = Block(6)
        self.scale = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.block(self.embed(x))
        h = self.mix(h, self.scale.weight)
        return F.linear(h, self.embed.weight)

    def mix(self, h: Tensor, weight: Tensor) -> Tensor:
        return h @ weight.t() + self.scale.bias + weight.square().mean()


@cases.at(1, 3)
def weights_of_other_modules_used_directly(stage: int) -> None:
    Pair(BorrowsWeights(), stage, **SMALL).train(squared, *tokens())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.other, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.other(torch.tanh(self.cell(x))))
        return self.head(x) + self.head(x * 2)


@cases.at(1, 3)
def modules_called_several_times(stage: int) -> None:
    Pair(Recurrent(), stage, **SMALL).train(squared, *batches(6, 5))


@cases.at(1, 3)
def two_forwards_before_one_backward(stage: int) -> None:
    def twice(model: nn.Module, x: Tensor) -> Tensor:
        return squared(model, x) + squared(model, x + 1)

    Pair(Recurrent(), stage, **SMALL).train(twice, *batches(6, 5))


@cases.at(1, 3)
def a_graph_kept_for_a_second_backward(stage: int) -> None:
    pair = Pair(Recurrent(), stage, **SMALL)
    x = random_batch(6, 5)
    mine = x.chunk(dist.get_world_size())[dist.get_rank()]
    for model, data in ((pair.plain, x), (pair.model, mine)):
        value = squared(model, data)
        value.backward(retain_graph=True)
        value.backward()
    pair.check_gradients()


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 5)
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.never = nn.Linear(5, 5)

    def forward(self, x: Tensor, choice: int) -> Tensor:
        return self.experts[choice](self.stem(x))


@cases.at(1, 3)
def ranks_that_take_different_branches(stage: int) -> None:
    """A missing gradient counts as zero; what no rank used keeps no gradient at all."""
    pair = Pair(Branching(), stage, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=False))
    world, rank = dist.get_world_size(), dist.get_rank()
    for step in range(3):
        x = random_batch(6, 5, seed=step)
        parts = x.chunk(world)
        sum(squared_of(pair.plain, part, i % 2) for i, part in enumerate(parts)).div(world).backward()
        squared_of(pair.model, parts[rank], rank % 2).backward()
        pair.check_gradients()
        assert pair.engine.full_grad(pair.model.never.weight) is None
        pair.step()
        pair.check_weights()


def squared_of(model: nn.Module, x: Tensor, choice: int) -> Tensor:
    return model(x, choice).square().mean()


@cases.at(1, 3)
def parameters_unused_by_all_keep_value_and_momentum(stage: int) -> None:
    """Two nets trained in turn: the idle one neither moves nor decays."""
    model = nn.ModuleDict({"a": nn.Linear(5, 3), "b": nn.Linear(5, 3)})
    pair = Pair(model, stage, lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.5, foreach=False))
    for step, name in enumerate("aabba"):

        def one(model: Any, x: Tensor, name: str = name) -> Tensor:
            return model[name](x).square().mean()

        pair.backward(one, random_batch(6, 5, seed=step))
        pair.check_gradients()
        pair.step()
        pair.check_weights()


@dataclass
class Output:
    main: Tensor
    rest: Any


class Custom:
    def __init__(self, value: Tensor) -> None:
        self.value = value


@cases.at(1, 3)
def outputs_in_containers(stage: int) -> None:
    class Wrapped(nn.Module):
        def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
            super().__init__()
            self.block, self.last = Block(), nn.Linear(5, 3)
            self.wrap = wrap

        def forward(self, x: Tensor) -> Any:
            return self.wrap(self.last(self.block(x)))

    kinds: list[tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = [
        (lambda t: {"a": {"b": t}}, lambda o: o["a"]["b"]),
        (lambda t: (None, [t, None], "text"), lambda o: o[1][0]),
        (lambda t: Output(t, None), lambda o: o.main),
        (lambda t: Custom(t), lambda o: o.value),
        (lambda t: [Custom(t)], lambda o: o[0].value),
    ]
    for wrap, unwrap in kinds:

        def loss(model: nn.Module, x: Tensor, unwrap: Callable[[Any], Tensor] = unwrap) -> Tensor:
            return unwrap(model(x)).square().mean()

        Pair(Wrapped(wrap), stage, **SMALL).train(loss, *batches(6, 5, steps=2))


@cases.at(1, 3)
def double_backward_of_a_gradient_penalty(stage: int) -> None:
    def penalised(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        score = torch.tanh(model(x)).sum(dim=1)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.mean() + (slope.norm(dim=1) - 1).square().mean()

    pair = Pair(nn.Sequential(Block(), Block(), nn.Linear(5, 3)), stage, **SMALL)
    pair.train(penalised, *batches(6, 5))
    pair.backward(squared, random_batch(6, 5))  # an ordinary one afterwards lets go of the weights again
    if stage == 3:
        assert gathered_bytes(pair) == 0


def gathered_bytes(pair: Pair) -> int:
    return {held.kind: held.bytes for held in pair.engine.report().held}["gathered"]


@cases.at(1, 3)
def compiled_blocks(stage: int) -> None:
    model = nn.Sequential(Block(), Block(), nn.Linear(5, 3))
    pair = Pair(model, stage)
    for i in range(2):
        model[i] = torch.compile(model[i], backend="eager")
    expected = [p for p in pair.plain.parameters()]
    for step in range(3):
        pair.backward(squared, random_batch(6, 5, seed=step))
        pair.check_gradients()
        pair.step()
        pair.check_weights()
    assert len(expected) == len(list(model.parameters()))


@cases.at(1, 3)
def a_forward_in_inference_mode_before_training(stage: int) -> None:
    pair = Pair(Tied(), stage, **SMALL)
    with torch.inference_mode():
        assert torch.allclose(pair.model(tokens()[0]), pair.plain(tokens()[0]), atol=1e-6)
    pair.train(squared, *tokens())


@cases.at(1, 3)
def evaluation_that_stops_early_between_training_steps(stage: int) -> None:
    class Early(Tied):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.training else self.blocks[0](self.embed(x))

    pair = Pair(Early(), stage, **SMALL)
    for step in range(4):
        pair.train(squared, tokens(4)[step])
        pair.model.eval()
        for _ in range(1 + dist.get_rank() if stage < 3 else 1):  # at stages 1 and 2 nothing is sent here
            with torch.no_grad():
                pair.model(tokens()[0])
        pair.model.train()
        if stage == 3:
            assert gathered_bytes(pair) == 0


@cases.at(1, 3)
def an_exception_in_forward_or_backward_skips_the_batch(stage: int) -> None:
    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(Block(), Block())
            self.fail = ""

        def forward(self, x: Tensor) -> Tensor:
            h = self.blocks[0](x)
            if self.fail == "forward":
                raise KeyError("bad batch")
            if self.fail == "backward":
                h.register_hook(_raise)
            return self.blocks[1](h)

    pair = Pair(Fragile(), stage, **SMALL)
    for step, fail in enumerate(["", "forward", "", "backward", ""]):
        pair.model.fail = fail
        if not fail:
            pair.train(squared, random_batch(6, 5, seed=step))
            continue
        try:
            squared(pair.model, random_batch(6, 5)).backward()
            raise AssertionError("should have raised")
        except (KeyError, ValueError):
            pair.optimizer.zero_grad()
    if stage == 3:
        assert gathered_bytes(pair) == 0


def _raise(_: Tensor) -> None:
    raise ValueError("in backward")


@cases.at(1, 3)
def unfreezing_during_training(stage: int) -> None:
    model = nn.Sequential(Block(), nn.Linear(5, 3))
    model[0].requires_grad_(False)
    pair = Pair(model, stage, lambda m: torch.optim.AdamW(m[1].parameters(), lr=0.01, foreach=False), **SMALL)
    pair.train(squared, *batches(6, 5))
    for net, optimizer in ((pair.plain, pair.plain_optimizer), (pair.model, pair.optimizer)):
        net[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(net[0].parameters())})
    pair.train(squared, *batches(6, 5))
    own = pair.engine.full_optimizer_state_dict(pair.optimizer)
    if dist.get_rank() == 0:
        plain = pair.plain_optimizer.state_dict()
        assert [len(g["params"]) for g in own["param_groups"]] == [len(g["params"]) for g in plain["param_groups"]]
        assert own["state"].keys() == plain["state"].keys()


@cases.at(1, 3)
def copies_and_pickles_of_a_sharded_model(stage: int) -> None:
    pair = Pair(nn.Sequential(Block(), nn.Linear(5, 3)), stage, **SMALL)
    pair.train(squared, *batches(6, 5))
    if stage == 3:
        for attempt in (lambda: copy.deepcopy(pair.model), lambda: torch.save(pair.model, io.BytesIO())):
            try:
                attempt()
                raise AssertionError("a copy of placeholders was made")
            except PartitionedParameterError as error:
                assert "full_params" in str(error)
    pair.backward(squared, random_batch(6, 5))
    pair.step()  # stages 1 and 2: weights may be on their way, and the copy waits for them
    with pair.engine.full_params():
        copied = copy.deepcopy(pair.model)
        file = io.BytesIO()
        torch.save(pair.model, file)
    file.seek(0)
    for clone in (copied, torch.load(file, weights_only=False)):
        x = random_batch(6, 5)
        assert torch.allclose(clone(x), pair.plain(x), atol=1e-5)
        squared(clone, x).backward()  # a plain model of its own: no rank waits for another
        assert all(type(p) is nn.Parameter and p.grad is not None for p in clone.parameters())
    pair.train(squared, *batches(6, 5))


@cases.at(1, 3)
def weights_exported_through_numpy(stage: int) -> None:
    """numpy pins the memory it looks at; training goes on beside it."""
    pair = Pair(nn.Sequential(Block(), nn.Linear(5, 3)), stage, **SMALL)
    with pair.engine.full_params():
        kept = pair.model[1].weight.detach().numpy()
        before = kept.copy()
    pair.train(squared, *batches(6, 5))
    if stage == 3:
        assert (kept == before).all()


@cases.at(1, 3)
def saved_tensor_hooks_around_and_inside_the_forward(stage: int) -> None:
    """Activation offloading of the user's own still sees the activations."""
    pair = Pair(nn.Sequential(Block(), Block()), stage, **SMALL)
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.clone()

    def offloaded(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            return squared(model, x)

    pair.backward(offloaded, random_batch(6, 5))
    pair.check_gradients()
    assert len(packed) > 20

    def saved_on_cpu(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            h = model[0](x)
        return model[1](h).square().mean()

    pair.plain_optimizer.zero_grad()
    pair.optimizer.zero_grad()
    pair.backward(saved_on_cpu, random_batch(6, 5))
    pair.check_gradients()


@cases.at(1, 3)
def several_dtypes_in_one_block(stage: int) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Linear(5, 7).to(torch.bfloat16)
            self.norm = nn.LayerNorm(7)
            self.high = nn.Linear(7, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.high(self.norm(self.low(x.bfloat16()).float()).double()).float()

    pair = Pair(Mixed(), stage)
    for step in range(3):
        pair.backward(squared, random_batch(24, 5, seed=step))
        pair.check_gradients(tolerance=1e-1)  # bf16 rounds at 4e-3, and sums of a few rows of either sign cancel
        pair.step()
        pair.check_weights(tolerance=3e-2)  # a few last places of a weight around 1
    assert [p.dtype for p in pair.model.parameters()] == [p.dtype for p in pair.plain.parameters()]


@cases.parametrize()
def test_gradients_are_those_of_the_plain_run(case: tuple[str, int], outcomes: Any) -> None:
    check(outcomes, case)
