"""Models beside the policy, the reference of a KL term and the critic of PPO."""
