"""`ZeroTrainerMixin`: transformers' Trainer as ever, with the losses and weights it has under DDP."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaForCausalLM, Seq2SeqTrainingArguments

from accelerate_zero import ZeroPlugin, ZeroTrainerMixin, sharded_init
from tests.helpers import models
from tests.helpers.cases import Cases, check, folder
from tests.helpers.ranks import run_ranks
from tests.helpers.training import Rows, ZeroSeq2SeqTrainer, arguments, losses, trainer
from zero_core import deferred, engine_of, verify_checkpoint

cases = Cases(__name__)
outcomes = cases.fixture(2, timeout=280)


def weights(run: Any) -> dict[str, torch.Tensor]:
    engine = engine_of(run.model)
    state = run.model.state_dict() if engine is None else engine.full_state_dict(all_ranks=True)
    return {name: value.detach().clone() for name, value in state.items()}


@dataclass
class Outcome:
    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    eval_loss: float


def outcome(run: Any, eval_loss: float = 0.0) -> Outcome:
    norms = [entry["grad_norm"] for entry in run.state.log_history if "grad_norm" in entry]
    return Outcome(losses(run), norms, weights(run), eval_loss)


@cache
def ddp(**settings: Any) -> Outcome:
    """What transformers' own Trainer arrives at; the same for every stage."""
    run = trainer(0, folder(), **settings)
    run.train()
    return outcome(run, run.evaluate()["eval_loss"])


def check_same(run: Any, expected: Outcome, tolerance: float = 5e-5) -> None:
    """Adam amplifies rounding where gradients vanish; the losses have no such excuse."""
    assert losses(run) == pytest.approx(expected.losses, rel=2e-5)
    own, other = weights(run), expected.weights
    assert own.keys() == other.keys()
    off = {k: (own[k] - v).abs().max().item() for k, v in other.items()}
    assert max(off.values()) < tolerance, sorted(off.items(), key=lambda item: -item[1])[:3]


@cases
def training_is_that_of_ddp(stage: int) -> None:
    for settings in ({}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}, {"gradient_checkpointing": True}):
        run, expected = trainer(stage, folder(), **settings), ddp(**settings)
        run.train()
        check_same(run, expected)
        assert run.evaluate()["eval_loss"] == pytest.approx(expected.eval_loss, rel=1e-4)
        assert outcome(run).norms == pytest.approx(expected.norms, rel=1e-3)


@cases.at(1, 3)
def evaluation_comes_first_or_alone(stage: int) -> None:
    run = trainer(stage, folder())
    assert run.evaluate()["eval_loss"] == pytest.approx(untrained_loss(), rel=1e-5)
    assert next(h.bytes for h in engine_of(run.model).report().held if h.kind == "optimizer") == 0
    run.train()
    # DDP's Trainer did not evaluate before: it would take the model for wrapped, and reduce nothing.
    check_same(run, ddp())
    predicted = run.predict(Rows(6, seed=2)).predictions
    assert predicted.shape == (6, 9, models.VOCAB)


@cases.at(1, 3)
def bf16_keeps_fp32_masters(stage: int) -> None:
    run = trainer(stage, folder(), bf16=True)
    run.train()
    assert next(run.model.parameters()).dtype == torch.bfloat16
    assert all(value.dtype == torch.float32 for value in weights(run).values())
    assert losses(run) == pytest.approx(ddp(bf16=True).losses, rel=2e-2)  # half weights; DDP casts fp32 ones


@cases.at(1, 3)
def checkpoints_rotate_and_the_best_is_loaded(stage: int) -> None:
    path = folder()
    run = trainer(
        stage, path, save_strategy="steps", eval_strategy="steps", save_steps=1, eval_steps=1, save_total_limit=2,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", learning_rate=0.1,
    )  # fmt: skip
    run.train()
    dist.barrier()
    names = sorted(p.name for p in Path(path).iterdir() if p.name.startswith("checkpoint"))
    assert len(names) == 2 and Path(run.state.best_model_checkpoint).name in names
    best = LlamaForCausalLM.from_pretrained(run.state.best_model_checkpoint).state_dict()
    assert all(torch.equal(best[name], value) for name, value in weights(run).items())


