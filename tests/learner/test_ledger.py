"""The ledger: which groups were trained, counted over the surviving line of policies."""

from typing import Any

from learner.ledger import FILE, Ledger, read

OF_STEP: dict[str, Any] = {"incarnation": 1, "digest": "d", "expected": ""}


def test_a_group_that_is_trained_again_is_counted(tmp_path):
    ledger = Ledger(tmp_path, resume_version=None)
    assert ledger.append(1, [[0, 1], [0, 2]], **OF_STEP) == 0
    assert ledger.append(2, [[0, 3], [1, 1]], **OF_STEP) == 0
    assert ledger.append(3, [[0, 2], [0, 4]], **OF_STEP) == 1
    assert [line["step"] for line in read(tmp_path)] == [1, 2, 3] and "expected" not in read(tmp_path)[0]


def test_steps_after_the_checkpoint_may_be_made_again_and_no_others(tmp_path):
    ledger = Ledger(tmp_path, resume_version=None)
    for step in (1, 2, 3):
        ledger.append(step, [[0, step]], **OF_STEP)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"step": 4, "gro')  # killed while writing
    resumed = Ledger(tmp_path, resume_version=2)
    assert resumed.append(3, [[0, 3]], incarnation=2, digest="d", expected="d") == 0
    assert resumed.append(4, [[0, 1]], **OF_STEP) == 1
    assert [(line["step"], line.get("expected")) for line in read(tmp_path)][2:] == [(3, None), (3, "d"), (4, None)]
