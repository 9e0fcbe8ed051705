"""Parts of a model: every change is counted, hooks work and leave nothing behind, and what may be captured is what was written."""

import pytest

from minivllm.core.module import Module, ModuleList, capture_problem, generation


class Double(Module):
    capturable = True

    def __call__(self, x):
        return 2 * x


class Chain(Module):
    capturable = True

    def __init__(self, *parts):
        self.links = ModuleList(parts)

    def __call__(self, x):
        for part in self.links:
            x = part(x)
        return x


CHANGES = {
    "an attribute": lambda chain: setattr(chain, "note", 1),
    "a deleted attribute": lambda chain: delattr(chain, "links"),
    "a part below": lambda chain: setattr(chain.links[0], "note", 1),
    "an item": lambda chain: chain.links.__setitem__(0, Double()),
    "a slice": lambda chain: chain.links.__setitem__(slice(1), []),
    "append": lambda chain: chain.links.append(Double()),
    "pop": lambda chain: chain.links.pop(),
    "clear": lambda chain: chain.links.clear(),
    "extend": lambda chain: chain.links.extend([Double()]),
    "insert": lambda chain: chain.links.insert(0, Double()),
    "reverse": lambda chain: chain.links.reverse(),
    "del": lambda chain: chain.links.__delitem__(0),
    "+=": lambda chain: chain.links.__iadd__([Double()]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_counted(name):
    chain = Chain(Double(), Double())
    before = generation()
    chain(1)
    assert generation() == before
    CHANGES[name](chain)
    assert generation() > before


def test_a_function_replaced_in_a_class_is_counted_and_seen(monkeypatch):
    chain, before = Chain(Double()), generation()
    with monkeypatch.context() as patch:
        patch.setattr(Double, "__call__", lambda self, x: 3 * x)
        assert generation() > before and chain(1) == 3
        assert capture_problem(chain) == "Double has a function that was replaced"
    assert chain(1) == 2 and capture_problem(chain) is None


def test_what_is_not_declared_capturable_is_not():
    class Inherits(Double):
        pass

    class Plain(Module):
        def __call__(self, x):
            return x

    assert capture_problem(Chain(Double(), Double())) is None
    assert "Inherits is not declared capturable" in capture_problem(Chain(Inherits()))
    assert "Plain is not declared capturable" in capture_problem(Chain(Plain()))
    assert "in the place of a part" in capture_problem(Chain(Double(), lambda x: x))
    odd = Double()
    vars(odd)["__call__"] = print
    assert "Double has a function that was replaced" in capture_problem(Chain(odd))


@pytest.mark.parametrize("inherits", [False, True])
def test_hooks(inherits):
    class Inherits(Double):
        capturable = True

    cls = Inherits if inherits else Double
    one, other, seen = cls(), cls(), []
    first = one.register_forward_hook(lambda module, args, output: seen.append((module, args, output)))
    second = one.register_forward_hook(lambda module, args, output: output + 1)
    assert one(3) == 7 and other(3) == 6 and seen == [(one, (3,), 6)]
    assert capture_problem(other) is not None
    first()
    first()
    assert one(3) == 7 and len(seen) == 1
    second()
    assert one(3) == 6 and capture_problem(one) is None and ("__call__" in vars(cls)) != inherits
