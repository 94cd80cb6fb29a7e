"""The fine-tuning of `finetune_minilm.py` with transformers' Trainer: `ZeroTrainerMixin` is all that ZeRO adds.

    torchrun --nproc-per-node 2 examples/finetune_transformers.py

(Without it, `accelerate-zero launch --num_processes 2` does the same to a script with the plain Trainer.)
"""

import tempfile
from typing import Any

import news
import torch
from transformers import EvalPrediction, Trainer, TrainingArguments, set_seed

from accelerate_zero import ZeroPlugin, ZeroTrainerMixin


class ZeroTrainer(ZeroTrainerMixin, Trainer):
    """transformers' Trainer on sharded models."""


def collate(rows: list[tuple[torch.Tensor, ...]]) -> dict[str, torch.Tensor]:
    """Makes a batch of rows."""
    input_ids, attention_mask, labels = (torch.stack(column) for column in zip(*rows, strict=True))
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """The share of right topics."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> None:
    """Trains and reports."""
    parser = news.arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="as given to torchrun (default: 2)")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "output_dir": folder,
            "per_device_train_batch_size": news.GLOBAL_BATCH // args.ranks,
            "per_device_eval_batch_size": news.GLOBAL_BATCH // args.ranks,
            "max_steps": args.steps,
            "max_grad_norm": news.CLIP,
            "train_sampling_strategy": "sequential",  # the rows are shuffled already
            "average_tokens_across_devices": False,  # the loss is a mean of articles; ranks have equal shares
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": not torch.cuda.is_available(),
        }
        set_seed(args.seed)
        train, held_out, topics = news.load_articles(args.steps, args.seed, args.held_out)
        model = news.build_model(topics)
        trainer = ZeroTrainer(
            model=model,
            args=TrainingArguments(**settings),
            data_collator=collate,
            train_dataset=train,
            eval_dataset=held_out,
            compute_metrics=accuracy,
            optimizers=news.build_optimizer(model, args.steps),
            zero_plugin=ZeroPlugin(stage=args.stage),
        )
        trainer.train()
        metrics = trainer.evaluate()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        news.write(args.json, losses, metrics["eval_accuracy"])


if __name__ == "__main__":
    main()
