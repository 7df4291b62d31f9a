"""Buckets as broadcasts in an NCCL group of the current epoch, from GPU to GPU.

The group is bare, as the gloo one. What keeps a lost peer from costing more than a timeout:

- The communicator is non-blocking: even building it ends after TORCH_NCCL_NONBLOCKING_TIMEOUT. It is built by the
  first collective, after all members have shown up in the store.
- Collectives are launched on a stream of their own and polled; a member that waits too long aborts the communicator.
  The next epoch builds another one under another prefix.
- PyTorch's watchdog is off for these groups (TORCH_NCCL_BLOCKING_WAIT): it would end the process on an error, or
  raise a flag that lets the watchdog of FSDP's group end it. Nothing else then touches the communicator, which is
  used by one thread at a time.
- Rank 0 closes every transfer with a reduction to itself. Its result is there only when every member has all
  buckets, so a group that is aborted afterwards loses nothing.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from configs.infrastructure import WeightBus
from configs.machine import NCCL_DEFAULTS
from replay.channel.interfaces import InterfaceError, bind_collectives
from weight_bus.errors import NotAvailable, TransportError, WeightBusError
from weight_bus.transports.base import PROTOCOL, Formation, ignore
from weight_bus.transports.meeting import GroupTransport, formed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroupNCCL, Work

log = logging.getLogger(__name__)

WATCHDOG = {
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "0"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", "3"),
    "TORCH_NCCL_ENABLE_MONITORING": ("0", "1"),
}
"""Read by the constructor of a group: the value for groups of the bus, and PyTorch's default for all others."""
ABORT_S = 10.0
POLL_S = 0.0002
STAGED = 2
"""Device buffers that buckets of host memory pass through in turn."""
CLOSING = -1  # number of the closing reduction among the buckets


def set_nccl_defaults(config: WeightBus) -> None:
    """Environment of NCCL where the user has set nothing; to be called before this process's first NCCL call.

    PyTorch's own keys are written with their defaults: later changes then replace a value in place, which another
    thread that reads its environment survives.
    """
    for name, value in NCCL_DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(math.ceil(config.collective_timeout_s)))
    for name, (_, default) in WATCHDOG.items():
        os.environ.setdefault(name, default)


def nccl_facts() -> dict[str, str]:
    """Backend, NCCL's version and what both ends must have set alike, as this process has them."""
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    agreed = {name: os.environ.get(name, "not set") for name in NCCL_DEFAULTS}
    return {"backend": "nccl", "nccl": version, "protocol": PROTOCOL, **agreed}


