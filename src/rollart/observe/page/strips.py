"""Histograms over time, with a bounded number of bins.

Invariants: all rows share one bin width, which doubles whenever the run outgrows the bins; the sum of a row is the
total of what was added to it.
"""

MOST_BINS = 1000
FIRST_WIDTH_S = 0.01


class Strips:
    """Rows by name. Times are seconds since the run began.

    >>> strips = Strips()
    >>> strips.add("a", 0.5, 3.0)
    >>> strips.add_span("a", 19.0, 21.0)
    >>> strips.width_s, round(sum(strips.rows["a"]), 6)
    (0.04, 5.0)
    """

    def __init__(self) -> None:
        self.width_s = FIRST_WIDTH_S
        self.rows: dict[str, list[float]] = {}

    def add(self, row: str, at: float, amount: float) -> None:
        """Add an amount at one moment."""
        bins = self._bins_up_to(row, at)
        bins[int(at / self.width_s)] += amount

    def add_span(self, row: str, start: float, end: float) -> None:
        """Add one per second between two moments."""
        bins = self._bins_up_to(row, end)
        width = self.width_s
        first, last = int(start / width), int(end / width)
        if first == last:
            bins[first] += end - start
            return
        bins[first] += (first + 1) * width - start
        for index in range(first + 1, last):
            bins[index] += width
        bins[last] += end - last * width

    def _bins_up_to(self, row: str, at: float) -> list[float]:
        while at >= self.width_s * MOST_BINS:
            self.width_s *= 2
            for name, bins in self.rows.items():
                self.rows[name] = [sum(bins[index : index + 2]) for index in range(0, len(bins), 2)]
        bins = self.rows.setdefault(row, [])
        missing = int(at / self.width_s) + 1 - len(bins)
        if missing > 0:
            bins.extend([0.0] * missing)
        return bins
