"""What is wanted, in a sentence, and what a purchase earns.

WebShop's reward (Yao et al. 2022, section 3.1):

              | wanted attributes that it has | + | wanted options that were chosen | + [ price ≤ limit ]
    r_type ·  ───────────────────────────────────────────────────────────────────────────────────────────
                             | wanted attributes | + | wanted options | + 1

r_type asks whether the right type of thing was bought. WebShop estimates it from the words of titles; here products
have kinds: 1 for the wanted kind, ½ for another one of its department that shares a word with it (a travel mug instead
of a coffee mug), 0.1 for any other one of its department, else 0.
"""

import random
from collections.abc import Mapping
from typing import NamedTuple

from rollart.tasks.shop.catalogue import Catalogue, Product

OPENINGS = ("Buy", "Find", "I want", "I need", "Get me")
"""Level 1 has the first alone."""
LIMIT = "for at most"
SAME_WORD, SAME_DEPARTMENT = 0.5, 0.1


class Goal(NamedTuple):
    """Every product that fits is as good as the one that the goal was made from."""

    kind: str
    attributes: tuple[str, ...]
    options: Mapping[str, str]
    """Wanted value by axis."""
    limit: int

    def text(self) -> str:
        """The goal as content of an episode; `goal_of` is the inverse."""
        options = ",".join(f"{axis}={value}" for axis, value in self.options.items())
        return f"{','.join(self.attributes)};{self.kind};{options};{self.limit}"

    def sentence(self, opening: str) -> str:
        """
        >>> Goal("mug", ("steel",), {"color": "red"}, 30).sentence("Buy")
        'Buy a steel mug, color red, for at most $30.'
        """
        things = f"{', '.join(self.attributes)} {self.kind}"
        article = "an" if things[0] in "aeiou" else "a"
        options = "".join(f", {axis} {value}" for axis, value in self.options.items())
        return f"{opening} {article} {things}{options}, {LIMIT} ${self.limit}."


def goal_of(text: str) -> Goal:
    """
    >>> goal_of("steel;mug;color=red;30")
    Goal(kind='mug', attributes=('steel',), options={'color': 'red'}, limit=30)
    """
    attributes, kind, options, limit = text.split(";")
    chosen = dict(option.split("=") for option in options.split(",")) if options else {}
    return Goal(kind, tuple(attributes.split(",")), chosen, int(limit))


def read_sentence(sentence: str) -> Goal:
    """The goal that a sentence states, as a customer reads it.

    >>> read_sentence("I need an insulated, leakproof travel mug, color red, for at most $30.").kind
    'travel mug'
    """
    said, _, limit = sentence.rstrip(".").rpartition(f", {LIMIT} $")
    _, _, said = said.partition(" an " if " an " in said else " a ")
    parts = said.split(", ")
    place = next(number for number, part in enumerate(parts) if " " in part)
    attribute, _, kind = parts[place].partition(" ")
    options = dict(part.split(" ", 1) for part in parts[place + 1 :])
    return Goal(kind, (*parts[:place], attribute), options, int(limit))


def make_goal(shop: Catalogue, chance: random.Random) -> Goal:
    """A goal that a random product of the catalogue fits."""
    product = chance.choice(shop.products)
    level = shop.level
    most = min(level.wanted_attributes[1], len(product.attributes))
    attributes = chance.sample(sorted(product.attributes), chance.randint(level.wanted_attributes[0], most))
    most = min(level.wanted_options[1], len(product.options))
    axes = chance.sample(list(product.options), chance.randint(min(level.wanted_options[0], most), most))
    options = {axis: chance.choice(values) for axis, values in product.options.items() if axis in axes}
    return Goal(
        product.kind, tuple(attributes), options, product.price + chance.randint(0, int(product.price * level.margin))
    )


def reward(shop: Catalogue, goal: Goal, product: Product, chosen: Mapping[str, str]) -> float:
    """Reward of buying a product with the options chosen."""
    attributes = len(product.attributes.intersection(goal.attributes))
    options = sum(chosen.get(axis) == value for axis, value in goal.options.items())
    within = product.price <= goal.limit
    met = attributes + options + within
    return _type_match(shop, goal, product) * met / (len(goal.attributes) + len(goal.options) + 1)


def _type_match(shop: Catalogue, goal: Goal, product: Product) -> float:
    if product.kind == goal.kind:
        return 1.0
    if product.department != shop.departments[goal.kind]:
        return 0.0
    return SAME_WORD if set(product.kind.split()) & set(goal.kind.split()) else SAME_DEPARTMENT
