"""Digests of tensors: one definition, a fast way in host memory and one on a GPU."""

from weight_bus.digest.definition import TensorSlice, add, combined, reference_digest
from weight_bus.digest.digester import Digester, Launched, slice_digest, slice_digests
