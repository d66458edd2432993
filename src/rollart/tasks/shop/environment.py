"""A shop in text, in the manner of WebShop: search, look at products, choose options, buy.

    Buy a steel mug, color red, for at most $30.      search[steel mug red]
    p31 steel mug $22                                 click[p31]
    p12 steel mug $35
    1/5 [next]
    p31 steel mug $22                                 click[red]
    color: red blue
    [buy] [back]
    p31 steel mug $22                                 click[buy]
    color: red* blue
    [buy] [back]

`search[words]` works on every page; `click[…]` on what the page shows: a product, `next`, `prev`, an option, `back`,
`buy`. Anything else wastes a turn. Only `buy` ends the episode and earns something (`goals`); an agent that has not
bought within the task's `max_turns` gets 0. Unlike WebShop's, a product is on one page, with its features where the
title does not have them all.
"""

import random
import re
from collections.abc import Mapping
from functools import lru_cache

from rollart.ports.environment import TextStep
from rollart.tasks.shop.catalogue import Catalogue, Product, catalogue
from rollart.tasks.shop.goals import LIMIT, OPENINGS, Goal, goal_of, make_goal, reward
from rollart.tasks.shop.words import vocabulary
from rollart.tasks.split import draw
from rollart.types.errors import EnvironmentFault
from rollart.types.trajectory import Prompt

RULES = "Say search[words] or click[name]."
NOTHING = "nothing found"
FEATURES = "features"
NEXT, PREVIOUS, BACK, BUY = "next", "prev", "back", "buy"
BOUGHT = "bought"
TEXTS = (
    RULES, NOTHING, f"{FEATURES} {NEXT} {PREVIOUS} {BACK} {BUY} {BOUGHT}", f"{' an '.join(OPENINGS)} a, {LIMIT}",
    *vocabulary(),
)  # fmt: skip
_ACTION = re.compile(r"(search|click)\[([^\[\]]*)\]")


class Shop:
    """A `TextEnvironment`. `level` is a key of `catalogue.LEVELS`. The first action in an answer counts."""

    def __init__(self, level: int = 1) -> None:
        self._level = level
        self._shop: Catalogue = catalogue(level)
        self._goal: Goal | None = None
        self._found: tuple[Product, ...] = ()
        self._page = 0
        self._product: Product | None = None
        """The product that is looked at; None on a page of results."""
        self._chosen: dict[str, str] = {}

    def reset(self, prompt: Prompt) -> TextStep:
        content = draw(prompt, self._content)
        self._goal = goal_of(content)
        self._found, self._page, self._product, self._chosen = (), 0, None, {}
        opening = OPENINGS[0] if self._level == 1 else random.Random(content).choice(OPENINGS)
        return TextStep(f"{RULES}\n{self._goal.sentence(opening)}", state=self._state())

    def step(self, action: str) -> TextStep:
        if self._goal is None:
            raise EnvironmentFault("step before reset: there is nothing to buy")
        said = _ACTION.search(action.lower())
        if said is None:
            return self._seen(RULES)
        verb, name = said[1], said[2].strip()
        if verb == "search":
            self._found, self._page, self._product = self._shop.search(name), 0, None
            return self._seen(self._results())
        if self._product is None:
            return self._seen(self._clicked_result(name))
        if name != BUY:
            return self._seen(self._clicked_product(self._product, name))
        earned = reward(self._shop, self._goal, self._product, self._chosen)
        self._goal = None
        return TextStep(f"{BOUGHT} {self._product.id}", earned, done=True)

    def close(self) -> None:
        self._goal = None

    def _clicked_result(self, name: str) -> str:
        if name == NEXT and self._page + 1 < self._pages:
            self._page += 1
        elif name == PREVIOUS and self._page:
            self._page -= 1
        else:
            self._product = next((product for product in self._shown() if product.id == name), None)
            self._chosen = {}
            return RULES if self._product is None else product_page(self._product, self._chosen)
        return self._results()

    def _clicked_product(self, product: Product, name: str) -> str:
        if name == BACK:
            self._product = None
            return self._results()
        if (axis := product.axis(name)) is None:
            return RULES
        self._chosen[axis] = name
        return product_page(product, self._chosen)

    @property
    def _pages(self) -> int:
        return -(-len(self._found) // self._shop.level.per_page)

    def _shown(self) -> tuple[Product, ...]:
        """Products of the current page of results."""
        first = self._page * self._shop.level.per_page
        return self._found[first : first + self._shop.level.per_page]

    def _results(self) -> str:
        if not self._found:
            return NOTHING
        rows = [f"{product.id} {product.title} ${product.price}" for product in self._shown()]
        buttons = [f"[{PREVIOUS}]"] * (self._page > 0) + [f"[{NEXT}]"] * (self._page + 1 < self._pages)
        return "\n".join([*rows, " ".join([f"{self._page + 1}/{self._pages}", *buttons])])

    def _seen(self, text: str) -> TextStep:
        return TextStep(text, state=self._state())

    def _state(self) -> str:
        """The page and the options chosen: all attempts at a prompt share one goal."""
        if self._product is None:
            return "/".join([*(product.id for product in self._shown()), f"page {self._page}"])
        return "/".join([self._product.id, *sorted(self._chosen.values())])

    def _content(self, seed: int) -> str:
        return _content(self._level, seed)


def product_page(product: Product, chosen: Mapping[str, str]) -> str:
    """The page of a product. Chosen options are marked, and features are listed if the title has not all of them."""
    lines = [f"{product.id} {product.title} ${product.price}"]
    if not product.attributes.issubset(product.title.split()):
        lines.append(f"{FEATURES}: {' '.join(sorted(product.attributes))}")
    for axis, values in product.options.items():
        marked = (f"{value}*" if chosen.get(axis) == value else value for value in values)
        lines.append(f"{axis}: {' '.join(marked)}")
    return "\n".join([*lines, f"[{BUY}] [{BACK}]"])


@lru_cache(maxsize=4096)
def _content(level: int, seed: int) -> str:
    return make_goal(catalogue(level), random.Random(seed)).text()
