"""Kernels in Gluon for sm_90. Nothing is imported here: few stacks have Gluon."""
