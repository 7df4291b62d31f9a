"""A few mutants of every package a day, chosen so that all come round; all of them under `-m slow`."""

import resource
import time
from itertools import islice

import pytest

from tests.mutants import all_mutants, changed, copy, count, noticed
from tests.mutants.__main__ import main

CPU_S = 18.0
"""Of the daily draw; the one that runs then is finished."""
A_DAY = 12
"""Mutants that come first on a day, at most."""


def used() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


@pytest.mark.parametrize("package", sorted(all_mutants()))
def test_every_mutant_replaces_what_is_there_once_by_something_else(package):
    mutants = all_mutants()[package]
    assert len({mutant.name for mutant in mutants}) == len(mutants)
    assert {mutant.name: count(mutant) for mutant in mutants if count(mutant) != 1} == {}
    assert not [mutant.name for mutant in mutants if mutant.old == mutant.new or not mutant.tests]


def test_mutants_of_today_are_noticed(tmp_path):
    every = [mutant for mutants in all_mutants().values() for mutant in mutants]
    first = int(time.time() // 86400) * A_DAY % len(every)
    copy(tmp_path)
    began, survived = used(), []
    for mutant in islice([*every, *every], first, first + A_DAY):
        if used() - began > CPU_S:
            break
        with changed(tmp_path, mutant):
            survived += [mutant.name] if noticed(tmp_path, mutant.tests) is None else []
    assert survived == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_mutants_are_noticed(capsys):
    assert main([]) == 0, capsys.readouterr().out
