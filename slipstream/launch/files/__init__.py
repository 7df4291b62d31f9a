"""What a scheduler starts a run from: a file for sbatch, manifests of a JobSet."""
