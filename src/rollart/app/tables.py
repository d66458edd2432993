"""Tables on a terminal, of names and messages that users wrote."""

from rich.console import RenderableType
from rich.style import StyleType
from rich.table import Table
from rich.text import Text


class PlainTable(Table):
    """Shows text cells as they are; in a `Table`, `[/INST]` is markup, and an error."""

    def add_row(
        self, *renderables: RenderableType | None, style: StyleType | None = None, end_section: bool = False
    ) -> None:
        cells = (Text(cell) if isinstance(cell, str) else cell for cell in renderables)
        super().add_row(*cells, style=style, end_section=end_section)
