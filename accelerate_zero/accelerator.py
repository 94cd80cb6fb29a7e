"""`Accelerator(zero_plugin=...)`: translates Accelerate's calls into the engine's."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import PartialState
from accelerate.utils import DynamoBackend, compile_regions
from torch import Tensor, nn
from torch.optim import Optimizer

from accelerate_zero import checkpoint
from accelerate_zero.optimizer import ZeroOptimizer
from accelerate_zero.plugin import ZeroPlugin
from zero_core import ZeroEngine, ZeroGradScaler, engine_of, shard
from zero_core.collectives import raising_together

# What switches each of Accelerate's other engines on.
_OTHER_ENGINES = {
    "ACCELERATE_USE_FSDP": ("fsdp_plugin",),
    "ACCELERATE_USE_DEEPSPEED": ("deepspeed_plugin", "deepspeed_plugins"),
    "ACCELERATE_USE_MEGATRON_LM": ("megatron_lm_plugin",),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("parallelism_config",),
}


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """Accelerate's `Accelerator` whose models are sharded by ZeRO.

    Models stay the user's objects, so nothing has to be unwrapped. Models, optimizers, loaders and schedulers may be
    prepared in any order, in one or several calls; several models with several optimizers work. Everything not named
    here is Accelerate's own. Works on CPU (gloo) and CUDA (NCCL), and alone, in a process without a launcher.

    Args:
        *args: as for `accelerate.Accelerator`.
        zero_plugin: ZeRO's settings; `None` for what the variables `ACCELERATE_ZERO_*` say, or the defaults.
        **kwargs: as for `accelerate.Accelerator`.

    Raises:
        ValueError: settings that contradict each other, or a plugin of another engine.
        RuntimeError: several processes were started that Accelerate takes for single ones.
    """

    def __init__(self, *args: Any, zero_plugin: ZeroPlugin | None = None, **kwargs: Any) -> None:
        self.zero_plugin = zero_plugin or ZeroPlugin()
        self._unbound: list[Optimizer] = []  # prepared before their models
        self._gathered: dict[int, Any] = {}  # models' states that are gathered, while they are written
        if not PartialState._shared_state and not torch.accelerator.is_available():
            kwargs.setdefault("cpu", True)  # or Accelerate would not join processes that have no other device
        _refuse_other_engines(kwargs)
        super().__init__(*args, **kwargs)
        self.zero_config = self.zero_plugin.config(self.mixed_precision)
        _join_alone_if_needed(self.device)
        self.native_amp = False  # the engine runs forward under autocast
        policy = self.zero_config.mixed_precision
        if policy is not None and policy.param == torch.float16 and policy.autocasts:
            scaling = self.scaler_handler.to_kwargs() if self.scaler_handler is not None else {}
            self.scaler = ZeroGradScaler(self.device.type, **scaling)

    # -- prepare ---------------------------------------------------------------------------------------------------

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shards a model, in place; a model that is sharded already is returned as it is. All ranks.

        Args:
            model: the model.
            device_placement: `False` leaves it on the device it is on.
            evaluation_mode: makes no difference: weights may be larger than a device in evaluation as well.

        Raises:
            ValueError: another wrapper holds the model already, or it is spread over devices.
        """
        engine = engine_of(model)
        if model not in self._models:
            self._models.append(model)
        if engine is None:
            if self.verify_device_map(model):
                raise ValueError(
                    "the model was loaded with device_map, which spreads it over devices. Load it without: shards are "
                    "brought to the device a unit at a time."
                )
            placed = self.device_placement if device_placement is None else device_placement
            if any(True for _ in model.parameters()):
                shard(model, self.zero_config, device=self.device if placed else None)
            elif placed:
                model.to(self.device)
        self._bind()
        model._is_accelerate_prepared = True  # type: ignore[assignment]
        return self._compiled(model)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> ZeroOptimizer:
        """Makes an optimizer step on this rank's slices, as soon as its model is prepared."""
        if isinstance(optimizer, ZeroOptimizer):
            if optimizer not in self._optimizers:
                self._optimizers.append(optimizer)
            return optimizer
        prepared = ZeroOptimizer(optimizer, self.scaler)
        self._optimizers.append(prepared)
        self._unbound.append(optimizer)
        self._bind()
        return prepared

    def _bind(self) -> None:
        waiting = []
        for optimizer in self._unbound:
            engine = engine_of(optimizer)
            if engine is None:
                waiting.append(optimizer)
            else:
                engine.bind(optimizer)
        self._unbound = waiting

    def _compiled(self, model: nn.Module) -> nn.Module:
        plugin = self.state.dynamo_plugin
        if plugin.backend == DynamoBackend.NO or isinstance(model, torch._dynamo.OptimizedModule):
            return model
        if plugin.use_regional_compilation:
            return compile_regions(model, **plugin.to_kwargs())  # type: ignore[no-any-return]
        return torch.compile(model, **plugin.to_kwargs())  # type: ignore[return-value]

    def free_memory(self, *objects: Any) -> list[Any]:
        """Lets go of what was prepared; see `accelerate.Accelerator.free_memory`. Models stay sharded while they live."""
        self._unbound = []
        return super().free_memory(*objects)  # type: ignore[no-any-return]

    # -- steps -----------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """A context for backwards that end no step; see `zero_core.ZeroEngine.no_sync`."""
        engine = engine_of(model)
        with engine.no_sync() if engine is not None else super().no_sync(model):
            yield

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[None]:
        """`torch.autocast` in the compute dtype of mixed precision, for code outside the models."""
        policy = self.zero_config.mixed_precision
        handler = autocast_handler or self.autocast_handler
        enabled = policy is not None and policy.autocasts and (handler is None or handler.enabled)
        dtype = None if policy is None else policy.param
        return torch.autocast(self.device.type, dtype, enabled=enabled)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divides the gradients by the loss scale, where fp16 has one. All ranks."""
        if self.scaler is None:
            return
        wanted = self._optimizers if optimizer is None else optimizer
        for item in wanted if isinstance(wanted, (list, tuple)) else [wanted]:
            inner = item.optimizer if isinstance(item, AcceleratedOptimizer) else item
            if not self.scaler._per_optimizer_states[id(inner)]["found_inf_per_device"]:
                self.scaler.unscale_(inner)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips the gradient of `parameters`, of one or several models, by its norm over all ranks. All ranks.

        Returns:
            the norm before clipping: 0-dim, the same bits on every rank.

        Raises:
            ValueError: a parameter of a model that is not prepared.
        """
        by_engine = self._by_engine(parameters)
        self._unscale_those_of(by_engine)
        norms = [engine.grad_norm(norm_type, params) for engine, params in by_engine.items()]
        total = _norm_of_norms(norms, norm_type, self.device)
        for engine, params in by_engine.items():
            engine.clip_grads_with_norm_(max_norm, total, params)
        return total

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamps the averaged gradient's elements to ±`clip_value`. All ranks.

        Raises:
            ValueError: a parameter of a model that is not prepared.
        """
        by_engine = self._by_engine(parameters)
        self._unscale_those_of(by_engine)
        for engine, params in by_engine.items():
            engine.clip_grad_value_(clip_value, params)

    def _unscale_those_of(self, by_engine: dict[ZeroEngine, list[nn.Parameter]]) -> None:
        # Not all: another optimizer may be in the middle of its micro-batches.
        clipped = {id(param) for params in by_engine.values() for param in params}
        self.unscale_gradients(
            [opt for opt in self._optimizers if any(id(p) in clipped for g in opt.param_groups for p in g["params"])]
        )

    def _by_engine(self, parameters: Any) -> dict[ZeroEngine, list[nn.Parameter]]:
        found: dict[ZeroEngine, list[nn.Parameter]] = {}
        params: Iterable[Any] = [parameters] if isinstance(parameters, Tensor) else parameters
        for param in params:
            engine = engine_of(param)
            if engine is None:
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} belongs to no prepared model: its gradient is this rank's "
                    "alone. Pass the model to accelerator.prepare()."
                )
            found.setdefault(engine, []).append(param)
        return found

    def join_uneven_inputs(
        self, joinables: list[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Not offered: at stage 3 a rank without batches would have to gather weights for the others all the same.

        Raises:
            ValueError: says what to do instead.
        """
        raise ValueError(
            "ranks must have the same number of batches under ZeRO. Keep DataLoaderConfiguration(even_batches=True), the "
            "default, with which gather_for_metrics leaves out what fills the last batch."
        )

    # -- state -----------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's whole state dict on the main process, on the CPU; empty on the others. All ranks."""
        engine = engine_of(model)
        if engine is None:
            return super().get_state_dict(model, unwrap)  # type: ignore[no-any-return]
        if id(model) in self._gathered:
            return self._gathered[id(model)]  # type: ignore[no-any-return]
        return engine.full_state_dict()

    def save_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Saves a model's weights as plain files; see `accelerate.Accelerator.save_model`. All ranks.

        Raises:
            Exception: writing failed; on all ranks.
        """
        self._meet("accelerator.save_model()", [model])
        with self.showing([(model, self.get_state_dict(model))]), raising_together():
            if self.is_main_process:
                super().save_model(model, *args, **kwargs)

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> Path:
        """Saves models, optimizers, schedulers, loaders, loss scale, random numbers and registered objects. All ranks.

        Models and optimizers are written in parts, by every rank its own, as `zero_core.save_checkpoint` does: they load at
        any number of ranks and stage, here and in plain loops and Lightning. The rest are Accelerate's own files. The
        directory takes its place when it is complete; files of others in one that is there already stay.

        With hooks of `register_save_state_pre_hook`, models are gathered, for the hooks to see them whole on the main
        process. What a hook takes out of the list is not saved, and what it changes is written whole, as by Accelerate.

        Args:
            output_dir: the directory, on a file system that all ranks see; `None` with automatic naming.
            safe_serialization: of models that are written whole; `False` for torch's format.
            **kwargs: as for `accelerate.Accelerator.save_state`; without effect.

        Returns:
            the directory.

        Raises:
            ValueError: there is no `output_dir`, or automatic naming finds the name taken.
            Exception: writing failed; on all ranks. A state that was there before is as it was.
        """
        self._meet("accelerator.save_state()", self._models)
        return checkpoint.save_state(self, output_dir, safe_serialization)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Loads what `save_state` saved, at any number of ranks and stage; each rank reads its part. All ranks.

        Takes states of Accelerate's own as well (DDP's, FSDP's), and what `zero_core.load_checkpoint` takes: then weights
        and optimizers go on from it, and the rest starts afresh.

        Args:
            input_dir: the directory; `None` for the newest one of automatic naming.
            load_kwargs: for Accelerate's reading of its own files.
            **kwargs: `strict=False` leaves out names that do not fit; `map_location` as for Accelerate.

        Raises:
            CheckpointError: it is damaged, or does not fit; says all that does not. Nothing is changed then.
            ValueError: there is no such directory.
            RuntimeError: it has more or fewer registered objects.
        """
        self._meet("accelerator.load_state()", self._models)
        checkpoint.load_state(self, input_dir, load_kwargs, kwargs)

    @contextmanager
    def showing(self, states: Iterable[tuple[nn.Module, dict[str, Any]]]) -> Iterator[None]:
        """A context in which `get_state_dict` returns states of models that are gathered already, and sends nothing."""
        self._gathered = {id(model): state for model, state in states}
        try:
            yield
        finally:
            self._gathered = {}

    def _meet(self, call: str, models: list[nn.Module]) -> None:
        """Finds out in seconds when a rank makes a call alone."""
        for engine in [engine for model in models if (engine := engine_of(model)) is not None][:1]:
            engine.meet(call)


def _refuse_other_engines(arguments: Mapping[str, Any]) -> None:
    # Looked at before Accelerate does: on a CPU it would ignore them in silence.
    for variable, names in _OTHER_ENGINES.items():
        given = [f"the argument {name}" for name in names if arguments.get(name) is not None]
        if os.environ.get(variable, "false").lower() == "true":
            given.append(f"the variable {variable}")
        if given:
            raise ValueError(
                f"{given[0]} switches on an engine that does what ZeRO does, in another way. Remove it (or the section of "
                "the config file that sets it); `accelerate-zero config --from` translates such a file."
            )


def _norm_of_norms(norms: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    if not norms:
        return torch.zeros((), device=device)
    if len(norms) == 1:
        return norms[0]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total


def _join_alone_if_needed(device: torch.device) -> None:
    """Makes a process group of one in a process without a launcher, for the engine to work on."""
    if dist.is_initialized():
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError(
            f"{os.environ['WORLD_SIZE']} processes were started, but Accelerate runs each on its own. On a CPU pass "
            "Accelerator(cpu=True) or TrainingArguments(use_cpu=True), or start with `accelerate-zero launch`."
        )
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
