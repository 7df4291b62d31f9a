"""The lanes of an update (weight_bus/lanes.py), by the configuration and the family's record: the same on all ranks."""

from configs.schema import Config
from learner.policy.model import Policy
from slipstream.families.names import Place, held
from slipstream.families.pictures import decoder_of
from slipstream.families.sizes import Sizes
from weight_bus.lanes import Lane, Slice, plan_lanes, whole


def lanes_of(config: Config, policy: Policy) -> tuple[Lane, ...]:
    """None where rank 0 sends whole tensors: alone, to one member of each engine.

    Adapters, changes (weight_bus.delta) and files (transport disk) go that way, too.

    Raises ValueError: the family's record does not say where a scheduler rank holds a tensor.
    """
    bucket_bytes, dtype = config.weight_bus.bucket_bytes, config.rollout.dtype
    senders, positions = config.lane_ends
    if max(senders, positions) == 1:
        return ()
    shapes = {shard.name: shard.shape for shard in policy.shards()}
    wanted = [[whole(name, dtype, shape) for name, shape in shapes.items()]]
    if positions > 1:
        sizes = Sizes.of(decoder_of(policy.model.transformer.config.to_dict()))
        wanted = [_held(sizes, Place(rank, positions), shapes, dtype) for rank in range(positions)]
    return plan_lanes(wanted, senders, bucket_bytes, kept=sorted(policy.frozen_digests))


def _held(sizes: Sizes, place: Place, shapes: dict[str, tuple[int, ...]], dtype: str) -> list[Slice]:
    """What a scheduler rank needs, in the order of the policy's tensors."""
    found: dict[str, list[Slice]] = {name: [] for name in shapes}
    for part in held(sizes, place):
        if part.name in found:
            found[part.name].append(Slice(part.name, dtype, part.shape, part.start, part.size))
    return [piece for pieces in found.values() for piece in pieces]
