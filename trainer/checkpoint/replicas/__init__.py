"""In-memory replicas: another node keeps each node's state between durable checkpoints; losing one
costs a step."""
