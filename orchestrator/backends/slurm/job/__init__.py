"""What runs inside an allocation, and `step`, which adds to it from outside."""
