"""The fine-tuning of `finetune_minilm.py` in an Accelerate loop: the import of `Accelerator` is all that ZeRO changes.

    torchrun --nproc-per-node 2 examples/finetune_accelerate.py

(With `from accelerate import Accelerator` instead, `accelerate-zero launch --num_processes 2` does the same.)
"""

import news
import torch
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader

from accelerate_zero import Accelerator, ZeroPlugin, sharded_init


def main() -> None:
    """Trains and reports."""
    args = news.arguments(__doc__).parse_args()

    accelerator = Accelerator(
        zero_plugin=ZeroPlugin(stage=args.stage),
        dataloader_config=DataLoaderConfiguration(split_batches=True),  # a batch is that of all ranks together
    )
    set_seed(args.seed)
    train, held_out, topics = news.load_articles(args.steps, args.seed, args.held_out)
    with sharded_init():  # each rank will read its part of the weights only
        model = news.build_model(topics)
    optimizer, schedule = news.build_optimizer(model, args.steps)
    loaders = [DataLoader(data, news.GLOBAL_BATCH) for data in (train, held_out)]
    model, optimizer, schedule, train_loader, held_out_loader = accelerator.prepare(
        model, optimizer, schedule, *loaders
    )

    losses = []
    model.train()
    for input_ids, attention_mask, labels in train_loader:
        loss = model(input_ids, attention_mask, labels=labels).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), news.CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())

    model.eval()
    hits = []
    for input_ids, attention_mask, labels in held_out_loader:
        with torch.no_grad():
            guesses = model(input_ids, attention_mask).logits.argmax(-1)
        hits.append(accelerator.gather_for_metrics(guesses == labels))
    if accelerator.is_main_process:
        news.write(args.json, losses, torch.cat(hits).float().mean().item())


if __name__ == "__main__":
    main()
