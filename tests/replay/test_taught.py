"""Rows that hold their answers: how they are read and encoded, and the groups that replay makes of them."""

import dataclasses
import json

import numpy as np
import pytest

from examples.sort6 import SYMBOLS, save_tokenizer
from learner.rows import check, lags_of, sampled_part
from replay import messages as m
from replay.batches.build import trained
from replay.batches.sharing import assign_minibatches
from replay.data import DataError, PromptSource, load_rows
from replay.data.encoding import RowEncoder, Unusable
from replay.decisions import making
from replay.journal import JournalError
from replay.journal.format import Record
from replay.service import Service
from replay.state.apply import boot_fields, check_boot
from replay.state.leases import SlotState
from tests.replay.simulated_run import config, group_message, joins, learner, lease, sent
from tests.replay.simulation.journal import SimulatedJournal
from tests.replay.simulation.samples import make_group
from tests.replay.simulation.world import comparable
from tests.replay.simulation.world import rows as plain_rows

TEMPLATE = (
    "{% if tools %}t{{ tools | length }};{% endif %}"
    "{% for message in messages %}<{{ message.role[0] }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}@{{ call.function.arguments.x }}{% endfor %}</{{ message.role[0] }}>\n"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
MARKED = TEMPLATE.replace(
    "{{ message.content }}",
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}{% else %}"
    "{{ message.content }}{% endif %}",
)
LATE = TEMPLATE.replace("</{{", "{% if loop.last and message.role == 'assistant' %}!{% endif %}</{{")
ASKED, TOLD = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"x": 7}'}}
TALK = [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "7"}, TOLD]
SHOWN = "<u>1+1</u>\n<a>@7</a>\n<t>7</t>\n<a>2</a>"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder, [*SYMBOLS, *"<>/ua ts@;!\n78\\+."])
    return folder


def configured(model, template=TEMPLATE, **overrides):
    given = {"model": {"path": str(model), "chat_template": template}, "learner__objective": "sft"}
    given |= {"data": {"train": "unused", "max_prompt_tokens": 100}, "rollout__max_new_tokens": 60}
    return config(**given | overrides)


def rows_of(folder, *rows, answers=1):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_rows(path, answers=answers)


def learned(encoder, row):
    """(text, text in the loss) of a row's only answer, up to its last token in the loss."""
    (one,) = encoder.encode(row)
    decode = encoder._tokenizer.decode
    whole = decode([*one.prompt_ids.tolist(), *one.token_ids.tolist()], skip_special_tokens=False)
    return whole, decode(one.token_ids[one.loss_mask != 0].tolist(), skip_special_tokens=False)


@pytest.mark.parametrize(
    ("row", "settings", "whole", "in_loss"),
    [
        ({"prompt": "1+1=", "completion": "2"}, {}, "1+1=2<eos>", "2<eos>"),
        ({"text": "1+1=2"}, {}, "1+1=2<eos>", "+1=2<eos>"),
        ({"messages": TALK}, {}, SHOWN, "@7</a>2</a>"),
        ({"messages": TALK, "tools": "[{}]"}, {}, f"t1;{SHOWN}", "@7</a>2</a>"),
        ({"messages": TALK}, {"data__loss_roles": ["tool"]}, SHOWN[: SHOWN.index("\n<a>2")], "<t>7</t>"),
        ({"messages": TALK}, {"template": MARKED}, SHOWN[:-4], "2"),
        ({"prompt": TALK[:3], "completion": [TOLD]}, {}, SHOWN, "2</a>"),
        ({"prompt": [ASKED, TOLD, ASKED], "completion": [TOLD]}, {"template": MARKED}, None, "2"),
    ],
)
def test_what_is_in_the_loss_of_each_form(tmp_path, model, row, settings, whole, in_loss):
    encoder = RowEncoder(configured(model, **settings))
    (found,) = rows_of(tmp_path, row)
    text, said = learned(encoder, found)
    assert said == in_loss and text == (whole or text)


