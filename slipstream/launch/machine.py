"""This machine as a placement sees it. Imports no torch."""

import os
from collections.abc import Mapping

from configs.errors import NoRoom
from configs.machine import count_gpus, torch_has_cuda, visible_devices
from configs.schema import Config
from slipstream.plan.processes import Machine


def this_machine(config: Config, environment: Mapping[str, str] = os.environ, *, is_of_the_run: bool = True) -> Machine:
    """This machine for the placement; 0 GPUs where torch cannot use them.

    A dry run may be made on another machine than the run: with placement.device cuda it need not have GPUs.

    Raises:
        ConfigError: placement.device is cuda and there is no GPU, or torch is built without CUDA.
    """
    device, address = config.placement.device, config.network.host
    if device == "cpu":
        return Machine(address, gpus=0)
    gpus, built, visible = count_gpus(), torch_has_cuda(), visible_devices(environment)
    if device == "cuda" and not is_of_the_run and not (gpus and built):
        return Machine(address, gpus=None)
    if device == "cuda" and not gpus:
        raise NoRoom(
            "placement.device: 'cuda', but this machine shows no GPU (nvidia-smi, /proc/driver/nvidia, /dev/nvidia*);"
            " take 'cpu' or 'auto'"
        )
    if device == "cuda" and not built:
        raise NoRoom(
            "placement.device: 'cuda', but the installed torch is built without CUDA; install a CUDA build, or take"
            " 'cpu'"
        )
    return Machine(address, gpus=gpus if built and visible != () else 0, visible=visible)
