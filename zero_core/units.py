"""Which modules form a unit: the user's classes, the model's own blocks, repeated blocks, large leaves, size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from zero_core.config import ZeroConfig


@dataclass(eq=False)
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


@dataclass(frozen=True)
class _Use:
    """One place where a module holds a parameter.

    Attributes:
        fqn: name of the parameter there.
        param: the parameter.
        caller: the module whose call reads it.
        block: path of the enclosing block, if any.
    """

    fqn: str
    param: nn.Parameter
    caller: nn.Module
    block: str | None


def find(model: nn.Module, config: ZeroConfig) -> Partitioning:
    """Divides the parameters of `model` into units.

    Raises:
        ValueError: a class in `config.unit_classes` matches no module.
    """
    blocks = _blocks(model, config)
    uses = list(_uses(model, blocks))
    first: dict[nn.Parameter, _Use] = {}
    for use in uses:
        first.setdefault(use.param, use)
    specs = {path: UnitSpec(path, [module]) for path, module in blocks.items()}
    for use in first.values():
        if use.block is not None:
            specs[use.block].params.append((use.fqn, use.param))
    rest = [use for use in first.values() if use.block is None]
    units = [*(spec for spec in specs.values() if spec.params), *_rest_units(model, rest, config)]
    order = {param: position for position, param in enumerate(first)}
    units.sort(key=lambda spec: order[spec.params[0][1]])
    return Partitioning(tuple(units), tuple(_borrowers(model, uses, units, blocks)))


def _uses(model: nn.Module, blocks: dict[str, nn.Module]) -> Iterator[_Use]:
    """Yields every use of a parameter in registration order, tied ones several times."""
    seen: set[nn.Module] = set()

    def visit(path: str, module: nn.Module, caller: nn.Module, block: str | None) -> Iterator[_Use]:
        if module in seen:
            return
        seen.add(module)
        # A ParameterList is never called itself: its parent reads the parameters.
        caller = caller if isinstance(module, (nn.ParameterList, nn.ParameterDict)) else module
        block = path if path in blocks else block
        prefix = f"{path}." if path else ""
        for name, param in module._parameters.items():
            if param is not None:
                yield _Use(f"{prefix}{name}", param, caller, block)
        for name, child in module.named_children():
            yield from visit(f"{prefix}{name}", child, caller, block)

    yield from visit("", model, model, None)


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


def _rest_units(model: nn.Module, rest: list[_Use], config: ZeroConfig) -> list[UnitSpec]:
    """Units for what no block covers: large leaves alone, the others together, divided by size where they are many."""
    paths = {module: path for path, module in model.named_modules()}
    leaves: dict[nn.Module, UnitSpec] = {}
    for use in rest:
        leaf = leaves.setdefault(use.caller, UnitSpec(paths[use.caller], [use.caller]))
        leaf.params.append((use.fqn, use.param))
    units = [leaf for leaf in leaves.values() if leaf.numel >= config.unit_numel and leaf.modules != [model]]
    small = [leaf for leaf in leaves.values() if leaf not in units]
    if sum(leaf.numel for leaf in small) > config.unit_numel:
        return units + list(_groups(small, config.unit_numel))
    if small:
        # The model's own call needs them throughout; each module's too, for it may be called by itself.
        callers = dict.fromkeys([model, *(module for leaf in small for module in leaf.modules)])
        units.append(UnitSpec("(rest)", list(callers), [item for leaf in small for item in leaf.params]))
    return units


def _groups(leaves: list[UnitSpec], numel: int) -> Iterator[UnitSpec]:
    """Joins neighbours until each group has `numel` elements."""
    group: list[UnitSpec] = []
    for leaf in leaves:
        group.append(leaf)
        if sum(member.numel for member in group) >= numel or leaf is leaves[-1]:
            name = group[0].name if len(group) == 1 else f"{group[0].name} … {group[-1].name}"
            yield UnitSpec(
                name, [m for leaf in group for m in leaf.modules], [i for leaf in group for i in leaf.params]
            )
            group = []


def _borrowers(
    model: nn.Module, uses: list[_Use], units: list[UnitSpec], blocks: dict[str, nn.Module]
) -> Iterator[tuple[nn.Module, tuple[UnitSpec, ...]]]:
    owners = {param: spec for spec in units for _, param in spec.params}
    borrowed: dict[nn.Module, dict[str, UnitSpec]] = {}
    for use in uses:
        owner = owners[use.param]
        callers = (use.caller, model, blocks[use.block] if use.block is not None else model)
        if not any(module in owner.modules for module in callers):
            borrowed.setdefault(use.caller, {})[owner.name] = owner
    for module, specs in borrowed.items():
        yield module, tuple(specs.values())
