"""Compares the planner's predictions with measurements: tables, calibration, published results."""
