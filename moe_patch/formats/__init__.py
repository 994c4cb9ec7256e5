"""How the weights of experts are stored, when it is not as plain tensors: one format a file.

A format names its dtypes, says the shapes of what comes with the weights (scales, say), and checks
them. The kernels that read it are in kernels/, the twins in reference.py.
"""
