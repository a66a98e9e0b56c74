"""For all tests: examples are not timed, since a machine that is busy with other ranks is no failure of the code."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None, derandomize=True)
settings.load_profile("untimed")
