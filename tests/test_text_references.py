"""The texts that samples of the task `text` are compared with."""

from __future__ import annotations

import pytest

from benchmarks.text_references import beginnings
from tokensteer.tasks.common.task import SHIPPED
from tokensteer.tasks.common.wordpiece import WordPiece
from tokensteer.tasks.text.corpus.windows import LENGTH

VOCABULARY = WordPiece.read(SHIPPED / "text-vocab.txt")
LONG = "The film was a real pleasure to watch. " * 30


def test_beginnings_of_reviews_are_windows_of_the_task():
    reviews = ["Too short.", LONG, "<br />" + LONG.replace("film", "movie"), "Снято хорошо. " * 60]
    found = beginnings(reviews, VOCABULARY, 2, 0)
    assert sorted(text.split()[1] for text in found) == ["film", "movie"]
    assert [len(VOCABULARY.encode(text)) for text in found] == [LENGTH, LENGTH]
    assert beginnings(reviews, VOCABULARY, 2, 0) == found
    with pytest.raises(ValueError, match="give --texts 2"):
        beginnings(reviews, VOCABULARY, 3, 0)
