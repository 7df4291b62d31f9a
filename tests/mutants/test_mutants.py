"""A few mutants of every package a day, chosen so that all come round; all of them under `-m slow`."""

import time
from contextlib import closing
from itertools import islice

import pytest

from tests.mutants import ROOT, Bench, all_mutants, count
from tests.mutants.__main__ import main

A_DAY = 6
"""Mutants that are a day's turn, at most: CPU_S seconds after the first one began, no other begins."""
CPU_S = 16.0


@pytest.mark.parametrize("package", sorted(all_mutants()))
def test_every_mutant_replaces_what_is_there_once_by_something_else(package):
    mutants = all_mutants()[package]
    assert len({mutant.name for mutant in mutants}) == len(mutants)
    assert {mutant.name: count(mutant) for mutant in mutants if count(mutant) != 1} == {}
    assert not [mutant.name for mutant in mutants if mutant.old == mutant.new or not mutant.tests]
    for mutant in mutants:
        source = (ROOT / mutant.path).read_text(encoding="utf-8")
        compile(source.replace(mutant.old, mutant.new), mutant.name, "exec")


def test_mutants_of_today_are_noticed(tmp_path):
    every = [mutant for mutants in all_mutants().values() for mutant in mutants]
    first, survived = int(time.time() // 86400) * A_DAY % len(every), []
    with closing(Bench(tmp_path)) as bench:
        for mutant in islice([*every, *every], first, first + A_DAY):
            survived += [mutant.name] if bench.cpu_s() < CPU_S and bench.notices(mutant) is None else []
    assert survived == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("package", sorted(all_mutants()))
def test_all_mutants_are_noticed(package, capsys):
    """The tests that notice them run in the same suite."""
    assert main([package, "--tested"]) == 0, capsys.readouterr().out
