"""What others see in place of a partitioned parameter and of its gradient: the right shape, and a helpful error.

Both are views of one NaN, so they cost no memory, and should anything read them without going through
`__torch_function__` the result is loud. `torch.nn.parameter.UninitializedParameter` is the precedent for switching a
parameter's class.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary


class Owner(Protocol):
    """Who can bring a parameter's values back."""

    def on_touch(self, param: nn.Parameter, func: Callable[..., Any]) -> None:
        """Makes the values available (then the parameter's class is plain again) or raises."""

    def on_copy(self, param: nn.Parameter, source: Tensor) -> bool:
        """Takes `param.copy_(source)` over while a state dict is loaded; false where it does not."""

    def zero_gradient(self, param: nn.Parameter) -> None:
        """Zeroes the shards of the gradient, as `param.grad.zero_()` asks."""

    def gradient_error(self, param: nn.Parameter) -> Exception:
        """The error for a touched placeholder gradient."""


# Parameter -> owner; by identity, since tensors compare element by element. Both ends are weak: the owner holds the
# parameters, so a strong value would keep them for ever.
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()


def register(param: nn.Parameter, owner: Owner) -> None:
    """Makes `owner` answer for `param` while it is partitioned."""
    _owners[param] = weakref.ref(owner)


def owner_of(param: nn.Parameter) -> Owner | None:
    """Who answers for `param`, if an engine does."""
    reference: weakref.ref[Owner] | None = _owners.get(param)
    return reference() if reference is not None else None


def forget(param: nn.Parameter) -> None:
    """Undoes `register`."""
    _owners.pop(param, None)


class PartitionedParameter(nn.Parameter):
    """The class of a parameter whose values are not (all) on this rank."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            return _plain(func, args, kwargs)
        if _changes_nothing(func, args, kwargs):
            return args[0]
        if func is torch.equal and all(type(item) is PartitionedParameter for item in args):
            # Asked whether a parameter is in a list (Lightning's finetuning callback does): the object answers that.
            return args[0] is args[1]
        for param in _partitioned(args, kwargs):
            owner = owner_of(param)
            if owner is None:
                raise AssertionError("a partitioned parameter has no owner")
            if func is Tensor.copy_ and param is args[0] and owner.on_copy(param, args[1]):
                return param
            owner.on_touch(param, func)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        # Parameter's own would make the copy of this class, with nobody to answer for it.
        if (owner := owner_of(self)) is not None:
            owner.on_touch(self, copy.deepcopy)
        return copy.deepcopy(self, memo)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PartitionedParameter(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"


class PartitionedGradient(Tensor):
    """The `.grad` of a parameter whose gradient was reduced into the shards of all ranks."""

    _param: weakref.ref[nn.Parameter]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            return _plain(func, args, kwargs)
        if _changes_nothing(func, args, kwargs):
            return args[0]
        if func is Tensor.detach_:  # `zero_grad(set_to_none=False)` detaches, then zeroes
            return args[0]
        for item in _leaves((args, kwargs)):
            param = item._param() if isinstance(item, PartitionedGradient) else None
            owner = owner_of(param) if param is not None else None
            if param is None or owner is None:
                continue
            if func not in _ZEROING:
                raise owner.gradient_error(param)
            owner.zero_gradient(param)
        return args[0]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PartitionedGradient(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"


def placeholder_values(like: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
    """One NaN (false, zero for dtypes without NaN) expanded to `like`'s shape, in `dtype` and on `device` (or its own)."""
    dtype = dtype or like.dtype
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device or like.device).expand(like.shape)


def placeholder_grad(param: nn.Parameter) -> PartitionedGradient:
    """The placeholder that stands in `param.grad` once the gradient lives in shards."""
    with torch._C.DisableTorchFunctionSubclass():
        grad = placeholder_values(param, param.grad_dtype).as_subclass(PartitionedGradient)
    grad._param = weakref.ref(param)
    return grad


def _plain(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _changes_nothing(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    # `model.to(device)` converts every parameter, then assigns `.data`; both are no-ops where all is in place already.
    if func == _SET_DATA:  # a method wrapper is a new object at every access
        return args[0] is args[1]
    return func in _CONVERSIONS and _plain(func, args, kwargs) is args[0]


def _partitioned(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[PartitionedParameter]:
    for item in _leaves((args, kwargs)):
        # A touch may have gathered a whole unit, so the class is read again for each.
        if type(item) is PartitionedParameter:
            yield item


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        yield tree
        return
    for item in tree:
        yield from _leaves(item)


# What a parameter can be asked in every state: everything but its values. Hooks and flags belong to the parameter
# object and not to its values, so they pass too.
_PROPERTIES = (
    "shape ndim dtype device layout requires_grad grad is_leaf grad_fn is_meta is_cuda is_cpu is_sparse is_mkldnn is_mps "
    "is_quantized is_nested is_sparse_csr is_xla is_xpu _version itemsize nbytes output_nr retains_grad _backward_hooks "
    "_post_accumulate_grad_hooks name names _is_view grad_dtype"
).split()
_METHODS = (
    "size dim numel nelement stride __len__ is_complex is_floating_point is_signed is_inference element_size "
    "ndimension get_device requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad storage_offset "
    "is_same_size __hash__ __dir__ __repr__ is_contiguous _is_view"
).split()


# New tensors of a parameter's shape and dtype (an optimizer's state) need no values either.
_FACTORIES = "empty_like zeros_like ones_like full_like rand_like randn_like".split()
_METHODS += "new_empty new_zeros new_ones new_full new_tensor".split()


def _metadata() -> frozenset[Any]:
    functions: set[Any] = {
        torch._has_compatible_shallow_copy_type,
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    }
    functions.update((torch.is_tensor, torch.is_same_size))
    functions.update(getattr(torch, name) for name in _FACTORIES)
    for name in _PROPERTIES:
        attribute: Any = getattr(Tensor, name, None)
        if attribute is not None:
            functions.add(attribute.__get__)
    for name in ("requires_grad", "grad"):
        functions.add(getattr(Tensor, name).__set__)
    functions.add(getattr(Tensor.grad, "__delete__"))  # noqa: B009 - typed as the tensor it gives
    for name in _METHODS:
        if (method := getattr(Tensor, name, None)) is not None:
            functions.add(method)
    return frozenset(functions)


_METADATA = _metadata()
_ZEROING = frozenset({Tensor.zero_, torch.zero_, torch._foreach_zero_})
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_CONVERSIONS = frozenset(
    getattr(Tensor, name) for name in "to cpu cuda float double half bfloat16 type contiguous".split()
)
