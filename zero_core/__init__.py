"""ZeRO (Rajbhandari et al., SC 2020) for plain PyTorch: partition optimizer state, gradients and parameters."""

from zero_core.checkpoint import Loaded, async_save_checkpoint, load_checkpoint, save_checkpoint, verify_checkpoint
from zero_core.config import MixedPrecision, Offload, ZeroConfig, ZeroStage
from zero_core.consolidation import consolidate
from zero_core.engine import ZeroEngine, engine_of, shard
from zero_core.errors import CheckpointError, PartitionedParameterError, UnsupportedOptimizerError
from zero_core.memory import Held, Report, Sent
from zero_core.pretrained import deferred_loading
from zero_core.scaler import ZeroGradScaler

__all__ = [
    "CheckpointError",
    "Held",
    "Loaded",
    "MixedPrecision",
    "Offload",
    "PartitionedParameterError",
    "Report",
    "Sent",
    "UnsupportedOptimizerError",
    "ZeroConfig",
    "ZeroEngine",
    "ZeroGradScaler",
    "ZeroStage",
    "async_save_checkpoint",
    "consolidate",
    "deferred_loading",
    "engine_of",
    "load_checkpoint",
    "save_checkpoint",
    "shard",
    "verify_checkpoint",
]
