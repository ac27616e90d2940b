"""Text that ships with Python, as the ids of its characters: the help topics of `pydoc`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..bench_data import Array

TEST_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids [tokens] to train on and, from other topics, to test on; `characters` by id."""

    characters: str
    train: Array
    test: Array

    def sequences(self, length: int, count: int) -> Array:
        """Returns the first `count` sequences [count, length] of the test text, int64."""
        count = min(count, len(self.test) // length)
        return self.test[: count * length].reshape(count, length)


def load_topics() -> Text:
    """Returns the topics of this Python's `pydoc`, one id per ASCII character.

    Each version of Python has its own text, so figures from two of them differ a little.
    """
    from pydoc_data.topics import topics

    texts = [topics[name].encode("ascii", "replace").decode() for name in sorted(topics)]
    characters = "".join(sorted(set("".join(texts))))
    codes = np.zeros(128, np.int64)
    codes[[ord(c) for c in characters]] = np.arange(len(characters))
    ids = [codes[np.frombuffer(text.encode("ascii"), np.uint8)] for text in texts]
    held_out = max(1, round(len(ids) * TEST_SHARE))
    # Every tenth topic, so that both parts hold all kinds of them.
    test = ids[:: len(ids) // held_out]
    train = [each for index, each in enumerate(ids) if index % (len(ids) // held_out)]
    return Text(characters, np.concatenate(train), np.concatenate(test))
