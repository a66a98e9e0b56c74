"""What runs inside a pod."""
