"""An update as a scheduler carries it out: what it copies and digests, and whether it decodes on. Without SGLang."""

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout_server.engines.sglang.update import armed, loader
from rollout_server.engines.sglang.update.layout import live_slices
from rollout_server.engines.sglang.update.live import RankWeights
from rollout_server.engines.sglang.update.orders import FOLDER as FOLDER_VARIABLE
from rollout_server.engines.sglang.update.orders import StagingFolder
from tests.rollout_server.test_sglang_requests import FOLDER, NORM, UP, Model, filled
from tests.support.idle_scheduler import idle_scheduler
from weight_bus.digest import slice_digest


class Mover(Model):
    """Loads by making parameters anew, as models do that pack their weights after loading; or flips a bit."""

    fault = ""

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        whole = dict(tensors)
        for piece in live_slices(self, FOLDER.items()):
            piece.view.copy_(whole[piece.name])
        if self.fault == "moves":
            self.model.norm.weight = torch.nn.Parameter(self.model.norm.weight.detach().clone())
        if self.fault == "flips":
            flip(self.model.norm.weight.data)


def flip(tensor: torch.Tensor) -> None:
    tensor.view(torch.int32).view(-1)[3] ^= 1


def request(*tokens: int, ended: bool = False) -> SimpleNamespace:
    return SimpleNamespace(rid="a", output_ids=[*tokens], finished_reason="stop" if ended else None)


@pytest.fixture
def staging(monkeypatch: pytest.MonkeyPatch) -> Iterator[StagingFolder]:
    """What the one scheduler of an engine, which is here, has its orders from."""
    staging = StagingFolder()
    monkeypatch.setenv(FOLDER_VARIABLE, str(staging.path))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(armed, "scheduler", idle_scheduler())
    yield staging
    staging.close()


def test_a_parameter_that_moved_is_refused_for_good(staging: StagingFolder) -> None:
    """Its digest would be that of memory which captured graphs do not read."""
    whole, model = filled(1)[0], Mover(0, 1)

    def update() -> str:
        staging.write_update(whole.items())
        loader.apply(model, [])
        return str(staging.replies(1)[0]["error"])

    assert update() == ""
    model.fault = "moves"
    assert "parameters of the model have moved, first 'model.norm.weight'" in update()
    model.fault = ""
    assert "have moved" in update(), "its graphs read the old memory for ever"


def test_a_scheduler_decodes_on_only_with_the_digests_of_its_order(staging: StagingFolder) -> None:
    whole, model = filled(1)[0], Mover(0, 1)
    digests = {name: slice_digest(tensor) for name, tensor in whole.items()}

    def update(expected: dict[str, int] | None, fault: str = "", flipped: str = "") -> dict[str, Any]:
        tensors = {name: tensor.clone() for name, tensor in whole.items()}
        if flipped:
            flip(tensors[flipped])
        model.fault = fault
        staging.write_update(tensors.items(), expected)
        loader.apply(model, [])
        (reply,) = staging.replies(1)
        assert reply["proven"] is not armed.scheduler._engine_paused
        began, ended = reply["stood"]
        assert 0 < ended - began < 60
        return reply

    assert update(digests)["proven"]
    assert not update(None)["proven"], "nothing says what it must hold"
    assert not update(digests, fault="flips")["proven"], "a bit of what is live"
    assert not update(digests, flipped=UP)["proven"], "a bit of what was staged"
    wrong = staging.digests(staging.replies(1))
    assert {name for name in digests if wrong[name] != digests[name]} == {UP}
    assert not update({name: digest for name, digest in digests.items() if name != NORM})["proven"], "one too many"
    failed = update(digests, fault="moves")
    assert not failed["proven"] and "have moved" in failed["error"]


