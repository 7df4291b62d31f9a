"""What goes into the image; tests/e2e/test_image.py builds one and runs pods of it."""

import re
import tomllib

from tests.support.runs import ROOT


def test_the_image_has_every_package_and_nothing_of_a_run():
    first, *rest = (ROOT / ".dockerignore").read_text().splitlines()
    taken = {line[1:] for line in rest if line.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert first == "*" and packages <= taken and all((ROOT / name).exists() for name in taken)
    assert not taken & {".git", "runs", "data", "models", "keys", "tests"}


def test_a_pod_names_process_1_of_the_image_and_its_extras_are_those_of_the_installation():
    text = (ROOT / "Dockerfile").read_text()
    assert "ENTRYPOINT" not in text, "its SIGTERM goes to the process that the pod names"
    assert re.findall(r"--venv (\S+)", text) == ["/opt/venv"] and "PATH=/opt/venv/bin:" in text
    extras = re.findall(r"EXTRAS=(\w+)", text)
    assert {*extras} == {"none", "sglang"}
