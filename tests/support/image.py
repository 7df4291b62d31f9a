"""The image of the Dockerfile, built without a registry, and pods of it: with a network, processes and files apart."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from tests.support.namespaces import Switch
from tests.support.runs import ROOT

PROGRAMS = ("buildah", "debootstrap", "unshare", "nsenter")
VARIABLE = "SLIPSTREAM_IMAGE_ROOT"
"""Environment variable with the root of an image that is built already."""
APT_SOURCES = (Path("/etc/apt/sources.list.d/debian.sources"), Path("/etc/apt/sources.list"))
POD = """set -e
cd {root}
mount --bind {work} work
mount --bind {files} etc/slipstream
mount --bind {names} etc/hosts
mount -t proc proc proc
mount --rbind /dev dev
mount -t tmpfs tmpfs dev/shm
mount -t tmpfs tmpfs tmp
exec chroot . env -i "$@"
"""


def build(folder: Path) -> Path:
    """The root of the image; skips the test where this machine cannot build one, and says why."""
    if given := os.environ.get(VARIABLE):
        return Path(given)
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"{', '.join(missing)} not installed: apt-get install buildah debootstrap")
    if os.geteuid() != 0:
        pytest.skip("an image is built as root")
    buildah = ["buildah", "--storage-driver", "vfs", "--root", f"{folder}/storage", "--runroot", f"{folder}/run"]
    sources = [path for path in APT_SOURCES if path.exists()]
    found = re.search(r"^(?:URIs:|deb) *(\S+)", sources[0].read_text(), re.MULTILINE) if sources else None
    if found is None:
        pytest.skip(f"no mirror of Debian in {' or '.join(map(str, APT_SOURCES))}")
    include = "--include=python3,python3-venv,ca-certificates"
    _said("debootstrap", "--variant=minbase", include, "bookworm", f"{folder}/base", found[1])
    base = _said(*buildah, "from", "scratch")
    _said(*buildah, "add", base, f"{folder}/base", "/")
    _said(*buildah, "commit", base, "localhost/base")
    shared = [word for path in _pip_configuration() for word in ("--volume", f"{path}:{path}:ro")]
    how = ["--isolation", "chroot", "--build-arg", "BASE=localhost/base", "--tag", "localhost/slipstream"]
    _said(*buildah, "bud", *how, *shared, str(ROOT))
    return Path(_said(*buildah, "mount", _said(*buildah, "from", "localhost/slipstream")))


def pod(
    root: Path, switch: Switch, node: str, command: Sequence[str], variables: Mapping[str, str], **folders: Path
) -> "subprocess.Popen[str]":
    """Start a container's command as its process 1, on this host of the switch.

    Args:
        root: of the image.
        switch: the network.
        node: which host of it.
        command: of the container.
        variables: all that it gets, beside the image's own.
        folders: `work` is the volume, `files` lies at /etc/slipstream, `names` is the host file.
    """
    (root / "etc/slipstream").mkdir(exist_ok=True)
    (root / "etc/hosts").touch()
    script = POD.format(root=shlex.quote(str(root)), **folders)
    own = {"PATH": "/opt/venv/bin:/usr/local/bin:/usr/bin:/bin", "SLIPSTREAM_PYTHON": "/opt/venv/bin/python"}
    given = [f"{key}={value}" for key, value in {**own, "PYTHONUNBUFFERED": "1", **variables}.items()]
    inside = ["nsenter", f"--net=/run/netns/{switch.host(node)}", "unshare", "--mount", "--uts", "--ipc", "--pid"]
    how = ["--fork", "--kill-child", "bash", "-c", script, "-", *given, "sh", "-c", 'cd /work && exec "$@"', "-"]
    return subprocess.Popen(
        [*inside, *how, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def process_1(started: "subprocess.Popen[str]") -> psutil.Process:
    """Process 1 of a pod, as this machine sees it."""
    (found,) = psutil.Process(started.pid).children()
    return found


def exec_in(started: "subprocess.Popen[str]", command: Sequence[str]) -> int:
    """Exit code of a command inside a pod, as a probe runs it."""
    inside = ["nsenter", "--all", "--root", f"--target={process_1(started).pid}", *command]
    return subprocess.run(inside, capture_output=True, check=False, timeout=60).returncode


def _pip_configuration() -> list[str]:
    """Files of pip's configuration on this machine, the certificates, and folders that the configuration names."""
    files = ("/etc/pip.conf", "/etc/xdg/pip", "/root/.config/pip", "/etc/ssl/certs/ca-certificates.crt")
    named = re.findall(r"(?:file://)?(/[^\s']+)", _said(sys.executable, "-m", "pip", "config", "list"))
    local = {str(Path(path).parent) if path.endswith("/simple") else path for path in named}
    return sorted({path for path in (*files, *local) if Path(path).exists()})


def _said(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1500)
    assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout.strip()
