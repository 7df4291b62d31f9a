"""Long operations say where they stand, quick ones say nothing."""

import logging
import re

import pytest

from slipstream.runtime.progress import EVERY_S, Progress
from tests.support.waiting import until


def test_a_long_operation_says_where_it_stands_and_that_it_is_done():
    said: list[str] = []
    with Progress("loading weights", total=10.0, unit="GiB", say=said.append, every_s=0.02) as progress:
        progress.add(2.5)
        until(lambda: len(said) >= 2, "a line every 0.02 s")
    assert re.fullmatch(r"progress: loading weights: 2\.5 of 10 GiB \(25%\), \d+ s so far, about \d+ s left", said[0])
    assert re.fullmatch(r"progress: loading weights: done after \d+ s", said[-1])
    assert not progress._thread.is_alive() and not any("done" in line for line in said[:-1])


def test_a_blocking_call_has_lines_too_and_one_that_raises_breaks_off(caplog):
    caplog.set_level(logging.INFO)
    with pytest.raises(OSError), Progress("exporting", every_s=0.02):
        until(lambda: "exporting" in caplog.text, "a line")
        raise OSError
    first, *_, last = [said for said in caplog.messages if "exporting" in said]
    assert re.fullmatch(r"progress: exporting: \d+ s so far", first)
    assert re.fullmatch(r"progress: exporting: broke off after \d+ s", last)


def test_a_quick_operation_says_nothing(caplog):
    caplog.set_level(logging.INFO)
    with Progress("a short one", total=3) as progress:
        progress.add(3)
    assert not any("a short one" in said for said in caplog.messages) and EVERY_S == 10.0


def test_the_time_left_follows_from_what_is_done():
    progress = Progress("reading", total=4.0, unit="GB")
    progress._started = 100.0
    assert progress.text(130.0) == "progress: reading: 0 of 4 GB (0%), 30 s so far"
    progress.add(1.0)
    assert progress.text(130.0) == "progress: reading: 1 of 4 GB (25%), 30 s so far, about 90 s left"
    progress.add(9.0)
    assert progress.text(130.0).endswith("(100%), 30 s so far, about 0 s left")
    assert "5 of 10 B (50%)" in Progress("writing", total=10.0, unit="B", measure=lambda: 5.0).text(0.0)
