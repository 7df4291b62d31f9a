"""Versions through a shared folder: real publisher, subscribers and files; readers that come late or look elsewhere."""

import json
from functools import partial
from pathlib import Path
from shutil import rmtree

import pytest
import torch
from safetensors.torch import load_file

from configs.infrastructure import WeightBus
from tests.support import bus_receiver
from tests.support.bus_receiver import CONFIG, HOST, RUN, Rollout, digests, learner, servers, until, weights
from weight_bus import WeightBusError
from weight_bus.errors import TransportError
from weight_bus.manifest import WITHOUT_GAPS, plan
from weight_bus.transports import make_transport
from weight_bus.transports.base import Formation
from weight_bus.transports.disk import INDEX


def disk(folder: Path, **keys: object) -> WeightBus:
    return CONFIG.model_copy(update={"transport": "disk", "folder": str(folder), **keys})


of_one_dtype = partial(weights, dtype=torch.float32)
publish = partial(bus_receiver.publish, dtype=torch.float32)


def test_versions_are_model_folders_and_the_two_newest_are_kept(tmp_path):
    config = disk(tmp_path)
    with learner(config, incarnation=3) as publisher:
        servers(publisher, "a", "b", config=config)
        for version in range(4):
            report = publish(publisher, version)
            assert sorted(report.served) == ["a", "b"] and not report.failed
        late = Rollout(publisher, "late", config=config)
        until(lambda: late.engine.activated == [3], "a late one reads what is there")
    folder = tmp_path / f"{RUN}-3"
    assert sorted(path.name for path in folder.iterdir()) == ["publisher.json", "v000002", "v000003"]
    index = json.loads((folder / "v000003" / INDEX).read_text())["weight_map"]
    held = {name: load_file(folder / "v000003" / file)[name] for name, file in index.items()}
    named = of_one_dtype(3)
    assert held.keys() == named.keys() and all(torch.equal(held[name], named[name]) for name in named)


def test_folders_of_earlier_incarnations_are_removed_and_those_of_other_runs_stay(tmp_path):
    others = [f"{RUN}-4", f"{RUN}-1-2", f"{RUN}-two-1", f"{RUN}x-1", "1", RUN, "model"]
    for name in [f"{RUN}-1", f"{RUN}-2", *others]:
        (tmp_path / name / "v000007").mkdir(parents=True)
        (tmp_path / name / "v000007" / "bucket-00001.safetensors").write_bytes(b"weights")
    config = disk(tmp_path)
    with learner(config, incarnation=3) as publisher:
        servers(publisher, "a", config=config)
        assert publish(publisher, 0).served == ["a"]
    assert {path.name for path in tmp_path.iterdir()} == {f"{RUN}-3", *others}
    assert all((tmp_path / name / "v000007" / "bucket-00001.safetensors").is_file() for name in others)


def test_a_file_that_was_damaged_is_found_by_the_digests_or_the_publisher_and_written_again(tmp_path):
    config = disk(tmp_path)
    with learner(config) as publisher:
        publish(publisher, 0)
        server = Rollout(publisher, "a", config=config)
        until(lambda: server.engine.activated == [0], "filled")
        path = tmp_path / f"{RUN}-1" / "v000000" / "bucket-00001.safetensors"
        whole = path.read_bytes()
        path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        late = Rollout(publisher, "late", config=config)
        until(lambda: late.engine.activated == [0], "it is filled from a whole one")
        assert late.engine.loads == 1 and path.read_bytes() == whole
        assert digests(late.engine.live) == digests(of_one_dtype(0))


def test_changes_go_through_files_as_well(tmp_path):
    config = disk(tmp_path, delta=True)
    with learner(config) as publisher:
        servers(publisher, "a", config=config)
        named = of_one_dtype(0)
        for version in range(3):
            bits = named["layers.0.weight"].view(-1).view(torch.int32)
            bits[version::500] += 1
            report = publisher.publish(version, named.items(), digests(named))
            assert report.served == ["a"], report
        assert report.num_bytes < 20_000 and (tmp_path / f"{RUN}-1" / "v000002.change").is_dir()


def formed(config: WeightBus, rank: int):
    transport = make_transport(config, HOST)
    transport.serve()
    transport.form(Formation(epoch=1, rank=rank, size=2, endpoint="disk", prefix=f"{RUN}/wb/1/1"))
    return transport


def test_another_folder_is_named_with_what_to_do(tmp_path):
    formed(disk(tmp_path / "learner"), 0)
    elsewhere = disk(tmp_path / "rollout", collective_timeout_s=0.2)
    with pytest.raises(TransportError, match=r"rollout/bus-test-1/publisher.json is not there .*; is weight_bus"):
        formed(elsewhere, 1)


def test_files_that_are_not_the_updates_are_refused(tmp_path):
    config = disk(tmp_path, collective_timeout_s=0.2)
    layout = plan([("w", "bfloat16", (10,))], 1000, WITHOUT_GAPS)
    writer, reader = formed(config, 0), formed(config, 1)
    for transport in (writer, reader):
        transport.label(5, layout)
    with pytest.raises(TransportError, match=r"bucket-00001.safetensors is not there .* may have been replaced"):
        reader.broadcast(torch.zeros(20, dtype=torch.uint8), 0)
    writer.broadcast(torch.arange(20, dtype=torch.uint8), 0)
    got = torch.zeros(20, dtype=torch.uint8)
    reader.broadcast(got, 0)
    assert got.tolist() == list(range(20))
    (path,) = tmp_path.glob("*/v000005/*.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TransportError, match="19 bytes of data or more, not 20"):
        reader.broadcast(got, 0)
    path.write_bytes(path.read_bytes()[10:])
    with pytest.raises(TransportError, match="its header is not that of the update"):
        reader.broadcast(got, 0)


def test_a_full_disk_is_no_fault_of_the_servers_which_wait_for_it(tmp_path):
    """They were removed for good after weight_bus.max_heals rounds."""
    config = disk(tmp_path)
    with learner(config) as publisher:
        (server,) = servers(publisher, "a", config=config)
        publish(publisher, 0)
        (tmp_path / f"{RUN}-1" / "v000001").write_text("no room")
        report = publish(publisher, 1)
        assert report.served == [] and "v000001/bucket-00001.safetensors: cannot be written" in report.failed["a"]
        rounds = publisher.stats()["rounds"]
        assert config.max_heals + 1 < rounds < 2 + config.deadline_s / config.heartbeat_s
        (tmp_path / f"{RUN}-1" / "v000001").unlink()
        until(lambda: publisher.members() == {"a": ("live", 1)}, "there is room, and it is sent again")
        assert server.ended is None and publisher.stats()["lost_peers"] == 0


def test_a_folder_that_is_emptied_between_versions_is_made_anew(tmp_path):
    config = disk(tmp_path / "shared")
    with learner(config) as publisher:
        servers(publisher, "a", config=config)
        for version in range(3):
            assert publish(publisher, version).served == ["a"]
            until((tmp_path / "shared" / f"{RUN}-1" / f"v{version:06d}" / INDEX).is_file, "its writer is done")
            rmtree(tmp_path / "shared" / ("" if version else f"{RUN}-1"))


def test_a_folder_that_cannot_be_written_is_an_error_of_the_publisher(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightBusError, match=r"weight_bus\.folder: .*file/weights cannot be written"):
        learner(disk(tmp_path / "file" / "weights"))
