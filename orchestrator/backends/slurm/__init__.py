"""Slurm: what its commands say, what a plan asks of it, the job script, and the backend that ties them together.

Pure: `hostlist`, `duration`, `nodes`, `states`, `queue`, `options`, `flags`, `render`, `preflight`, `starts`,
`dependency`. Effects: `commands`, `submission`, `array` (its script is pure), and `place` and `task` inside a job.
"""
