"""An environment that does next to nothing; it needs the standard library alone."""

from typing import Any


class Light:
    """Counts what it is told; its episodes end only at a limit."""

    def reset(self, *, seed: int, options: Any = None) -> tuple[str, dict[str, Any]]:  # noqa: ARG002 - the interface
        self.count = seed
        return f"count from {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.count += len(action)
        return f"now at {self.count}", 0.0, False, False, {}
