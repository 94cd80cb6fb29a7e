"""ZeRO for Hugging Face Accelerate. Nothing is here yet; use `zero_core.shard` or `lightning_zero` meanwhile."""

__all__: list[str] = []