@pytest.mark.parametrize(
    ("row", "settings", "reason", "said"),
    [
        ({"messages": TALK}, {"template": LATE}, "prompt_not_rendered", "generation %}"),
        ({"messages": [ASKED]}, {}, "prompt_not_rendered", "no token"),
        ({"chosen": [ASKED, TOLD], "rejected": [ASKED, TOLD, ASKED]}, {}, "prompt_not_rendered", "same tokens"),
        ({"prompt": "1+1=", "chosen": "2", "rejected": "2"}, {}, "prompt_not_rendered", "same tokens"),
        ({"messages": TALK}, {"rollout__max_new_tokens": 1, "data": {"train": "x", "max_prompt_tokens": 9}},
         "prompt_too_long", "data.max_prompt_tokens"),
        ({"messages": TALK}, {"template": "{{ messages[0].content + 1 }}"}, "prompt_not_rendered", "chat_template"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_encoded_says_why(tmp_path, model, row, settings, reason, said):
    answers = 1 + ("chosen" in row)
    (found,) = rows_of(tmp_path, row, answers=answers)
    with pytest.raises(Unusable, match=said) as raised:
        RowEncoder(configured(model, **settings), answers).encode(found)
    assert raised.value.reason == reason


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "1+1?"}, "`messages`, or `prompt` and `completion`"),
        ({"messages": []}, "'messages'"),
        ({"messages": [{"role": "judge", "content": "2"}]}, "role"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{**ASKED, "mood": "good"}]}, "mood"),
        ({"prompt": "1+1=", "completion": [TOLD]}, "all text, or all messages"),
        ({"messages": TALK, "tools": "[{"}, "tools"),
        ({"messages": [ASKED, {**TOLD, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "arguments"),
        ({"messages": [ASKED, {**TOLD, "tool_calls": 5}]}, "'messages.1..tool_calls': expected a list of calls"),
        ({"messages": "1+1"}, "'messages': expected a list of messages"),
        ({"text": TALK}, "'text': expected text, found a list"),
        ({"messages": TALK, "images": ["a.png"]}, "images"),
    ],
)
def test_rows_without_usable_answers_are_refused_by_name(tmp_path, row, said):
    with pytest.raises(DataError, match=said):
        rows_of(tmp_path, row)


@pytest.fixture
def source(tmp_path):
    def made(num_rows=40):
        numbers = range(num_rows)
        rows = [{"prompt": f"{n}=", "completion": "1" * (200 if n == 2 else 1 + n % 7)} for n in numbers]
        return PromptSource(rows_of(tmp_path, *rows), shuffle=False, seed=0)

    return made


def service(model, source, journal=None, **overrides):
    return Service(configured(model, **overrides), source, {}, 0.0, journal=journal or SimulatedJournal())


def take(made, step, rank="l"):
    made.handle(rank, m.Take(step=step, rank=0), 1.0)
    return sent(made, rank, m.Batch)[-1]


def test_batches_come_of_the_data_alone_in_its_order_and_without_lag(model, source):
    made = service(model, source(), rollout__wait_for_servers_s=1.0)
    learner(made, "l")
    for step, ids in ((1, [0, 1, 3, 4]), (2, [5, 6, 7, 8])):
        batch = take(made, step)
        check(batch, async_lag=1, vocab_size=64)
        assert [index for _, index in batch.group_ids] == ids, "row 2 is too long"
        assert set(lags_of(batch).tolist()) == {0} and batch.lag_histogram.keys() == {"0"}
        assert not [name for name in batch.stats if name.startswith(("critic/", "reward/"))]
        made.handle("l", m.Committed(step=step, digest=f"d{step}"), 1.0)
    assert made.counters["dropped/prompt_too_long"] == 1
    made.tick(5.0)
    assert made.ended is None, "no rollout server is waited for"


def test_a_restart_goes_on_with_the_same_batches(model, source):
    made = service(model, source())
    learner(made, "l")
    take(made, 1)
    made.handle("l", m.Committed(step=1, digest="d1"), 1.0)
    second = take(made, 2)
    for crash in (None, 1, 2):  # a lease without its group was the last that the journal got
        journal = made.journal.crash(None)
        if crash:
            leases = [at for at, each in enumerate(journal.records) if each.kind == "lease"]
            journal.records = journal.records[: leases[-crash] + 1]
            journal.flushed = len(journal.records)
        again = service(model, source(), journal)
        again.restore(list(journal.records), 1.0)
        assert crash or comparable(again) == comparable(made)
        learner(again, "n", version=1, digest="d1")
        found = take(again, 2, "n")
        for name in ("token_ids", "loss_mask", "lengths", "trajectory", "microbatch", "versions"):
            assert np.array_equal(getattr(found, name), getattr(second, name)), name
        assert all(slot.state is SlotState.BUFFERED for slot in again.buffer.slots.values())


def test_rollout_servers_evaluate_and_get_no_lease(model, source, monkeypatch):
    monkeypatch.setattr(making, "TURN_S", 0.0)  # so there is room
    made = service(model, source())
    learner(made, "l")
    joins(made, "a")
    made.handle("a", m.LeaseRequest(capacity=4, version=0, incarnation=1), 1.0)
    assert made.buffer.room > 0 and not sent(made, "a", m.Lease)


def test_a_dataset_of_which_no_row_can_be_used_ends_the_run_by_name(model, tmp_path):
    rows = rows_of(tmp_path, *({"prompt": "1=", "completion": "1" * 200} for _ in range(3)))
    made = service(model, PromptSource(rows, shuffle=False, seed=0))
    learner(made, "l")
    assert made.failed and "prompt_too_long" in str(made.ended)


def test_what_is_compared_lies_in_one_microbatch():
    groups = [dataclasses.replace(make_group([5 + n, 3], index=n), rewards=np.zeros(2, np.float32)) for n in range(9)]
    place = {"num_ranks": 2, "max_tokens": 24, "number": 1}
    found, _ = assign_minibatches(groups, trained(groups, flat=True), "auto", whole=True, **place)
    bins = list(zip(found.rank.tolist(), found.microbatch.tolist(), strict=True))
    assert bins[::2] == bins[1::2] and len(set(bins)) > 2


def test_rows_beside_sampled_groups_follow_from_the_step_alone(model, tmp_path):
    term = {"objective": "rl", "sft": {"data": "rows", "rows_per_step": 3}, "max_tokens_per_microbatch": 200}
    taught = [{"prompt": f"{n}=", "completion": "1" * (200 if n == 4 else 1 + n)} for n in range(5)]

    def made(journal=None):
        source = PromptSource(plain_rows(40), shuffle=False, seed=0)
        source.beside = PromptSource(rows_of(tmp_path, *taught), shuffle=False, seed=0)
        given = configured(model, learner__objective="rl", learner=term)
        return Service(given, source, {}, 0.0, journal=journal or SimulatedJournal())

    def batches(service, until, rank="l"):
        found = []
        for step in range(service.buffer.version + 1, until + 1):
            service.handle(rank, m.Take(step=step, rank=0), 0.0)
            for given in lease(service, capacity=50, version=step - 1, incarnation=service.incarnation):
                service.handle("a", group_message(given, [step - 1]), 0.0)
            found.append(sent(service, rank, m.Batch)[-1])
            service.handle(rank, m.Committed(step=step, digest=f"d{step}"), 0.0)
        return found

    service = made()
    learner(service, "l")
    joins(service, "a")
    found = batches(service, 3)
    assert [batch.group_ids[4:] for batch in found] == [
        [[-1, 0], [-1, 1], [-1, 2]], [[-1, 3], [-2, 0]], [[-2, 1], [-2, 2], [-2, 3]]
    ], "row 4 is too long"  # fmt: skip
    for batch in found:
        check(batch, async_lag=1, vocab_size=64)
        rows, microbatches = batch.taught
        is_taught = batch.all_groups[batch.trajectory] >= 4
        assert rows == is_taught.sum() == batch.stats["sft/rows"]
        assert set(batch.microbatch[is_taught].tolist()) == set(
            range(batch.num_microbatches - microbatches, batch.num_microbatches)
        )
        assert batch.microbatch[~is_taught].max() < batch.num_microbatches - microbatches
        assert sampled_part(batch).all_rewards.size == 8 and batch.stats["critic/score/mean"] == 0.5
    again = made(service.journal.crash(None))
    again.restore(list(again.journal.records), 1.0)
    learner(again, "n", version=1, digest="d1")
    joins(again, "a")
    for one, other in zip(batches(again, 3, "n"), found[1:], strict=True):
        assert np.array_equal(one.token_ids, other.token_ids) and one.group_ids == other.group_ids
    other = made()
    other.run.source.beside = PromptSource(rows_of(tmp_path, *taught[:3]), shuffle=False, seed=0)
    with pytest.raises(JournalError, match=r"learner\.sft\.data"):
        check_boot(other.run, Record("boot", 1, boot_fields(service.config, service.run.source.state(), 1), None))
