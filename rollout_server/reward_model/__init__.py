"""A scalar reward model in a server of its own, beside the rollout servers.

main      the process `python -m rollout_server.reward_model.main`
server    requests in, scores out; each answered once
scorer    the model, through accelerate; conversations into batches
messages  what travels
client    the rollout server's side: asks again after a restart
combined  the model's score with that of a reward function
"""
