"""Products in 8 bits: rounding, the ops of linears, and those of experts."""
