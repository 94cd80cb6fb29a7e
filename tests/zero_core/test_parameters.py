"""Parameters of unusual shape, layout, dtype or origin train, save and keep what they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers import models
from tests.helpers.cases import Cases, check
from tests.helpers.twin import Pair, random_batch
from zero_core import PartitionedParameterError, ZeroConfig, shard

cases = Cases(__name__)
outcomes = cases.fixture(3)


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).abs().square().mean()


def batches(*shape: int) -> list[Tensor]:
    return [random_batch(*shape, seed=i) for i in range(2)]


def check_saved(pair: Pair) -> None:
    """The whole state dict is that of the plain twin, in names, shapes and dtypes, and loads into a plain model."""
    state = pair.engine.full_state_dict()
    if dist.get_rank() != 0:
        assert state == {}
        return
    plain = pair.plain.state_dict()
    assert list(state) == list(plain)
    assert [(v.shape, v.dtype) for v in state.values()] == [(v.shape, v.dtype) for v in plain.values()]
    pair.plain.load_state_dict(state)


class Odd(nn.Module):
    """Empty, 0-dim, transposed, sliced and channels-last parameters beside ordinary ones."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Linear(4, 0, bias=False)
        self.empty = nn.Parameter(torch.zeros(0))
        self.scale = nn.Parameter(torch.tensor(2.6))
        self.transposed = nn.Parameter(torch.randn(3, 5).t())
        self.strided = nn.Parameter(torch.randn(5, 6)[:, ::2])
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        image = F.linear(x, self.transposed.t() + self.strided.t()).view(-1, 3, 1, 1).expand(-1, 3, 4, 4)
        h = self.conv(image.contiguous(memory_format=torch.channels_last)).mean(dim=(2, 3))
        return self.last(h) * self.scale.exp() + self.none(h).sum() + self.empty.sum()


@cases
def empty_scalar_strided_and_channels_last_parameters(stage: int) -> None:
    for size in (1, 10**6):
        pair = Pair(Odd(), stage, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=False), unit_numel=size)
        pair.train(squared, *batches(6, 5))
        for (name, param), plain in zip(pair.model.named_parameters(), pair.plain.parameters(), strict=True):
            assert param.shape == plain.shape and param.numel() == plain.numel() and param.ndim == plain.ndim, name
        with pair.engine.full_params():
            assert pair.model.transposed.stride() == (1, 5)
            assert pair.model.conv.weight.is_contiguous(memory_format=torch.channels_last)
        check_saved(pair)
        own = pair.engine.full_optimizer_state_dict(pair.optimizer)
        if dist.get_rank() == 0:
            pair.plain_optimizer.load_state_dict(own)


@cases.at(1, 3)
def complex_parameters(stage: int) -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return x.to(torch.complex64) @ self.weight

    pair = Pair(Complex(), stage)
    pair.train(squared, *batches(6, 5))
    check_saved(pair)


@cases.at(1, 3)
def sizes_around_rank_and_alignment_boundaries(stage: int) -> None:
    class Sizes(nn.Module):
        def __init__(self, sizes: list[int]) -> None:
            super().__init__()
            self.params = nn.ParameterList([nn.Parameter(torch.randn(n)) for n in sizes])

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([(p * x.mean()).sum() for p in self.params]) + x.mean()

    # 16 fp32 elements are one 64-byte line; 32 and 48 fill the lines of 2 and 3 ranks exactly.
    for sizes in ([1], [3], [1, 1, 1], [16], [17], [31, 1], [32], [33], [47, 1], [48], [49], [7, 64, 1]):
        for unit_numel in (1, 16, 10**6):
            pair = Pair(Sizes(sizes), stage, unit_numel=unit_numel)
            x = random_batch(1, 5).expand(dist.get_world_size(), 5)  # the same for all: the sum is not linear in x
            pair.train(squared, x)
            check_saved(pair)


@cases.at(1, 3)
def fewer_elements_than_ranks(stage: int) -> None:
    pair = Pair(nn.Linear(1, 1), stage, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01))
    pair.train(squared, *batches(6, 1))
    check_saved(pair)
    own = pair.engine.full_optimizer_state_dict(pair.optimizer)
    assert dist.get_rank() != 0 or len(own["state"]) == 2


@cases.at(1, 3)
def a_model_without_parameters_to_train(stage: int) -> None:
    model = nn.Sequential(nn.Flatten(), nn.ReLU())
    engine = shard(model, ZeroConfig(stage=stage))
    assert model(torch.ones(2, 3)).sum() == 6 and engine.report().held[0].bytes == 0


