"""Which modules form a unit: the user's classes, the model's own blocks, repeated blocks, large leaves, size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from zero_core.config import ZeroConfig


@dataclass
class UnitSpec:
    """A unit before it has memory.

    Attributes:
        name: path of its module, or the first and last of several.
        modules: the modules whose call needs the unit's weights; the model itself for what no block covers.
        params: (fully qualified name, parameter) of what the unit owns; a tied parameter belongs to the unit that
            comes first.
    """

    name: str
    modules: list[nn.Module] = field(default_factory=list)
    params: list[tuple[str, nn.Parameter]] = field(default_factory=list)

    @property
    def numel(self) -> int:
        """Elements owned."""
        return sum(param.numel() for _, param in self.params)


@dataclass(frozen=True)
class Partitioning:
    """The units of a model.

    Attributes:
        units: units in registration order; each owns at least one parameter.
        borrowers: modules that use a parameter another module's unit owns (a tied head), with those units.
    """

    units: tuple[UnitSpec, ...]
    borrowers: tuple[tuple[nn.Module, tuple[UnitSpec, ...]], ...]


def find(model: nn.Module, config: ZeroConfig) -> Partitioning:
    """Divides the parameters of `model` into units.

    Raises:
        ValueError: a class in `config.unit_classes` matches no module.
    """
    blocks = _blocks(model, config)
    specs: dict[nn.Module, UnitSpec] = {module: UnitSpec(path, [module]) for path, module in blocks.items()}
    rest: list[tuple[str, nn.Module]] = []
    users: list[tuple[nn.Module, str, nn.Parameter, UnitSpec | None]] = []
    owned: set[nn.Parameter] = set()
    for path, module, caller, block in _walk(model, "", None, blocks):
        params = [(f"{path}.{name}" if path else name, p) for name, p in module._parameters.items() if p is not None]
        spec = specs[block] if block is not None else None
        users += [(caller, name, param, spec) for name, param in params]
        if spec is None and any(param not in owned for _, param in params):
            rest.append((path, module))
        for name, param in params:
            if param not in owned and spec is not None:
                spec.params.append((name, param))
            owned.add(param)
    units = [spec for spec in specs.values() if spec.params]
    units += _rest_units(model, rest, {param for spec in units for _, param in spec.params}, config)
    order = {param: i for i, param in enumerate(model.parameters())}
    units.sort(key=lambda spec: order[spec.params[0][1]])
    return Partitioning(tuple(units), tuple(_borrowers(model, users, units)))


def _walk(
    model: nn.Module, path: str, block: nn.Module | None, blocks: dict[str, nn.Module]
) -> Iterator[tuple[str, nn.Module, nn.Module, nn.Module | None]]:
    """Yields (path, module, module whose call uses its parameters, enclosing block) in registration order."""
    seen: set[nn.Module] = set()

    def visit(
        path: str, module: nn.Module, caller: nn.Module, block: nn.Module | None
    ) -> Iterator[tuple[str, nn.Module, nn.Module, nn.Module | None]]:
        if module in seen:
            return
        seen.add(module)
        # A ParameterList is never called itself: its parent reads the parameters.
        caller = caller if isinstance(module, (nn.ParameterList, nn.ParameterDict)) else module
        block = blocks.get(path, block)
        yield path, module, caller, block
        for name, child in module.named_children():
            yield from visit(f"{path}.{name}" if path else name, child, caller, block)

    yield from visit(path, model, model, block)


def _blocks(model: nn.Module, config: ZeroConfig) -> dict[str, nn.Module]:
    if config.unit_classes:
        blocks = {path: m for path, m in model.named_modules() if path and _matches(m, config.unit_classes)}
        for item in config.unit_classes:
            if not any(_matches(module, (item,)) for module in blocks.values()):
                name = item if isinstance(item, str) else item.__name__
                known = ", ".join(sorted({type(m).__name__ for _, m in model.named_modules()}))
                raise ValueError(
                    f"unit_classes names {name!r}, but the model has no such submodule. It is made of: {known}."
                )
        return blocks
    declared = {name for m in model.modules() for name in (getattr(m, "_no_split_modules", None) or ())}
    blocks = {path: m for path, m in model.named_modules() if path and type(m).__name__ in declared}
    return blocks or dict(_repeated_blocks(model))


def _matches(module: nn.Module, classes: Sequence[type[nn.Module] | str]) -> bool:
    names = {cls.__name__ for cls in type(module).__mro__}
    return any(item in names if isinstance(item, str) else isinstance(module, item) for item in classes)


def _repeated_blocks(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields the outermost composed members of module lists, and of sequences in which their class repeats.

    A list of one counts: ALBERT keeps its one layer, called many times, in such a list.
    """
    children = list(module.named_children())
    for name, child in children:
        child_path = f"{path}.{name}" if path else name
        repeated = sum(type(other) is type(child) for _, other in children) > 1
        listed = isinstance(module, nn.ModuleList) or (isinstance(module, (nn.Sequential, nn.ModuleDict)) and repeated)
        if listed and next(child.children(), None) is not None and next(child.parameters(), None) is not None:
            yield child_path, child
        else:
            yield from _repeated_blocks(child, child_path)


def _rest_units(
    model: nn.Module, rest: list[tuple[str, nn.Module]], owned: set[nn.Parameter], config: ZeroConfig
) -> list[UnitSpec]:
    """Units for what no block covers: large leaves alone, the others together, by size where they are many."""
    units: list[UnitSpec] = []
    small: list[UnitSpec] = []
    for path, module in rest:
        params = []
        for name, param in module._parameters.items():
            if param is not None and param not in owned:
                owned.add(param)
                params.append((f"{path}.{name}" if path else name, param))
        if not params:
            continue
        spec = UnitSpec(path or "(root)", [module], params)
        called = not isinstance(module, (nn.ParameterList, nn.ParameterDict)) and module is not model
        (units if called and spec.numel >= config.unit_numel else small).append(spec)
    if sum(spec.numel for spec in small) <= config.unit_numel:
        if small:
            # The model's own call needs them throughout; each module's too, for it may be called by itself.
            callers = [model, *(module for spec in small for module in spec.modules if module is not model)]
            units.append(UnitSpec("(rest)", callers, [item for spec in small for item in spec.params]))
        return units
    group = UnitSpec("")
    for spec in small:
        group.modules += spec.modules
        group.params += spec.params
        group.name = f"{group.name.split(' … ')[0]} … {spec.name}" if group.name else spec.name
        if group.numel >= config.unit_numel:
            units.append(group)
            group = UnitSpec("")
    return units + ([group] if group.params else [])


def _borrowers(
    model: nn.Module,
    users: list[tuple[nn.Module, str, nn.Parameter, UnitSpec | None]],
    units: Iterable[UnitSpec],
) -> Iterator[tuple[nn.Module, tuple[UnitSpec, ...]]]:
    owner = {param: spec for spec in units for _, param in spec.params}
    borrowed: dict[nn.Module, dict[int, UnitSpec]] = {}
    for caller, _, param, spec in users:
        owning = owner[param]
        covered = owning is spec or caller in owning.modules or model in owning.modules
        if not covered:
            borrowed.setdefault(caller, {})[id(owning)] = owning
    for module, specs in borrowed.items():
        yield module, tuple(specs.values())
