"""Formatted sizes, rates, times, counts and text from files."""

import sys
import unicodedata

from fst._profile.formatting import format_count, format_rate, format_seconds, format_size, visible, visible_lines


def test_sizes_rates_times_and_counts():
    sizes = {0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 3 << 19: "1.5 MiB", 5 << 30: "5.0 GiB", 1 << 52: "4096.0 TiB"}
    assert {nbytes: format_size(nbytes) for nbytes in sizes} == sizes
    assert format_rate(5 * 10**9, 4) == "1.25 GB/s"
    times = {0: "0.00 ms", 0.0125: "12.50 ms", 1: "1.00 s", 75.126: "75.13 s"}
    assert {seconds: format_seconds(seconds) for seconds in times} == times
    assert [format_count(number, "file") for number in (0, 1, 2000)] == ["0 files", "1 file", "2,000 files"]
    assert format_count(2, "copy", "copies") == "2 copies"


def test_ordinary_names_are_unchanged():
    texts = ["model.layers.0.weight", "été", "e\u0301", "模型", "وزن", "משקל", "می\u200cخ", "👩\u200d🔬", "a\\b"]
    assert list(map(visible, texts)) == texts


def test_hidden_characters_are_escaped():
    """No character of the result acts on a terminal: its category is neither control, separator nor surrogate."""
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    shown = visible(everything)
    assert not {"Cc", "Zl", "Zp", "Cs"} & {unicodedata.category(character) for character in shown}
    directions = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    assert not directions & {unicodedata.bidirectional(character) for character in shown}
    assert not set("\u200e\u200f\u061c") & set(shown)
    assert visible("a\x1b[2Jb\u202ec\nd") == r"a\x1b[2Jb\u202ec\nd"
    assert visible_lines("a\nb\x1b") == "a\n  b\\x1b"
