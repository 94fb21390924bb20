"""Formatted sizes, rates, times and counts."""

import pytest

from fst._core.formatting import format_count, format_rate, format_seconds, format_size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 << 19, "1.5 MiB"),
        (5 << 30, "5.0 GiB"),
        (1 << 52, "4096.0 TiB"),
    ],
)
def test_format_size(nbytes, text):
    assert format_size(nbytes) == text


def test_format_rate():
    assert format_rate(5 * 10**9, 4) == "1.25 GB/s"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0.00 ms"), (0.0125, "12.50 ms"), (1, "1.00 s"), (75.126, "75.13 s")]
)
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text


def test_format_count():
    assert [format_count(number, "file") for number in (0, 1, 2000)] == ["0 files", "1 file", "2,000 files"]
    assert format_count(2, "copy", "copies") == "2 copies"
