"""YAML of plain data, for people to read and edit: keys in the order given, texts of several lines as blocks.

PyYAML is not a dependency of its own: it comes with Ray, which a run on a cluster needs.
"""

from collections.abc import Sequence
from typing import Any

from rollart.types.errors import RequestError


def to_yaml(documents: Sequence[Any]) -> str:
    """Several documents, separated by `---`. The same data gives the same text."""
    try:
        import yaml
    except ImportError:
        raise RequestError("manifests need PyYAML, which comes with Ray: pip install 'rollart[ray]'") from None

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
        def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
            return True

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    written: str = yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
    return written
