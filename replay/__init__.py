"""Replay: the only owner of the prompt cursor, the leases and the buffer. CPU only, never imports torch."""

from slipstream.runtime.packages import require_ours

require_ours()
