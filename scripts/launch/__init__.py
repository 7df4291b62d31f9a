"""Starting a run on several machines: over ssh, under Slurm, in Kubernetes. All three run scripts.launch.node."""
