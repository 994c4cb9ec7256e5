"""The version, read by setup.py too. It imports nothing."""

__version__ = "0.1.0"
