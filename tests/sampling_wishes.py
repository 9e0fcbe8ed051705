"""Random JSON schemas and regular expressions that both the grammar engine and the judges (jsonschema, re) know."""

import random
from typing import Any

WORDS = ["name", "age", "city", "tags", "value", "is ok", "größe", "x"]
FORMATS = ["date", "date-time", "uuid", "ipv4"]


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    simple = [
        _string,
        _integer,
        _number,
        _constant,
        _enumeration,
        lambda rng, depth: {"type": rng.choice(["boolean", "null"])},
    ]
    nested = [_object, _object, _array, _tuple, _union]
    return rng.choice(simple if depth == 0 else simple + nested + nested)(rng, depth)


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string"}
    if kind == 1:
        low = rng.randrange(4)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(8)}
    if kind == 2:
        return {"type": "string", "pattern": f"^{random_regex(rng, 2, ascii_only=True)}$"}
    return {"type": "string", "format": rng.choice(FORMATS)}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(-500, 500)
    limits = [{}, {"minimum": low}, {"maximum": low}, {"minimum": low, "maximum": low + rng.randrange(900)}]
    return {"type": "integer"} | rng.choice([*limits, {"multipleOf": rng.randrange(1, 12)}, {"exclusiveMinimum": low}])


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(-50, 50) / 4
    return {"type": "number"} | rng.choice(
        [{}, {"minimum": low}, {"minimum": low, "maximum": low + rng.random() + 0.5}]
    )


def _constant(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice([42, "fixed", None, True, 1.5, 'with "quotes" and \\'])}


def _enumeration(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample(["red", "green", 1, 2, None, False, "ü", "a b"], rng.randrange(1, 5))}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randrange(5))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
    }
    extra = rng.randrange(3)
    if extra == 0:
        schema["additionalProperties"] = False
    if extra == 1:
        schema["additionalProperties"] = random_schema(rng, 0)
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(3)
    return {
        "type": "array",
        "items": random_schema(rng, depth - 1),
        "minItems": low,
        "maxItems": low + rng.randrange(4),
    }


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    items = [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": rng.randrange(len(items) + 1)}


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]}


def random_regex(rng: random.Random, terms: int = 4, *, ascii_only: bool = False) -> str:
    """Up to `terms` repeated choices in a row. Repetitions are not nested, for Python's `re` would need for ever."""
    return "".join(_term(rng, ascii_only) for _ in range(rng.randrange(1, terms + 1)))


def _term(rng: random.Random, ascii_only: bool) -> str:
    atoms = ["a", "b", "xyz", "[0-9]", "[a-f]", "[A-Z_]", "\\.", "-", " ", "(?:yes|no)"]
    if not ascii_only:
        atoms += ["é", "日本", ".", "[^a-z\\n]"]  # not \\d: which signs are digits differs between versions of Unicode
    choice = "".join(rng.choices(atoms, k=rng.randrange(1, 4)))
    for _ in range(rng.randrange(3)):
        choice += "|" + "".join(rng.choices(atoms, k=rng.randrange(1, 3)))
    low = rng.randrange(3)
    return f"(?:{choice})" + rng.choice(
        ["", "", "?", "*", "+", f"{{{low},{low + rng.randrange(1, 4)}}}", f"{{{low + 1}}}"]
    )
