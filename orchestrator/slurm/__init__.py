"""Slurm: what its commands say, what a plan asks of it, the job script, and the backend that ties them together.

Pure: `hostlist`, `duration`, `nodes`, `topology`, `states`, `queue`, `options`, `flags`, `render`. Effects: `commands`.
"""
