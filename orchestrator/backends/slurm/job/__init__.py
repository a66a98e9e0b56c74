"""What runs inside an allocation."""
