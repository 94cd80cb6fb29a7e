"""transformers' `from_pretrained` without reading: weights stay in their files until `shard` reads each rank's part.

Knows transformers' loader by the names of two of its functions, and imports it only where the caller has or asks to.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zero_core.deferred import SafetensorsFile, StoredTensor, defer

_DEPTH: list[int] = []


@contextmanager
def deferred_loading() -> Iterator[None]:
    """A context in which `from_pretrained` leaves the weights in their files.

    What it returns has the right shapes, dtypes, ties and buffers; `shard` (or the host that calls it) reads each rank's
    part. Values that are asked for before are read whole, tensor by tensor. Weights that the files do not have are
    initialised as ever. What transformers converts while loading (fused experts, quantised weights) is read whole.

    Does nothing where transformers has not been imported.
    """
    modeling, loader = (
        sys.modules.get("transformers.modeling_utils"),
        sys.modules.get("transformers.core_model_loading"),
    )
    if modeling is None or loader is None or _DEPTH:
        yield
        return
    model_class = modeling.PreTrainedModel
    stock_load, stock_from = model_class.__dict__["_load_pretrained_model"], model_class.__dict__["from_pretrained"]

    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        # A default device of "meta", which models are built on that have no files, would make transformers refuse.
        with torch.device("cpu"):
            return stock_from.__get__(None, cls)(*args, **kwargs)

    _DEPTH.append(1)
    model_class._load_pretrained_model = staticmethod(functools.partial(_load, stock_load.__func__, loader))
    model_class.from_pretrained = classmethod(functools.wraps(stock_from.__func__)(from_pretrained))
    try:
        yield
    finally:
        _DEPTH.pop()
        model_class._load_pretrained_model, model_class.from_pretrained = stock_load, stock_from


def _load(
    stock: Callable[..., Any],
    loader: Any,
    model: Any,
    state_dict: Any,
    files: list[str] | None,
    config: Any,
    *rest: Any,
) -> Any:
    """Defers what is only renamed on its way from the files; leaves the rest to transformers."""
    if state_dict is not None or not files or config.device_map is not None or config.hf_quantizer is not None:
        return stock(model, state_dict, files, config, *rest)
    stored = _stored_tensors(files)
    params = dict(model.named_parameters(remove_duplicate=False))
    keeps_digits = _matcher(loader, config.dtype_plan)
    converters = [m for m in config.weight_mapping or [] if isinstance(m, loader.WeightConverter)]
    renamings = [m for m in config.weight_mapping or [] if isinstance(m, loader.WeightRenaming)]
    names = model.state_dict()
    later: dict[str, StoredTensor] = {}
    left: dict[str, Any] = {}
    for key, tensor in stored.items():
        name, converter = loader.rename_source_key(key, renamings, converters, model.base_model_prefix, names)
        if name not in names and key in names:
            name, converter = loader.rename_source_key(key, [], [], model.base_model_prefix, names)
        param = params.get(name)
        shape = tuple(tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape)
        if converter is not None or param is None or tuple(param.shape) != shape or keeps_digits(name):
            left[key] = tensor
        else:
            later[name] = StoredTensor(tensor, shape)
    info, index = stock(model, left, None, config, *rest)
    for name, source in later.items():
        defer(params[name], source)
        params[name]._is_hf_initialized = True
    info.missing_keys -= later.keys()
    return info, index


def _stored_tensors(files: list[str]) -> dict[str, Any]:
    stored: dict[str, Any] = {}
    for path in files:
        if path.endswith(".safetensors"):
            file = SafetensorsFile(path)
            stored.update({key: file.slice(key) for key in file.keys()})
        else:
            stored.update(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
    return stored


def _matcher(loader: Any, plan: dict[str, torch.dtype] | None) -> Callable[[str], bool]:
    """Whether a parameter is kept in another dtype than the model's, which is transformers' business."""
    if not plan:
        return lambda name: False
    pattern = loader.build_glob_alternation(list(plan))[0]
    return lambda name: pattern.search(name) is not None
