"""Weights that are still in their files: each rank reads its part, and whoever asks before gets the values."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertForSequenceClassification,
    GPT2LMHeadModel,
    LlamaForCausalLM,
)

from tests.helpers import models
from tests.helpers.cases import Cases, check, folder
from tests.helpers.twin import Pair
from zero_core import ZeroConfig, deferred, deferred_loading, shard

cases = Cases(__name__)
outcomes = cases.fixture(3)


def saved(family: str, **how: Any) -> str:
    """A folder of a model's files that all ranks see."""
    path = folder()
    if dist.get_rank() == 0:
        models.build(family).save_pretrained(path, **how)
    dist.barrier()
    return path


class Counted:
    """A stored tensor that notes how many bytes each reading takes."""

    def __init__(self, stored: Any, sizes: list[int]) -> None:
        self._stored, self._sizes = stored, sizes

    def get_shape(self) -> list[int]:
        return self._stored.get_shape()

    def __getitem__(self, index: Any) -> Tensor:
        values = self._stored[index]
        self._sizes.append(values.nbytes)
        return values


@contextmanager
def counting() -> Iterator[list[int]]:
    """The sizes of what is read from files opened inside."""
    sizes: list[int] = []
    stock = deferred.SafetensorsFile.slice
    deferred.SafetensorsFile.slice = lambda file, key: Counted(stock(file, key), sizes)
    try:
        yield sizes
    finally:
        deferred.SafetensorsFile.slice = stock


@cases
def a_rank_reads_its_shard_and_the_rows_it_ends_in(stage: int) -> None:
    path = saved("llama", max_shard_size="30KB")  # several files
    with counting() as sizes:
        with deferred_loading():
            model = LlamaForCausalLM.from_pretrained(path)
        assert sizes == []
        whole = sum(p.numel() for p in model.parameters()) * 4
        with torch._C.DisableTorchFunctionSubclass():
            assert all(p.untyped_storage().nbytes() == 4 for p in model.parameters())  # a number each
        engine = shard(model, ZeroConfig(stage=stage, unit_numel=3000))
    layouts = [p.layout for unit in engine._units for p in unit.partitions]
    own = sum(piece.numel for layout in layouts for piece in layout.pieces(dist.get_rank())) * 4
    row = 50 * 4  # the longest; a shard begins and ends inside one
    assert own <= sum(sizes) <= own + 2 * row * len(layouts) < whole
    assert max(sizes) <= max(p.numel() for p in model.parameters()) * 4
    expected = models.build("llama").state_dict()
    assert all(torch.equal(expected[name], value) for name, value in engine.full_state_dict(all_ranks=True).items())


@cases.at(1, 3)
def training_is_that_of_a_model_in_memory(stage: int) -> None:
    for family, kind in (("llama", AutoModelForCausalLM), ("gpt2", GPT2LMHeadModel)):
        path = saved(family)
        with deferred_loading():
            model = kind.from_pretrained(path)
        pair = Pair(models.build(family), stage, unit_numel=3000)
        own = shard(model, ZeroConfig(stage=stage, unit_numel=3000))
        optimizer = own.bind(torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9))
        for step in range(2):
            data = models.part(models.batch(family, step), dist.get_rank(), dist.get_world_size())
            for net, opt in ((pair.model, pair.optimizer), (model, optimizer)):
                models.loss(net, data).backward()
                opt.step()
                opt.zero_grad()
        expected = pair.engine.full_state_dict(all_ranks=True)
        state = own.full_state_dict(all_ranks=True)
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], value) for name, value in expected.items()), family


@cases.at(1, 3)
def precision_and_offload_are_as_ever(stage: int) -> None:
    path = saved("llama")
    for config in (
        {"precision": "bf16-mixed"},
        {"offload": "optimizer"},
        {"precision": "bf16-mixed", "offload": "optimizer"},
    ):
        with deferred_loading():
            model = LlamaForCausalLM.from_pretrained(path)
        engine = shard(model, ZeroConfig(stage=stage, unit_numel=3000, **config))
        expected = models.build("llama").state_dict()
        assert all(torch.equal(expected[k], v) for k, v in engine.full_state_dict(all_ranks=True).items())
    with deferred_loading():
        half = LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    assert half.lm_head.weight.dtype == torch.bfloat16
    engine = shard(half, ZeroConfig(stage=stage))
    assert torch.equal(engine.full_state_dict(all_ranks=True)["lm_head.weight"], expected["lm_head.weight"].bfloat16())


@cases.at(1, 3)
def a_new_head_is_initialised_and_equal_on_all_ranks(stage: int) -> None:
    path = saved("bert")
    torch.manual_seed(dist.get_rank())  # ranks draw different heads
    with deferred_loading():
        model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=3)
    assert isinstance(model, BertForSequenceClassification)
    engine = shard(model, ZeroConfig(stage=stage, unit_numel=3000))
    state = engine.full_state_dict(all_ranks=True)
    expected = models.build("bert").state_dict()
    assert torch.equal(
        state["bert.encoder.layer.0.output.dense.weight"], expected["bert.encoder.layer.0.output.dense.weight"]
    )
    heads = [torch.empty_like(state["classifier.weight"]) for _ in range(dist.get_world_size())]
    dist.all_gather(heads, state["classifier.weight"])
    assert all(torch.equal(head, heads[0]) for head in heads) and 0 < heads[0].std() < 0.1


@cases.at(1, 3)
def embeddings_are_resized_before_sharding(stage: int) -> None:
    path = saved("gpt2")
    torch.manual_seed(0)
    with deferred_loading():
        model = GPT2LMHeadModel.from_pretrained(path)
    assert model.get_input_embeddings().weight.shape == (models.VOCAB, 36)
    model.resize_token_embeddings(models.VOCAB + 3)
    engine = shard(model, ZeroConfig(stage=stage, unit_numel=3000))
    state = engine.full_state_dict(all_ranks=True)
    expected = models.build("gpt2").state_dict()["transformer.wte.weight"]
    assert state["transformer.wte.weight"].shape == (models.VOCAB + 3, 36)
    assert torch.equal(state["transformer.wte.weight"][: models.VOCAB], expected)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert 0 < state["transformer.wte.weight"][models.VOCAB :].std() < 1


@cases.at(3)
def whoever_asks_before_gets_the_values(stage: int) -> None:
    path, expected = saved("llama"), models.build("llama")
    with deferred_loading():
        model = LlamaForCausalLM.from_pretrained(path)
    assert torch.equal(model.lm_head.weight + 0, expected.lm_head.weight)
    assert deferred.source_of(model.lm_head.weight) is None
    assert deferred.source_of(model.model.norm.weight) is not None
    other = copy.deepcopy(model)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), expected.parameters(), strict=True))
    data = models.batch("llama", 0)
    assert torch.equal(models.loss(model, data), models.loss(expected, data))  # it is a model like any other
    assert all(type(p) is nn.Parameter for p in model.parameters())


@cases.at(3)
def outside_the_context_from_pretrained_is_transformers(stage: int) -> None:
    path = saved("llama")
    stock = LlamaForCausalLM.__mro__[-2]
    try:
        with deferred_loading(), deferred_loading():
            raise KeyError
    except KeyError:
        pass
    model = LlamaForCausalLM.from_pretrained(path)
    assert all(deferred.source_of(p) is None for p in model.parameters()) and stock is not None


@cases.parametrize()
def test_weights_are_read_where_they_are_needed(case: tuple[str, int], outcomes: Any) -> None:
    check(outcomes, case)
