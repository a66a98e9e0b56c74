"""The Slurm backend.

Pure: `options`, `queue`, `states`, `preflight` and `script/`. Effects: `commands` (every call of
Slurm), `submission`, `backend`, and `job/`, which runs inside an allocation.
"""
