"""Each technique's step against torch's own, in turns, in the same processes."""
