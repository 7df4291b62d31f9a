"""Which learner rank holds which box of each logical tensor: what digests, gathers, checkpoints and the bus go by."""

from learner.layout.boxes import Box, Inner, as_it_is, box_of, local_of
from learner.layout.digests import CopiesDiffer, digester, digests
from learner.layout.gathering import gather, gather_pieces, spans
from learner.layout.layout import DTYPES, Holding, Layout, Shard, carrier, exchanged
from learner.layout.spreading import Spreader, slice_digests, slice_shards
