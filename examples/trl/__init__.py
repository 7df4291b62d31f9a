"""Slipstream's rollouts and weight bus under TRL's asynchronous trainer, through its two protocols.

Example:
    config = load("my.yaml")
    args = AsyncGRPOConfig("out", learning_rate=1e-6, **trl_arguments(config, per_device_train_batch_size=16))
    worker, transfer = connect(config, args)
    AsyncGRPOTrainer(model, args=args, train_dataset=..., rollout_worker=worker, weight_transfer=transfer).train()

TRL has the loss, the optimizer and its checkpoints; replay, rollout servers and the bus work as under our learner. The
extra is `slipstream-rl[trl]`; only examples/trl/ and the example import TRL.
"""

from examples.trl.agreement import trl_arguments
from examples.trl.protocols import SlipstreamRolloutWorker, SlipstreamWeightTransfer, connect

__all__ = ["SlipstreamRolloutWorker", "SlipstreamWeightTransfer", "connect", "trl_arguments"]
