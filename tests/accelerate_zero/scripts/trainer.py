"""A script around transformers' Trainer, which does not know of ZeRO."""

import json
import os
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows: int, seed: int) -> None:
        self.ids = torch.randint(1, 61, (rows, 8), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def main() -> None:
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(sys.argv[1:])
    set_seed(args.seed)
    config = GPT2Config(vocab_size=61, n_embd=36, n_layer=2, n_head=4, n_positions=16)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = GPT2LMHeadModel(config)
    trainer = Trainer(model=model, args=args, train_dataset=Rows(64, 1), eval_dataset=Rows(10, 2))
    last = get_last_checkpoint(args.output_dir) if os.path.isdir(args.output_dir) else None
    trainer.train(resume_from_checkpoint=last)
    metrics = trainer.evaluate()
    trainer.save_model()
    trainer.save_state()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        with open(os.path.join(args.output_dir, "losses.json"), "w") as file:
            json.dump({"losses": losses, "eval": metrics["eval_loss"], "resumed": last is not None}, file)


if __name__ == "__main__":
    main()
