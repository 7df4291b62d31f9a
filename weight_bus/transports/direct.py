"""The publisher's end of a group whose other members are the processes of SGLang engines (weight_bus.apply: direct).

They build their end by `init_weights_update_group`, that is: by torch.distributed, under the group's name. Here it is
the same bare backend as in the staged mode, over the store prefixes that torch.distributed gives such a group. What
the members of a staged group say to each other beside the buckets (showing up, the closing reduction) is not there:
SGLang receives buckets and nothing else. So the control plane says when all are ready and when all have everything.
"""

from collections.abc import Callable
from datetime import timedelta

from torch.distributed.distributed_c10d import Backend, BackendConfig, PrefixStore

from configs.infrastructure import WeightBus
from weight_bus.transports.base import PROTOCOL, Formation
from weight_bus.transports.gloo import Collective
from weight_bus.transports.meeting import GroupTransport, Meeting
from weight_bus.transports.nccl import NcclCollective, nccl_facts


def direct_facts(config: WeightBus) -> dict[str, str]:
    """What publisher and engine must have alike; SGLang sets NCCL's environment in the server's process too."""
    facts = nccl_facts() if config.backend == "nccl" else {"backend": config.backend, "protocol": PROTOCOL}
    return {**facts, "apply": "direct"}


class NamedMeeting(Meeting):
    """The keys of a group that torch.distributed has built under a name, which is the formation's prefix."""

    def __init__(self, host: str, timeout: timedelta, backend: str) -> None:
        super().__init__(host, timeout)
        # the first device that the backend serves names the keys of a group that one backend serves whole
        self._device = next(iter(BackendConfig(Backend(backend)).get_device_backend_map()))

    def at(self, formation: Formation) -> PrefixStore:
        return PrefixStore(f"{self._device}/", PrefixStore(f"{formation.prefix}/", super().at(formation)))


class _OfEngines(GroupTransport):
    def __init__(self, config: WeightBus, host: str) -> None:
        super().__init__(config, host)
        self._meeting = NamedMeeting(host, timedelta(seconds=self._timeout_s), self.backend)

    def facts(self) -> dict[str, str]:
        return direct_facts(self._config)


class DirectGloo(_OfEngines, Collective):
    """Rank 0 of a gloo group of engines, which show up nowhere before they build their own end."""

    def _enter(self, formation: Formation) -> None:
        self._group = self._connected(self._meeting.at(formation), formation, self._timeout_s)


class DirectNccl(_OfEngines, NcclCollective):
    """Rank 0 of an NCCL group of engines. The first bucket builds the communicator."""

    def _enter(self, formation: Formation) -> None:
        with self._here():
            self._group = self._build(self._meeting.at(formation), formation)

    def _close_transfer(self) -> None:
        """SGLang takes part in no such collective; the subscribers say Staged when their engines have everything."""


DIRECT_BACKENDS: dict[str, Callable[[WeightBus, str], Collective | NcclCollective]]
DIRECT_BACKENDS = {"gloo": DirectGloo, "nccl": DirectNccl}  # the publisher's end, by weight_bus.backend
