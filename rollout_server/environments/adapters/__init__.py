"""Environments of other packages, each an extra; environments/loading.py knows them by name.

textarena_games   games of textarena
verifiers_tasks   environments of verifiers (prime-rl), over the agents' endpoint; verifiers_chat is a harness
openenv           servers that speak OpenEnv's protocol
"""
