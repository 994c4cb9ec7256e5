"""4-bit experts in transformers' own loading: quantised on the way, saved, kept as they are.

config.py is `ExpertsQuantConfig`; layouts.py reads the configs of checkpoints that other libraries
quantised; conversions.py holds the steps that transformers runs on weights as it loads them;
loader.py is the quantizer that transformers calls.
"""