@cases
def training_resumes_from_a_checkpoint_at_another_stage(stage: int) -> None:
    path = folder()
    settings = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    whole = trainer(stage, path, **settings)
    whole.train()
    dist.barrier()
    rest = trainer(stage % 3 + 1, folder(), seed=5, **settings)
    rest.train(resume_from_checkpoint=f"{path}/checkpoint-2")
    check_same(rest, outcome(whole))
    assert rest.state.global_step == 4
    manifest = verify_checkpoint(f"{path}/checkpoint-2/optimizer_zero")
    assert manifest.world_size == 2 and not Path(path, "checkpoint-2", "optimizer.pt").exists()


@cases.at(1, 3)
def a_checkpoint_of_ddp_resumes_here(stage: int) -> None:
    rest = trainer(stage, folder(), seed=5, save_strategy="steps", save_steps=2)
    rest.train(resume_from_checkpoint=f"{ddp_checkpoints()}/checkpoint-2")
    check_same(rest, ddp())


@cache
def ddp_checkpoints() -> str:
    path = folder()
    trainer(0, path, save_strategy="steps", save_steps=2).train()
    dist.barrier()
    assert Path(path, "checkpoint-2", "optimizer.pt").exists()
    return path


@cases.at(1, 3)
def generation_stops_at_different_lengths(stage: int) -> None:
    """Each rank's sequences end where they end; nobody waits for ever."""
    model = models.build("t5")
    model.generation_config.eos_token_id = int(models.build("t5").generate(Rows(1, seed=3).ids, max_length=12)[0, 3])
    args = arguments(
        folder(), Seq2SeqTrainingArguments, predict_with_generate=True, generation_max_length=12, max_steps=1,
        per_device_eval_batch_size=1,
    )  # fmt: skip
    plugin = ZeroPlugin(stage=stage, unit_numel=3000)
    run = ZeroSeq2SeqTrainer(
        model=model, args=args, train_dataset=Rows(8), eval_dataset=Rows(6, seed=3), zero_plugin=plugin
    )
    predictions = torch.as_tensor(run.predict(Rows(6, seed=3)).predictions)
    plain = models.build("t5")
    plain.generation_config.eos_token_id = model.generation_config.eos_token_id
    for row, ids in zip(predictions, Rows(6, seed=3).ids, strict=True):
        expected = plain.generate(ids[None], max_length=12)[0]
        assert row[: len(expected)].tolist() == expected.tolist()
    lengths = {len(plain.generate(ids[None], max_length=12)[0]) for ids in Rows(6, seed=3).ids}
    assert len(lengths) > 1
    run.train()
    run.evaluate()


@cache
def untrained_loss() -> float:
    return trainer(0, folder()).evaluate()["eval_loss"]


@cache
def ddp_with_adapters() -> Outcome:
    run = trainer(0, folder(), model=lora(), learning_rate=1e-2)
    run.train()
    return outcome(run)


def lora(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.0)
    return get_peft_model(models.build("llama"), config)


@cases.at(1, 3)
def adapters_are_trained_and_saved_in_pefts_own_format(stage: int) -> None:
    path = folder()
    settings = {"save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2}
    run = trainer(stage, path, model=lora(), **settings)
    run.train()
    check_same(run, ddp_with_adapters(), 5e-4)
    dist.barrier()
    files = {p.name for p in Path(path, "checkpoint-2").iterdir()}
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files
    loaded = PeftModel.from_pretrained(models.build("llama"), f"{path}/checkpoint-4").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in weights(run).items())
    rest = trainer(stage, folder(), model=lora(1), **settings)
    rest.train(resume_from_checkpoint=f"{path}/checkpoint-2")
    check_same(rest, outcome(run), 5e-4)


