"""What people look at: a plan as a page in the terminal and as pictures."""
