"""The fine-tuning of `finetune_minilm.py` in a plain PyTorch loop: `zero_core.shard` is all that ZeRO adds.

torchrun --nproc-per-node 2 examples/finetune_torch.py
"""

import news
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

import zero_core


def main() -> None:
    """Trains and reports."""
    args = news.arguments(__doc__).parse_args()

    on_gpu = torch.cuda.is_available()
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)

    torch.manual_seed(args.seed)
    train, held_out, topics = news.load_articles(args.steps, args.seed, args.held_out)
    model = news.build_model(topics)
    engine = zero_core.shard(model, zero_core.ZeroConfig(stage=args.stage), device=device)
    optimizer, schedule = news.build_optimizer(model, args.steps)
    engine.bind(optimizer)

    # The articles are shuffled already; dealt out in turn, a step's are the same for any number of ranks.
    rows = news.GLOBAL_BATCH // dist.get_world_size()
    loaders = [DataLoader(data, rows, sampler=DistributedSampler(data, shuffle=False)) for data in (train, held_out)]
    losses = []
    model.train()
    for batch in loaders[0]:
        input_ids, attention_mask, labels = (column.to(device) for column in batch)
        loss = model(input_ids, attention_mask, labels=labels).loss
        loss.backward()
        engine.clip_grad_norm_(news.CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss.detach()))

    model.eval()
    hits = []
    with torch.no_grad():
        for batch in loaders[1]:
            input_ids, attention_mask, labels = (column.to(device) for column in batch)
            hits.append((model(input_ids, attention_mask).logits.argmax(-1) == labels).float().mean())
    accuracy = mean_over_ranks(torch.stack(hits).mean())
    if dist.get_rank() == 0:
        print(engine.report())
        news.write(args.json, losses, accuracy)


def mean_over_ranks(value: torch.Tensor) -> float:
    """The mean of all ranks' scalars, which have equal shares of the articles."""
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


if __name__ == "__main__":
    main()
