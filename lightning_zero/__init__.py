"""ZeRO for PyTorch Lightning: `import lightning_zero`, then `Trainer(strategy="zero3")`."""

from lightning_zero.checkpoint import load_from_checkpoint, read_directories
from lightning_zero.precision import ZeroPrecision
from lightning_zero.strategy import ZeroStrategy

__all__ = ["ZeroPrecision", "ZeroStrategy", "load_from_checkpoint"]

read_directories()
