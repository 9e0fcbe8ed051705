"""`@method` in a running notebook."""

import abc
from dataclasses import dataclass

import pytest

from minivllm.literate import method


class Purse:
    coins = 3


def test_functions_properties_class_and_static_methods():
    @method(Purse)
    def double(self):
        return 2 * self.coins

    @method(Purse)
    @property
    def rich(self):
        return self.coins > 2

    @method(Purse)
    @classmethod
    def empty(cls):
        made = cls()
        made.coins = 0
        return made

    @method(Purse)
    @staticmethod
    def currency():
        return "groat"

    assert (Purse().double(), Purse().rich, Purse.empty().rich, Purse.currency()) == (6, True, False, "groat")
    assert Purse.double.__qualname__ == "Purse.double"


def test_names_mean_what_they_meant_before():
    cell = "@method(Purse)\ndef sum(self): return 1\n@method(Purse)\ndef spare(self): return 2\n@method(Purse)\ndef fresh(self): return 3"
    names = {"method": method, "Purse": Purse, "spare": "a global"}
    exec(cell, names)
    assert (names["sum"], names["spare"], names["fresh"]) == (sum, "a global", None)
    assert (Purse().sum(), Purse().spare(), Purse().fresh()) == (1, 2, 3)


def test_an_abstract_method_told_later_counts():
    class Shape(abc.ABC):
        @abc.abstractmethod
        def area(self): ...

    class Square(Shape):
        pass

    with pytest.raises(TypeError):
        Square()

    @method(Square)
    def area(self):
        return 4

    assert Square().area() == 4


def test_what_only_works_inside_the_class_body_is_refused():
    @dataclass
    class Point:
        x: int

    with pytest.raises(
        TypeError, match="__post_init__ only works inside the class body: define it in the cell of Point"
    ):

        @method(Point)
        def __post_init__(self): ...

    with pytest.raises(TypeError, match="super"):

        @method(Point)
        def show(self):
            return super().__repr__()
