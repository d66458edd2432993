"""BM25 over a fixed collection of short documents.

    score(query, document) = Σ idf(word) · tf · (k1 + 1) / (tf + k1 · (1 − b + b · length / mean length))
    idf(word) = ln(1 + (documents − df + ½) / (df + ½))

The sum is over the words of the query; tf is the count of the word in the document, df the number of documents with it.
All weights are computed when the index is built; a search adds up those of the query's words. Equal scores are in the
order of the documents.
"""

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

K1 = 1.2
B = 0.75
QUERIES_KEPT = 4096
_WORD = re.compile(r"[a-z0-9]+")


def words(text: str) -> list[str]:
    """Words of a query or document, in lower case.

    >>> words("Red mug, 2-pack")
    ['red', 'mug', '2', 'pack']
    """
    return _WORD.findall(text.lower())


class Index:
    """Documents are named by their number in `documents`.

    >>> Index(["red mug", "blue mug", "red lamp"]).search("a red mug", 2)
    (0, 1)
    """

    def __init__(self, documents: Sequence[str]) -> None:
        counts = [Counter(words(document)) for document in documents]
        lengths = np.array([sum(count.values()) for count in counts], dtype=np.float64)
        mean = float(lengths.mean()) or 1.0
        found: dict[str, tuple[list[int], list[int]]] = {}
        for number, count in enumerate(counts):
            for word, times in count.items():
                numbers, frequencies = found.setdefault(word, ([], []))
                numbers.append(number)
                frequencies.append(times)
        self._size = len(documents)
        self._postings: dict[str, tuple[NDArray[np.intp], NDArray[np.float64]]] = {}
        for word, (numbers, frequencies) in found.items():
            places, tf = np.array(numbers), np.array(frequencies, dtype=np.float64)
            idf = np.log(1 + (self._size - len(places) + 0.5) / (len(places) + 0.5))
            self._postings[word] = places, idf * tf * (K1 + 1) / (tf + K1 * (1 - B + B * lengths[places] / mean))
        self._ranked = lru_cache(maxsize=QUERIES_KEPT)(self._rank)

    def search(self, query: str, most: int) -> tuple[int, ...]:
        """The best documents that have a word of the query, best first. A word counts once, wherever it stands."""
        known = sorted({word for word in words(query) if word in self._postings})
        return self._ranked(tuple(known), most) if known else ()

    def _rank(self, query: tuple[str, ...], most: int) -> tuple[int, ...]:
        scores = np.zeros(self._size)
        for word in query:
            places, weights = self._postings[word]
            scores[places] += weights
        (matching,) = scores.nonzero()
        best = matching[np.argsort(-scores[matching], kind="stable")[:most]]
        return tuple(best.tolist())
