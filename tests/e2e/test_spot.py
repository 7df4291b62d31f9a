"""A rollout server whose machine is taken away (SIGTERM): what it has of its answers is kept, and ended elsewhere."""

import json
import re
import signal

import pytest

from scripts.chaos.checker import check
from scripts.chaos.checker.journal import arrays, read
from tests.e2e.half_answers import ANSWERS, GROUPS, SIZE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_half_answers_of_a_server_that_is_ended_are_kept_and_ended_by_another_one(launch, tmp_path):
    file, program = tmp_path / "half.json", "tests.e2e.half_answers"
    sizes = (f"rollout.groups_per_step={GROUPS}", f"rollout.group_size={SIZE}", "rollout.max_new_tokens=24")
    run = launch(
        *sizes, "replay.async_lag=1", "replay.journal_keep=all", "placement.local_rollouts=false", split="1:1", steps=3
    )
    leaver = launch.server(run, "leaver", program, (str(file),))
    run.wait_until(file.exists, "half answers")
    for _ in range(2):  # the second changes nothing
        leaver.process.send_signal(signal.SIGTERM)
    launch.server(run, "finisher", program, ("-",))
    assert leaver.wait(60) == 0, leaver.text()  # after ten seconds it would be ended by an alarm
    assert run.wait() == 0, run.text()[-3000:]
    half = {tuple(map(int, name.split("/")[:2])): answers for name, answers in json.loads(file.read_text()).items()}
    count = sum(len(tokens) for answers in half.values() for tokens, _, _ in answers)
    assert {version for answers in half.values() for _, _, versions in answers for version in versions} == {0, 1}
    said = re.findall(r"(\d+) answers with (\d+) tokens of (\d+) leases are handed back", leaver.text())
    assert said == [(str(ANSWERS), str(count), str(len(half)))], leaver.text()
    assert "replay said goodbye" in leaver.text() and "no goodbye" not in leaver.text()
    assert run.steps()[-1]["buffer/partial_tokens_used"] == count
    report = check(run.folder)
    assert report.in_order and report.trained == 3 * GROUPS, report
    ended = {tuple(r.fields["group"]): r for r in read(run.folder / "journal")[0] if r.kind == "group"}
    for group, answers in half.items():
        assert ended[group].fields["server"].startswith("finisher") and ended[group].fields["attempt"] == 2
        whole, at = arrays(ended[group]), 0
        for length, answer in zip(whole["lengths"].tolist(), answers, strict=True):
            for name, kept in zip(("token_ids", "logprobs", "versions"), answer, strict=True):
                assert len(kept) < length and whole[name][at : at + len(kept)].tolist() == kept, (group, name)
            at += length
