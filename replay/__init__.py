"""Replay: the only owner of the prompt cursor, the leases and the buffer. CPU only, never imports torch.

A prompt goes data/source.py -> decisions/leasing.py -> a rollout server -> decisions/intake.py -> decisions/batching.py
-> batches/ -> the learner's ranks. service.py hands each message to its decision, which state/apply.py records.
"""

from slipstream.runtime.packages import require_ours

require_ours()
