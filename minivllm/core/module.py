"""Parts of a model that can be replaced and hooked, and a count of every such change."""

# Generated from nbs/core/module.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from abc import ABCMeta
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

_changes = 0


def generation() -> int:
    """How many times a part of any model in this process was set, replaced or patched.

    Whatever was captured of a model (a CUDA graph, a program of CPU kernels) is void once this number has grown.
    """
    return _changes


def _counting(owner: type, name: str) -> Callable[..., Any]:
    """A method of a built-in class that also counts as a change."""
    original = getattr(owner, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        global _changes
        _changes += 1
        return original(*args, **kwargs)

    return changed


def _functions(namespace: Any) -> dict[str, Any]:
    return {name: value for name, value in namespace.items() if callable(value)}


class ModuleType(ABCMeta):
    """Type of `Module` classes. It remembers the functions that a class was written with, and counts every later change."""

    _written: dict[str, Any]

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(name, bases, namespace, **kwargs)
        type.__setattr__(cls, "_written", _functions(namespace))

    __setattr__, __delattr__ = _counting(type, "__setattr__"), _counting(type, "__delattr__")

    @property
    def is_patched(cls) -> bool:
        """Whether a function of the class, or of one that it inherits from, is not the one that it was written with."""
        return any(_functions(vars(c)) != c._written for c in cls.__mro__ if isinstance(c, ModuleType))


Hook = Callable[[Any, tuple[Any, ...], Any], Any]
"""Called with a module, its arguments and its output. What it returns, if not None, replaces the output."""


class Module(metaclass=ModuleType):
    """A part of a model. Its attributes may be parts in turn, and a cell may replace any of them, also by a function.

    Setting an attribute counts as a change (`generation`), so do it when a model is built or changed, not in a step.

    Attributes:
        capturable: set to True in the body of a class whose calls do nothing but compute tensors, by themselves or by
            other capturable parts: then a captured step may stand for them. It is not inherited.
    """

    capturable: ClassVar[bool] = False
    __call__: Callable[..., Any]
    _hooks: tuple[Hook, ...] = ()

    __setattr__, __delattr__ = _counting(object, "__setattr__"), _counting(object, "__delattr__")

    def all_parts(self) -> Iterator[Any]:
        """This module, every module below it, and every function that stands in a module's place."""
        seen: set[int] = set()
        waiting: list[Any] = [self]
        while waiting:
            part = waiting.pop()
            if isinstance(part, list):
                waiting += part
            elif id(part) not in seen and (isinstance(part, Module) or callable(part)):
                seen.add(id(part))
                yield part
                waiting += [v for k, v in getattr(part, "__dict__", {}).items() if not k.startswith("_")]

    def register_forward_hook(self, hook: Hook) -> Callable[[], None]:
        """Call `hook(module, args, output)` after every call of this part, as in torch.

        Hooks cost nothing where there are none: `__call__` of the class is replaced while an instance of it has one.

        Returns:
            A function that removes the hook.
        """
        cls = type(self)
        if not _hooked[cls]:
            own = vars(cls).get("__call__")
            cls.__call__ = _with_hooks(cls.__call__, own)  # type: ignore[method-assign]
        _hooked[cls] += 1
        self._hooks = (*self._hooks, hook)

        def remove() -> None:
            if hook not in self._hooks:
                return
            self._hooks = tuple(kept for kept in self._hooks if kept is not hook)
            _hooked[cls] -= 1
            if not _hooked[cls]:
                own = cls.__call__.own  # type: ignore[attr-defined]
                del cls.__call__
                if own is not None:
                    cls.__call__ = own  # type: ignore[method-assign]

        return remove


_hooked: Counter[ModuleType] = Counter()


def _with_hooks(call: Callable[..., Any], own: Callable[..., Any] | None) -> Callable[..., Any]:
    def call_with_hooks(self: Module, *args: Any) -> Any:
        output = call(self, *args)
        for hook in self._hooks:
            changed = hook(self, args, output)
            output = output if changed is None else changed
        return output

    call_with_hooks.own = own  # type: ignore[attr-defined]
    return call_with_hooks


class ModuleList(list[Any]):
    """A list of parts. Any change of it counts as one of the model."""


_CHANGES = "__setitem__ __delitem__ __iadd__ __imul__ append clear extend insert pop remove reverse sort"
for _name in _CHANGES.split():
    setattr(ModuleList, _name, _counting(list, _name))


def capture_problem(module: Module) -> str | None:
    """Why a captured step cannot stand for a module, or None: some part of it has its own code that must run each time."""
    for part in module.all_parts():
        cls = type(part)
        if not isinstance(part, Module):
            return f"{getattr(part, '__qualname__', cls.__qualname__)} is code of its own in the place of a part"
        declared = vars(cls).get("capturable")
        if not (declared.__get__(part) if isinstance(declared, property) else declared):
            return f"{cls.__qualname__} is not declared capturable"
        if cls.is_patched or any(
            vars(part).keys() & c._written.keys() for c in cls.__mro__ if isinstance(c, ModuleType)
        ):
            return f"{cls.__qualname__} has a function that was replaced"
    return None
