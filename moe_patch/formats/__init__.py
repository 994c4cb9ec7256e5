"""How the weights of experts are stored, when it is not as plain tensors: one format a file.

scaled.py is FP8 with block scales: its dtypes, the shapes of what comes with the weights, and their
checks. The 4-bit formats nf4.py, mxfp4.py and int4.py each make a `Format` (format.py); packed.py
packs, quantises, dequantises and checks stacks of them. The kernels that read a format are in
kernels/.
"""