class NcclCollective(GroupTransport):
    """An NCCL group per epoch. Buckets live on the CUDA device that is current in the constructor.

    Raises WeightBusError: this process has no CUDA device, PyTorch no NCCL, or no interface the address `host`.
    """

    backend = "nccl"
    _group: "ProcessGroupNCCL | None" = None

    def __init__(self, config: WeightBus, host: str) -> None:
        super().__init__(config, host)
        self.device, self._stream = self._open(config, host)
        self._launched: list[tuple[int, Work]] = []
        self._buffers: dict[int, torch.Tensor] = {}
        with self._here():
            self._mark = torch.zeros(1, dtype=torch.float32, device=self.device)

    def _open(self, config: WeightBus, host: str) -> tuple[torch.device, torch.cuda.Stream]:
        if not (torch.cuda.is_available() and dist.is_nccl_available()):
            why = "PyTorch has no NCCL" if torch.cuda.is_available() else "there is no CUDA device in this process"
            raise NotAvailable(f"weight_bus.backend 'nccl' cannot be used: {why}; take weight_bus.backend: gloo")
        set_nccl_defaults(config)
        try:
            bind_collectives(os.environ, host)
        except InterfaceError as error:
            raise WeightBusError(str(error)) from error
        device = torch.device("cuda", torch.cuda.current_device())
        return device, torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def facts(self) -> dict[str, str]:
        return nccl_facts()

    def broadcast(self, bucket: torch.Tensor, index: int) -> None:
        with self._or_leave(f"{_named(index)} failed"), self._here():
            self._launch(bucket if bucket.device.type == self.device.type else self._staged(bucket), index)

    def _staged(self, bucket: torch.Tensor) -> torch.Tensor:
        """A bucket of host memory on the device, in a buffer whose last broadcast has ended."""
        if len(self._launched) >= STAGED:
            index, work = self._launched[-STAGED]
            self._wait(work, index)
        turn = len(self._launched) % STAGED
        if turn not in self._buffers or self._buffers[turn].numel() < bucket.numel():
            self._buffers[turn] = torch.empty_like(bucket, device=self.device)
        return self._buffers[turn][: bucket.numel()].copy_(bucket, non_blocking=True)

    def finish(self, arrived: Callable[[int], None] = ignore) -> None:
        """Wait for all buckets in order, each for the collective timeout, and close the transfer."""
        with self._or_leave(f"{_named(CLOSING)} failed"), self._here():
            # the result of this collective is on rank 0 only when every member has every bucket; the stubs lack it
            self._launched.append((CLOSING, formed(self._group).reduce(self._mark, 0)))  # type: ignore[attr-defined]
        for index, work in self._launched:
            with self._or_leave(f"{_named(index)} failed"), self._here():
                self._wait(work, index)
            if index != CLOSING:
                arrived(index)  # on the caller's stream, where a digest of the bucket is also read
        self._launched.clear()

    def leave(self) -> None:
        """Abort the communicator: its kernels end, whatever the peers do."""
        group, self._group = self._group, None
        self._launched.clear()
        try:
            if group is not None:
                with self._here():
                    group.abort()
        except RuntimeError as error:
            log.warning("weight bus: the communicator was not aborted in %.0f s: %s", ABORT_S, error)

    def _enter(self, formation: Formation) -> None:
        store = self._meeting.at(formation)
        self._meeting.show_up(store, formation, self._timeout_s)
        with self._here():
            self._group = self._build(store, formation)
            self._launch(self._mark, CLOSING)
        self.finish()

    @contextmanager
    def _here(self) -> Iterator[None]:
        """This transport's device in any thread, and a stream that waits for no other kernels."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def _build(self, store: PrefixStore, formation: Formation) -> "ProcessGroupNCCL":
        """A group without a watchdog; its communicator is built by the first collective."""
        from torch.distributed.distributed_c10d import ProcessGroupNCCL  # only there in a PyTorch with NCCL

        options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timedelta(seconds=ABORT_S)  # bounds abort(); collectives are bounded by `_wait`
        options.config.blocking = 0
        options.group_name = formation.prefix  # type: ignore[assignment]  # GroupName is a str
        options.global_ranks_in_group = list(range(formation.size))
        before = {name: os.environ.get(name, default) for name, (_, default) in WATCHDOG.items()}
        try:
            os.environ.update({name: value for name, (value, _) in WATCHDOG.items()})
            return ProcessGroupNCCL(store, formation.rank, formation.size, options)
        finally:
            os.environ.update(before)

    def _launch(self, tensor: torch.Tensor, index: int) -> None:
        # the stubs lack what is inherited from Backend
        self._launched.append((index, formed(self._group).broadcast(tensor, 0)))  # type: ignore[attr-defined]

    def _wait(self, work: "Work", index: int) -> None:
        started = time.monotonic()
        while not work.is_completed():
            if time.monotonic() - started > self._timeout_s:
                raise TransportError(f"not done in {self._timeout_s:.1f} s", "silent")
            time.sleep(POLL_S)
        work.wait()  # has ended: raises what the communicator reported, never waits


def _named(index: int) -> str:
    return "the closing collective" if index == CLOSING else f"broadcast of bucket {index + 1}"
