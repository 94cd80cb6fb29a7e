"""Tiny models of every family the engine must handle, with a batch for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCAB = 101


def mlp() -> nn.Module:
    """66 elements in odd sizes: nothing divides by 2 or 3 ranks."""
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=40, intermediate_size=50, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=False,
        )
    )  # fmt: skip


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB, n_embd=36, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )  # fmt: skip


def bert() -> nn.Module:
    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCAB, hidden_size=36, num_hidden_layers=2, num_attention_heads=4, intermediate_size=50,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def albert() -> nn.Module:
    """One layer's weights, called four times."""
    return AlbertForMaskedLM(
        AlbertConfig(
            vocab_size=VOCAB, embedding_size=20, hidden_size=36, num_hidden_layers=4, num_attention_heads=4,
            intermediate_size=50, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            classifier_dropout_prob=0.0,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB, d_model=36, d_kv=9, num_layers=2, num_heads=4, d_ff=50, dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )  # fmt: skip


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp, "llama": llama, "gpt2": gpt2, "bert": bert, "albert": albert, "t5": t5,
}  # fmt: skip


def build(name: str, seed: int = 0) -> nn.Module:
    """The model of a family with the weights of `seed`."""
    torch.manual_seed(seed)
    return FAMILIES[name]()


def batch(name: str, step: int, size: int = 12) -> dict[str, Tensor]:
    """The whole (all ranks') batch of a step."""
    generator = torch.Generator().manual_seed(1000 + step)
    if name == "mlp":
        x, y = torch.randn(size, 5, generator=generator), torch.randn(size, 3, generator=generator)
        return {"input": x, "target": y}
    ids = torch.randint(1, VOCAB, (size, 9), generator=generator)
    return {"input_ids": ids, "labels": ids}


def random_tokens(*shape: int, seed: int = 0) -> Tensor:
    """Tokens, the same on all ranks."""
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def part(data: dict[str, Tensor], rank: int, world_size: int) -> dict[str, Tensor]:
    """`rank`'s part of a whole batch."""
    return {key: value.chunk(world_size)[rank] for key, value in data.items()}


def loss(model: nn.Module, data: dict[str, Any]) -> Tensor:
    """The mean loss of a batch."""
    if "target" in data:
        return nn.functional.mse_loss(model(data["input"]), data["target"])
    result: Tensor = model(**data).loss
    return result