@cases.at(3)
def adapters_under_either_kind_of_checkpointing(stage: int) -> None:
    for reentrant in (False, True):
        settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
        model = lora()
        model.enable_input_require_grads()
        run = trainer(stage, folder(), model=model, learning_rate=1e-2, **settings)
        run.train()
        check_same(run, ddp_with_adapters(), 5e-4)


@cases.at(3)
def weights_alone_are_saved_and_the_best_is_loaded(stage: int) -> None:
    path = folder()
    run = trainer(
        stage, path, save_strategy="steps", eval_strategy="steps", save_steps=2, eval_steps=2, save_only_model=True,
        load_best_model_at_end=True, metric_for_best_model="eval_loss",
    )  # fmt: skip
    run.train()
    assert not any("optim" in path.name for path in Path(run.state.best_model_checkpoint).iterdir())
    best = LlamaForCausalLM.from_pretrained(run.state.best_model_checkpoint).state_dict()
    assert all(torch.equal(best[name], value) for name, value in weights(run).items())


@cases.at(1, 3)
def pretrained_weights_are_read_where_they_are_needed(stage: int) -> None:
    """Under `sharded_init` nobody reads a whole model, not before training and not for it."""
    path = folder()
    if dist.get_rank() == 0:
        models.build("llama").save_pretrained(path)
    dist.barrier()
    with sharded_init():
        model = LlamaForCausalLM.from_pretrained(path)
    run = trainer(stage, folder(), model=model)
    assert all(deferred.source_of(param) is not None for param in model.parameters())
    run.train()
    check_same(run, ddp())


@cases.at(1, 3)
def embeddings_resized_before_training_are_saved(stage: int) -> None:
    path = folder()
    model = models.build("gpt2")
    model.resize_token_embeddings(models.VOCAB + 3)
    run = trainer(stage, path, model=model)
    run.train()
    assert run.model.get_input_embeddings().weight.shape[0] == models.VOCAB + 3
    run.save_model()
    dist.barrier()
    loaded = type(model).from_pretrained(path)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert torch.equal(loaded.lm_head.weight, weights(run)["transformer.wte.weight"])


@cases.parametrize()
def test_the_trainer_is_transformers(case: tuple[str, int], outcomes: Any) -> None:
    check(outcomes, case)


def tokenizer() -> Any:
    """One word a token, made here: nothing is fetched."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(models.VOCAB)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "w0")), pad_token="w0", eos_token="w1")


def sft(path: str) -> list[float]:
    """Fine-tunes adapters with TRL: sharded on several ranks, TRL's own Trainer on one."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    class ZeroSFTTrainer(ZeroTrainerMixin, SFTTrainer):
        pass

    alone = dist.get_world_size() == 1
    args = arguments(
        path, SFTConfig, learning_rate=1e-2, save_strategy="steps", save_steps=4, max_length=9, bf16=False,
        per_device_train_batch_size=8 // dist.get_world_size(),
    )  # fmt: skip
    torch.manual_seed(0)
    run = (SFTTrainer if alone else ZeroSFTTrainer)(
        model=models.build("llama"),
        args=args,
        train_dataset=Dataset.from_dict({"input_ids": models.random_tokens(32, 9).tolist()}),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.0),
        **({} if alone else {"zero_plugin": ZeroPlugin(stage=3, unit_numel=3000)}),
    )
    run.train()
    dist.barrier()
    loaded = PeftModel.from_pretrained(models.build("llama"), f"{path}/checkpoint-4").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in weights(run).items())
    return losses(run)


def test_trls_sft_trainer_has_the_losses_of_one_process(tmp_path: Path) -> None:
    alone = run_ranks(1, sft, str(tmp_path / "alone"))[0]
    together = run_ranks(2, sft, str(tmp_path / "together"))[0]
    assert together == pytest.approx(alone, rel=1e-5) and len(alone) == 4
