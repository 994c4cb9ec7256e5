"""Kernels in Gluon for sm_90. Nothing is imported here: Gluon's API is that of Triton 3.6."""
