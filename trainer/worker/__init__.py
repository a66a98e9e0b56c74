"""What a worker process exchanges with its agent: reports and progress out, termination signals
in."""
