"""Starting a run on several machines: over ssh, under Slurm, in Kubernetes. All three run learner.launch.hosts.node."""
