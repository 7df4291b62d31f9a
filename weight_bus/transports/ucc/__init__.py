"""The UCC transport. Experimental: docs/ucc.md."""

from weight_bus.transports.ucc.collective import UccCollective
from weight_bus.transports.ucc.source import resolve_ucc

__all__ = ["UccCollective", "resolve_ucc"]
