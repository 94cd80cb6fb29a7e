"""The layout covers every element of every parameter once, in equal, aligned shards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers import models
from zero_core import ZeroConfig
from zero_core.layout import ALIGNMENT_BYTES, dense_stride, flat_layout
from zero_core.units import find


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("sizes", [[(1,)], [(3, 5), (5,), (), (0, 4)], [(100, 7), (7,)], [(16,)], [(33,)]])
def test_pieces_cover_each_element_once(sizes: list[tuple[int, ...]], dtype: torch.dtype, world_size: int) -> None:
    named = [(f"p{i}", torch.empty(size, dtype=dtype)) for i, size in enumerate(sizes)]
    layout = flat_layout(named, world_size)
    covered = {p.fqn: [] for p in layout.params}
    for rank in range(world_size):
        filled = 0
        for piece in layout.pieces(rank):
            covered[layout.params[piece.index].fqn] += range(piece.start, piece.stop)
            assert layout.params[
                piece.index
            ].offset + piece.start == rank * layout.shard_numel + piece.shard_offset or (piece.numel == 0)
            filled += piece.numel
        assert filled == layout.filled_numel(rank)
    assert covered == {name: list(range(tensor.numel())) for name, tensor in named}
    assert layout.padded_numel == world_size * layout.shard_numel >= layout.numel
    assert layout.shard_numel * dtype.itemsize % ALIGNMENT_BYTES == 0
    assert layout.padded_numel - layout.numel < world_size * max(1, ALIGNMENT_BYTES // dtype.itemsize)


def test_matrices_come_before_vectors_in_registration_order() -> None:
    layout = flat_layout(
        [("a", torch.empty(2)), ("b", torch.empty(2, 2)), ("c", torch.empty(3)), ("d", torch.empty(1, 1))], 2
    )
    assert [p.fqn for p in layout.params] == ["b", "d", "a", "c"]


@pytest.mark.parametrize(
    ("tensor", "stride"),
    [
        (torch.empty(3, 5).t(), (1, 5)),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), (60, 1, 15, 3)),
        (torch.empty(5, 6)[:, ::2], (3, 1)),
        (torch.empty(1).expand(4), (1,)),
        (torch.empty(()), ()),
    ],
)
def test_strides_are_kept_where_memory_is_dense(tensor: torch.Tensor, stride: tuple[int, ...]) -> None:
    assert dense_stride(tensor) == stride


def names(model: nn.Module, **config: object) -> list[str]:
    return [spec.name for spec in find(model, ZeroConfig(**config)).units]  # type: ignore[arg-type]


def test_units_follow_what_transformers_says_not_to_split() -> None:
    assert names(models.build("llama")) == ["(rest)", "model.layers.0", "model.layers.1", "model.layers.2"]
    assert names(models.build("t5"), unit_numel=3000) == [
        "shared", "encoder.block.0", "encoder.block.1", "(rest)", "decoder.block.0", "decoder.block.1"
    ]  # fmt: skip


def test_large_leaves_are_units_of_their_own() -> None:
    assert names(models.build("llama"), unit_numel=4040)[::4] == ["model.embed_tokens", "(rest)"]
    assert "lm_head" in names(models.build("llama"), unit_numel=4040)


def test_repeated_blocks_are_found_without_a_declaration() -> None:
    block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.ModuleList([block, nn.Identity()]))
    assert names(model) == ["(rest)", "2.0"]
    assert names(nn.Sequential(nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 3), nn.Linear(4, 4))) == [
        "0.layers.0", "0.layers.1", "0.layers.2", "(rest)"
    ]  # fmt: skip


def test_the_shared_layer_of_albert_is_one_unit() -> None:
    assert "albert.encoder.albert_layer_groups.0" in names(models.build("albert"))


def test_what_is_left_is_divided_by_size() -> None:
    model = nn.Sequential(*[nn.Linear(10, 10) for _ in range(6)])
    assert names(model, unit_numel=200) == ["0 … 1", "2 … 3", "4 … 5"]
    assert names(model, unit_numel=110) == ["0", "1", "2", "3", "4", "5"]


def test_a_tied_parameter_belongs_to_the_first_unit_and_is_lent_to_the_other() -> None:
    model = models.build("gpt2")
    partitioning = find(model, ZeroConfig(unit_numel=3000))
    owners = [spec.name for spec in partitioning.units if any(p is model.lm_head.weight for _, p in spec.params)]
    assert owners == ["transformer.wte"]
    assert [(module, [spec.name for spec in specs]) for module, specs in partitioning.borrowers] == [
        (model.lm_head, ["transformer.wte"])
    ]


def test_every_parameter_is_in_exactly_one_unit() -> None:
    for family in models.FAMILIES:
        for unit_numel in (1, 3000, 10**6):
            model = models.build(family)
            owned = [p for spec in find(model, ZeroConfig(unit_numel=unit_numel)).units for _, p in spec.params]
            assert len(owned) == len(set(owned)) and set(owned) == set(model.parameters())
