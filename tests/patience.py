"""How long a test waits for what needs the processor: far longer than a crowded machine takes."""

PATIENCE_S = 300.0
