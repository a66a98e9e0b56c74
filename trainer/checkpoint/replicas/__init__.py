"""In-memory replicas: another node keeps each node's state between durable checkpoints, so that a
lost node costs a step."""
