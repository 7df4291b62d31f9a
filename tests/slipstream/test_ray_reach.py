"""A node's process in the hands of an actor, without Ray: the actor is an object of this process, or of a child."""

import subprocess
import sys

import pytest

from configs.errors import PackageMissing
from slipstream.launch.reach import actor
from slipstream.launch.reach.actor import NOT_STARTED, NodeActor
from slipstream.runtime import processes
from tests.support.waiting import until

NODE = """
import os, sys
print("told", sys.stdin.readline().strip(), "in", os.getcwd(), flush=True)
sys.stdin.read()
print("ends in order", flush=True)
sys.exit(7)
"""
WORDS = [sys.executable, "-c", NODE, actor.NODE_MODULE]
HOLDER = "import sys; from slipstream.launch.reach.actor import NodeActor; a = NodeActor()\n"
HOLDER += "print(a.start(sys.argv[1:], 'x\\n', '.', 0), flush=True); sys.stdin.read()"


def all_news(held):
    lines, code = [], None
    while code is None:
        new, code = held.news()
        lines += new
    return b"".join(lines).decode(), code


def ended(pid):
    found = processes.of(pid)
    return found is None or found.state == "Z"


def test_a_node_gets_its_line_and_ends_in_order_with_its_stdin(tmp_path):
    held = NodeActor()
    assert held.start(WORDS, "order\n", str(tmp_path), 0) > 0
    assert held.news() == ([f"told order in {tmp_path}\n".encode()], None)
    held.close_stdin()
    assert all_news(held) == ("ends in order\n", 7)


def test_a_node_is_killed_and_one_that_cannot_start_says_why(tmp_path):
    held = NodeActor()
    held.start(WORDS, "order\n", str(tmp_path), 0)
    held.kill()
    assert all_news(held)[1] == -9
    for words, folder in [(WORDS, tmp_path / "not-here"), (["/no/such/python"], tmp_path)]:
        held = NodeActor()
        assert held.start(words, "order\n", str(folder), 0) == 0
        said, code = all_news(held)
        assert code == NOT_STARTED and "No such file or directory" in said


def test_a_node_ends_when_its_actor_is_gone():
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, *WORDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    pid = int(holder.stdout.readline())
    assert not ended(pid)
    holder.kill()
    holder.communicate()
    until(lambda: ended(pid), "the end of the node's process")


def test_a_node_starts_once_its_earlier_process_has_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(actor, "BEFORE_S", 0.2)
    earlier, held = NodeActor(), NodeActor()
    pid = earlier.start(WORDS, "order\n", str(tmp_path), 0)
    assert held.start(WORDS, "order\n", str(tmp_path), pid) > 0
    assert all_news(earlier)[1] == -9, "it had its time"
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    NodeActor().start(["true"], "order\n", str(tmp_path), other.pid)
    assert other.poll() is None, "what has the number of one is not ended"
    other.communicate()
    held.kill()


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "slipstream.launch.reach.ray", raising=False)
    with pytest.raises(PackageMissing, match=r"--ray: needs the package ray.*pip install 'slipstream-rl\[ray\]'"):
        __import__("slipstream.launch.reach.ray")
