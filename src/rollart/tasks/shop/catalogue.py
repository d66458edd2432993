"""The products of a shop, generated from the level alone, and their search index.

Every process generates the same catalogue, once, in a fraction of a second. Training and held-out goals share it: what
is held out are goals, not products.
"""

import random
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from rollart.tasks.shop.bm25 import Index
from rollart.tasks.shop.words import BRANDS, CORNER_SHOP, STORE, Department
from rollart.types.errors import RequestError

SEED = 26


class Level(NamedTuple):
    """Size of a shop and of its goals."""

    departments: Mapping[str, Department]
    products: int
    first_id: int
    """Ids are consecutive and have equally many digits."""
    per_page: int
    pages: int
    """Most pages of results."""
    attributes: tuple[int, int]
    """Fewest and most attributes of a product."""
    wanted_attributes: tuple[int, int]
    wanted_options: tuple[int, int]
    axes: tuple[int, int]
    """Fewest and most options of a product."""
    prices: tuple[int, int]
    margin: float
    """Most that a goal allows above the price of the product that it was made from, as a share."""
    branded: bool
    """Titles have a brand and not all attributes."""
    turns: int


LEVELS = {
    1: Level(
        CORNER_SHOP, 90, 10, per_page=3, pages=5, attributes=(1, 1), wanted_attributes=(1, 1), wanted_options=(1, 1),
        axes=(1, 1), prices=(10, 90), margin=0.3, branded=False, turns=8,
    ),
    2: Level(
        STORE, 900, 100, per_page=5, pages=10, attributes=(1, 3), wanted_attributes=(1, 2), wanted_options=(1, 1),
        axes=(1, 2), prices=(10, 190), margin=0.2, branded=True, turns=15,
    ),
    3: Level(
        STORE, 4000, 1000, per_page=10, pages=5, attributes=(2, 5), wanted_attributes=(1, 3), wanted_options=(1, 3),
        axes=(1, 3), prices=(5, 300), margin=0.1, branded=True, turns=30,
    ),
}  # fmt: skip


class Product(NamedTuple):
    """`options`: the values of each axis. `title` may not have all attributes."""

    id: str
    title: str
    department: str
    kind: str
    attributes: frozenset[str]
    options: Mapping[str, tuple[str, ...]]
    price: int

    def axis(self, value: str) -> str | None:
        """The axis on which the product has a value."""
        return next((axis for axis, values in self.options.items() if value in values), None)


class Catalogue(NamedTuple):
    level: Level
    products: tuple[Product, ...]
    searched: Index
    departments: Mapping[str, str]
    """The department of each kind."""

    def search(self, query: str) -> tuple[Product, ...]:
        most = self.level.per_page * self.level.pages
        return tuple(self.products[number] for number in self.searched.search(query, most))


@lru_cache
def catalogue(level: int) -> Catalogue:
    """The catalogue of a level."""
    if level not in LEVELS:
        raise RequestError(f"shop has no level {level!r}; levels are {', '.join(map(str, LEVELS))}")
    settings = LEVELS[level]
    chance = random.Random(f"{SEED}/{level}")
    products = tuple(_product(settings, settings.first_id + place, chance) for place in range(settings.products))
    kinds = {kind: name for name, department in settings.departments.items() for kind in department.kinds}
    return Catalogue(settings, products, Index([_document(product) for product in products]), kinds)


def _product(level: Level, number: int, chance: random.Random) -> Product:
    name = chance.choice(list(level.departments))
    department = level.departments[name]
    kind = chance.choice(department.kinds)
    attributes = chance.sample(department.attributes, chance.randint(*level.attributes))
    axes = chance.sample(list(department.options), min(chance.randint(*level.axes), len(department.options)))
    options = {axis: _values(department.options[axis], chance) for axis in department.options if axis in axes}
    shown = attributes[: chance.randint(0, 2)] if level.branded else attributes
    title = " ".join([*([chance.choice(BRANDS)] if level.branded else []), *shown, kind])
    price = chance.randint(*level.prices)
    return Product(f"p{number}", title, name, kind, frozenset(attributes), options, price)


def _values(values: tuple[str, ...], chance: random.Random) -> tuple[str, ...]:
    """At least two and about half of the values of an axis, in their order."""
    some = chance.sample(values, chance.randint(2, max(2, (len(values) + 1) // 2)))
    return tuple(value for value in values if value in some)


def _document(product: Product) -> str:
    values = [value for some in product.options.values() for value in some]
    return " ".join([product.title, *sorted(product.attributes), *values])
