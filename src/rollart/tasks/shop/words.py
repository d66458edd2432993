"""What the shop can sell: departments with their kinds of products, attributes and options, and invented brands.

Attributes and option values are single words, and within a department no word is both. So a goal can be read word by
word, by people, scripts and small models alike.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Department(NamedTuple):
    """Kinds of products that share their attributes and options."""

    kinds: tuple[str, ...]
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    """Values by axis. A product has some of the axes, and on each of them some of the values."""


COLORS = ("red", "blue", "green", "white", "black", "grey", "pink", "yellow", "brown", "purple")
SIZES = ("small", "medium", "large", "huge")
PACKS = ("single", "double", "triple")

CORNER_SHOP = {
    "household": Department(
        kinds=("mug", "lamp", "bag", "chair", "clock", "box"),
        attributes=("steel", "wood", "glass", "paper"),
        options={"color": ("red", "blue", "green", "white")},
    )
}
"""The small shop, for models of a million parameters."""

STORE = {
    "kitchen": Department(
        kinds=("coffee mug", "travel mug", "frying pan", "sauce pan", "cutting board", "water bottle", "lunch box"),
        attributes=(
            "ceramic",
            "insulated",
            "leakproof",
            "stackable",
            "nonstick",
            "bamboo",
            "dishwashable",
            "unbreakable",
        ),
        options={"color": COLORS, "size": SIZES, "pack": PACKS},
    ),
    "clothing": Department(
        kinds=("rain jacket", "winter jacket", "dress shirt", "sport shirt", "wool scarf", "leather belt", "sun hat"),
        attributes=("waterproof", "breathable", "stretchy", "lined", "organic", "wrinklefree", "slim", "reflective"),
        options={"color": COLORS, "size": ("tiny", *SIZES), "length": ("short", "regular", "long")},
    ),
    "lighting": Department(
        kinds=("desk lamp", "floor lamp", "night light", "string light", "ceiling light", "reading lamp"),
        attributes=("dimmable", "wireless", "rechargeable", "adjustable", "foldable", "touch", "outdoor", "antique"),
        options={"color": COLORS, "light": ("warm", "cool", "daylight"), "pack": PACKS},
    ),
    "audio": Department(
        kinds=("ear plug", "head set", "shower speaker", "shelf speaker", "desk microphone", "pocket radio"),
        attributes=(
            "wireless",
            "waterproof",
            "foldable",
            "noiseless",
            "rechargeable",
            "lightweight",
            "stereo",
            "padded",
        ),
        options={"color": COLORS, "plug": ("usb", "jack", "optical")},
    ),
    "furniture": Department(
        kinds=("office chair", "dining chair", "coffee table", "side table", "book shelf", "wall shelf", "shoe rack"),
        attributes=("foldable", "adjustable", "padded", "stackable", "wooden", "rustic", "swivel", "lockable"),
        options={"color": COLORS, "size": SIZES, "finish": ("matte", "glossy", "natural")},
    ),
    "garden": Department(
        kinds=("garden hose", "plant pot", "bird feeder", "hand rake", "tool shed", "seed tray"),
        attributes=(
            "rustproof",
            "retractable",
            "biodegradable",
            "weatherproof",
            "hanging",
            "lightweight",
            "glazed",
            "drained",
        ),
        options={"color": COLORS, "size": SIZES, "pack": PACKS},
    ),
    "sports": Department(
        kinds=("yoga mat", "jump rope", "tennis racket", "swim cap", "bike helmet", "running shoe", "hiking shoe"),
        attributes=("nonslip", "adjustable", "lightweight", "breathable", "padded", "foldable", "antifog", "cushioned"),
        options={"color": COLORS, "size": SIZES, "grip": ("soft", "firm")},
    ),
    "beauty": Department(
        kinds=("hand cream", "face cream", "hair brush", "nail file", "bath soap", "lip balm", "hair dryer"),
        attributes=("vegan", "fragrancefree", "organic", "refillable", "gentle", "quick", "hydrating", "travelsize"),
        options={"scent": ("lavender", "citrus", "mint", "rose"), "pack": PACKS, "size": SIZES},
    ),
}
"""The large shop."""

BRANDS = (
    "Alvor", "Brenta", "Corvex", "Dunmar", "Elvano", "Fjorda", "Gavlin", "Hestra", "Ildora", "Jorvik",
    "Kestrel", "Lumeno", "Mirova", "Norvik", "Ostara", "Pelion", "Quintar", "Rovena", "Solvig", "Tarnow",
)  # fmt: skip


def vocabulary() -> tuple[str, ...]:
    """Every word of every shop, once at the beginning of a text and once within it."""
    words: dict[str, None] = {}
    for department in (*CORNER_SHOP.values(), *STORE.values()):
        for text in (*department.kinds, *department.attributes, *department.options):
            words.update(dict.fromkeys(text.split()))
        for values in department.options.values():
            words.update(dict.fromkeys(values))
    words.update(dict.fromkeys(BRANDS))
    return tuple(f"{word} {word}" for word in words)
