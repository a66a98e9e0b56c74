"""Reading runs: their time, their reports, pages and pictures."""
