"""What others measured beside what we predict: tables, calibration, published results."""
