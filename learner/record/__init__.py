"""What people see of a run: metrics, evaluations, trained trajectories, the live view and the plot."""
