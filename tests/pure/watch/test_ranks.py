"""Lists of ranks are short, and read as they were written."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx.watch.ranks import as_ranges, from_ranges, ranks_in_words


@given(st.lists(st.integers(0, 200), unique=True).map(sorted))
def test_members_survive_whatever_their_pattern(ranks):
    assert from_ranges(as_ranges(ranks)) == tuple(ranks)


def test_long_lists_of_ranks_are_short():
    assert ranks_in_words([2, 3]) == "2, 3"
    assert ranks_in_words(range(64)) == "0-63"
    assert ranks_in_words(range(0, 64, 2)) == "0-62 by 2"
    assert ranks_in_words(range(0, 256, 16)) == "0-240 by 16"
    assert len(as_ranges(range(0, 4096, 8))) < 12
