"""Where each tensor of a checkpoint goes in this run, and all that does not fit, found before anything is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from zero_core.engine import ZeroEngine, engine_of
from zero_core.errors import CheckpointError
from zero_core.sharded_state import EVERYWHERE, clean, is_extra_state, same
from zero_core.stored import Stored, StoredOptimizer

T = TypeVar("T")


class ModelRoom:
    """One model's part of a load.

    Args:
        stored: the checkpoint.
        names: of its tensors, each with the reader's name for it.
        values: what modules keep beside tensors, by name.
        engine: the model to load.
        rename: beginnings of stored names, each with what to put in its place.

    Attributes:
        missing: names that only the model has.
        unexpected: names that only the checkpoint has.
        misshapen: names of what has another shape there, with both shapes.
    """

    def __init__(
        self,
        stored: Stored,
        names: Mapping[str, str],
        values: Mapping[str, Any],
        engine: ZeroEngine,
        rename: Mapping[str, str],
    ) -> None:
        self._engine = engine
        self._state = engine.model_state()
        shapes = self._state.names
        own = [*shapes, *filter(is_extra_state, self._state.values)]
        values = {name: value for name, value in values.items() if is_extra_state(name)}
        self._rename = rename or prefix([*names, *values], own)
        places = {self._renamed(name): place for name, place in names.items()}
        self._values = {self._renamed(name): value for name, value in values.items()}
        self._places = {self.kept(name): place for name, place in reversed(places.items()) if name in shapes}
        # Of a tied tensor one name is enough.
        self.missing = [n for n in own if self.kept(n) not in self._places and n not in self._values]
        self.unexpected = [name for name in (*places, *self._values) if name not in {*own}]
        self.misshapen = {
            name: (tuple(stored.entry(place).size), shapes[name])
            for name, place in places.items()
            if name in shapes and tuple(stored.entry(place).size) != shapes[name]
        }

    def _renamed(self, name: str) -> str:
        for old, new in self._rename.items():
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    def own_name(self, name: str) -> str:
        """A stored parameter's name in the model; of several the one it is kept under."""
        return self.kept(self._renamed(clean(name)))

    def kept(self, name: str) -> str:
        """Of a tied tensor's names the one it is kept under."""
        return self._state.tied.get(name, name)

    def place(self, name: str) -> str | None:
        """The reader's name for a tensor; `None` where the checkpoint does not have it."""
        return self._places.get(self.kept(name))

    def lacks_just_the_frozen_base(self) -> bool:
        """Whether what is missing are all frozen parameters, and perhaps buffers of modules that are all frozen."""
        params = self._engine.model.named_parameters(remove_duplicate=False)
        trained = {clean(name): param.requires_grad for name, param in params}
        frozen = {name for name, is_trained in trained.items() if not is_trained}
        missing = {*self.missing}
        return bool(frozen) and frozen <= missing and not any(_is_trained(name, trained) for name in missing)

    def frozen(self) -> set[str]:
        """Names of the parameters that are not trained."""
        return {clean(name) for name, param in self._engine.model.named_parameters() if not param.requires_grad}

    def targets(self) -> dict[str, Tensor]:
        """By the reader's name, this rank's part of each tensor, to be filled."""
        return {self._places[n]: tensor for n, tensor in self._state.tensors.items() if n in self._places}

    def finish(self) -> None:
        """Hands what is not tensors to its modules."""
        for name, module in self._engine.model.named_modules(remove_duplicate=False):
            key = clean(f"{name}._extra_state".lstrip("."))
            if key in self._values:
                module.set_extra_state(self._values[key])