@cases.at(1, 3)
def metadata_and_groups_are_right_in_every_state(stage: int) -> None:
    pair = Pair(models.build("llama"), stage)
    for _ in range(2):
        for (name, param), plain in zip(pair.model.named_parameters(), pair.plain.parameters(), strict=True):
            assert isinstance(param, nn.Parameter) and param.is_leaf, name
            assert (param.shape, param.dtype, param.device, param.requires_grad, len(param), param.numel()) == (
                plain.shape, plain.dtype, plain.device, plain.requires_grad, len(plain), plain.numel()
            )  # fmt: skip
        assert sum(p.numel() for p in pair.model.parameters()) == sum(p.numel() for p in pair.plain.parameters())
        pair.model.to("cpu").float()  # changes nothing, so it works while sharded
        assert pair.model.get_input_embeddings().weight.shape[0] == models.VOCAB
        pair.backward(models.loss, models.batch("llama", 0))
        pair.step()


@cases.at(1, 3)
def identity_and_ties_survive(stage: int) -> None:
    model = models.build("gpt2")
    before = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    engine = shard(model, ZeroConfig(stage=stage))
    with engine.full_params():
        pass
    assert before == {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    assert model.lm_head.weight is model.transformer.wte.weight
    state = engine.full_state_dict(all_ranks=True)
    plain = models.build("gpt2")
    assert not plain.load_state_dict(state).missing_keys
    assert torch.equal(state["lm_head.weight"], state["transformer.wte.weight"])


@cases.at(1, 3)
def meta_models_are_made_a_unit_at_a_time(stage: int) -> None:
    """Weights, buffers (rotary frequencies, batch statistics) and ties come out as on a real device."""
    for family in ("llama", "gpt2", "bert", "t5", "albert"):
        with torch.device("meta"):
            model = models.build(family)
        params = {id(p) for p in model.parameters()}
        engine = shard(model, ZeroConfig(stage=stage, unit_numel=3000))
        assert {id(p) for p in model.parameters()} == params and not any(p.is_meta for p in model.parameters())
        real = models.build(family)
        state = engine.full_state_dict(all_ranks=True)
        for name, value in real.state_dict().items():
            assert state[name].shape == value.shape and torch.isfinite(state[name].float()).all(), name
            if value.dim() == 2:  # normal, of the family's standard deviation
                assert 0.8 < state[name].std() / value.std() < 1.25, (family, name, state[name].std(), value.std())
            elif value.is_floating_point():
                assert torch.equal(state[name], value), (family, name)
        for name, value in real.named_buffers():
            assert torch.equal(model.get_buffer(name), value), name
        real.load_state_dict(state)
        data = models.batch(family, 0)
        assert torch.allclose(models.loss(model, data), models.loss(real, data), rtol=1e-5)


@cases.at(1, 3)
def plain_modules_on_meta_use_reset_parameters(stage: int) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    engine = shard(model, ZeroConfig(stage=stage, unit_numel=1))
    optimizer = engine.bind(torch.optim.SGD(model.parameters(), lr=0.1))
    squared(model, random_batch(6, 5, seed=dist.get_rank())).backward()
    optimizer.step()
    assert torch.isfinite(
        torch.cat([v.flatten().float() for v in engine.full_state_dict(all_ranks=True).values()])
    ).all()

    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.empty(3))

    with torch.device("meta"):
        bad = nn.Sequential(Custom())
    try:
        shard(bad, ZeroConfig(stage=stage))
        raise AssertionError("should have raised")
    except RuntimeError as error:
        assert "'0.w'" in str(error) and "reset_parameters" in str(error)


