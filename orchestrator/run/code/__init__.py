"""The code of a run: what is copied of a program's folder, and how it travels."""
