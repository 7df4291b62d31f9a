"""scripts/constraints.txt pins what the project depends on, within the ranges of pyproject.toml."""

import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.runs import ROOT

ELSEWHERE = {"torch", "slipstream-rl"}


def test_every_dependency_is_pinned_within_its_range() -> None:
    lines = (ROOT / "scripts" / "constraints.txt").read_text().splitlines()
    pins = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    tested = {*extras["dev"][0].partition("[")[2].rstrip("]").split(","), "dev"}
    needed = [*project["dependencies"], *(line for extra in tested for line in extras[extra])]
    wanted = [one for one in map(Requirement, needed) if one.name not in ELSEWHERE]
    assert len(wanted) > 30
    assert [str(one) for one in wanted if pins.get(canonicalize_name(one.name), "0") not in one.specifier] == []