class OptimizerRoom:
    """One optimizer's part of a load.

    Args:
        stored: the checkpoint.
        found: the optimizer in it.
        optimizer: the one to load.
        model: the part of its model.

    Attributes:
        problems: what does not fit, said in words.
    """

    def __init__(self, stored: Stored, found: StoredOptimizer, optimizer: Optimizer, model: ModelRoom) -> None:
        self._stored = stored
        self._model = model
        self._optimizer = optimizer
        self._load = _engine(optimizer).optimizer_load(optimizer)
        by_group = self._load.groups()
        names = [name for group in by_group for name in group]
        if found.positional:
            self._own = {str(number): name for number, name in enumerate(names)}
        else:
            own = {model.kept(name): name for name in names}
            given = {*found.tensors, *found.shared, *(found.settings or ())}
            given |= {str(name) for group in found.param_groups or [] for name in group["params"]}
            self._own = {name: own[kept] for name in given if (kept := model.own_name(name)) in own}
        self.problems = self._fit_groups(found, by_group)
        self._groups = found.param_groups if found.settings is None else self._grouped(found.settings, by_group)
        self._places: dict[tuple[str, str], str] = {}
        self._fit_state(found)

    def _fit_groups(self, found: StoredOptimizer, by_group: list[list[str]]) -> list[str]:
        if found.param_groups is None:
            return []
        given = [list(group["params"]) for group in found.param_groups]
        if not found.positional:  # some leave out what is frozen
            unknown = self._model.frozen() - {*self._own.values()}
            by_group = [[name for name in group if name not in unknown] for group in by_group]
        sizes, given_sizes = [len(group) for group in by_group], [len(group) for group in given]
        same_names = found.positional or [
            sorted(self._own.get(str(name), "") for name in group) for group in given
        ] == [sorted(group) for group in by_group]
        if sizes == given_sizes and same_names:
            return []
        return [
            f"the optimizer has groups of {given_sizes} parameters there, and this {type(self._optimizer).__name__} of "
            f"{sizes}{', by other names' if sizes == given_sizes else ''}: make the groups of the run that saved it, or "
            "load the weights alone: load_checkpoint(path, engine)"
        ]

    def _grouped(self, settings: Mapping[str, Any], by_group: list[list[str]]) -> list[dict[str, Any]]:
        """Each group's settings, from those of its parameters."""
        known = {self._own[name]: values for name, values in settings.items() if name in self._own}
        found = [[known[name] for name in group if name in known] for group in by_group]
        for number, given in enumerate(found):
            unequal = {key for values in given for key in values if not same(values[key], given[0].get(key))}
            if unequal:
                self.problems.append(
                    f"parameters that are in group {number} here have different {', '.join(sorted(unequal))} there: make "
                    "the groups of the run that saved it, or load the weights alone: load_checkpoint(path, engine)"
                )
        return [values[0] if values else own for values, own in zip(found, self._optimizer.param_groups, strict=True)]

    def _fit_state(self, found: StoredOptimizer) -> None:
        shapes, whole = self._load.shapes(), dict[tuple[str, str], str]()
        shared = [(n, key, runs) for n, entries in found.shared.items() for key, runs in entries.items()]
        for given, entries in found.tensors.items():
            if given not in self._own:
                continue
            name = self._own[given]
            for key, place in entries.items():
                size = self._stored.entry(place).size
                if key == "step" or (tuple(size) != shapes[name] and size.numel() == 1):
                    whole[given, key] = place
                elif tuple(size) == shapes[name]:
                    self._places[name, key] = place
                else:
                    self.problems.append(
                        f"the state '{key}' of '{name}' has shape {tuple(size)} there and the parameter {shapes[name]}"
                    )
        values = self._stored.read(whole.values())
        shared += [(given, key, [(*EVERYWHERE, values[place])]) for (given, key), place in whole.items()]
        torn = [
            f"'{key}' of '{self._own[given]}'"
            for given, key, runs in shared
            if given in self._own and not self._load.share(self._own[given], key, runs)
        ]
        if torn:
            self.problems.append(
                f"the states {', '.join(torn)} have one value for each slice of the run that saved them, and this run cuts "
                "other slices: load them with the same number of ranks, or the weights alone: load_checkpoint(path, engine)"
            )

    def targets(self) -> dict[str, Tensor]:
        """By the reader's name, room for this rank's part of each tensor."""
        found: dict[str, Tensor] = {}
        for (name, key), place in self._places.items():
            dtype = self._stored.entry(place).properties.dtype
            param = self._model.place(name)
            given = dtype if param is None else self._stored.entry(param).properties.dtype
            # In the parameter's own digits, which may be others here, unless the optimizer chose to keep fewer.
            narrow = not dtype.is_floating_point or dtype.itemsize < given.itemsize
            room = self._load.room(name, key, dtype if narrow else None)
            if room is not None:
                found[place] = room
        return found

    def finish(self, rounding: Mapping[str, Tensor]) -> None:
        """Hands over what was read; `rounding` is that of `OptimizerState`, of this rank."""
        groups = self._optimizer.param_groups if self._groups is None else self._groups
        self._load.finish([dict(group) for group in groups], rounding)


