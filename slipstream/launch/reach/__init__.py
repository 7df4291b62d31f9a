"""How a node's process is started on a host: as a child, over ssh, by a step of srun."""