@pytest.mark.parametrize("fault", ["", "staged", "live", "moves"])
def test_one_forward_runs_beside_the_digests_and_the_next_one_only_with_a_proof(
    staging: StagingFolder, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """A request decodes; what is wrong is found before the second forward, wherever and whenever it went wrong."""
    whole, model = filled(1)[0], Mover(0, 1)
    digests = {name: slice_digest(tensor) for name, tensor in whole.items()}
    kind = type("Scheduler", (SimpleNamespace,), {})
    armed.watch(kind)
    scheduler = kind(**vars(idle_scheduler()))
    scheduler.running_batch = SimpleNamespace(reqs=[request(5, 6)])
    monkeypatch.setattr(armed, "scheduler", scheduler)
    tensors = {name: tensor.clone() for name, tensor in whole.items()}
    if fault == "staged":
        flip(tensors[UP])
    model.fault = fault
    staging.write_update(tensors.items(), digests)
    loader.apply(model, [])
    (reply,) = staging.replies(1)
    assert (reply["proven"], reply["tokens"], reply["error"], staging.proofs(1)) == (None, {"a": 2}, "", [])
    assert not scheduler._engine_paused and staging.proofs(1) == [], "the forward beside which digests are taken"
    if fault == "live":
        flip(model.model.norm.weight.data)
    assert scheduler._engine_paused is bool(fault)
    (proof,) = staging.proofs(1)
    assert staging.proofs(1) == [], "once"
    assert proof["proven"] is not bool(fault) and proof["settled_s"] > 0
    assert ("have moved" in proof["error"]) is (fault == "moves")
    wrong = {name for name, digest in staging.digests([proof]).items() if digests[name] != digest} if fault else set()
    assert fault == "moves" or wrong == {"staged": {UP}, "live": {NORM}}.get(fault, set())


def test_a_load_that_fails_on_one_rank_stops_all_after_the_forward_that_ran_beside(
    staging: StagingFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, model = filled(1)[0], Mover(0, 1)
    kind = type("Scheduler", (SimpleNamespace,), {})
    armed.watch(kind)
    scheduler = kind(**vars(idle_scheduler()))
    monkeypatch.setattr(armed, "scheduler", scheduler)
    digests = {name: slice_digest(tensor) for name, tensor in whole.items()}
    staging.write_update(whole.items(), digests)
    loader.apply(model, [])
    assert staging.replies(1)[0]["proven"], "nothing decodes, so nothing is waited for"
    scheduler.last_batch = SimpleNamespace(reqs=[request(5, ended=True)])
    staging.write_update(whole.items(), digests)
    loader.apply(model, [])
    assert (staging.replies(1)[0]["proven"], staging.replies(1)[0]["tokens"]) == (True, {}), "its last token is booked"
    scheduler.waiting_queue = [request()]
    staging.write_update(whole.items(), digests)
    monkeypatch.setattr(loader, "_tensors", lambda *_: 1 / 0)
    loader.apply(model, [])
    (reply,) = staging.replies(1)
    assert (reply["proven"], reply["error"]) == (None, "ZeroDivisionError: division by zero")
    assert [scheduler._engine_paused for _ in range(3)] == [False, True, True]
    (proof,) = staging.proofs(1)
    assert not proof["proven"] and "division" in proof["error"]


def test_the_ranks_of_an_engine_decode_on_together_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, models = filled(2)
    store, mine = torch.distributed.HashStore(), threading.local()
    monkeypatch.setattr(armed, "scheduler", mine)
    request = {
        "expected": {name: slice_digest(tensor) for name, tensor in whole.items()},
        "tensors": [[name, "", list(shape), 0, 0] for name, shape in FOLDER.items()],
        "base": [],
        "lora": {},
    }

    def found_by(rank: int, case: str, fails: bool) -> tuple[bool, bool]:
        own = torch.distributed.PrefixStore(case, store)
        mine.tp_cpu_group = torch.distributed.ProcessGroupGloo(own, rank, 2, timedelta(seconds=30))
        slices = [] if fails else RankWeights(models[rank], FOLDER.items()).digests()
        return armed.goes_on(request, slices), mine._engine_paused

    def found(case: str, fails: bool = False) -> list[tuple[bool, bool]]:
        with ThreadPoolExecutor(2) as ranks:
            return [*ranks.map(found_by, (0, 1), (case, case), (False, fails))]

    assert found("equal") == [(True, False)] * 2
    assert found("failed", fails=True) == [(False, True)] * 2
    for number, part in enumerate((models[1].model.layers[0].mlp.gate_up_proj, models[1].model.norm)):
        flip(part.weight.data)
        assert found(f"flipped {number}") == [(False, True)] * 2
        flip(part.weight.data)