class LoadPlan:
    """All that a load will do.

    Args:
        stored: the checkpoint.
        models: to load, by key.
        optimizers: likewise.
        extra: likewise.
        strict: see `load_checkpoint`.
        rename: see `load_checkpoint`.
        skip: see `load_checkpoint`.

    Raises:
        CheckpointError: something does not fit; lists all that does not.
        ValueError: the checkpoint has other models or optimizers than asked for.
    """

    def __init__(
        self,
        stored: Stored,
        models: Mapping[str, ZeroEngine],
        optimizers: Mapping[str, Optimizer],
        extra: Mapping[str, Any],
        strict: bool,
        rename: Mapping[str, str],
        skip: Collection[str] = (),
    ) -> None:
        self._several = len(models) > 1
        given = {key: (names, stored.values.get(key, {})) for key, names in stored.models.items()}
        self._models = {
            key: ModelRoom(stored, *(({}, {}) if key in skip else held), engine, rename)
            for key, engine, held in _matching(given, models, "model")
        }
        self._loaded = {key: room for key, room in self._models.items() if key not in skip}
        problems = [problem for key, room in self._loaded.items() for problem in self._misfits(key, room, strict)]
        if optimizers and not stored.optimizers:
            problems.append(
                "it has weights only, and no optimizer's state: load it without the optimizer, which then starts afresh: "
                "load_checkpoint(path, engine)"
            )
        self.optimizers: dict[str, OptimizerRoom] = {}
        for key, optimizer, found in _matching(stored.optimizers, optimizers, "optimizer") if stored.optimizers else ():
            model = self._models[owner(key, optimizer, models)]
            self.optimizers[key] = OptimizerRoom(stored, found, optimizer, model)
            problems += self.optimizers[key].problems
        problems += [
            f"it has no extra '{key}', only {sorted(stored.extra) or 'none'}"
            for key in extra
            if key not in stored.extra
        ]
        if problems:
            raise CheckpointError(f"{stored.folder.name} does not fit: " + "; ".join(problems) + ".")

    def _misfits(self, key: str, room: ModelRoom, strict: bool) -> list[str]:
        shown = self._shown(key, room.misshapen)
        problems = [
            f"'{name}' has shape {there} there and {here} here"
            for name, (there, here) in zip(shown, room.misshapen.values(), strict=True)
        ]
        if strict and room.missing and not room.lacks_just_the_frozen_base():
            problems.append(f"missing there: {', '.join(self._shown(key, room.missing))}")
        if strict and room.unexpected:
            problems.append(f"not in the model: {', '.join(self._shown(key, room.unexpected))}")
        if len(problems) > len(shown):
            problems[-1] += " (strict=False leaves names out, rename={'stored prefix': 'model prefix'} changes them)"
        return problems

    def _shown(self, key: str, names: Iterable[str]) -> list[str]:
        return [f"{key}.{name}" if self._several else name for name in names]

    @property
    def missing(self) -> list[str]:
        """Names of the models' tensors that the checkpoint does not have."""
        return [name for key, room in self._loaded.items() for name in self._shown(key, room.missing)]

    @property
    def unexpected(self) -> list[str]:
        """Names that the models do not have."""
        return [name for key, room in self._loaded.items() for name in self._shown(key, room.unexpected)]

    def targets(self) -> dict[str, Tensor]:
        """By the reader's name, what is to be filled on this rank; makes room for it."""
        rooms = (*(room.targets() for room in self._models.values()), *(o.targets() for o in self.optimizers.values()))
        return {place: tensor for targets in rooms for place, tensor in targets.items()}

    def finish(self, rounding: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Hands over what was read; `rounding` is that of `OptimizerState`, of this rank, by optimizer."""
        for model in self._models.values():
            model.finish()
        for key, optimizer in self.optimizers.items():
            optimizer.finish(rounding.get(key, {}))


def owner(key: str, optimizer: Optimizer, models: Mapping[str, ZeroEngine]) -> str:
    """The key of the model that an optimizer steps.

    Raises:
        ValueError: it is none of these.
    """
    engine = _engine(optimizer)
    for name, candidate in models.items():
        if candidate is engine:
            return name
    raise ValueError(
        f"'{key}' ({type(optimizer).__name__}) steps parameters of none of the engines given; pass its engine."
    )


def _engine(optimizer: Optimizer) -> ZeroEngine:
    engine = engine_of(optimizer)
    if engine is None:
        raise ValueError(f"this {type(optimizer).__name__} is not bound to an engine; call engine.bind(optimizer).")
    return engine


def _matching(stored: Mapping[str, T], wanted: Mapping[str, Any], what: str) -> list[tuple[str, Any, T]]:
    """Pairs by key, or by order where the hosts name them differently and there are equally many."""
    if all(key in stored for key in wanted):
        return [(key, item, stored[key]) for key, item in wanted.items()]
    if len(stored) != len(wanted):
        raise ValueError(
            f"the checkpoint has the {what}s {sorted(stored)}, and asked for are {sorted(wanted)}. Pass a dict with them."
        )
    return [(key, item, found) for (key, item), found in zip(wanted.items(), stored.values(), strict=True)]


def prefix(names: Collection[str], wanted: Collection[str]) -> dict[str, str]:
    """The one prefix to take from given names, or to put before them, that makes them fit, with what to put in its place."""
    given, known = {*names}, {*wanted}
    if given & known:
        return {}
    usual = _usual_prefix(names, known)
    if usual and (all(name.startswith(usual) for name in names) or all(f"{usual}{name}" in given for name in wanted)):
        return {usual: ""}
    usual = _usual_prefix(wanted, given)
    return {"": usual} if usual and all(f"{usual}{name}" in known for name in names) else {}


def _usual_prefix(longer: Iterable[str], shorter: set[str]) -> str:
    """What most often stands before one of the shorter names in the longer ones."""
    splits = ((name[: dot + 1], name[dot + 1 :]) for name in longer for dot, c in enumerate(name) if c == ".")
    found = Counter(start for start, rest in splits if rest in shorter).most_common(1)
    return found[0][0] if found else ""


def _is_trained(name: str, trained: Mapping[str, bool]) -> bool:
    """Whether a parameter, or something in the smallest module around another tensor that has any, is trained."""
    if name in trained:
        return trained[name]
    while name:
        name = name.rpartition(".")[0]
        inside = [flag for param, flag in trained.items() if param.startswith(f"{name}." if name else "")]
        if inside:
            return any(inside)
    return True