@cases.at(3)
def touching_a_partitioned_parameter_names_it_and_the_cure(stage: int) -> None:
    pair = Pair(models.build("llama"), stage)
    weight = pair.model.model.layers[0].mlp.up_proj.weight

    def write() -> None:
        with torch.no_grad():
            weight.fill_(1.0)

    for touch in (
        lambda: weight.sum(), lambda: weight + 1, lambda: weight[0], lambda: weight.tolist(), lambda: weight.data,
        lambda: torch.norm(weight), lambda: F.linear(torch.ones(1, 40), weight), write, lambda: weight.double(),
        lambda: pair.model.state_dict(), lambda: pair.model.half(), lambda: float(weight.mean()),
    ):  # fmt: skip
        try:
            touch()
            raise AssertionError("a placeholder was used")
        except PartitionedParameterError as error:
            assert error.world_size == dist.get_world_size() and error.rank == dist.get_rank()
            assert error.parameter in str(error) and "full_params" in str(error)
    try:
        pair.model.load_state_dict(pair.plain.state_dict())
        raise AssertionError("placeholders were written")
    except RuntimeError as error:  # torch collects one error per parameter into its own
        assert "lm_head.weight" in str(error) and "load_full_state_dict" in str(error)
    assert "shape=(50, 40)" in repr(weight)
    pair.backward(models.loss, models.batch("llama", 0))  # and nothing is broken by having tried
    pair.check_gradients()


@cases.at(1, 3)
def reading_and_writing_inside_full_params(stage: int) -> None:
    pair = Pair(models.build("llama"), stage)
    with pair.engine.full_params(writeback=True), torch.no_grad():
        for model in (pair.plain, pair.model):
            model.lm_head.weight.mul_(1.5)
            model.model.norm.weight[3] = 7.0
    pair.check_weights(tolerance=0.0 + 1e-12)
    for step in range(2):
        pair.backward(models.loss, models.batch("llama", step))
        pair.check_gradients()
        pair.step()
        pair.check_weights()
    if stage == 3:
        try:
            with pair.engine.full_params(), torch.no_grad():
                pair.model.lm_head.weight.zero_()
            raise AssertionError("a lost write went unnoticed")
        except RuntimeError as error:
            assert "lm_head.weight" in str(error) and "writeback=True" in str(error)
        pair.check_weights()
    with pair.engine.full_params():  # forward, backward and step inside are fine too
        pair.backward(models.loss, models.batch("llama", 5))
        pair.step()
        pair.check_weights()


@cases.at(1, 3)
def methods_other_than_forward(stage: int) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 6)
            self.proj = nn.Parameter(torch.randn(6, 3))
            self.head = nn.Linear(3, 2)

        def encode(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x) @ self.proj)

    ids = torch.randint(0, 11, (6, 4))
    pair = Pair(Encoder(), stage, unit_numel=1)
    pair.backward(lambda m, x: (pair.engine.run(m.encode, x) if m is pair.model else m.encode(x)).square().mean(), ids)
    pair.check_gradients()
    pair.step()
    pair.check_weights()


@cases.at(1, 3)
def generation_with_the_same_number_of_forwards(stage: int) -> None:
    pair = Pair(models.build("llama").eval(), stage)
    prompt = torch.randint(1, models.VOCAB, (2, 4))
    expected = pair.plain.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
    own = pair.model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert torch.equal(own, expected)


@cases.at(1, 3)
def embeddings_are_resized_before_sharding_or_between_two(stage: int) -> None:
    model = models.build("llama")
    model.resize_token_embeddings(models.VOCAB + 3)
    pair = Pair(model, stage)
    assert model.get_input_embeddings().weight.shape[0] == models.VOCAB + 3
    pair.backward(models.loss, models.batch("llama", 0))
    pair.check_gradients()
    pair.engine.close()
    torch.manual_seed(0)
    model.resize_token_embeddings(models.VOCAB + 7)
    again = Pair(model, stage)
    again.backward(models.loss, models.batch("llama", 1))
    again.check_gradients()


@cases.at(1, 3)
def a_parameter_that_is_new_is_an_error_not_a_rank_of_its_own(stage: int) -> None:
    model = models.build("llama")
    engine = shard(model, ZeroConfig(stage=stage))
    with pytest.raises(RuntimeError, match=r"weight' is new.*engine\.close\(\)"):
        with engine.full_params(writeback=True):
            model.resize_token_embeddings(models.VOCAB + 3)


@cases.at(1, 3)
def closing_leaves_a_plain_model(stage: int) -> None:
    pair = Pair(models.build("llama"), stage)
    pair.backward(models.loss, models.batch("llama", 0))
    pair.step()
    pair.engine.close()
    assert all(type(p) is nn.Parameter for p in pair.model.parameters())
    again = Pair(pair.model, stage % 3 + 1)  # and another engine may take it over
    again.backward(models.loss, models.batch("llama", 1))
    again.check_gradients()


@cases.parametrize()
def test_parameters_keep_what_they_are(case: tuple[str, int], outcomes: Any) -> None:
    check(outcomes, case)
