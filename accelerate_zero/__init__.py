"""ZeRO for Hugging Face Accelerate."""

from accelerate_zero.accelerator import Accelerator
from accelerate_zero.activation import activate, activate_if_configured, deactivate
from accelerate_zero.optimizer import ZeroOptimizer
from accelerate_zero.plugin import ZeroPlugin
from accelerate_zero.trainer import ZeroTrainerMixin, sharded_init

__all__ = ["Accelerator", "ZeroOptimizer", "ZeroPlugin", "ZeroTrainerMixin", "activate", "deactivate", "sharded_init"]

activate_if_configured()
