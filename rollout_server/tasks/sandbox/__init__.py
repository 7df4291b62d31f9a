"""Runs programs that a policy wrote, cut off from files, network, processes and secrets of the machine.

box       starts one program, feeds it, bounds its time and output
inside    the process that cuts itself off and becomes the program
root      its file system: a small one in memory, with the interpreter read-only
probe     what this machine can cut off, found by trying (`python -m rollout_server.tasks.sandbox`)
"""

from configs.errors import SlipstreamError


class SandboxError(SlipstreamError, RuntimeError, code="SLIP-SANDBOX-01"):
    """A program could not be started as it was asked for; says nothing about the program."""
