"""An Accelerate script of the usual shape, which does not know of ZeRO."""

import argparse
import json
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--checkpointing_steps", type=int, default=3)
    parser.add_argument("--resume_from_checkpoint")
    args = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=2, project_dir=args.output_dir)
    set_seed(0)
    config = GPT2Config(vocab_size=61, n_embd=36, n_layer=2, n_head=4, n_positions=16)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = GPT2LMHeadModel(config)
    rows = torch.randint(1, 61, (32, 8), generator=torch.Generator().manual_seed(1))
    held_out = torch.randint(1, 61, (7, 8), generator=torch.Generator().manual_seed(2))
    train, evaluation = (
        DataLoader(TensorDataset(rows), batch_size=4, shuffle=True),
        DataLoader(TensorDataset(held_out), 2),
    )

    decay = [p for n, p in model.named_parameters() if "bias" not in n and "ln" not in n]
    rest = [p for n, p in model.named_parameters() if "bias" in n or "ln" in n]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    steps = args.epochs * len(train) // 2
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, steps)
    model, optimizer, train, evaluation, scheduler = accelerator.prepare(model, optimizer, train, evaluation, scheduler)

    done, losses = 0, []
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        done = int(args.resume_from_checkpoint.rsplit("_", 1)[1])
    step = 0
    for epoch in range(args.epochs):
        model.train()
        train.set_epoch(epoch)
        for (ids,) in train:
            with accelerator.accumulate(model):
                if accelerator.sync_gradients:
                    step += 1
                if step < done or (step == done and accelerator.sync_gradients):
                    continue
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
            if accelerator.sync_gradients and step % args.checkpointing_steps == 0:
                accelerator.save_state(os.path.join(args.output_dir, f"step_{step}"))
        model.eval()
        found = []
        for (ids,) in evaluation:
            with torch.no_grad():
                out = model(input_ids=ids)
            found.append(accelerator.gather_for_metrics((out.logits.argmax(-1), ids)))
        hits = sum((guess == ids).sum().item() for guess, ids in found)
        assert sum(len(ids) for _, ids in found) == len(held_out)
        accelerator.print(f"epoch {epoch}: {hits} hits")
    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        args.output_dir, is_main_process=accelerator.is_main_process, save_function=accelerator.save, state_dict=state
    )
    if accelerator.is_main_process:
        with open(os.path.join(args.output_dir, "losses.json"), "w") as file:
            json.dump({"losses": losses, "lr": scheduler.get_last_lr()[0], "kind": type(accelerator).__module__}, file)
    accelerator.end_training()


if __name__ == "__main__":
    main()
