"""Starting a run on several machines: over ssh, under Slurm, in Kubernetes. All run hosts/node.py."""
