"""What a configuration needs beside the policy, here or on ranks of its own."""

from collections.abc import Mapping

from configs.schema import Config
from learner.beside.beside import Beside, CriticModel, ReferenceModel
from learner.beside.critic import Critic
from learner.beside.folders import check_folders
from learner.beside.line import Line
from learner.beside.reference import Reference
from learner.beside.remote import RemoteCritic, RemoteReference
from learner.policy.model import Policy


def build_beside(config: Config, policy: Policy, lines: Mapping[str, Line]) -> Beside:
    """Load local models, and connect to those on other ranks. A collective.

    Raises:
        ConfigError: a folder does not suit the policy.
        PolicyError: a folder holds no model that the learner can use.
    """
    check_folders(config)
    place = (policy.mesh, policy.device, policy.budget)
    reference: ReferenceModel | None = None
    critic: CriticModel | None = None
    if "reference" in lines:
        reference = RemoteReference(lines["reference"], config.learner.compute_dtype)
    elif config.algorithm.kl != "none":
        reference = Reference(config, *place)
    if "critic" in lines:
        critic = RemoteCritic(lines["critic"])
    elif config.algorithm.advantage == "gae":
        critic = Critic(config, *place)
    return Beside(config, policy, reference, critic)
