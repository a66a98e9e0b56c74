"""The processes inside a pod."""
