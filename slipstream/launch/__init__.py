"""Starting a run: checks before it, child processes, watching over them. Imports no torch."""

from slipstream.runtime.packages import require_ours

require_ours()
