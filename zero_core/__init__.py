"""ZeRO (Rajbhandari et al., SC 2020) for plain PyTorch: partition optimizer state, gradients and parameters."""

from zero_core.config import MixedPrecision, Offload, ZeroConfig, ZeroStage
from zero_core.engine import ZeroEngine, engine_of, shard
from zero_core.errors import PartitionedParameterError, UnsupportedOptimizerError
from zero_core.memory import Held, Report, Sent
from zero_core.pretrained import deferred_loading
from zero_core.scaler import ZeroGradScaler

__all__ = [
    "Held",
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
    "deferred_loading",
    "engine_of",
    "shard",
]
