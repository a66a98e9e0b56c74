"""Computes the headline results of the papers that this project builds on, and compares them with
the published figures."""
